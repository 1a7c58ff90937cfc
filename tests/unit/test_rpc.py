"""RPC over ZeroMQ: order, failures, limits; workers are threads of this process."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import zmq
from fakes import worker_config
from rpc_fakes import CalledTarget, FakeActor, FakeRef, call

from polopt.rollouts.transport import messages
from polopt.rollouts.transport.endpoint import Address
from polopt.rollouts.transport.messages import decode, encode
from polopt.rollouts.transport.rpc_client import (
    LargeCallError,
    RpcChannel,
    RpcClient,
    RpcError,
    RpcFuture,
    TransportError,
    UndecodableAnswerError,
)
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

HOST = "127.0.0.1"
LIMIT_S = 60.0


class Target(CalledTarget):
    """Object whose methods are called."""

    def __init__(self) -> None:
        self.notes: list[Any] = []
        self.go_on = threading.Event()
        self.array = np.zeros(messages.AUTO_FRAME_BYTES + 1, np.uint8)

    def note(self, value: Any) -> Any:
        self.notes.append(value)
        return value

    def wait(self) -> str:
        assert self.go_on.wait(LIMIT_S)
        return "waited"

    def fail(self) -> None:
        raise ZeroDivisionError("division in the worker")

    def large(self, value: int) -> np.ndarray:
        """An array that this object changes with the next call."""
        self.array[:] = value
        return self.array

    def unpicklable(self) -> Any:
        return threading.Lock()


@pytest.fixture
def client() -> Iterator[RpcClient]:
    made = RpcClient(HOST, LIMIT_S)
    yield made
    made.close()


@pytest.fixture
def actor() -> Iterator[FakeActor]:
    made = FakeActor(Target())
    yield made
    made.stop()


@pytest.fixture
def channel(client: RpcClient, actor: FakeActor) -> Iterator[RpcChannel]:
    made = connect(client, actor)
    yield made
    made.close()  # ends `serve`, before the actor is stopped


def wait_until(client: RpcClient, condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        client.poll(0.2)


def connect(client: RpcClient, actor: FakeActor, name: str = "worker 1") -> RpcChannel:
    channel = client.channel(None, actor, name)
    wait_until(client, lambda: channel.connected)
    return channel


def result(client: RpcClient, future: RpcFuture) -> Any:
    wait_until(client, lambda: future.done)
    return future.result()


# ---- messages ----------------------------------------------------------------------------------


class Parcel(NamedTuple):
    arrays: list[np.ndarray]
    stats: dict[str, float]


def test_arrays_arrive_equal_and_writable(client: RpcClient, channel: RpcChannel) -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal(9_155).astype(np.float32),
        np.zeros(0),
        rng.integers(0, 9, (3, 5), dtype=np.int8),
        rng.standard_normal((4, 6)).T,
    ]
    got = result(client, call(channel, "note", Parcel(arrays, {"loss": 0.5})))
    assert got.stats == {"loss": 0.5}
    for array, sent in zip(got.arrays, arrays, strict=True):
        assert array.dtype == sent.dtype
        np.testing.assert_array_equal(array, sent)
        assert array.flags.writeable
        assert array.flags.aligned


def test_large_arrays_are_frames_of_their_own() -> None:
    array = np.arange(10_000.0)
    frames = encode(messages.CALL, 1, (array, "text"))
    assert len(frames) == 2
    assert memoryview(frames[1]).nbytes == array.nbytes
    assert len(frames[0]) < 1_000


def test_message_without_a_pickle_is_refused() -> None:
    with pytest.raises(EOFError):
        decode([zmq.Frame(encode(messages.ANSWER)[0][:9])])


# ---- order and waiting -------------------------------------------------------------------------


def test_calls_run_in_the_order_they_were_made(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    calls: list[Any] = []
    for number in range(60):
        if number % 7 in (2, 3):
            channel.pause()
            calls.append(actor.note.remote(number))
        else:
            calls.append(call(channel, "note", number))
    answers = [
        result(client, each) if isinstance(each, RpcFuture) else each.ended.result(LIMIT_S)
        for each in calls
    ]
    assert answers == actor.target.notes == list(range(60))
    assert len(set(actor.endpoints)) == 1, "one connection for all"


def test_first_answer_ends_the_wait(client: RpcClient) -> None:
    slow, quick = FakeActor(Target()), FakeActor(Target())
    waiting = call(connect(client, slow), "wait")
    answered = call(connect(client, quick, "worker 2"), "note", 1)
    assert result(client, answered) == 1
    assert not waiting.done
    slow.target.go_on.set()
    assert result(client, waiting) == "waited"
    client.close()
    slow.stop()
    quick.stop()


def test_end_of_a_watched_ray_call_ends_the_wait(client: RpcClient, actor: FakeActor) -> None:
    ref = actor.wait.remote()
    client.watch(ref)
    threading.Timer(0.2, actor.target.go_on.set).start()
    began_s = time.monotonic()
    client.poll(LIMIT_S)
    assert ref.ended.done()
    assert time.monotonic() - began_s < LIMIT_S / 2.0


def test_poll_returns_after_its_timeout(client: RpcClient) -> None:
    client.poll(0.0)
    began_s = time.monotonic()
    client.poll(0.05)
    assert time.monotonic() - began_s >= 0.05


def test_waits_may_be_as_long_as_configs_allow(actor: FakeActor) -> None:
    client = RpcClient(HOST, 1e7)
    future = call(connect(client, actor), "note", 1)
    until_s = time.monotonic() + LIMIT_S
    while not future.done:
        client.poll(1e7)
        assert time.monotonic() < until_s
    client.close()


# ---- messages that are too large ---------------------------------------------------------------


def test_large_answers_come_through_ray_as_they_were(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    calls = [call(channel, "large", number) for number in (1, 2)]
    small = call(channel, "note", 3)
    for number, future in enumerate(calls, start=1):
        answer = result(client, future)
        assert answer.nbytes == messages.AUTO_FRAME_BYTES + 1
        assert answer.min() == answer.max() == number
        assert answer.flags.writeable
    assert result(client, small) == 3
    assert client.num_large_messages == 2
    assert channel.open, "the worker goes on serving"


def test_large_answer_survives_the_end_of_its_connection(
    client: RpcClient, channel: RpcChannel
) -> None:
    large, failing = call(channel, "large", 1), call(channel, "fail")
    with pytest.raises(ZeroDivisionError, match="in the worker"):
        result(client, failing)
    assert result(client, large).max() == 1


def test_large_answer_of_another_connection_is_an_error(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    taken = actor.server.take_large_answer

    def lost(endpoint: Any, number: int) -> list[bytes]:
        return taken(endpoint._replace(password="of another"), number)

    actor.server.take_large_answer = lost
    with pytest.raises(KeyError, match="there is another connection"):
        result(client, call(channel, "large", 1))


def large_answers(actor: FakeActor) -> dict[int, list[bytes]]:
    connection = actor.server._connection
    assert connection is not None
    return connection.large_answers


def test_large_answers_that_are_not_fetched_are_dropped(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    take = actor.server.take_large_answer
    actor.server.take_large_answer = lambda endpoint, number: 1 / 0
    for number in range(5):
        with pytest.raises(ZeroDivisionError):
            result(client, call(channel, "large", number))
        assert len(large_answers(actor)) == 1, "the last one"
    actor.server.take_large_answer = take
    large, small = call(channel, "large", 7), call(channel, "note", 3)
    assert result(client, small) == 3
    assert result(client, large).max() == 7, "it was waited for"
    assert not large_answers(actor)


def test_worker_of_a_closed_channel_keeps_no_large_answers(
    channel: RpcChannel, actor: FakeActor
) -> None:
    for number in range(3):
        call(channel, "large", number)
    until_s = time.monotonic() + LIMIT_S
    while len(large_answers(actor)) < 3:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    channel.close()
    while large_answers(actor):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_large_argument_is_refused_and_nothing_is_sent(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    limit = messages.AUTO_FRAME_BYTES
    with pytest.raises(LargeCallError, match="worker 1: arguments of note"):
        call(channel, "note", np.zeros(limit + 1, np.uint8))
    assert len(result(client, call(channel, "note", np.zeros(limit, np.uint8)))) == limit
    assert len(actor.target.notes) == 1
    assert client.num_large_messages == 1


def test_required_transport_has_a_larger_limit(actor: FakeActor) -> None:
    client = RpcClient(HOST, LIMIT_S, required=True)
    channel = connect(client, actor)
    assert result(client, call(channel, "large", 1)).max() == 1
    assert client.num_large_messages == 0
    assert client._router.socket.maxmsgsize >= messages.MAX_FRAME_BYTES
    client.close()


# ---- failures ----------------------------------------------------------------------------------


def test_exception_ends_later_calls_and_none_before(client: RpcClient, channel: RpcChannel) -> None:
    before, failing, after = (
        call(channel, "note", 1),
        call(channel, "fail"),
        call(channel, "note", 2),
    )
    assert result(client, before) == 1
    for future in (failing, after):
        with pytest.raises(ZeroDivisionError, match="in the worker"):
            result(client, future)
    assert channel.broken


def test_exception_is_reported_after_the_channel_reopened(
    client: RpcClient, channel: RpcChannel
) -> None:
    assert result(client, call(channel, "note", 0)) == 0
    failing = call(channel, "fail")
    channel.pause()
    again = call(channel, "note", 1)
    with pytest.raises(ZeroDivisionError, match="in the worker"):
        result(client, failing)
    with pytest.raises(RpcError):
        result(client, again)


def test_answer_that_cannot_be_pickled_is_refused(client: RpcClient, channel: RpcChannel) -> None:
    answer = result(client, call(channel, "unpicklable"))
    assert answer.startswith("refused: its value cannot be pickled")
    assert result(client, call(channel, "note", 1)) == 1
    assert channel.open, "the worker goes on serving"


class Undecodable:
    """Unpickles to an error, as a class does that the other process cannot import.

    Args:
        error: what unpickling raises.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return (_throw, (self.error,))


