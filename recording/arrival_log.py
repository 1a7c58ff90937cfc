"""The record of a run: the events that depend on timing, in the order in which they happened.

The record also has events that do not depend on timing, such as results. A rerun repeats the
recorded run, and compares these events with its own.

The file is a sequence of gzip members. Each flush writes one member, which is a line of JSON. So
`zcat` shows the file. The first line is the header. Each other line is
`{"events": [...], "clock": [...]}`. An event is a list that begins with its kind (`EVENT_KINDS`).
Events are numbered from 0. `clock` holds the readings of the driver's clock, each in microseconds
since the previous reading. The first `clock` number in the file is the first reading itself.
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

#: Name pattern of the files of a record. Each process that trains a trial begins a file. With
#: `record_restarts`, it also begins a new file after each checkpoint.
PATTERN = f"arrivals_{'[0-9]' * 6}.jsonl.gz"
#: Version of the format.
FORMAT = 1
#: The kinds of events. Each text lists the values that follow the kind in the event, and says what
#: happened. Processes are numbered from 0 in the order of their starts. A ticket stands for one
#: start or call. Tickets are numbered from 0 in the order in which starts and calls were sent.
EVENT_KINDS = {
    "start": "name of the process: the driver starts a process",
    "remake": "process: the process makes its object again",
    "send": "process, version of the driver's weights: the driver sends a call",
    "wait": "tickets: the driver waited, and these tickets have ended (none if nothing ended)",
    "up": "ticket: a process has started",
    "reply": "ticket, fingerprint, environment steps, error, number for the names of phases, "
    "microseconds of each phase, effects of timing if any (`Record.timing`): a call was answered",
    "fail": "ticket, class of the error, message, true if a process failed at its start, true "
    "if its node was preempted (absent otherwise): a call got no usable answer",
    "kill": "process: the driver kills a process, usually because the process has failed",
    "ended": "ticket, true or false: the driver checked whether a call has ended",
    "silent": "process, seconds without progress (null if unknown): the driver checked a process",
    "waiting": "processes that may lack resources, largest number of them that really lack "
    "resources: the driver checked for a lack of resources",
    "leaving": "processes: the nodes of these processes have announced their end",
    "phases": "names of the phases of a call: replies refer to this list by its number, from 0",
    "decide": "true or false: the trainer made a decision that depends on time",
    "train": "an iteration begins",
    "save": "the driver saves a checkpoint, and first waits for the calls that were sent",
    "restore": "path: the driver restores a checkpoint",
    "result": "iteration, version of the weights, SHA-256 of the weights: an iteration has ended",
}
#: Once a log with a file holds this number of events or of clock readings in memory, it writes them
#: to the file. If the file is already closed, the log drops them.
MOST_EVENTS, MOST_READINGS = 20_000, 100_000
#: `read_log` refuses files above this size.
MOST_BYTES = 2**33
#: `read_log` refuses files that unpack to more than this number of bytes for each of their bytes,
#: plus `_FREE_BYTES`. Records have a ratio of 2 to 10.
_MOST_UNPACKED, _FREE_BYTES = 40, 1 << 20
_PIECE_BYTES = 1 << 12
_US = 1e6
_HEADER_BYTES = 10  # of a gzip member

Event = list[Any]


class RerunDifference(RuntimeError):
    """A rerun differs from the recorded run. The message says what differs.

    Attributes:
        event: number of the first event at which the two runs differ.
    """

    def __init__(self, event: int, message: str) -> None:
        super().__init__(message)
        self.event = event


class ArrivalLog:
    """Records a run. `open` gives the log a file, and `take` returns the events of a log without a
    file. A log with a file keeps a limited number of events in memory (`MOST_EVENTS`). A log
    without a file keeps all events until `take` returns them.

    Only the thread that waits for calls may add events, and only its clock readings are recorded.
    Other threads read the real clock.

    Args:
        clock: a function that returns the seconds of the real clock.

    Attributes:
        repeats: always False, because this log does not repeat a record.
        num_events: number of events so far. The next event gets this number.
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

    # ---- called by transports -------------------------------------------------------------------

    def own_thread(self) -> None:
        """Notes that the current thread is the thread that waits for calls."""
        self._thread = threading.get_ident()

    @property
    def is_own_thread(self) -> bool:
        """True in the thread that waits for calls."""
        return threading.get_ident() == self._thread

    def read_clock(self) -> float:
        """Returns the seconds of the clock, and records the reading. The seconds are rounded down
        to whole microseconds, so a rerun can return exactly the same seconds. In other threads,
        returns the seconds of the real clock, and records nothing."""
        if threading.get_ident() != self._thread:
            return self._clock()
        now_us = int(self._clock() * _US)
        self._readings.append(now_us)
        return now_us / _US

    def note(self, *event: Any) -> None:
        """Adds an event."""
        self._events.append([*event])
        self.num_events += 1
        is_full = len(self._events) >= MOST_EVENTS or len(self._readings) >= MOST_READINGS
        if is_full and self._path is not None:
            self.flush()
            self.take()  # drops the events if the file is closed

    def next(self, kind: str, *expected: Any) -> Event | None:
        """Returns None, because this log does not repeat a record. See `Rerun.next`."""
        return None

    def phases(self, names: tuple[str, ...]) -> int:
        """Returns the number that stands for these names of phases in events of kind `reply`."""
        if names not in self._phases:
            self._phases[names] = len(self._phases)
            self.note("phases", *names)
        return self._phases[names]

    # ---- called by trainers ---------------------------------------------------------------------

    def mark(self, kind: str, *values: Any) -> None:
        """Adds an event that does not depend on time."""
        self.note(kind, *values)

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """Makes a decision that depends on time, records it, and returns it.

        Args:
            decision: makes the decision.
            repeat: not called here. A rerun calls `repeat` if the recorded decision is True.
        """
        made = bool(decision())
        self.note("decide", made)
        return made

    def result(self, iteration: int, version: int, digest: str) -> None:
        """Adds the result of an iteration, and writes all events to the file if there is one."""
        self.note("result", iteration, version, digest)
        self.flush()

    # ---- output ---------------------------------------------------------------------------------

    def take(self) -> dict[str, Any]:
        """Returns the events and clock readings that the log holds in memory as JSON values, and
        removes them from the log."""
        events, self._events = self._events, []
        readings, self._readings = self._readings, []
        deltas = [b - a for a, b in itertools.pairwise([self._last_us, *readings])]
        if readings:
            self._last_us = readings[-1]
        return {"events": events, "clock": deltas}

    def open(self, path: Path, header: dict[str, Any]) -> None:
        """Creates a file. From now on, the log writes to this file.

        Raises:
            OSError: the file exists or cannot be created.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._path = path.open("xb"), path
        self._write({"polopt_arrivals": FORMAT, **header})
        self.flush()

    def flush(self) -> None:
        """Writes the events since the last flush to the file. Does nothing without a file. If
        writing fails, logs a warning and ends the record. The run itself continues."""
        if self._file is not None:
            self._write(self.take())

    def _write(self, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":")) + "\n"
        packer = zlib.compressobj(3, wbits=31)  # a gzip member
        try:
            self._file.write(packer.compress(text.encode()) + packer.flush())
            self._file.flush()
        except OSError as error:
            logger.warning(
                "%s cannot be written. Recording ends, and the run continues: %s", self._path, error
            )
            self._close_file()

    def close(self) -> None:
        """Writes the remaining events, and closes the file."""
        self.flush()
        self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


class Departure(BaseException):
    """Raised when a rerun differs from the recorded run. This is a BaseException, so code that
    handles failures of workers does not catch it.

    Attributes:
        event: number of the event at which the rerun differs.
    """

    def __init__(self, event: int, message: str) -> None:
        super().__init__(message)
        self.event = event


class RecordEnded(BaseException):
    """Raised when a rerun has reached the end of the record."""


class Rerun:
    """Repeats a record. Has the methods of `ArrivalLog`, except `open`.

    Args:
        recorded: the events and the deltas of the clock, as `ArrivalLog.take` returns them.
        clock: a function that returns the seconds of the real clock, for other threads and for the
            time after the end of the record.
        is_below: True if the record holds the calls of a gradient worker to the workers below it,
            which sample its fragments. Such a record travels to the driver in the replies of the
            gradient worker. It therefore lacks the calls after the last of these replies. So the
            end of such a record does not end the rerun, and later calls are not compared.

    Raises:
        ConfigError: an event names a process or call that the record does not have.

    Attributes:
        repeats: True until the end of the record, or until `finish` is called.
        before: a function that is called before each event is repeated, with the number of the
            event.
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
        #: The effects of timing in each call (`Record.timing`), by ticket.
        self.timing: dict[int, dict[str, Any]] = {}
        #: The tickets of calls and starts that failed in the recorded run.
        self.failed: set[int] = set()
        self._below: dict[int, list[dict[str, Any]]] = {}
        self._phases: list[list[str]] = []
        try:
            self._index()
        except (LookupError, TypeError) as error:
            raise ConfigError(f"the record is damaged: {error!r}. Record the run again") from error

    def _index(self) -> None:
        processes: list[int] = []  # the number of the process, by ticket
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
        """Returns the record of the calls that a process itself made in the recorded run, such as
        the calls of a gradient worker to the workers below it. None if the record has no calls that
        process number `process` made."""
        parts = self._below.get(process)
        if parts is None:
            return None
        return {key: [one for part in parts for one in part[key]] for key in ("events", "clock")}

    def names_of(self, number: int) -> list[str]:
        """Returns the names of phases for which `number` stands in events of kind `reply`."""
        return self._phases[number]

    # ---- called by transports -------------------------------------------------------------------

    def own_thread(self) -> None:
        """Notes that the current thread is the thread that waits for calls."""
        self._thread = threading.get_ident()

    @property
    def is_own_thread(self) -> bool:
        """True in the thread that waits for calls."""
        return threading.get_ident() == self._thread

    def read_clock(self) -> float:
        """Returns the next recorded reading of the clock. Other threads get the real time.

        Raises:
            RecordEnded: the driver's record has no more readings. After `finish`, and in a gradient
                worker, the method returns the real time instead.
        """
        if threading.get_ident() != self._thread or not self.repeats:
            return self._clock()
        if self._read >= len(self._readings):
            self._end()
            return self._clock()
        self._read += 1
        return self._readings[self._read - 1] / _US

    def note(self, *event: Any) -> None:
        """Does nothing, because a rerun does not record."""

    def next(self, kind: str, *expected: Any) -> Event | None:
        """Returns the next recorded event, and compares it with the event that happens now. Returns
        None after `finish`, and after the end of the record of a gradient worker.

        Args:
            kind: kind of the event that happens now.
            expected: the first values of this event, as far as they are known already.

        Raises:
            Departure: the record has a different event here.
            RecordEnded: the driver's record has no more events.
        """
        event = self.peek() if self.repeats else None
        if event is None:
            self._end()
            return None
        number = self.num_events
        self.before(number)
        if event[: 1 + len(expected)] != [kind, *expected]:
            self.depart(
                number, f"{described([kind, *expected])}, but the record has {described(event)}"
            )
        self.num_events += 1
        return event

    def peek(self) -> Event | None:
        """Returns the next recorded event. `next` then returns the same event again. Skips events
        of kind `phases`. Returns None after the last event."""
        while self.num_events < len(self.events) and self.events[self.num_events][0] == "phases":
            self.num_events += 1
        return self.events[self.num_events] if self.num_events < len(self.events) else None

    def finish(self) -> None:
        """Ends the repetition without an error. Later events are not compared with the record."""
        self.repeats, self._is_below = False, True

    def depart(self, event: int, what: str) -> NoReturn:
        """Ends the rerun at a difference: raises `Departure`."""
        raise Departure(event, what)

    def _end(self) -> None:
        self.repeats = False
        if not self._is_below:
            raise RecordEnded

    def phases(self, names: tuple[str, ...]) -> int:
        """Returns 0, because a rerun does not record."""
        return 0

    # ---- called by trainers ---------------------------------------------------------------------

    def mark(self, kind: str, *values: Any) -> None:
        """Compares an event that does not depend on time with the record. Does not compare the path
        of a restored checkpoint, because the checkpoint may have been moved. Raises the errors of
        `next`."""
        self.next(kind, *([] if kind == "restore" else values))

    def decide(self, decision: Callable[[], bool], repeat: Callable[[], object]) -> bool:
        """Returns the recorded decision. If the decision is True, calls `repeat` first. Returns
        False after `finish`. Raises the errors of `next`."""
        event = self.next("decide")
        made = bool(event is not None and event[1])
        if made:
            repeat()
        return made

    def result(self, iteration: int, version: int, digest: str) -> None:
        """Compares the result of an iteration with the record.

        Raises:
            Departure: the weights or their version differ from the record. See also `next`.
            RecordEnded: see `next`.
        """
        number = self.num_events
        event = self.next("result", iteration)
        if event is not None and event[2:] != [version, digest]:
            what = "a different version" if event[2] != version else "different bytes"
            self.depart(number, f"the weights of iteration {iteration} have {what}")

    def take(self) -> dict[str, Any]:
        """Returns an empty record, because a rerun does not record."""
        return {"events": [], "clock": []}

    def flush(self) -> None:
        """Does nothing, because a rerun writes no file."""

    def close(self) -> None:
        """Does nothing, because a rerun has no open file."""


