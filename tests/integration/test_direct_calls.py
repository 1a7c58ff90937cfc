"""Direct calls: that they are what calls through Ray are, whatever happens to those they go to."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import ray
from fakes import make_optimizer, pid_of, worker_config
from faulty_envs import NeverResets

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.rollouts.transport.direct_calls import Answering, Connection, connect, encode, greet
from polopt.rollouts.transport.line import DirectCall, Line
from polopt.rollouts.transport.sockets import new_token
from polopt.rollouts.transport.switchboard import Switchboard
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

HOST = "127.0.0.1"
Pool = Callable[[WorkerConfig], WorkerSet]


class Parcel(NamedTuple):
    """Like what optimizers send."""

    arrays: list[np.ndarray]
    note: dict[str, float]


def pair() -> tuple[Connection, Connection]:
    with socket.create_server((HOST, 0)) as listener:
        token = new_token()
        one = connect(listener.getsockname(), token)
        caller, _ = listener.accept()
        assert greet(caller, [new_token(), token], 5.0) == token
        return one, Connection(caller, 5.0)


@pytest.fixture
def connected() -> Iterator[tuple[Connection, Connection]]:
    one, other = pair()
    yield one, other
    one.close()
    other.close()


# ---- messages ----------------------------------------------------------------------------------


def test_what_is_sent_arrives(connected: tuple[Connection, Connection]) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(9_155).astype(np.float32),
        np.zeros(0),
        rng.integers(0, 9, (3, 5), dtype=np.int8),
        rng.standard_normal((4, 6)).T,
        np.arange(3),
    ]
    connected[0].send(Parcel(arrays, {"loss": 0.5}))
    connected[0].send("and another")
    got = connected[1].receive()
    assert got.note == {"loss": 0.5}
    for array, sent in zip(got.arrays, arrays, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)
        assert array.flags.writeable, "torch warns of arrays that are not"
        assert array.flags.aligned
    assert connected[1].receive() == "and another"


def test_two_messages_wait_for_nobody_to_read(connected: tuple[Connection, Connection]) -> None:
    largest = np.zeros(25_000, np.float32)
    for _ in range(2):
        connected[1].send(largest)
        connected[0].send(largest)
    for _ in range(2):
        assert connected[0].receive().nbytes == connected[1].receive().nbytes == 100_000


def test_a_message_may_come_in_pieces(connected: tuple[Connection, Connection]) -> None:
    message = encode(np.arange(100.0))

    def dribble() -> None:
        for i in range(0, len(message), 100):
            connected[0].socket.sendall(message[i : i + 100])
            time.sleep(0.001)

    thread = threading.Thread(target=dribble)
    thread.start()
    np.testing.assert_array_equal(connected[1].receive(), np.arange(100.0))
    thread.join()


def test_the_end_of_the_other_side_shows(connected: tuple[Connection, Connection]) -> None:
    connected[0].socket.sendall(encode("whole")[:-1])
    connected[0].close()
    with pytest.raises(EOFError, match="gone"):
        connected[1].receive()


def test_one_that_stops_within_a_message_is_not_waited_for() -> None:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = Connection(listener.accept()[0], 0.2)
    one.sendall(encode("whole")[:-1])
    with pytest.raises(TimeoutError):
        other.receive()
    one.close()
    other.close()


def test_the_end_shows_even_if_a_forked_process_holds_the_connection(
    connected: tuple[Connection, Connection],
) -> None:
    held = os.dup(connected[0].socket.fileno())  # as a process forked from this one would
    connected[0].close()
    with pytest.raises(EOFError, match="gone"):
        connected[1].receive()
    os.close(held)


def test_a_slow_stranger_has_so_long_for_all_it_says() -> None:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()

    def dribble() -> None:
        for _ in range(12):
            one.sendall(b"0")
            time.sleep(0.1)

    thread = threading.Thread(target=dribble)
    thread.start()
    began_s = time.monotonic()
    assert greet(other, [b"0" * 16], 0.3) is None
    assert time.monotonic() - began_s < 0.9
    thread.join()
    one.close()
    other.close()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1", b"0" * 16])
def test_strangers_do_not_get_in(said: bytes) -> None:
    with socket.create_server((HOST, 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    one.sendall(said)
    one.shutdown(socket.SHUT_WR)
    assert greet(other, [new_token()], 5.0) is None
    one.close()
    other.close()


# ---- actors ------------------------------------------------------------------------------------


class Clerk:
    """Takes calls, directly or not, and keeps a list of them."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.answering = Answering()

    def serve(self, address: tuple[str, int], token: bytes) -> str:
        return self.answering.serve(self, address, token)

    def note(self, what: Any) -> Any:
        self.done.append(what)
        return what

    def sleep(self, duration_s: float) -> float:
        time.sleep(duration_s)
        return duration_s

    def fail(self) -> None:
        raise ZeroDivisionError("over the edge")

    def lose_a_pipe(self) -> None:
        raise BrokenPipeError("a pipe of its own")

    def leave(self) -> None:
        os._exit(1)

    def all(self) -> list[Any]:
        return self.done


