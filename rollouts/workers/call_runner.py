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
    """The other end of a channel: runs functions `fn(self, *args)`, one at a time.

        def count(shard, batch):             # a function of a strategy
            shard.rows += len(batch)
            return shard.rows

        runner.run(number, count, batch)     # -> Answer(value, record, error)

    Args:
        control: requests to end a call early. None: the process has no page that others share.
        clock: seconds of a monotonic clock.

    Attributes:
        state: what a strategy keeps in this process between calls, by a name of its choice. Empty
            at the start, after a replacement, a restore and a reset. Never saved. Values with a
            method `close` are closed then.
        record: counts of the current call.
        clock: the clock.
        control: the page.
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
        self._running: list[int] = []  # calls. A gradient worker's own run within its driver's

    # ---- calls ----------------------------------------------------------------------------------

    def run(self, number: int, function: Callable[..., Any], *args: Any) -> Answer:
        """Runs a call of another process.

        Args:
            number: number of the call, which requests to stop early name.
            function: `fn(self, *args)`.
            args: its further arguments.

        Returns:
            its value, or its error. With what it has counted either way.
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
        """As `run`, for a caller in this process: exceptions reach it unchanged."""
        outer, self.record = self.record, Record(self.clock)
        try:
            with self._during(number):
                value = function(self, *args)
            return self._answer(value)
        finally:
            self.record = outer

    def refuse(self, why: str) -> Answer:
        """The answer to a call that cannot be run, or whose value cannot be sent."""
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
        """Adds to the record of a call what not every reply carries."""
        return

    @property
    def version(self) -> int:
        """Version of this process's weights. 0 if it has none."""
        return 0

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of the current call: `with worker.phase("learn"): ...`. Results report the
        shares of `sample`, `gradient`, `learn`, of the strategy's `worker_phases`, and of the
        `other` time of calls."""
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
        """Steps after which the fragments of the current call are to end. None: they are not to end
        early. Any thread may call this."""
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
