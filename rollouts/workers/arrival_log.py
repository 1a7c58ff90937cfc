"""The record of a run: everything in which timing has decided, in the order in which it did.

A file of gzip members, one for each flush. Each member is a line of JSON, so `zcat` shows the file.
The first line is the header. The others are `{"events": [...], "clock": [...]}`. An event is a list
that begins with its kind (`EVENT_KINDS`). Its number is its place among all events, from 0. `clock`
holds the readings of the driver's clock, in microseconds since the reading before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from polopt.common.config import ConfigError
from polopt.common.files import read_regular

logger = logging.getLogger("polopt")

#: Version of the format.
FORMAT = 1
#: Kinds of events, and what follows the kind in the list. A process has a number from 0, in the
#: order of starts. So has a ticket: starts and calls together.
EVENT_KINDS = {
    "start": "name: a process is started",
    "remake": "process: it replaces its object",
    "send": "process, version of the driver's weights: a call is sent",
    "wait": "tickets: those that have ended when the driver waited; none: it waited for nothing",
    "up": "ticket: a process has started",
    "reply": "ticket, fingerprint, steps, error, names of phases, microseconds of each, and what "
    "else timing has decided in the call",
    "fail": "ticket, kind, message, at start: a call got no answer",
    "kill": "process: the driver has noticed its failure, and ends it",
    "ended": "ticket, whether it had ended when the driver looked",
    "silent": "process, seconds without progress; null: unknown",
    "waiting": "processes that wait for resources, and how many of them do",
    "phases": "names of phases, which replies refer to by number",
    "decide": "a decision of the trainer that depends on time",
    "train": "an iteration begins",
    "save": "a checkpoint is saved: all pending calls are waited for",
    "restore": "path of a checkpoint",
    "result": "iteration, version, SHA-256 of the weights",
}
#: Events and readings of the clock that are kept at most until they are written.
MOST_EVENTS, MOST_READINGS = 20_000, 100_000
#: A log of this size is not read.
MOST_BYTES = 2**33
_US = 1e6

Event = list[Any]


class ArrivalLog:
    """Records a run. Bounded: `open` gives it a file, or `take` empties it.

    Only the thread that waits for calls is recorded. Other threads read the real clock.

    Args:
        clock: the real clock, in seconds.

    Attributes:
        repeats: False.
        num_events: number of events so far, which is the number of the next one.
    """

    repeats = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: list[Event] = []
        self._readings: list[int] = []
        self._last_us = 0
        self._file: Any = None
        self._path: Path | None = None
        self._phases: dict[tuple[str, ...], int] = {}
        self.num_events = 0
        self._thread = threading.get_ident()

    # ---- what transports tell -------------------------------------------------------------------

    def own_thread(self) -> None:
        """Notes that the current thread is the one that waits for calls."""
        self._thread = threading.get_ident()

    @property
    def is_own_thread(self) -> bool:
        """Whether this thread waits for calls."""
        return threading.get_ident() == self._thread

    def read_clock(self) -> float:
        """Seconds, in whole microseconds: what a rerun reads is equal."""
        if threading.get_ident() != self._thread:
            return self._clock()
        now_us = int(self._clock() * _US)
        self._readings.append(now_us)
        return now_us / _US

    def note(self, *event: Any) -> None:
        """Adds an event."""
        self._events.append([*event])
        self.num_events += 1
        if len(self._events) >= MOST_EVENTS or len(self._readings) >= MOST_READINGS:
            self.flush()
            self.take()  # without a file, it is lost

    def next(self, kind: str, *expected: Any) -> Event | None:
        """The recorded event. None: nothing is repeated."""
        return None

    def phases(self, names: tuple[str, ...]) -> int:
        """Number of the names of phases, in this order."""
        if names not in self._phases:
            self._phases[names] = len(self._phases)
            self.note("phases", *names)
        return self._phases[names]

    # ---- what trainers tell ---------------------------------------------------------------------

    def mark(self, kind: str, *values: Any) -> None:
        """Adds an event that does not depend on time."""
        self.note(kind, *values)

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """A decision that depends on time.

        Args:
            decision: makes it.
            repeat: called in a rerun instead, where the decision was True.
        """
        made = bool(decision())
        self.note("decide", made)
        return made

    def result(self, iteration: int, version: int, digest: str) -> None:
        """Adds a result, and writes everything."""
        self.note("result", iteration, version, digest)
        self.flush()

    # ---- where it goes --------------------------------------------------------------------------

    def take(self) -> dict[str, Any]:
        """Everything since the last call, as JSON values."""
        events, self._events = self._events, []
        readings, self._readings = self._readings, []
        deltas = [b - a for a, b in itertools.pairwise([self._last_us, *readings])]
        if readings:
            self._last_us = readings[-1]
        return {"events": events, "clock": deltas}

    def open(self, path: Path, header: dict[str, Any]) -> None:
        """Writes to a file from now on, which must not exist.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._path = path.open("xb"), path
        self._write({"polopt_arrivals": FORMAT, **header})
        self.flush()

    def flush(self) -> None:
        """Writes the events that were recorded since the last call. If that fails, warns and ends
        the record. The run itself continues."""
        if self._file is not None:
            self._write(self.take())

    def _write(self, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":")) + "\n"
        packer = zlib.compressobj(3, wbits=31)  # a gzip member
        try:
            self._file.write(packer.compress(text.encode()) + packer.flush())
            self._file.flush()
        except OSError as error:
            logger.warning("%s: recording ends, and the run goes on: %s", self._path, error)
            self._close_file()

    @property
    def is_open(self) -> bool:
        """Whether the record goes into a file."""
        return self._file is not None

    def close(self) -> None:
        """Writes what is left, and closes the file."""
        self.flush()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class Departure(BaseException):
    """A rerun does something else than the recorded run. Not an Exception: the code that handles
    failures of workers must not take it for one.

    Attributes:
        event: number of the event.
    """

    def __init__(self, event: int, message: str) -> None:
        super().__init__(message)
        self.event = event