def _throw(error: BaseException) -> None:
    raise error


MISSING = ModuleNotFoundError("No module named 'statistics_of_mine'")


def test_arguments_that_cannot_be_unpickled_are_refused(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    answer = result(client, call(channel, "note", Undecodable(MISSING)))
    assert answer.startswith("refused: the call cannot be unpickled in the worker")
    assert "statistics_of_mine" in answer
    assert result(client, call(channel, "note", 1)) == 1
    assert actor.target.notes == [1]


@pytest.mark.parametrize("error", [MISSING, SystemExit("exit"), RecursionError()], ids=repr)
def test_undecodable_answer_fails_only_its_call(
    client: RpcClient, channel: RpcChannel, actor: FakeActor, error: BaseException
) -> None:
    actor.target.undecodable = lambda: Undecodable(error)
    bad, good = call(channel, "undecodable"), call(channel, "note", 1)
    with pytest.raises(UndecodableAnswerError) as caught:
        result(client, bad)
    assert str(caught.value) == f"{type(error).__name__}: {error}"
    assert result(client, good) == 1


class SignalledWhileUnpickled:
    """Its unpickling is interrupted by a signal."""

    def __reduce__(self) -> Any:
        return (signal.raise_signal, (signal.SIGTERM,))


def test_signal_while_an_answer_is_unpickled_is_not_the_workers_failure(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    def stop(number: int, frame: Any) -> None:
        raise SystemExit(143)

    actor.target.signals = SignalledWhileUnpickled
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(SystemExit, match="143"):
            result(client, call(channel, "signals"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert result(client, call(channel, "note", 1)) == 1


def test_futures_are_listed_in_the_order_they_ended(client: RpcClient, channel: RpcChannel) -> None:
    ended: deque[RpcFuture] = deque()
    futures = [call(channel, "note", i, ended=ended) for i in range(3)]
    futures.append(call(channel, "fail", ended=ended))
    wait_until(client, lambda: len(ended) == 4)
    assert list(ended) == futures


def test_new_channel_replaces_a_broken_one(
    client: RpcClient, channel: RpcChannel, actor: FakeActor
) -> None:
    assert client.channel(channel, actor, "worker 1") is channel
    assert result(client, call(channel, "note", 1)) == 1
    channel.close()
    second = client.channel(channel, actor, "worker 1")
    assert second is not channel
    wait_until(client, lambda: second.connected)
    assert result(client, call(second, "note", 2)) == 2
    second.close()
    assert len(set(actor.endpoints)) == 2, "each connection has keys of its own"


def test_lost_connection_ends_serve_with_a_reason(actor: FakeActor) -> None:
    client = RpcClient(HOST, LIMIT_S)
    channel = connect(client, actor)
    assert result(client, call(channel, "note", 1)) == 1
    serving = channel.serving
    assert serving is not None
    client._router.socket.close(0)  # as when the driver's process is killed
    assert serving.result(LIMIT_S) == "the connection was lost"
    client.close()


def test_answer_to_a_closed_client_ends_serve(actor: FakeActor) -> None:
    client = RpcClient(HOST, LIMIT_S)
    channel = connect(client, actor)
    call(channel, "note", "before")
    call(channel, "wait")
    serving = channel.serving
    assert serving is not None
    wait_until(client, lambda: actor.target.notes == ["before"])
    client._router.socket.close(0)
    time.sleep(0.5)  # the worker's socket notices the end of the connection on its own thread
    actor.target.go_on.set()
    assert serving.result(LIMIT_S) == "the connection was lost"
    client.close()


def test_worker_that_cannot_connect_goes_through_ray(
    client: RpcClient, actor: FakeActor, caplog: pytest.LogCaptureFixture
) -> None:
    other = FakeActor(Target())
    reachable = connect(client, other, "worker 2")
    client._router.address = closed_address()
    channel = client.channel(None, actor, "worker 1")
    wait_until(client, lambda: channel.refused)
    assert not channel.connected
    assert client.channel(channel, actor, "worker 1") is channel, "it does not try again"
    assert result(client, call(reachable, "note", 9)) == 9
    assert [r.message.count("worker 1 cannot connect") for r in caplog.records] == [1]
    reachable.close()
    other.stop()


class ThreadWorkerSet(WorkerSet):
    """Worker set whose remote workers are threads."""

    def _start(self, index: int) -> WorkerHandle:
        return WorkerHandle(index, FakeActor(Target()))

    def note(self, worker: WorkerHandle, value: int) -> Any:
        """Has the worker note a value."""
        number = self.next_call_number()
        return self.start_call(worker, number, "note", b"note", (value,), deque())


def test_worker_set_calls_only_a_refused_worker_through_ray(client: RpcClient) -> None:
    workers = ThreadWorkerSet(worker_config())
    refused, other = workers.remote
    refused.actor.server.connect = lambda endpoint: "no route"
    workers.rpc = client
    for worker in workers.remote:
        workers.note(worker, 0)
    wait_until(client, lambda: refused.channel.refused and other.channel.connected)
    assert workers.transport == "zmq, ray"
    ref = workers.note(refused, 1)
    assert isinstance(ref, FakeRef)
    assert ref.ended.result(LIMIT_S) == 1
    assert result(client, workers.note(other, 2)) == 2
    assert len(refused.actor.endpoints) == 1, "it does not try again"
    workers.close_rpc()
    for worker in (refused, other):
        worker.actor.stop()


def closed_address() -> Address:
    with socket.create_server((HOST, 0)) as closed:
        return Address(f"tcp://{HOST}:{closed.getsockname()[1]}")


def test_required_transport_raises_where_a_worker_cannot_connect(actor: FakeActor) -> None:
    client = RpcClient(HOST, LIMIT_S, required=True)
    client._router.address = closed_address()
    channel = client.channel(None, actor, "worker 1")
    with pytest.raises(TransportError, match=r"worker 1 cannot connect.*transport: auto"):
        wait_until(client, lambda: channel.refused)
    client.close()


def test_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(zmq.ZMQError):
        RpcClient("192.0.2.77", LIMIT_S)


# ---- resources ---------------------------------------------------------------------------------


def test_channels_leave_no_descriptors_and_threads() -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def run() -> None:
        client = RpcClient(HOST, LIMIT_S)
        actors = [FakeActor(Target()) for _ in range(4)]
        for number, actor in enumerate(2 * actors):
            channel = connect(client, actor)
            assert result(client, call(channel, "note", number)) == number
            channel.close()
        client.close()
        for actor in actors:
            actor.stop()

    run()
    gc.collect()  # what other tests left must not end in between
    before = count()
    for _ in range(3):
        run()
    gc.collect()
    assert count() == before


def test_a_hundred_workers_connect(client: RpcClient) -> None:
    actors = [FakeActor(Target()) for _ in range(100)]
    channels = [client.channel(None, actor, "worker") for actor in actors]
    wait_until(client, lambda: all(channel.connected for channel in channels))
    futures = [call(channel, "note", i) for i, channel in enumerate(channels)]
    assert [result(client, future) for future in futures] == list(range(100))
    for channel, actor in zip(channels, actors, strict=True):
        channel.close()
        actor.stop()


def test_fork_leaves_connections_to_the_parent(client: RpcClient, channel: RpcChannel) -> None:
    assert result(client, call(channel, "note", 1)) == 1
    child = os.fork()
    if child == 0:
        del client, channel
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert result(client, call(channel, "note", 2)) == 2
