"""`Supervisor`: calls that exceed their time limit, and failures of processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated_channel import (
    SimulatedChannel,
    SimulatedTicket,
    SimulatedTransport,
    none_ready,
)
from toy_shards import Shards, count, make_rows

from polopt.common.progress import PROGRESS
from polopt.rollouts.transport.channel import (
    AnswerTimeoutError,
    ChannelError,
    LostProcessError,
    Ticket,
    UndecodableAnswerError,
    UnsendableError,
)
from polopt.rollouts.workers import calls as calls_module
from polopt.rollouts.workers.call import Call
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.process_group import CHECK_INTERVAL_S
from polopt.rollouts.workers.supervisor import Supervisor

LIMIT_S = 60.0
BEGIN_S = 1000.0


class WholeCall(Supervisor):
    """A wrong variant, in which the time limit applies to the whole call."""

    def _deadline_s(self, call: Call) -> float:
        return min(call.began_s + self.timeout_s(call), call.latest_s)


class ProgressFirst(Supervisor):
    """A wrong variant, in which progress also extends a deadline that was tightened."""

    def _deadline_s(self, call: Call) -> float:
        if call.progress_s > call.began_s:
            return call.progress_s + self.timeout_s(call)
        return super()._deadline_s(call)

    def overdue(self, oldest: list[Call], now_s: float) -> Call | None:
        for call in oldest:
            call.progress_s = now_s - (call.worker.channel.silent_s() or 0.0)
        return super().overdue(oldest, now_s)


class SteppingChannel(SimulatedChannel):
    """A channel to a process that makes a step every `step_s` seconds, for `lives_s` seconds.

    Attributes:
        step_s: seconds between two steps. None means that the channel does not know the progress of
            its process.
        lives_s: seconds after which the process hangs.
        asked: the times at which `silent_s` was called.
    """

    clock: Callable[[], float]
    step_s: float | None = None
    lives_s = 1e9

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[float] = []

    def silent_s(self) -> float | None:
        self.asked.append(self.clock())
        if self.step_s is None:
            return None
        passed_s = self.clock() - BEGIN_S
        last_s = min(passed_s, self.lives_s) // self.step_s * self.step_s
        return passed_s - last_s


class Stepping(SimulatedTransport):
    """A transport with `SteppingChannel`s. No call to a process ends before `ends_s`.

    Attributes:
        ends_s: the time at which calls to a process end, in seconds since `BEGIN_S`, by name of the
            process. A missing name means 1e9.
        unread: tickets whose answers have arrived, but were not read yet.
    """

    def __init__(self) -> None:
        super().__init__(self.ended)
        self.ends_s: dict[str, float] = {}
        self.unread: list[SimulatedTicket] = []

    def ended(self, pending: list[SimulatedTicket]) -> SimulatedTicket | None:
        now_s = self.clock() - BEGIN_S
        ended = [one for one in pending if self.ends_s.get(one.channel.name, 1e9) <= now_s]
        return ended[0] if ended else None

    def make_channel(self, *args: Any) -> SteppingChannel:
        channel = SteppingChannel(*args)
        channel.clock = self.clock
        return channel

    def wait(self, tickets: Any, timeout_s: float) -> list[Ticket]:
        for ticket in self.unread:
            ticket.done = True
        return super().wait(tickets, timeout_s)


@pytest.fixture
def transport() -> Stepping:
    return Stepping()


@pytest.fixture
def make(transport: Stepping) -> Callable[..., Any]:
    """Returns a function that makes shards that are up, and a `Calls` for them."""

    def build(num_shards: int = 1, **options: Any) -> tuple[Shards, Calls]:
        shards = Shards(transport, num_shards, worker_timeout_s=LIMIT_S)
        for channel in transport.channels:
            channel.finish()
        shards.up()
        return shards, Calls(shards, "test", **{"after_failure": "drop", **options})

    return build


def right_and(wrong: type[Supervisor]) -> Any:
    """Runs a test with the supervisor, and again with a wrong variant of the supervisor."""
    return pytest.mark.parametrize("kind", [Supervisor, wrong])


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Supervisor]], None]:
    return lambda kind: monkeypatch.setattr(calls_module, "Supervisor", kind)


# ---- deadlines ---------------------------------------------------------------------------------


@right_and(WholeCall)
def test_call_that_makes_progress_has_no_limit(
    transport: Stepping, make: Any, use: Any, kind: type[Supervisor]
) -> None:
    use(kind)
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s = 50.0
    transport.ends_s = {"shard 1": 600.0}
    calls.send(shard, count, "after ten minutes")
    reply = calls.next()
    if kind is WholeCall:
        assert reply.failure.kind == "hang"
        assert transport.clock() == BEGIN_S + 60.0
        return
    assert reply.value[0] == "after ten minutes"
    assert transport.clock() >= BEGIN_S + 600.0
    assert shards.faults.num_restarts == 0
    assert len(shard.channel.asked) <= 13, "calls of `silent_s` are rare"


def test_call_without_progress_ends_at_its_limit(transport: Stepping, make: Any) -> None:
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 50.0, 0.0
    calls.send(shard, count)
    failure = calls.next().failure
    assert transport.clock() == BEGIN_S + 60.0
    assert failure.kind == "hang"
    said = "test: function toy_shards.count failed in shard 1: no answer and no progress for 60.0 s"
    assert said in failure.message.replace("tests.", "")
    assert failure.message.endswith("(worker_timeout_s=60)")


@right_and(WholeCall)
def test_limit_begins_with_the_last_progress(
    transport: Stepping, make: Any, use: Any, kind: type[Supervisor]
) -> None:
    use(kind)
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 50.0, 200.0
    calls.send(shard, count)
    assert calls.next().failure.kind == "hang"
    assert transport.clock() == BEGIN_S + (60.0 if kind is WholeCall else 260.0)


@right_and(ProgressFirst)
def test_tightened_deadline_holds_in_spite_of_progress(
    transport: Stepping, make: Any, use: Any, kind: type[Supervisor]
) -> None:
    use(kind)
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s = 5.0
    transport.ends_s = {"shard 1": 600.0}
    calls.send(shard, count)
    calls.tighten_deadline(shard, 32.0)
    calls.tighten_deadline(shard, 40.0)  # a later deadline has no effect
    reply = calls.next()
    if kind is ProgressFirst:
        assert reply.failure is None
        return
    assert reply.failure.kind == "hang"
    assert "no answer for 32.0 s, and other processes that waited" in reply.failure.message
    assert transport.clock() == BEGIN_S + 32.0


def test_unknown_progress_makes_the_limit_apply_to_the_whole_call(
    transport: Stepping, make: Any
) -> None:
    shards, calls = make()
    calls.send(shards.remote[0], count)
    assert calls.next().failure.kind == "hang"
    assert transport.clock() == BEGIN_S + 60.0


def test_only_the_process_without_progress_is_replaced(transport: Stepping, make: Any) -> None:
    shards, calls = make(3)
    one, two, three = shards.remote
    for shard in (one, two, three):
        shard.channel.step_s = 7.0
        calls.send(shard, count)
    two.channel.lives_s = 100.0  # the last step of this process is at 98 s
    transport.ends_s = {"shard 1": 300.0, "shard 3": 400.0}
    replies = [calls.next()]
    assert transport.clock() == BEGIN_S + 98.0 + 60.0
    transport.ends_s["shard 2"] = 0.0  # the replacement of this process starts
    replies += [calls.next() for _ in range(2)]
    assert [reply.worker.index for reply in replies] == [2, 1, 3]
    assert [reply.failure is None for reply in replies] == [False, True, True]
    assert shards.faults.counts == {**dict.fromkeys(shards.faults.counts, 0), "hang": 1}


def test_limit_of_a_call_begins_with_the_answer_to_the_previous_call(
    transport: Stepping, make: Any
) -> None:
    shards, calls = make(per_worker=2)
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 50.0, 100.0
    transport.ends_s = {"shard 1": 105.0}
    calls.send(shard, count, "first")
    calls.send(shard, count, "second")
    assert calls.next().value[0] == "first"
    answered_s = transport.clock()
    # The driver waits until the deadline, which is 60 s after the step at 50 s.
    assert answered_s == BEGIN_S + 110.0
    transport.script = none_ready
    assert calls.next().failure.kind == "hang"
    assert transport.clock() == answered_s + 60.0


def test_short_limit_of_a_later_call_is_checked_in_time(transport: Stepping, make: Any) -> None:
    """The first call has a long limit, so the supervisor would next look long after the second
    call's limit."""
    shards, calls = make(per_worker=2)
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 1.0, 25.0
    transport.ends_s = {"shard 1": 25.0}
    calls.send(shard, count, "first", timeout_s=600.0)
    calls.send(shard, count, "second", timeout_s=10.0)
    assert calls.next().value[0] == "first"
    answered_s = transport.clock()
    transport.script = none_ready
    assert calls.next().failure.kind == "hang"
    assert transport.clock() == answered_s + 10.0