class RecordEnded(BaseException):
    """A rerun has come to the end of the record."""


class Rerun:
    """Repeats a record: the counterpart of `ArrivalLog`, with the same methods.

    Args:
        recorded: the events and the deltas of the clock, as `ArrivalLog.take` returns them.
        clock: the real clock, for other threads.
        is_below: the record is of the calls of a gradient worker to the workers below it. At its
            end the rerun goes on: calls take their course, because the driver takes no later answer
            of that gradient worker.

    Attributes:
        repeats: True until the end of the record.
        before: called with the number of each event before it is repeated.
    """

    def __init__(
        self, recorded: dict[str, Any], clock: Callable[[], float], is_below: bool = False
    ) -> None:
        self.repeats = True
        self.events: list[Event] = recorded["events"]
        self._readings = list(itertools.accumulate(recorded["clock"]))
        self._read = 0
        self._clock = clock
        self._is_below = is_below
        self.num_events = 0
        self._thread = threading.get_ident()
        self.before: Callable[[int], None] = lambda event: None
        #: By ticket: what timing has decided in its call. Tickets that failed.
        self.timing: dict[int, dict[str, Any]] = {}
        self.failed: set[int] = set()
        self._below: dict[int, list[dict[str, Any]]] = {}
        self._phases: list[list[str]] = []
        self._index()

    def _index(self) -> None:
        processes: list[int] = []  # by ticket
        num_processes = 0
        for event in self.events:
            match event:
                case ["start", _]:
                    processes.append(num_processes)
                    num_processes += 1
                case ["remake", process] | ["send", process, _]:
                    processes.append(process)
                case ["fail", ticket, *_]:
                    self.failed.add(ticket)
                case ["phases", *names]:
                    self._phases.append(names)
                case ["reply", ticket, *_, dict(timing)]:
                    below = timing.pop("below", None)
                    if below is not None:
                        self._below.setdefault(processes[ticket], []).append(below)
                    self.timing[ticket] = timing

    def below(self, process: int) -> dict[str, Any] | None:
        """The record of the calls that a process has made itself. None: it has made none."""
        parts = self._below.get(process)
        if parts is None:
            return None
        return {key: [one for part in parts for one in part[key]] for key in ("events", "clock")}

    def names_of(self, number: int) -> list[str]:
        """Names of phases by their number."""
        return self._phases[number]

    # ---- what transports ask --------------------------------------------------------------------

    def own_thread(self) -> None:
        """Notes that the current thread is the one that waits for calls."""
        self._thread = threading.get_ident()

    @property
    def is_own_thread(self) -> bool:
        """Whether this thread waits for calls."""
        return threading.get_ident() == self._thread

    def read_clock(self) -> float:
        """The recorded reading."""
        if threading.get_ident() != self._thread or not self.repeats:
            return self._clock()
        if self._read >= len(self._readings):
            self._end()
            return self._clock()
        self._read += 1
        return self._readings[self._read - 1] / _US

    def note(self, *event: Any) -> None:
        """Nothing is recorded."""

    def next(self, kind: str, *expected: Any) -> Event | None:
        """The next recorded event. None: the record of a worker's calls has ended.

        Args:
            kind: of the event.
            expected: what the event begins with besides, as far as it is known.

        Raises:
            Departure: another one was recorded.
            RecordEnded: none was.
        """
        event = self.peek() if self.repeats else None
        if event is None:
            self._end()
            return None
        number = self.num_events
        self.before(number)
        if event[: 1 + len(expected)] != [kind, *expected]:
            self.depart(
                number, f"{described([kind, *expected])}, where the record has {described(event)}"
            )
        self.num_events += 1
        return event

    def peek(self) -> Event | None:
        """The next recorded event. None after the last one."""
        while self.num_events < len(self.events) and self.events[self.num_events][0] == "phases":
            self.num_events += 1
        return self.events[self.num_events] if self.num_events < len(self.events) else None

    def finish(self) -> None:
        """Repeats no more: what follows takes its course."""
        self.repeats, self._is_below = False, True

    def depart(self, event: int, what: str) -> NoReturn:
        """Ends the rerun at a difference."""
        raise Departure(event, what)

    def _end(self) -> None:
        self.repeats = False
        if not self._is_below:
            raise RecordEnded

    def phases(self, names: tuple[str, ...]) -> int:
        """Not recorded."""
        return 0

    # ---- what trainers ask ----------------------------------------------------------------------

    def mark(self, kind: str, *values: Any) -> None:
        """Compares an event that does not depend on time. A checkpoint may have been moved."""
        self.next(kind, *([] if kind == "restore" else values))

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """The recorded decision."""
        event = self.next("decide")
        made = bool(event is not None and event[1])
        if made:
            repeat()
        return made

    def result(self, iteration: int, version: int, digest: str) -> None:
        """Compares a result.

        Raises:
            Departure: the weights, or their version, differ.
        """
        number = self.num_events
        event = self.next("result", iteration)
        if event is not None and event[2:] != [version, digest]:
            what = "version" if event[2] != version else "bytes"
            self.depart(number, f"the weights of iteration {iteration} have other {what}")

    def take(self) -> dict[str, Any]:
        """Nothing was recorded."""
        return {"events": [], "clock": []}

    is_open = False

    def flush(self) -> None:
        """Nothing is written."""

    def close(self) -> None:
        """Nothing is open."""


