"""The contract of `Channel`, tested through Ray, over sockets, in this process, and simulated."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from channel_helpers import (
    LIMIT_S,
    NO_RESOURCES,
    Line,
    Notebook,
    note,
    note_slowly,
    notes,
    pid,
    ticket_answer,
)
from simulated_channel import Reference, SimulatedTransport, of_process

from polopt.rollouts.transport.channel import (
    ChannelError,
    LostProcessError,
    LostReferenceError,
    Transport,
    UndecodableAnswerError,
    UnsendableError,
)
from polopt.rollouts.transport.local_channel import LocalChannel
from polopt.rollouts.transport.ray_channel import RayTransport
from polopt.rollouts.transport.socket_channel import SocketTransport
from polopt.rollouts.workers.call_runner import CallRunner

ALL = ("ray", "socket", "local", "simulated")
PROCESSES = ("ray", "socket")
Make = Callable[..., Line]


@pytest.fixture(scope="module")
def transports(ray_session: None) -> Iterator[dict[str, Transport]]:
    made: dict[str, Transport] = {
        "ray": RayTransport(),
        "socket": SocketTransport(RayTransport(), LIMIT_S, required=True),
        "simulated": SimulatedTransport(),
    }
    made["local"] = made["ray"]
    yield made
    made["ray"].close()
    made["socket"].close()


@pytest.fixture(scope="module")
def make(transports: dict[str, Transport]) -> Iterator[Make]:
    """Returns a function that makes a `Line` to a new process. The process is up, and connected if
    the transport has connections."""
    lines = []

    def build(kind: str, name: str = "worker 1", *args: Any) -> Line:
        transport = transports[kind]
        if kind == "local":
            return Line(kind, transport, LocalChannel(Notebook(*args), transport))
        lines.append(Line(kind, transport, transport.start(Notebook, args, NO_RESOURCES, name)))
        lines[-1].note_started()
        return lines[-1]

    yield build
    for line in lines:
        if line.kind != "simulated":
            line.transport.kill(line.channel)


@pytest.fixture(scope="module")
def pool(make: Make) -> Callable[[str], Line]:
    """Returns a function that returns a `Line` to one process of each kind. All tests that do not
    kill this process share it. Each test gets a new object in the process."""
    made: dict[str, Line] = {}

    def get(kind: str) -> Line:
        if kind == "local" or kind not in made:
            made[kind] = make(kind)
            return made[kind]
        line = made[kind]
        line.transport.remake(line.channel, ())
        line.note_started()
        return line

    return get


@pytest.fixture(params=ALL)
def line(request: pytest.FixtureRequest, pool: Callable[[str], Line]) -> Line:
    return pool(request.param)


@pytest.fixture(params=PROCESSES)
def process(request: pytest.FixtureRequest, pool: Callable[[str], Line]) -> Line:
    return pool(request.param)


def all_answers(line: Line, tickets: list[Any]) -> list[Any]:
    """Waits for each ticket, oldest first, and returns the values in this order."""
    return [line.answer(ticket).value for ticket in tickets]


# ---- order -------------------------------------------------------------------------------------


def test_calls_run_and_end_in_the_order_they_were_sent(line: Line) -> None:
    large = np.zeros(1_000_000, np.uint8)
    reference = line.transport.put("by reference")
    tickets, sent = [], []
    for number in range(30):
        if number % 7 == 2:  # this call does not fit into the buffer of a socket
            tickets.append(line.send(note, (number, large)))
            sent.append(number)
        elif number % 7 == 4:
            tickets.append(line.send(note, reference))
            sent.append("by reference")
        else:
            tickets.append(line.send(note, number))
            sent.append(number)
    values = all_answers(line, tickets)
    assert [value[0] if isinstance(value, tuple) else value for value in values] == sent
    noted = line.call(notes)
    assert [value[0] if isinstance(value, tuple) else value for value in noted] == sent


def make_array(book: Notebook, size: int) -> np.ndarray:
    return np.arange(size, dtype=np.float32)


@pytest.mark.parametrize("size", [0, 10, 50_000, 1_000_000])
def test_arrays_of_any_size_arrive_equal(line: Line, size: int) -> None:
    """This also holds for two answers that wait in the driver at the same time."""
    array = np.arange(size, dtype=np.float32)
    tickets = [line.send(make_array, size) for _ in range(2)] + [line.send(note, array)]
    for value in all_answers(line, tickets):
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, array)


@pytest.mark.parametrize("kind", ["ray", "socket", "simulated"])
def test_first_of_several_processes_ends_the_wait(make: Make, kind: str) -> None:
    slow, quick = make(kind), make(kind, "worker 2")
    transport = slow.transport
    if isinstance(transport, SimulatedTransport):
        transport.script = of_process("worker 2")
    tickets = [slow.send(note_slowly, "slow", 3.0 * (kind != "simulated")), quick.send(note, 1)]
    until_s = time.monotonic() + LIMIT_S
    while not (ended := transport.wait(tickets, 10.0)):
        assert time.monotonic() < until_s
    assert ended == [tickets[1]]
    assert not tickets[0].ended()
    assert tickets[1].result(0.0).value == 1
    if isinstance(transport, SimulatedTransport):
        transport.script = of_process("worker 1")
    assert slow.answer(tickets[0]).value == "slow"


def test_wait_without_an_answer_returns_at_its_limit(process: Line) -> None:
    ticket = process.send(note_slowly, "slow", 1.0)
    began_s = time.monotonic()
    assert not process.transport.wait([ticket], 0.0)
    assert time.monotonic() - began_s < 0.9
    assert not process.transport.wait([ticket], 0.1)
    assert not ticket.ended()
    assert process.answer(ticket).value == "slow"


# ---- errors ------------------------------------------------------------------------------------


def fail(book: Notebook) -> None:
    raise ZeroDivisionError("division in the function")


def test_function_that_raises_is_an_answer(line: Line) -> None:
    ticket, later = line.send(fail), line.send(note, 1)
    if ticket.reraises:
        with pytest.raises(ZeroDivisionError, match="in the function"):
            line.answer(ticket)
    else:
        error = line.answer(ticket).error
        assert error.kind == "exception"
        assert error.message.startswith("ZeroDivisionError: division in the function")
    assert line.answer(later).value == 1


@pytest.mark.parametrize("kind", ["ray", "socket", "simulated"])
def test_arguments_that_cannot_be_pickled_are_not_sent(
    pool: Callable[[str], Line], kind: str
) -> None:
    line = pool(kind)
    with pytest.raises(TypeError, match="pickle"):
        line.send(note, threading.Lock())
    assert line.call(note, 1) == 1
    assert line.call(notes) == [1]


def make_lock(book: Notebook) -> Any:
    return threading.Lock()


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize("kind", ["ray", "socket", "simulated"])
def test_value_that_cannot_be_pickled_fails_only_its_call(
    pool: Callable[[str], Line], kind: str, by_reference: bool
) -> None:
    if kind == "simulated" and by_reference:
        pytest.skip("references of the simulated transport hold objects of this process")
    line = pool(kind)
    ticket, later = line.send(make_lock, by_reference=by_reference), line.send(note, 1)
    try:
        error = line.answer(ticket).error
    except UnsendableError as unsendable:
        message = str(unsendable)
    else:
        assert error.kind == "function"
        message = error.message
    assert "cannot be pickled" in message
    assert "lock" in message
    assert line.answer(later).value == 1


class MissingThere:
    """An object that can be unpickled only in the process of the test."""

    def __init__(self) -> None:
        self.pid = os.getpid()

    def __reduce__(self) -> Any:
        return (_import_unless, (self.pid,))


def _import_unless(own: int) -> str:
    if os.getpid() != own:
        importlib.import_module("statistics_of_mine")
    return "here"


def test_arguments_that_cannot_be_unpickled_are_refused(process: Line) -> None:
    ticket, later = process.send(note, MissingThere()), process.send(note, 1)
    error = process.answer(ticket).error
    assert error.kind == "function"
    assert "the call cannot be unpickled in the worker" in error.message
    assert "statistics_of_mine" in error.message
    assert process.answer(later).value == 1


class Undecodable:
    """An object that cannot be unpickled, such as an object of a class that the other process
    cannot import.

    Args:
        raises: the function that raises during unpickling.
        argument: the argument of this function.
    """

    def __init__(self, raises: Callable[..., Any], argument: str) -> None:
        self.raises, self.argument = raises, argument

    def __reduce__(self) -> Any:
        return (self.raises, (self.argument,))


def make_undecodable(book: Notebook, raises: Callable[..., Any], argument: str) -> Any:
    return Undecodable(raises, argument)


@pytest.mark.parametrize(
    ("raises", "argument"), [(importlib.import_module, "statistics_of_mine"), (sys.exit, "exit")]
)
@pytest.mark.parametrize("large", [False, True])
def test_answer_that_cannot_be_unpickled_fails_only_its_call(
    process: Line, raises: Callable[..., Any], argument: str, large: bool
) -> None:
    """Ray does not report the end of a call whose answer raises SystemExit during unpickling."""
    size = bytes(1_000_000 if large else 10)
    ticket = process.send(lambda book, data: make_undecodable(book, raises, argument), size)
    later, began_s = process.send(note, 1), time.monotonic()
    with pytest.raises(UndecodableAnswerError, match=argument):
        process.answer(ticket)
    assert time.monotonic() - began_s < LIMIT_S / 4.0
    assert process.answer(later).value == 1


class SignalledWhileUnpickled:
    """An object whose unpickling is interrupted by a signal."""

    def __reduce__(self) -> Any:
        return (signal.raise_signal, (signal.SIGTERM,))


def test_signal_while_an_answer_is_unpickled_is_not_the_processs_failure(process: Line) -> None:
    def stop(number: int, frame: Any) -> None:
        raise SystemExit(143)

    ticket = process.send(lambda book: SignalledWhileUnpickled())
    process.transport.wait([ticket], LIMIT_S) if process.kind == "socket" else None
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit, match="143"):
            process.answer(ticket)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert process.call(note, 1) == 1


# ---- references --------------------------------------------------------------------------------


def test_function_gets_the_object_of_a_reference(line: Line) -> None:
    reference = line.transport.put({"key": [1, 2]})
    assert line.call(note, reference) == {"key": [1, 2]}
    assert line.call(lambda book, *args: args, 1, reference, 2) == (1, {"key": [1, 2]}, 2)
    assert line.transport.get(reference) == {"key": [1, 2]}
    assert line.transport.get("a value") == "a value"


def test_value_can_stay_in_the_process_that_made_it(line: Line) -> None:
    reference = line.call(make_array, 1000, by_reference=True)
    assert not isinstance(reference, np.ndarray)
    np.testing.assert_array_equal(line.call(note, reference), np.arange(1000.0))
    np.testing.assert_array_equal(line.transport.get(reference), np.arange(1000.0))


def pause(book: Any, seconds: float) -> None:
    time.sleep(seconds)


@pytest.mark.parametrize("kind", PROCESSES)
def test_sent_call_keeps_the_values_of_its_references(make: Make, kind: str) -> None:
    """The driver may put newer weights before a process begins a call with earlier weights."""
    owner, other = make(kind), make(kind, "worker 2")
    references = [
        other.transport.put(np.arange(1000.0)),
        owner.call(make_array, 1000, by_reference=True),
    ]
    tickets = [other.send(pause, 0.5)]
    tickets += [other.send(lambda book, value: value.sum(), value) for value in references]
    del references
    gc.collect()
    owner.call(note, 1)  # tells the owner to drop values that nobody can fetch any more
    assert [other.answer(ticket).value for ticket in tickets] == [None, 499_500.0, 499_500.0]


def test_error_of_a_call_by_reference_is_an_answer(process: Line) -> None:
    answer = process.answer(process.send(fail, by_reference=True))
    assert answer.error.kind == "exception"


def call_until_error(line: Line, value: Any) -> None:
    """Calls until a call fails. Ray kills a process and drops its objects some time after the
    request."""
    until_s = time.monotonic() + LIMIT_S
    while time.monotonic() < until_s:
        line.call(lambda book, _: None, value)  # if the function kept the array, Ray would, too
        time.sleep(0.2)


@pytest.mark.parametrize("kind", PROCESSES)
def test_reference_to_an_object_of_a_dead_process_is_lost(make: Make, kind: str) -> None:
    """The loss is not a `LostProcessError`, because the called process has not failed."""
    owner, other = make(kind), make(kind, "worker 2")
    reference = owner.call(make_array, 1000, by_reference=True)
    owner.transport.kill(owner.channel)
    with pytest.raises(LostProcessError):
        call_until_error(owner, 1)
    with pytest.raises(LostReferenceError):
        call_until_error(other, reference)
    assert other.call(note, 1) == 1


def test_lost_reference_in_this_process(pool: Callable[[str], Line]) -> None:
    transport, line = SimulatedTransport(), pool("local")
    line.channel = LocalChannel(Notebook(), transport)
    with pytest.raises(LostReferenceError):
        line.call(note, Reference(LostReferenceError("of a test")))


# ---- early stops and progress ------------------------------------------------------------------


def until_stopped(runner: CallRunner, limit_s: float = LIMIT_S) -> int | None:
    until_s = time.monotonic() + limit_s
    while runner.stop_after() is None and time.monotonic() < until_s:
        time.sleep(0.005)
    return runner.stop_after()


def test_running_call_is_stopped_early(process: Line) -> None:
    ticket = process.send(until_stopped)
    number = next(Line._numbers) - 1
    time.sleep(0.2)
    assert not ticket.ended()
    process.channel.stop_early(number, 7)
    assert process.answer(ticket).value == 7


def test_each_pending_call_is_stopped_by_its_own_request(process: Line) -> None:
    first, second = process.send(until_stopped), process.send(until_stopped)
    number = next(Line._numbers) - 2
    process.channel.stop_early(number, 7)
    process.channel.stop_early(number + 1, 8)
    assert all_answers(process, [first, second]) == [7, 8]
    assert process.call(until_stopped, 0.0) is None


def test_local_call_is_stopped_early(pool: Callable[[str], Line]) -> None:
    line = pool("local")
    ticket = line.send(until_stopped)
    line.channel.stop_early(next(Line._numbers) - 1, 7)
    assert line.answer(ticket).value == 7


def phases(runner: CallRunner, duration_s: float) -> None:
    until_s = time.monotonic() + duration_s
    while time.monotonic() < until_s:
        with runner.phase("learn"):
            time.sleep(0.02)


def test_progress_is_visible_while_a_call_runs(process: Line) -> None:
    working = process.send(phases, 1.5)
    time.sleep(1.2)
    silent_s = process.channel.silent_s()
    assert silent_s is not None
    assert silent_s < 1.0
    process.answer(working)
    hanging = process.send(note_slowly, 1, 1.5)
    time.sleep(1.2)
    assert (process.channel.silent_s() or 0.0) > 1.0
    process.answer(hanging)


def test_local_process_is_never_silent(pool: Callable[[str], Line]) -> None:
    assert pool("local").channel.silent_s() == 0.0


# ---- ends --------------------------------------------------------------------------------------


def test_remake_replaces_the_object_of_a_process(process: Line) -> None:
    own = process.call(pid)
    pending = process.send(note_slowly, "before", 0.2)
    process.transport.remake(process.channel, ("first",))
    process.note_started()
    assert process.answer(pending).value == "before"
    assert process.call(notes) == ["first"]
    assert process.call(pid) == own


@pytest.mark.parametrize("kind", PROCESSES)
def test_error_of_a_constructor_ends_the_start(make: Make, transports: Any, kind: str) -> None:
    transport = transports[kind]
    failing = transport.start(Notebook, ("fail",), NO_RESOURCES, "worker 1")
    with pytest.raises(LostProcessError, match="division in the constructor") as caught:
        ticket_answer(transport, failing.start)
    assert caught.value.at_start
    transport.kill(failing)
    line = make(kind)
    transport.remake(line.channel, ("fail",))
    with pytest.raises(LostProcessError, match="division in the constructor") as caught:
        line.note_started()
    assert caught.value.at_start
    assert "pickled" not in str(caught.value)


def end(book: Notebook, how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else os._exit(1)


@pytest.mark.parametrize("how", ["killed", "exit"])
@pytest.mark.parametrize("kind", PROCESSES)
def test_death_ends_all_calls_of_the_process(make: Make, kind: str, how: str) -> None:
    line, other = make(kind), make(kind, "worker 2")
    assert line.call(note, 1) == 1
    dying, after = line.send(end, how), line.send(note, 2)
    for ticket in (dying, after):
        with pytest.raises(LostProcessError) as caught:
            line.answer(ticket)
        assert not caught.value.at_start
    with pytest.raises(ChannelError):
        line.answer(line.send(note, 3))
    line.transport.kill(line.channel)
    assert other.call(note, 1) == 1


@pytest.mark.parametrize("kind", ["ray", "socket", "simulated"])
def test_calls_of_a_killed_process_end(make: Make, kind: str) -> None:
    """This also holds if another thread kills the process while this thread waits. A process may be
    killed twice."""
    line = make(kind)
    tickets = [line.send(note_slowly, 1, 1e4 * (kind != "simulated")), line.send(note, 2)]
    if kind == "simulated":
        line.transport.kill(line.channel)
    else:
        threading.Timer(0.3, line.transport.kill, (line.channel,)).start()
    began_s = time.monotonic()
    for ticket in tickets:
        with pytest.raises(LostProcessError):
            line.answer(ticket)
    assert time.monotonic() - began_s < LIMIT_S / 4.0
    line.transport.kill(line.channel)


@pytest.mark.parametrize("kind", PROCESSES)
def test_sending_to_a_stopped_process_does_not_wait(make: Make, kind: str) -> None:
    line, other = make(kind), make(kind, "worker 2")
    process_id = line.call(pid)
    os.kill(process_id, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        tickets = [line.send(note, (number, bytes(20_000))) for number in range(100)]
        assert time.monotonic() - began_s < LIMIT_S / 4.0
        assert other.call(note, 1) == 1
        assert not line.transport.wait(tickets[:1], 0.1)
        assert (line.channel.silent_s() or 0.0) > 0.0
    finally:
        os.kill(process_id, signal.SIGCONT)
    assert [value[0] for value in all_answers(line, tickets)] == list(range(100))


@pytest.mark.parametrize("kind", PROCESSES)
def test_stop_lets_objects_close_their_resources(make: Make, kind: str, tmp_path: Any) -> None:
    line, path = make(kind), tmp_path / "stopped"

    class Closing:
        def close(self) -> None:
            path.write_text("closed")

    line.call(lambda book: book.state.update(closing=Closing()))
    line.transport.stop([line.channel], LIMIT_S)
    assert path.read_text() == "closed"
    with pytest.raises(ChannelError):
        line.answer(line.send(note, 1))


def test_transport_names_the_paths_of_calls(process: Line) -> None:
    assert process.transport.paths([process.channel]) == process.kind