def test_own_limit_of_a_call_also_begins_with_the_last_progress(
    transport: Stepping, make: Any
) -> None:
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 9.0, 27.0
    calls.send(shard, count, timeout_s=10.0)
    failure = calls.next().failure
    assert failure.kind == "hang"
    said = "no answer and no progress for 10.0 s (limit of this call: 10 s)"
    assert failure.message.endswith(said)
    assert transport.clock() == BEGIN_S + 37.0


def test_answer_that_nobody_has_read_is_no_hang(transport: Stepping, make: Any) -> None:
    """The answer arrived while the driver was busy."""
    shards, calls = make()
    calls.send(shards.remote[0], count, "arrived")
    transport.unread = list(shards.remote[0].channel.tickets)
    transport.clock.advance(100.0 * LIMIT_S)
    assert calls.next().value[0] == "arrived"
    assert shards.faults.num_restarts == 0


def test_answer_that_is_on_its_way_is_no_hang(
    transport: Stepping, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer exists on another node, and the driver has not fetched the answer yet."""
    shards, calls = make()
    transport.ends_s = {"shard 1": 90.0}
    calls.send(shards.remote[0], count, "fetched")
    monkeypatch.setattr(SimulatedTicket, "ended", lambda ticket: True)
    assert calls.next().value[0] == "fetched"
    assert transport.clock() == BEGIN_S + 90.0, "the supervisor checks again every second"


def test_wait_for_processes_that_make_progress_is_progress(
    transport: Stepping, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient worker must not count as hanging while it waits for the workers below it."""
    shards, calls = make()
    (shard,) = shards.remote
    shard.channel.step_s, shard.channel.lives_s = 50.0, 100.0
    noted: list[float] = []
    monkeypatch.setattr(time, "monotonic", transport.clock)
    monkeypatch.setattr(PROGRESS, "at_s", np.full(1, BEGIN_S))
    transport.script = lambda pending: noted.append(float(PROGRESS.at_s[0]) - BEGIN_S)
    calls.send(shard, count)
    assert calls.next().failure.kind == "hang"
    assert noted == [0.0, 50.0, 100.0]


def test_wait_for_a_start_is_progress(transport: Stepping, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start has its own time limit, which may be longer than the limit of a call."""
    shards = Shards(transport, 1, worker_startup_timeout_s=100.0)
    silent_s: list[float] = []
    monkeypatch.setattr(time, "monotonic", transport.clock)
    monkeypatch.setattr(PROGRESS, "at_s", np.full(1, BEGIN_S))
    transport.script = lambda pending: silent_s.append(transport.clock() - PROGRESS.at_s[0])
    while shards.faults.num_restarts == 0:
        shards.take_started(CHECK_INTERVAL_S)
    assert transport.clock() == BEGIN_S + 100.0
    assert max(silent_s) <= CHECK_INTERVAL_S


# ---- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (LostProcessError("gone"), "death", "gone"),
        (ChannelError("cut"), "death", "cut"),
        (AnswerTimeoutError("late"), "hang", "late"),
        (UndecodableAnswerError("odd"), "exception", "in shard 1: its answer cannot be unpickled"),
    ],
)
def test_failure_of_a_process_that_gave_no_answer(
    transport: Stepping, make: Any, error: ChannelError, kind: str, said: str
) -> None:
    shards, calls = make()
    (shard,) = shards.remote
    calls.send(shard, count)
    shard.channel.die(error)
    failure = calls.next().failure
    assert (failure.kind, failure.at_start) == (kind, False)
    assert said in failure.message
    assert shards.remote[0] is not shard
    assert shard.removed


def test_value_that_cannot_be_pickled_is_an_error_of_the_function(make: Any) -> None:
    shards, calls = make()
    (shard,) = shards.remote
    calls.send(shard, count)
    shard.channel.die(UnsendableError("its value cannot be pickled"))
    with pytest.raises(FunctionError, match=r"test: .*count failed in shard 1: its value cannot"):
        calls.next()
    assert shards.remote == [shard]
    assert calls.idle


def test_value_that_the_owner_refuses_is_a_failure(make: Any, transport: Stepping) -> None:
    def check(value: Any) -> None:
        if len(value) != 3:
            raise TypeError(f"three rows were expected; got {len(value)}")

    shards, calls = make(check=check)
    transport.ends_s = {"shard 1": 0.0}
    for num_rows in (3, 2):
        calls.send(shards.remote[0], make_rows, num_rows)
    assert calls.next().failure is None
    failure = calls.next().failure
    assert failure.kind == "exception"
    assert "TypeError: three rows were expected; got 2" in failure.message
