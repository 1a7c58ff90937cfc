"""`RecordedTransport`: records everything that arrives over another transport, or repeats a record.

The effects of timing on a run reach the driver through its transport:

- the calls and starts that have ended when the driver waits or checks,
- the reason why a call got no answer,
- the time for which a process has been silent,
- the processes that wait for resources,
- the readings of the clock,
- the effects of timing inside a call, which are in its answer (`Record.timing`).

The trainer also records its own decisions that depend on time (`ArrivalLog.decide`). So the same
program with the same record makes the same run. In such a rerun, the processes really run. The
transport returns their answers in the recorded order. An answer that arrives too early waits in the
transport.
"""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from polopt.common.sample_batch import SampleBatch
from polopt.common.sums import SUMS
from polopt.metrics.record import Record
from polopt.recording.arrival_log import ArrivalLog, Rerun
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import (
    AnswerTimeoutError,
    Channel,
    ChannelError,
    LostProcessError,
    LostReferenceError,
    Message,
    Started,
    Ticket,
    Transport,
    UndecodableAnswerError,
    UnsendableError,
)
from polopt.rollouts.transport.local_channel import run_here
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.worker_config import WorkerConfig

_FAILURES: dict[str, type[RuntimeError]] = {
    kind.__name__: kind
    for kind in (
        AnswerTimeoutError,
        ChannelError,
        LostProcessError,
        LostReferenceError,
        UndecodableAnswerError,
        UnsendableError,
    )
}
#: A fingerprint uses at most this many elements of an array, at equal distances. They suffice to
#: detect a difference in gradients, because one different transition or weight changes nearly all
#: elements of a gradient.
_MOST_NUMBERS = 1024
#: The interval at which a rerun checks whether the process that it waits for makes progress.
_CHECK_S = 1.0


class RecordedTicket(Ticket):
    """The ticket of one call or start, with its number in the record.

    Attributes:
        inner: the ticket of the inner transport.
        number: number of the ticket. See `EVENT_KINDS`.
        channel: the channel to the process.
        name: name of the function, for messages.
    """

    __slots__ = ("channel", "inner", "name", "number")

    def __init__(self, inner: Ticket, number: int, channel: RecordedChannel, name: str) -> None:
        self.inner = inner
        self.number = number
        self.channel = channel
        self.name = name

    def ended(self) -> bool:
        log = self.channel.log
        event = log.next("ended", self.number)
        if event is not None:
            return bool(event[2])
        ended = self.inner.ended()
        log.note("ended", self.number, ended)
        return ended

    def result(self, timeout_s: float) -> Any:
        log = self.channel.log
        return self._repeated(log, timeout_s) if log.repeats else self._recorded(log, timeout_s)

    def _recorded(self, log: ArrivalLog | Rerun, timeout_s: float) -> Any:
        try:
            answer = self.inner.result(timeout_s)
        except (ChannelError, UnsendableError) as error:
            facts = [False]
            if isinstance(error, LostProcessError):
                facts = [error.at_start, *[True] * error.preempted]
            log.note("fail", self.number, type(error).__name__, str(error), *facts)
            raise
        if not _is_whole(answer):
            log.note("up", self.number)
            return answer
        record: Record = answer.record
        names = tuple(record.seconds)
        phases = log.phases(names)
        microseconds = [round(1e6 * seconds) for seconds in record.seconds.values()]
        timing = [record.timing] if record.timing else []
        log.note("reply", self.number, *_facts(answer), phases, *microseconds, *timing)
        _set_seconds(record, names, microseconds)
        return answer

    def _repeated(self, log: ArrivalLog | Rerun, timeout_s: float) -> Any:
        assert isinstance(log, Rerun)
        event = log.peek()
        number = log.num_events
        if event is not None and event[0] == "fail":
            log.next("fail", self.number)
            _, _, kind, message, *facts = event
            error = _FAILURES.get(kind, ChannelError)
            raise error(message, *facts) if error is LostProcessError else error(message)
        try:
            answer = self.inner.result(timeout_s)
        except (ChannelError, UnsendableError) as error:
            log.depart(
                number, f"{self.place} gave no answer ({error}), but the record has an answer"
            )
        if not _is_whole(answer):
            log.next("up", self.number)
            return answer
        event = log.next("reply", self.number)
        if event is None:
            return answer
        _, _, *facts, phases = event[:6]
        number = log.num_events - 1
        for own, recorded, what in zip(_facts(answer), facts, _FACTS, strict=True):
            if own != recorded:
                log.depart(number, f"{self.place} answered with {what.format(own, recorded)}")
        names = log.names_of(phases)
        _set_seconds(answer.record, names, event[6 : 6 + len(names)])
        return answer

    @property
    def place(self) -> str:
        """The process and the function as text, for messages."""
        return f"{self.channel.name} ({self.name})"


