"""`ProcessActor`: the Ray actor that runs calls on an object, such as a rollout worker."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import ray

from polopt.rollouts.transport.channel import Started
from polopt.rollouts.transport.control_page import ControlPage, remove
from polopt.rollouts.transport.socket_server import Endpoint, SocketServer


class ProcessActor:
    """A process that holds an object, its target, and runs functions on this object.

    The actor makes, calls and stops the target in the main thread of the process. Some environments
    work only in the thread that made them, and some of their libraries work only in the main
    thread.

    The constructor of the actor takes almost no time. So `booted` answers as soon as the process
    exists, while `make` may take long.
    """

    target: Any = None
    _control_path = ""

    def __init__(self) -> None:
        self._control = ControlPage()
        self._server = SocketServer()
        self._on_sigterm = signal.signal(signal.SIGTERM, self._announce_end)

    def _announce_end(self, number: int, frame: Any) -> None:
        """Handles SIGTERM. Its answers then tell the driver that this process leaves, and the
        driver replaces it once its work has come back. A second SIGTERM, or SIGTERM before the
        target was made, ends the process at once."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        if self.target is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.target.leaves = True

    def booted(self) -> None:
        """Does nothing. Its answer shows that the process exists and has its resources."""

    def make(self, endpoint: Endpoint | None, make: Callable[..., Any], *args: Any) -> Started:
        """Makes the target, connects to the driver, and returns the data that the driver needs
        about the process.

        Args:
            endpoint: the endpoint to which the process connects. None if all calls go through Ray.
            make: a function or class. `make(*args, control=page)` returns the target, which has the
                methods of `polopt.rollouts.workers.call_runner.CallRunner`.
            args: the arguments of `make`.
        """
        self.target = make(*args, control=self._control)
        # Without the page, the driver cannot read the progress of this process, and cannot end
        # calls early.
        with contextlib.suppress(OSError):
            self._control_path = self._control.share()
        unreachable = "" if endpoint is None else self._server.connect(endpoint)
        return self._started()._replace(unreachable=unreachable)

    def _started(self) -> Started:
        node = ray.get_runtime_context().get_node_id()
        return Started(os.getpid(), node, self._control_path)

    def remake(self, *args: Any) -> Started:
        """Replaces the target by a new target, in the same process."""
        leaves = self.target.leaves
        self.target = self.target.remade(*args, control=self._control)
        self.target.leaves = leaves
        return self._started()

    def run(self, call: bytes, *apart: Any) -> Any:
        """Runs a call, and returns the answer of the target.

        Args:
            call: the number, the function, the arguments and `by_reference` of the call. The driver
                encodes them together by cloudpickle, because this takes less time than letting Ray
                encode each argument.
            apart: the arguments of a call that has references among them. Ray replaces each
                reference by its object before the call. `call` then holds no arguments.
        """
        try:
            number, function, args, by_reference = ray.cloudpickle.loads(call)
        except Exception as error:  # an import of the user's module may raise anything
            return self.target.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        answer = self.target.run(number, function, *args, *apart)
        if by_reference and answer.error is None:
            answer = answer._replace(value=ray.put(answer.value))
        return answer

    def serve(self) -> str:
        """Answers calls over the socket until the connection ends. See `SocketServer.serve`."""
        return self._server.serve(self)

    def stop(self) -> None:
        """Stops the target, closes the connection, and removes the file of the control page."""
        self._server.close()
        if self.target is not None:
            remove(self._control_path)
            self.target.stop()