@pytest.fixture(scope="module")
def clerks(ray_session: None) -> Iterator[Callable[[], Any]]:
    made = []

    def make() -> Any:
        made.append(ray.remote(num_cpus=0)(Clerk).remote())
        return made[-1]

    yield make
    for actor in made:
        ray.kill(actor)


@pytest.fixture
def board() -> Iterator[Switchboard]:
    made = Switchboard(HOST, 20.0)
    yield made
    made.close()


def result(board: Switchboard, call: Any) -> Any:
    assert board.wait([call], 30.0) == [call]
    return call.result(30.0) if isinstance(call, DirectCall) else ray.get(call, timeout=30.0)


def test_calls_run_in_the_order_they_were_made(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    actor = clerks()
    line: Line | None = None
    calls: list[Any] = []
    for number in range(60):
        if number % 7 in (2, 3):
            if line is not None:
                line.hang_up()
            calls.append(actor.note.remote(number))
        else:
            line = board.line(line, actor)
            calls.append(line.ask("note", (number,)))
    assert [result(board, call) for call in calls] == list(range(60))
    assert line is not None
    line.hang_up()
    assert ray.get(actor.all.remote(), timeout=30.0) == list(range(60))


def test_what_ends_first_is_returned_first(board: Switchboard, clerks: Callable[[], Any]) -> None:
    other = clerks()
    slow, quick = board.line(None, clerks()), board.line(None, clerks())
    for ready in (slow.ask("note", (0,)), quick.ask("note", (0,)), other.note.remote(0)):
        result(board, ready)
    waiting = slow.ask("sleep", (5.0,))
    assert board.wait([waiting], 0.0) == []
    through_ray, sooner = other.sleep.remote(1.5), quick.ask("sleep", (0.1,))
    assert board.wait([waiting, through_ray, sooner], 30.0) == [sooner]
    assert board.wait([waiting, through_ray], 30.0) == [through_ray], "nothing else woke it"
    assert board.wait([waiting], 0.05) == []
    assert board.wait([waiting], 30.0) == [waiting]
    assert board.wait([waiting, through_ray], 0.0) == [waiting], "in their order"


def test_an_exception_ends_what_comes_after_it_and_nothing_before(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    line = board.line(None, clerks())
    before, failing, after = (
        line.ask("note", (1,)),
        line.ask("fail", ()),
        line.ask("note", (2,)),
    )
    assert result(board, before) == 1
    for call in (failing, after):
        with pytest.raises(ray.exceptions.RayTaskError, match="over the edge"):
            result(board, call)
    assert line.broken


def test_a_broken_pipe_of_the_method_is_its_own_exception(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    call = board.line(None, clerks()).ask("lose_a_pipe", ())
    with pytest.raises(ray.exceptions.RayTaskError, match="a pipe of its own"):
        result(board, call)


def test_an_exception_is_told_of_though_the_line_was_opened_again(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    actor = clerks()
    line = board.line(None, actor)
    assert result(board, line.ask("note", (0,))) == 0
    failing = line.ask("fail", ())
    line.hang_up()
    again = board.line(line, actor).ask("note", (1,))
    with pytest.raises(ray.exceptions.RayTaskError, match="over the edge"):
        result(board, failing)
    assert board.wait([again], 30.0) == [again]
    with pytest.raises(ConnectionError):
        again.result(30.0)


def test_waits_may_be_as_long_as_configs_allow(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    patient = Switchboard(HOST, 1e7)
    call = patient.line(None, clerks()).ask("sleep", (1.5,))
    assert patient.wait([call], 1e7) == [call]
    assert call.result(30.0) == 1.5
    patient.close()


@pytest.mark.parametrize("idle", [False, True])
def test_a_dead_process_is_known_at_once(
    board: Switchboard, clerks: Callable[[], Any], idle: bool
) -> None:
    actor = clerks()
    line = board.line(None, actor)
    assert result(board, line.ask("note", (1,))) == 1
    if idle:
        line.hang_up()
        actor.leave.remote()
        time.sleep(0.5)
        line = board.line(line, actor)
        call = line.ask("note", (2,))
    else:
        call = line.ask("leave", ())
    began_s = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        result(board, call)
    assert time.monotonic() - began_s < 8.0


def test_answers_nobody_waits_for_any_more_are_forgotten(
    board: Switchboard, clerks: Callable[[], Any]
) -> None:
    line = board.line(None, clerks())
    line.ask("note", ("forgotten",))
    line.calls.clear()
    assert result(board, line.ask("note", ("wanted",))) == "wanted"


def test_a_line_that_was_closed_is_made_anew(board: Switchboard, clerks: Callable[[], Any]) -> None:
    actor = clerks()
    first = board.line(None, actor)
    assert result(board, first.ask("note", (1,))) == 1
    first.close()
    second = board.line(first, actor)
    assert second is not first
    assert result(board, second.ask("note", (2,))) == 2


def test_strangers_disturb_nobody(board: Switchboard, clerks: Callable[[], Any]) -> None:
    strangers = [socket.create_connection(board.address) for _ in range(2)]
    strangers[0].sendall(b"0" * 16)
    assert result(board, board.line(None, clerks()).ask("note", (1,))) == 1
    for stranger in strangers:
        stranger.close()


def test_a_worker_that_can_not_connect_is_called_through_ray(
    clerks: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    board = Switchboard(HOST, 20.0)
    with socket.create_server((HOST, 0)) as closed:
        board.address = closed.getsockname()
    actor = clerks()
    with caplog.at_level(logging.WARNING, "polopt"):
        line = board.line(None, actor)
        calls = [line.ask("note", (number,)) for number in range(3)]
        assert [result(board, call) for call in calls] == [0, 1, 2]
    assert board.refused
    assert [r.message.count("can not connect to the driver") for r in caplog.records] == [1]
    board.close()


# ---- workers -----------------------------------------------------------------------------------


def async_gradients(pool: Pool, rollout: dict[str, Any] | None = None, **options: Any) -> Any:
    workers = pool(worker_config("a2c", rollout={"num_workers": 1, **(rollout or {})}, lr=1e-2))
    return make_optimizer(AsyncGradients, workers, grads_per_step=10, **options)


@pytest.mark.parametrize("depth", [1, 2])
def test_training_is_the_same_bits_as_through_ray(worker_pool: Pool, depth: int) -> None:
    learned = []
    for direct in (True, False):
        optimizer = async_gradients(
            worker_pool, direct_calls=direct, max_requests_in_flight_per_worker=depth
        )
        for _ in range(3):
            optimizer.step()
        assert (optimizer.workers.remote[0].line is not None) == direct
        optimizer.drain()
        learned.append(optimizer.policy.get_weights().flat)
    np.testing.assert_array_equal(*learned)


def test_only_small_policies_and_few_calls_at_once_go_past_ray(worker_pool: Pool) -> None:
    assert async_gradients(worker_pool).workers.switchboard is not None
    deep = async_gradients(worker_pool, max_requests_in_flight_per_worker=3)
    assert deep.workers.switchboard is None
    workers = worker_pool(
        worker_config("a2c", rollout={"num_workers": 1}, model={"fcnet_hiddens": (256, 256)})
    )
    large = make_optimizer(AsyncGradients, workers)
    assert large.policy.flat.grads.nbytes > 100_000
    assert large.workers.switchboard is None
    large.step()


def test_a_pause_of_the_driver_is_not_the_workers(worker_pool: Pool) -> None:
    """The worker connects while the driver does something else for longer than its patience."""
    optimizer = async_gradients(worker_pool, {"worker_timeout_s": 0.8})
    worker = optimizer.workers.remote[0]
    optimizer.health.up()
    optimizer.in_flight.launch(
        worker,
        optimizer.workers.call(
            worker, "sample_and_compute_gradients", optimizer.workers.weights_for(worker)
        ),
    )
    time.sleep(1.5)
    assert optimizer.in_flight.wait().failure is None


def test_without_a_place_to_listen_calls_go_through_ray(
    worker_pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "192.0.2.77")
    with caplog.at_level(logging.WARNING, "polopt"):
        optimizer = async_gradients(worker_pool)
        optimizer.step()
    assert optimizer.workers.switchboard is None
    assert "can not listen at 192.0.2.77" in caplog.text


def test_other_calls_come_between(worker_pool: Pool) -> None:
    optimizer = async_gradients(worker_pool)
    optimizer.step()
    state = optimizer.get_state()
    optimizer.step()
    optimizer.set_state(state)
    optimizer.update_algorithm_parameter("lr", 0.5)
    optimizer.step()
    assert pid_of(optimizer.workers.remote[0]) != os.getpid()
    optimizer.step()
    assert optimizer.workers.faults.num_restarts == 0


def test_an_environment_that_fails_is_told_of_as_through_ray(worker_pool: Pool) -> None:
    messages = []
    for direct in (True, False):
        workers = worker_pool(worker_config("a2c", NeverResets, rollout={"num_workers": 1}))
        calls = InFlight(workers)
        worker = workers.remote[0]
        calls.launch(worker, worker.actor.ping.remote())
        assert calls.wait().failure is None
        if direct:
            workers.begin_direct_calls()
        weights = workers.weights_for(worker)
        calls.launch(worker, workers.call(worker, "sample_and_compute_gradients", weights))
        assert (worker.line is not None) == direct
        failure = calls.wait().failure
        assert failure is not None
        assert failure.kind == "environment"
        messages.append(failure.message.partition("\n")[0])
        workers.replace(worker, failure)
    assert messages[0] == messages[1]


def test_a_killed_and_a_stopped_worker_are_replaced(worker_pool: Pool) -> None:
    rollout = {"num_workers": 2, "worker_timeout_s": 3.0}
    optimizer = async_gradients(worker_pool, rollout)
    optimizer.step()
    for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        optimizer.drain()
        victim = pid_of(optimizer.workers.remote[0])
        optimizer.step()
        os.kill(victim, sent)
        began_s = time.monotonic()
        while optimizer.workers.faults.num_restarts == number:
            optimizer.step()
            assert time.monotonic() - began_s < 30.0
    assert optimizer.workers.faults.counts["death"] == 1
    assert optimizer.workers.faults.counts["hang"] == 1
    while any(worker.line is None for worker in optimizer.workers.remote):
        optimizer.step()  # the one that came last takes its first call through Ray
        assert time.monotonic() - began_s < 60.0
