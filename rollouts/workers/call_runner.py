"""`CallRunner`: an object in a process that runs calls on itself, and records what they did."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from polopt.common.sums import SUMS
from polopt.metrics.record import Record
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.answer import Answer, CallError


class CallRunner:
    """The process's end of a channel. It runs functions `fn(self, *args)`, one at a time.

        def count(shard, batch):             # a function of a strategy
            shard.rows += len(batch)
            return shard.rows

        runner.run(number, count, batch)     # -> Answer(value, record, error)

    Args:
        control: the page with requests to end a call early. None: the process has a page of its
            own, which other processes cannot write.
        clock: returns the seconds of a monotonic clock.

    Attributes:
        state: the data that a strategy keeps in this process between calls, by names of its choice.
            It is never saved. It is empty at the start, and after a replacement, a restore or a
            reset. Values that are dropped are closed if they have a method `close`.
        record: counts of the current call.
        clock: see the argument.
        control: see the argument.
        recorded_steps: in a rerun, the steps of each fragment of the current call, if one of them
            ended early in the recorded run.
    """

    def __init__(
        self, control: ControlPage | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.control = control or ControlPage()
        self.state: dict[str, Any] = {}
        self.record = Record(clock)
        self.recorded_steps: Sequence[int] = ()
        # Numbers of calls. A gradient worker makes calls of its own while it runs a driver's call.
        self._running: list[int] = []

    # ---- calls ----------------------------------------------------------------------------------

    def run(self, number: int, function: Callable[..., Any], *args: Any) -> Answer:
        """Runs a call of another process.

        Args:
            number: number of the call. Requests to end it early name this number.
            function: runs as `function(self, *args)`.
            args: the further arguments.

        Returns:
            the value or the error of the call, and its record in both cases.
        """
        self.record = Record(self.clock)
        SUMS.begin()
        value, failed = None, None
        with self._during(number):
            try:
                value = function(self, *args)
            except Exception as error:  # the user's code may raise anything
                failed = CallError.of(error)
        return self._answer(value, failed)

    def run_here(self, number: int, function: Callable[..., Any], *args: Any) -> Answer:
        """Runs a call of this process itself. Unlike with `run`, the caller gets the exceptions of
        the function unchanged."""
        outer, self.record = self.record, Record(self.clock)
        try:
            with self._during(number):
                value = function(self, *args)
            return self._answer(value)
        finally:
            self.record = outer

    def refuse(self, why: str) -> Answer:
        """Makes the answer to a call that cannot be run, or whose value cannot be sent."""
        self.record = Record(self.clock)
        return self._answer(None, CallError("function", why))

    def _answer(self, value: Any, error: CallError | None = None) -> Answer:
        record = self.record
        if SUMS.broken:
            record.timing["sums"] = SUMS.done
        self.complete(record)
        record.end(self.version, value)
        return Answer(value, record, error)

    def complete(self, record: Record) -> None:
        """Called at the end of each call. A subclass adds data that only some replies carry."""
        return

    @property
    def version(self) -> int:
        """Version of this process's weights. 0 if it has none."""
        return 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of the current call: `with worker.phase("learn"): ...`. Results report the
        share of each phase: `sample`, `gradient`, `learn`, the strategy's `worker_phases`, and
        `other` for the rest of the call."""
        return self.record.phase(name)

    # ---- early stops ----------------------------------------------------------------------------

    @contextmanager
    def _during(self, number: int) -> Iterator[None]:
        self._running.append(number)
        try:
            yield
        finally:
            self._running.pop()

    def stop_after(self) -> int | None:
        """The number of steps after which fragments of the current call should end. None: they
        should not end early. Any thread may call this."""
        if self.recorded_steps:
            fragment = min(self.record.num_fragments, len(self.recorded_steps) - 1)
            return self.recorded_steps[fragment]
        for number in self._running:
            steps = self.control.keep_steps(number)
            if steps is not None:
                return steps
        return None

    # ---- state and end --------------------------------------------------------------------------

    def clear_state(self) -> None:
        """Drops what a strategy keeps in this process."""
        kept, self.state = self.state, {}
        for value in kept.values():
            if hasattr(value, "close"):
                value.close()

    def remade(self, *args: Any, control: ControlPage) -> Any:
        """Another object of this class in the same process, which takes this one's place.

        Args:
            args: as for the constructor.
            control: as for the constructor.
        """
        self.stop()
        kind: Any = type(self)  # subclasses have arguments of their own
        return kind(*args, control=control)

    def stop(self) -> None:
        """Drops what a strategy keeps, and ends what this object has opened."""
        self.clear_state()