def described(event: Event) -> str:
    """An event as words, with the numbers of calls and processes."""
    match event:
        case ["start", name, *_]:
            return f"the start of {name}"
        case ["send", process, version, *_]:
            return f"a call to process {process} with weights of version {version}"
        case ["wait"]:
            return "a wait in which nothing ended"
        case ["wait", *tickets]:
            return f"the end of call {', '.join(map(str, tickets))}"
        case ["reply", ticket, *_]:
            return f"the reply to call {ticket}"
        case ["up", ticket, *_]:
            return f"the start that is call {ticket} has ended"
        case ["fail", ticket, *rest]:
            return f"the failure of call {ticket}" + (f" ({rest[0]})" if rest else "")
        case ["kill", process, *_]:
            return f"the end of process {process}, which has failed"
        case ["result", iteration, *_]:
            return f"the result of iteration {iteration}"
        case ["train"]:
            return "the beginning of an iteration"
        case ["save"]:
            return "a checkpoint"
        case ["restore", path, *_]:
            return f"the restore of {path}"
    return " ".join(map(str, event))


def lines_of(events: list[Event], first: int, last: int) -> Iterator[str]:
    """The events from `first` to `last` as text, with the names of processes."""
    names: list[str] = []
    tickets: list[tuple[int, int | None]] = []  # process, and version of the weights
    for number, event in enumerate(events):
        if number > last:
            return
        words = described(event)
        match event:
            case ["start", name]:
                tickets.append((len(names), None))
                names.append(name)
            case ["remake", process]:
                tickets.append((process, None))
            case ["send", process, version]:
                words = f"call {len(tickets)} to {names[process]}, weights {version}"
                tickets.append((process, version))
            case ["wait", *ended] if ended:
                words += f" ({', '.join(names[tickets[one][0]] for one in ended)})"
            case ["reply" | "up" | "fail", ticket, *_]:
                process, version = tickets[ticket]
                sent = "" if version is None else f", sent with weights {version}"
                words = f"{words}: {names[process]}{sent}"
            case ["kill", process]:
                words = f"{names[process]} has failed and is ended (process {process})"
        if number >= first:
            yield f"{number:>8}  {words}"


def read_log(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a file as far as it is whole: a process that dies may leave half of the last flush.

    Returns:
        the header, and all events and deltas of the clock.

    Raises:
        ConfigError: it cannot be read, or is not a record.
    """
    try:
        lines = _lines(read_regular(path, MOST_BYTES))
        header = next(lines, None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(header, dict) or header.get("polopt_arrivals") != FORMAT:
        raise ConfigError(
            f"{str(path)!r} is not a record of arrivals of format {FORMAT}, which this version of "
            "polopt writes"
        )
    events: list[Event] = []
    deltas: list[int] = []
    try:
        for line in lines:
            events += line["events"]
            deltas += line["clock"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r} is damaged: {error!r}") from error
    return header, {"events": events, "clock": deltas}


def _lines(data: bytes) -> Iterator[Any]:
    while data:
        unpacker = zlib.decompressobj(wbits=31)
        try:
            text = unpacker.decompress(data)
        except zlib.error:
            return
        if not unpacker.eof:
            return  # the process died while it wrote this one
        yield json.loads(text)
        data = unpacker.unused_data
