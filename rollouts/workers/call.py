"""`Call`: one call of a function in a process, from `Calls.send` until it was counted.

    waiting --sent--> sent --arrived--> answered --taken--> taken --counted--> counted
       |               |                    |                  |
       +---------------+------------------> lost <-------------+

- `waiting`: `Calls` holds the call, because its process is not up yet, or has other calls to run.
- `sent`: the process has the call, and has not answered.
- `answered`: the value has arrived, and the strategy has not taken it.
- `taken`: the strategy has the value. The counts of the call are not added yet.
- `counted`: the counts were added to the counters of the strategy. This happens once.
- `lost`: the process has failed or was removed, the answer could not be used, or the caller dropped
  the call. If the work of a lost call is still wanted, `Call.again` makes a new call for it.

A strategy sees a call as the reply to it: `reply.worker`, `reply.value`, `reply.tag`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from polopt.common.faults import Fault
from polopt.metrics.record import Record
from polopt.rollouts.transport.channel import Function
from polopt.rollouts.workers.worker_handle import WorkerHandle

State = Literal["waiting", "sent", "answered", "taken", "counted", "lost"]

#: The states that may follow each state.
_NEXT: dict[State, tuple[State, ...]] = {
    "waiting": ("sent", "lost"),
    "sent": ("answered", "lost"),
    "answered": ("taken", "lost"),
    "taken": ("counted", "lost"),
    "counted": (),
    "lost": (),
}


#: The counts of calls without an answer.
_NO_COUNTS = Record()


@dataclass(slots=True, eq=False)
class Call:
    """One call of `function(target, *args)` in a process. See the diagram of its states above.

    Attributes:
        worker: the handle of the process that runs the call. Plugins use this name, so it stays.
            After a failure of kind `reference`, this process continues. After any other failure, it
            is killed, and a replacement starts unless it failed too often.
        function: the function that the process runs.
        args: the arguments of the function. They may include `WEIGHTS`.
        tag: any value that the strategy gave to `Calls.send`.
        timeout_s: seconds that the call may take without progress. None means `worker_timeout_s`.
        order: the key by which `Calls.all` sorts replies. It consists of the index of the worker to
            which the work was first sent, and of a serial number.
        by_reference: see `Message`.
        state: the state of the call.
        number: number of the call. A request to end the call early contains this number.
        ticket: the ticket that the channel returned.
        version: version of the driver's weights when the call was sent.
        sent_s: time at which the call was sent.
        progress_s: the last time at which the process made progress, as far as the supervisor
            knows.
        latest_s: a deadline that progress does not extend.
        keep_steps: the number of steps in the last request to end the fragments of this call early.
            Infinite without such a request.
        value: return value of the function, or a reference to that value. None without an answer.
        counts: the steps, episodes, times and faults that the worker counted during the call. Empty
            if no answer arrived.
        failure: the reason why the call failed. None unless it failed.
    """

    worker: WorkerHandle
    function: Function
    args: tuple[Any, ...]
    tag: Any
    timeout_s: float | None
    order: tuple[int, int]
    by_reference: bool = False
    state: State = "waiting"
    number: int = 0
    ticket: Any = None  # a Ticket once the call was sent
    version: int = 0
    sent_s: float = 0.0
    progress_s: float = -math.inf
    latest_s: float = math.inf
    keep_steps: float = math.inf
    value: Any = None
    counts: Record = _NO_COUNTS
    failure: Fault | None = None

    def to(self, state: State) -> None:
        """Changes the state.

        Raises:
            RuntimeError: this state cannot follow the current state. For example, a call that was
                counted cannot be counted again.
        """
        if state not in _NEXT[self.state]:
            raise RuntimeError(f"a call of {self.name} is {self.state}, and cannot be {state}")
        self.state = state

    def again(self) -> Call:
        """Returns a new call for the work of this lost call."""
        asked = self.function, self.args, self.tag, self.timeout_s, self.order, self.by_reference
        return Call(self.worker, *asked)

    @property
    def name(self) -> str:
        """The name of the function in messages, with the name of its module."""
        function = self.function
        name = getattr(function, "__qualname__", None) or repr(function)
        return f"{getattr(function, '__module__', '?')}.{name}"

    @property
    def code(self) -> Any:
        """The code of the function, which identifies the function.

        The name does not suffice, because two lambdas have the same name. The function object does
        not suffice, because a strategy may make a new lambda with the same code for each call. For
        a `functools.partial`, this is the code of the wrapped function. For a callable object, it
        is the code of its `__call__`. For a function without Python code, it is the name."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        called = function if hasattr(function, "__code__") else type(function).__call__
        return getattr(called, "__code__", self.name)

    @property
    def began_s(self) -> float:
        """The time at which the worker began this call, as far as the driver knows. This is the
        time at which the call was sent, or the later time at which the answer to the previous call
        arrived. Only valid for the oldest sent call of a worker."""
        return max(self.sent_s, self.worker.last_answer_s)


#: The reply to a call is the call itself, once it has a value or a failure.
Reply = Call