def described(event: Event) -> str:
    """Returns a text that describes an event. Calls and running processes appear as numbers."""
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
            return f"the end of call {ticket}, which starts a process"
        case ["fail", ticket, *rest]:
            return f"the failure of call {ticket}" + (f" ({rest[0]})" if rest else "")
        case ["kill", process, *_]:
            return f"the kill of process {process}"
        case ["leaving", *processes]:
            return f"the leaving of process {', '.join(map(str, processes))}"
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
    """Yields a line of text for each event from number `first` to number `last`. The lines contain
    the names of processes."""
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
                words = f"the driver kills {names[process]} (process {process})"
        if number >= first:
            yield f"{number:>8}  {words}"


def read_log(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads a file that an `ArrivalLog` wrote. Ignores an incomplete gzip member at the end of the
    file, because a process that dies may leave such a member.

    Returns:
        the header, and all events and deltas of the clock (see `Rerun`).

    Raises:
        ConfigError: the file cannot be read, is not a record of format `FORMAT`, has a gzip member
            that cannot be unpacked, or has a line that does not hold events and clock readings.
    """
    try:
        lines = _lines(read_regular(path, MOST_BYTES))
        header = next(lines, None)
    except zlib.error:
        header = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    except RecursionError:
        header = None
    if not isinstance(header, dict) or header.get("polopt_arrivals") != FORMAT:
        raise ConfigError(
            f"{str(path)!r} is not a record of arrivals of format {FORMAT}, which this version of "
            "polopt writes"
        )
    events: list[Event] = []
    deltas: list[int] = []
    try:
        for line in lines:
            for event in line["events"]:
                if not isinstance(event, list) or not isinstance(event[0], str):
                    raise ValueError(f"got event {event!r:.80}")
            if not all(isinstance(delta, int) for delta in line["clock"]):
                raise ValueError("a reading of the clock is not an integer")
            events += line["events"]
            deltas += line["clock"]
    except (LookupError, TypeError, ValueError, RecursionError, zlib.error) as error:
        raise ConfigError(
            f"{str(path)!r} is damaged at event {len(events)}: {error!r}. Copy the file again, "
            "or record the run again"
        ) from error
    return header, {"events": events, "clock": deltas}


def _lines(data: bytes) -> Iterator[Any]:
    """Yields the JSON value of each gzip member. Raises a ValueError if all members together unpack
    to more than `_MOST_UNPACKED` bytes for each byte of the file."""
    left, start = _MOST_UNPACKED * len(data) + _FREE_BYTES, 0
    while start < len(data):
        unpacker, parts, at = zlib.decompressobj(wbits=31), [], start
        while not unpacker.eof and at < len(data):
            # Small pieces, because `unused_data` is a copy of the rest of a piece.
            piece = data[at : at + _PIECE_BYTES]
            at += len(piece)
            parts.append(unpacker.decompress(piece, left + 1))
            left -= len(parts[-1])
            if left < 0:
                raise ValueError(
                    f"it unpacks to more than {_MOST_UNPACKED} bytes for each of its bytes"
                )
        if not unpacker.eof:
            # All members begin with the same bytes.
            if data.find(data[start : start + _HEADER_BYTES], start + 1) > 0:
                raise zlib.error("a gzip member before the last member has no end")
            return  # the process died while it wrote this member
        yield json.loads(b"".join(parts))
        start = at - len(unpacker.unused_data)
