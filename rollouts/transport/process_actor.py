"""`ProcessActor`: the Ray actor that runs calls on an object, such as a rollout worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray

from polopt.rollouts.transport.channel import Started
from polopt.rollouts.transport.control_page import ControlPage, remove
from polopt.rollouts.transport.socket_server import Endpoint, SocketServer


class ProcessActor:
    """A process that runs functions on the object that it holds, its target.

    The target is made, called and stopped in the main thread of the process. Environments may be
    bound to the thread that made them, and some of what they use works in the main thread only.

    Its constructor takes no time: `booted` answers as soon as the process is up, and `make` may
    take long.
    """

    _target: Any = None

    def __init__(self) -> None:
        self._control = ControlPage()
        self._server = SocketServer()

    def booted(self) -> None:
        """Tells that there is a process, which has its resources."""

    def make(self, make: Callable[..., Any], *args: Any) -> Started:
        """Makes the target, and tells that the process has started.

        Args:
            make: makes the target: `make(*args, control=page)`. The target has the methods of
                `polopt.rollouts.workers.call_runner.CallRunner`.
            args: its arguments.
        """
        self._target = make(*args, control=self._control)
        try:
            self._control_path = self._control.share()
        except OSError:  # the driver then knows nothing of a call until it ends
            self._control_path = ""
        return self._started()

    def _started(self) -> Started:
        node = ray.get_runtime_context().get_node_id()
        return Started(os.getpid(), node, self._control_path)

    def remake(self, *args: Any) -> Started:
        """Replaces the target by another one, in the same process."""
        self._target = self._target.remade(*args, control=self._control)
        return self._started()

    def run_encoded(self, call: bytes) -> Any:
        """Runs a call: number, function, arguments and whether to answer by reference, encoded by
        cloudpickle together. Encoding them together takes less time than Ray needs to encode each
        argument. Returns the target's answer."""
        try:
            number, function, args, by_reference = ray.cloudpickle.loads(call)
        except Exception as error:  # an import of the user's module may raise anything
            return self._target.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        return self._run(number, function, args, by_reference)

    def run_with_references(
        self, number: int, function: bytes, by_reference: bool, *args: Any
    ) -> Any:
        """Runs a call whose arguments may be references. Ray has replaced them by their objects."""
        try:
            decoded = ray.cloudpickle.loads(function)
        except Exception as error:  # whatever the user's code raises
            return self._target.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        return self._run(number, decoded, args, by_reference)

    def _run(self, number: int, function: Any, args: Any, by_reference: bool) -> Any:
        answer = self._target.run(number, function, *args)
        if by_reference and answer.error is None:
            answer = answer._replace(value=ray.put(answer.value))
        return answer

    def connect(self, endpoint: Endpoint) -> str:
        """Connects to the driver's socket. See `SocketServer.connect`."""
        return self._server.connect(endpoint)

    def serve(self, endpoint: Endpoint) -> str:
        """Answers calls over the socket until the driver ends that. See `SocketServer.serve`."""
        return self._server.serve(self._target, endpoint)

    def stop(self) -> None:
        """Stops the target, and closes the connection."""
        self._server.close()
        if self._target is not None:
            remove(self._control_path)
            self._target.stop()