#: The values of a reply that a rerun compares with the record, as texts for messages.
_FACTS = (
    "different numbers (fingerprint {}, recorded: {})",
    "{} environment steps (recorded: {})",
    "error {!r} (recorded: {!r})",
)


def _facts(answer: Answer) -> tuple[int, int, str | None]:
    error = None if answer.error is None else answer.error.kind
    return fingerprint(answer), answer.record.env_steps, error


def _is_whole(answer: Any) -> bool:
    return isinstance(answer, Answer) and isinstance(answer.record, Record)


def _set_seconds(record: Record, names: Sequence[str], microseconds: Sequence[int]) -> None:
    """Sets the seconds of each phase to the whole microseconds in the log. A policy optimizer may
    use these seconds in decisions, so the seconds must be equal in a run and in its rerun."""
    record.seconds = {name: us / 1e6 for name, us in zip(names, microseconds, strict=True)}


def fingerprint(answer: Answer) -> int:
    """Returns a 32-bit checksum of an answer. It depends on the arrays and bytes in the value, also
    in nested tuples, lists and mappings, and on the returns of the episodes. It ignores strings and
    single numbers, because they may be addresses or times, which differ from run to run."""
    crc = zlib.crc32(np.asarray(answer.record.episodes.returns, np.float64).tobytes())
    for array in _arrays(answer.value, 0):
        flat = array.reshape(-1)
        crc = zlib.crc32(flat[:: len(flat) // _MOST_NUMBERS + 1].tobytes(), crc)
    return crc


def _arrays(value: Any, depth: int) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "biufcV":
            yield value
    elif isinstance(value, torch.Tensor):
        yield value.detach().cpu().numpy()
    elif isinstance(value, SampleBatch):
        yield value.all_obs
        yield from value.columns.values()
    elif isinstance(value, bytes):
        yield np.frombuffer(value, np.uint8)
    elif depth < 4:
        if isinstance(value, tuple | list):
            for one in value:
                yield from _arrays(one, depth + 1)
        elif isinstance(value, Mapping):
            for one in value.values():
                yield from _arrays(one, depth + 1)


class RecordedChannel(Channel):
    """A channel that records the calls to one process, or repeats a record of these calls.

    Attributes:
        inner: the channel of the inner transport.
        process: number of the process. See `EVENT_KINDS`.
        log: the log of the `RecordedTransport`.
    """

    def __init__(self, inner: Channel, process: int, transport: RecordedTransport) -> None:
        self.inner = inner
        self.process = process
        self.name = inner.name
        self.log = transport.log
        self._transport = transport
        self.start = transport.ticket(inner.start, self, "start")

    def send(self, message: Message) -> Ticket:
        log = self.log
        log.next("send", self.process, message.version)
        log.note("send", self.process, message.version)
        timing = log.timing.get(self._transport.num_tickets) if isinstance(log, Rerun) else None
        if timing:
            args = (message.function, timing, *message.args)
            message = message._replace(function=run_as_recorded, args=args)
        ticket = self._transport.ticket(self.inner.send(message), self, message.name)
        if timing and "sums" in timing:
            self._transport.broken_sums.append(ticket)
        return ticket

    def stop_early(self, number: int, keep_steps: int) -> None:
        if not self.log.repeats:  # in a rerun, `run_as_recorded` ends fragments early
            self.inner.stop_early(number, keep_steps)

    def silent_s(self) -> float | None:
        event = self.log.next("silent", self.process)
        silent_s = self.inner.silent_s() if event is None else event[2]
        self.log.note("silent", self.process, silent_s)
        return None if silent_s is None else float(silent_s)

    def note_started(self, started: Started) -> None:
        super().note_started(started)
        self.inner.note_started(started)


def run_as_recorded(
    target: Any, function: Callable[..., Any], timing: dict[str, Any], *args: Any
) -> Any:
    """Runs a function in a process, and repeats the effects that timing had on the recorded call.

    These effects are `steps`, the number of steps of each fragment, `sums`, the number of sums that
    all-reduce completed before its group broke, and `leaves`: the process had announced its end.

    Args:
        target: the object that runs calls in the process.
        function: the function of the call.
        timing: see `Record.timing`.
        args: the arguments of the call.
    """
    SUMS.limit = timing.get("sums")
    if timing.get("leaves"):
        target.record.timing["leaves"] = True
    control = target.control
    if timing.get("steps"):
        target.control = RecordedStops(target, timing["steps"])
    try:
        return function(target, *args)
    finally:
        target.control = control


class RecordedStops:
    """Takes the place of a `ControlPage` during a repeated call. Ends the fragments of the call
    after the recorded numbers of steps.

    Args:
        target: the `CallRunner` that runs the call.
        steps: the number of steps of each fragment.
    """

    def __init__(self, target: Any, steps: Sequence[int]) -> None:
        self._target = target
        self._steps = steps

    def keep_steps(self, number: int) -> int:
        """Returns the recorded number of steps of the current fragment."""
        return self._steps[min(self._target.record.num_fragments, len(self._steps) - 1)]


@dataclass(frozen=True)
class Recorder:
    """Wraps transports (`WorkerConfig.wrap_transport`).

    Attributes:
        recorded: a record to repeat, as `ArrivalLog.take` returns it. None makes a new record. The
            driver repeats the record of its own calls. A gradient worker repeats the record of its
            calls to the workers below it, which sample its fragments.
        is_below: see `Rerun`.
    """

    recorded: dict[str, Any] | None = None
    is_below: bool = False

    def __call__(self, transport: Transport, rollout: RolloutConfig) -> RecordedTransport:
        limits_s = rollout.worker_timeout_s, rollout.worker_startup_timeout_s
        return RecordedTransport(transport, self.recorded, self.is_below, limits_s)


class RecordedTransport(Transport):
    """A transport that passes calls to an inner transport. It records what arrives, or repeats a
    record.

    Args:
        inner: carries the calls.
        recorded: a record to repeat, as `ArrivalLog.take` returns it. None means that the transport
            makes a new record.
        is_below: see `Rerun`.
        limits_s: the time limits of a rerun, in seconds without progress: the limit for the answer
            to a call, and the limit for a start.

    Attributes:
        log: the new record, or the record to repeat.
        num_tickets: number of starts and calls so far.
        broken_sums: in a rerun, the calls whose all-reduce failed in the recorded run. `kill`
            empties this list.
    """

    def __init__(
        self,
        inner: Transport,
        recorded: dict[str, Any] | None = None,
        is_below: bool = False,
        limits_s: tuple[float, float] = (60.0, 120.0),
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.log: ArrivalLog | Rerun = (
            ArrivalLog(inner.clock) if recorded is None else Rerun(recorded, inner.clock, is_below)
        )
        self.clock = self.log.read_clock
        self._limits_s = limits_s
        self._num_processes = 0
        self.num_tickets = 0
        self.broken_sums: list[RecordedTicket] = []

    @property
    def event(self) -> int:
        return self.log.num_events - 1

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        return self.log.decide(decision, repeat)

    def take_timing(self) -> dict[str, Any]:
        """Returns the events and clock readings of this log since the previous call."""
        taken = self.log.take()
        return taken if taken["events"] or taken["clock"] else {}

    def ticket(self, inner: Ticket, channel: RecordedChannel, name: str) -> RecordedTicket:
        """Returns a ticket with the next number."""
        self.num_tickets += 1
        return RecordedTicket(inner, self.num_tickets - 1, channel, name)

    def _below(self) -> dict[str, Any] | None:
        """Returns the record of the calls that a process itself made in the recorded run, such as
        the calls of a gradient worker to the workers below it. The process is the one that `start`
        starts next. None if the record has no such calls, or if this is not a rerun."""
        return self.log.below(self._num_processes) if isinstance(self.log, Rerun) else None

    def start(
        self, make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], name: str
    ) -> Channel:
        self.log.next("start", name)
        self.log.note("start", name)
        below = Recorder(self._below(), is_below=True)
        args = tuple(
            dataclasses.replace(one, wrap_transport=below) if isinstance(one, WorkerConfig) else one
            for one in args
        )
        self._num_processes += 1
        return RecordedChannel(
            self.inner.start(make, args, options, name), self._num_processes - 1, self
        )

    def remake(self, channel: Channel, args: tuple[Any, ...]) -> Ticket:
        assert isinstance(channel, RecordedChannel)
        self.log.next("remake", channel.process)
        self.log.note("remake", channel.process)
        channel.start = self.ticket(self.inner.remake(channel.inner, args), channel, "start")
        return channel.start

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> list[Ticket]:
        ready = run_here(tickets)
        if ready:
            return ready
        self.log.own_thread()
        event = self.log.next("wait")
        inner = {one.inner: one for one in tickets if isinstance(one, RecordedTicket)}
        if event is None:
            ended = [inner[one] for one in self.inner.wait(list(inner), timeout_s)]
            self.log.note("wait", *[one.number for one in ended])
            return [*ended]
        assert isinstance(self.log, Rerun)
        by_number = {one.number: one for one in inner.values()}
        missing = [number for number in event[1:] if number not in by_number]
        if missing:
            number = self.log.num_events - 1
            self.log.depart(
                number, f"call {missing[0]} is not pending, but ended here in the recorded run"
            )
        wanted = [by_number[number] for number in event[1:]]
        self._await(self.log, [one for one in wanted if one.number not in self.log.failed])
        return [*wanted]

    def _await(self, log: Rerun, wanted: list[RecordedTicket]) -> None:
        """Waits until all wanted calls have ended. Raises `Departure` if a process makes no
        progress within the time limit. Other calls that end meanwhile stay in the inner
        transport."""
        begun_s = time.monotonic()
        while wanted:
            ended = self.inner.wait([one.inner for one in wanted], _CHECK_S)
            wanted = [one for one in wanted if one.inner not in ended]
            if ended or not wanted:
                begun_s = time.monotonic()
                continue
            waited_s, first = time.monotonic() - begun_s, wanted[0]
            limit_s = self._limits_s[first.name == "start"]
            silent_s = first.channel.inner.silent_s()
            if waited_s >= limit_s and (silent_s is None or silent_s >= limit_s):
                log.depart(
                    log.num_events - 1,
                    f"{first.place} has not answered for {waited_s:.0f} s and makes no progress, "
                    "but the record has an answer",
                )

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        own = {one.process: one for one in channels if isinstance(one, RecordedChannel)}
        event = self.log.next("waiting")
        if event is not None:
            return [own[process] for process in event[1] if process in own], event[2]
        inner = {one.inner: one for one in own.values()}
        found, number = self.inner.waiting(list(inner))
        self.log.note("waiting", [inner[one].process for one in found], number)
        return [inner[one] for one in found], number

    def leaving(self, channels: Iterable[Channel]) -> list[Channel]:
        """See `Transport.leaving`. Records an answer only if it is not empty."""
        if isinstance(self.log, Rerun):
            return self._left_here(self.log, channels)
        inner: dict[Channel, RecordedChannel] = {}

        def inner_channels() -> Iterator[Channel]:
            for one in channels:
                if isinstance(one, RecordedChannel):
                    inner[one.inner] = one
                    yield one.inner

        found = [inner[one] for one in self.inner.leaving(inner_channels())]
        if found:
            self.log.note("leaving", *[one.process for one in found])
        return [*found]

    def _left_here(self, log: Rerun, channels: Iterable[Channel]) -> list[Channel]:
        """Returns the channels whose processes left here in the recorded run."""
        event = log.peek() if log.repeats else None
        if event is None or event[0] != "leaving":
            return []
        own = {one.process: one for one in channels if isinstance(one, RecordedChannel)}
        if not own.keys() >= {*event[1:]}:
            return []  # they are of another group of processes
        log.next("leaving")
        return [own[process] for process in event[1:]]

    # ---- passed to the inner transport ----------------------------------------------------------

    def resources(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return self.inner.resources()

    def put(self, value: Any) -> Any:
        return self.inner.put(value)

    def get(self, value: Any) -> Any:
        return self.inner.get(value)

    def kill(self, channel: Channel) -> None:
        assert isinstance(channel, RecordedChannel)
        if self.log.is_own_thread:
            self.log.next("kill", channel.process)
            self.log.note("kill", channel.process)
            if isinstance(self.log, Rerun):
                # The other ranks of an all-reduce need this process until they reach the sum that
                # failed in the recorded run. In a rerun, the driver may get here before the ranks
                # reach this sum.
                self._await(self.log, [one for one in self.broken_sums if one.channel != channel])
                self.broken_sums = []
        self.inner.kill(channel.inner)

    def stop(self, channels: Sequence[Channel], timeout_s: float) -> None:
        self.inner.stop(
            [one.inner for one in channels if isinstance(one, RecordedChannel)], timeout_s
        )

    def close(self) -> None:
        self.log.close()
        self.inner.close()

    def paths(self, channels: Sequence[Channel]) -> str:
        return self.inner.paths([c.inner for c in channels if isinstance(c, RecordedChannel)])
