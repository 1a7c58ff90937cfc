"""Compares simulations with closed forms. Each closed form fails for a wrong variant."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from simulated_toys import MANY, calibrated, outcome, with_costs

from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.rollouts.workers.call import Call, Reply
from polopt.rollouts.workers.calls import Calls
from polopt.simulation import predictions
from polopt.simulation.costs import WARM_UP_S, Costs, Learning, MessageCosts
from polopt.simulation.engine import Engine, Link
from polopt.simulation.predictions import Machines
from polopt.simulation.processes import VirtualTransport
from polopt.simulation.stand_ins import partners

STEP_S = 0.01
STEPS = 4  # of a fragment


def near(value: float, rel: float = 0.03) -> Any:
    return pytest.approx(value, rel=rel)


# ---- the engine ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "jobs", "ends"),
    [
        (2, [1.0, 1.0, 1.0], [1.5, 1.5, 1.5]),  # each job gets 2/3 of a core
        (1, [1.0, 2.0], [2.0, 3.0]),  # both share the core until the first ends
        (4, [1.0, 2.0], [1.0, 2.0]),
    ],
)
def test_jobs_share_the_cores_of_a_node(cores: float, jobs: list[float], ends: list[float]) -> None:
    engine, ended = Engine([cores]), []
    for seconds in jobs:
        engine.nodes[0].run(seconds, lambda: ended.append(engine.now_s))
    while engine.run_next():
        pass
    assert ended == pytest.approx(ends)
    assert engine.nodes[0].busy_s == pytest.approx(sum(jobs))


def test_a_job_that_comes_later_slows_the_first() -> None:
    engine, ended = Engine([1.0]), []
    node = engine.nodes[0]
    node.run(1.0, lambda: ended.append(engine.now_s))
    engine.at(0.5, lambda: node.run(1.0, lambda: ended.append(engine.now_s)))
    while engine.run_next():
        pass
    assert ended == pytest.approx([1.5, 2.0])


def test_messages_pass_a_link_one_after_the_other() -> None:
    link = Link(latency_s=0.1, bandwidth=100.0)
    assert link.arrival_s(0.0, 50) == pytest.approx(0.6)
    assert link.arrival_s(0.0, 50) == pytest.approx(1.1)  # waits for the first message
    assert link.arrival_s(10.0, 50) == pytest.approx(10.6)


# ---- strategies ---------------------------------------------------------------------------------


def harmonic(count: int) -> float:
    return sum(1.0 / k for k in range(1, count + 1))


def test_a_synchronous_round_lasts_as_long_as_its_slowest_worker() -> None:
    """The mean of the maximum of N exponential times is the harmonic number H(N) times their
    mean."""
    waits = np.random.default_rng(0).exponential(STEP_S, 5000)
    waits *= STEP_S / waits.mean()
    workers = 8
    rate = outcome(calibrated("A2C", steps=1, wait_s=waits), workers).env_steps_per_s
    assert rate == near(workers / (harmonic(workers) * STEP_S), 0.2)  # H(8) is 2.7
    constant = outcome(calibrated("A2C", steps=1, wait_s=STEP_S), workers).env_steps_per_s
    assert constant == near(workers / STEP_S), "wrong for exponential times by the factor H(N)"


def test_an_asynchronous_strategy_does_not_wait_for_the_slowest_worker() -> None:
    waits = np.random.default_rng(0).exponential(STEP_S, 5000)
    waits *= STEP_S / waits.mean()
    rate = outcome(calibrated("A3C", steps=8, wait_s=waits), 8).env_steps_per_s
    assert rate == near(8 / STEP_S, 0.1)


def test_an_asynchronous_strategy_saturates_at_the_drivers_cost() -> None:
    message_s, apply_s = 0.001, 0.0005
    costs = MessageCosts(driver_s=message_s)
    slow = calibrated("A3C", STEPS, wait_s=STEP_S, message=costs, apply_s=apply_s)
    gradient_s = STEPS * STEP_S
    few = outcome(slow, 4)
    assert few.env_steps_per_s == near(4 * STEPS / (gradient_s + message_s + apply_s), 0.05)
    many = outcome(slow, 60)
    assert many.env_steps_per_s == near(STEPS / (message_s + apply_s))
    assert many.driver_busy == near(1.0)
    half = outcome(with_costs(slow, apply_s=0.0), 60)
    assert half.env_steps_per_s == near(STEPS / message_s), "applying is a part of the cost"


def test_messages_cost_more_if_the_driver_had_to_wait_for_them() -> None:
    costs = MessageCosts(driver_s=0.001, cold=4.0)
    slow = calibrated("A3C", STEPS, wait_s=STEP_S, message=costs)
    alone = outcome(slow, 1).env_steps_per_s
    assert alone == near(STEPS / (STEPS * STEP_S + 0.001 + 3.0 * WARM_UP_S), 0.005)
    assert outcome(slow, 60).env_steps_per_s == near(STEPS / 0.001, 0.05)


@pytest.mark.parametrize("workers", [1, 5])
def test_the_lag_of_a3c_is_one_less_than_the_number_of_workers(workers: int) -> None:
    waits = np.random.default_rng(1).exponential(STEP_S, 1000)
    lag = outcome(calibrated("A3C", STEPS, wait_s=waits), workers).policy_lag
    assert lag == pytest.approx(workers - 1, abs=0.1)


def test_synchronous_learning_stops_the_workers() -> None:
    learn_s, workers = 0.02, 4
    rows = STEPS * workers
    learning = (Learning(STEPS, learn_s / workers, 1), Learning(rows, learn_s, 1))
    slow = calibrated("A2C", STEPS, wait_s=STEP_S, learning=learning)
    assert outcome(slow, workers).env_steps_per_s == near(rows / (STEPS * STEP_S + learn_s))
    twice = outcome(slow, 2 * workers).env_steps_per_s  # the cost grows with the batch
    assert twice == near(2 * rows / (STEPS * STEP_S + 2 * learn_s))


def test_answers_are_taken_while_later_workers_still_sample() -> None:
    """A call is sent later to each further worker, so the answers do not arrive all at once."""
    message_s, workers = 0.001, 8
    costs = MessageCosts(driver_s=message_s, send_s=message_s)
    slow = calibrated("A2C", STEPS, wait_s=STEP_S, message=costs)
    round_s = workers * message_s + STEPS * STEP_S + message_s  # the last answer comes alone
    assert outcome(slow, workers).env_steps_per_s == near(workers * STEPS / round_s)


def test_work_takes_longer_if_workers_share_cores() -> None:
    busy = calibrated("A3C", STEPS, compute_s=STEP_S, crowded=((2, 1.2), (4, 1.5)))
    assert outcome(busy, 8, Machines(cores=2)).env_steps_per_s == near(2 / (1.5 * STEP_S))
    assert outcome(busy, 4, Machines(cores=2)).env_steps_per_s == near(2 / (1.2 * STEP_S))
    assert outcome(busy, 8, Machines(cores=8)).env_steps_per_s == near(8 / STEP_S)
    assert outcome(busy, 8, Machines(nodes=4, cores=2)).env_steps_per_s == near(8 / STEP_S)


def test_all_work_takes_longer_on_shared_cores() -> None:
    message = MessageCosts(driver_s=1.0, send_s=2.0, cold=3.0, latency_s=5.0, fetch_s=4.0)
    crowded = ((2, 2.0), (4, 4.0))
    costs = Costs(np.ones(1), np.ones(1), message=message, exchange_s=1.0, crowded=crowded)
    shared = costs.on_shared_cores(3.0)
    assert (shared.step_cpu_s[0], shared.step_wait_s[0], shared.exchange_s) == (3.0, 1.0, 3.0)
    own = MessageCosts(driver_s=3.0, send_s=6.0, cold=1.0, latency_s=5.0, fetch_s=12.0)
    assert shared.message == own, "waiting takes as long as before, and crowded caches are cold"
    assert dataclasses.replace(costs, shared_exchange_s=2.0).on_shared_cores(2.0).exchange_s == 4.0
    assert [costs.crowding(each) for each in (0.5, 1.0, 1.5, 8.0)] == [1.0, 1.0, 1.5, 4.0]


def test_a_fragment_that_a_shard_fetches_costs_processor_time() -> None:
    replay = {"buffer_size": 2000, "learning_starts": 50, "train_batch_size": 8}
    options = {**replay, "training_intensity": 1.0, "num_replay_shards": 1}
    fetch_s = 0.5  # so one core serves two fragments a second
    slow = calibrated("ApexDQN", STEPS, options, message=MessageCosts(fetch_s=fetch_s))
    rate = outcome(slow, 3, Machines(cores=1)).env_steps_per_s
    assert rate == near(STEPS / fetch_s, 0.1)


def test_computing_workers_share_the_cores() -> None:
    busy = calibrated("A3C", STEPS, compute_s=STEP_S)
    assert outcome(busy, 8, Machines(cores=2)).env_steps_per_s == near(2 / STEP_S)
    assert outcome(busy, 8, MANY).env_steps_per_s == near(8 / STEP_S)
    nodes = Machines(nodes=2, cores=2)
    assert outcome(busy, 8, nodes).env_steps_per_s == near(4 / STEP_S)


def test_workers_on_another_node_wait_for_the_link() -> None:
    slow = calibrated("A3C", STEPS, wait_s=STEP_S)
    own_s, latency_s = STEPS * STEP_S, 0.02
    nodes = Machines(nodes=2, cores=1e9, latency_s=latency_s)
    expected = STEPS / own_s + STEPS / (own_s + 2 * latency_s)  # one worker on each node
    assert outcome(slow, 2, nodes).env_steps_per_s == near(expected, 0.05)


def test_a_slow_link_limits_the_bytes() -> None:
    calibration = calibrated("A3C", STEPS, wait_s=1e-4)
    flat = calibration.examples.policy.flat
    num_bytes = flat.params.nbytes + flat.grads.nbytes  # weights one way, a gradient the other
    nodes = Machines(nodes=2, cores=1e9, bandwidth=100.0 * num_bytes)
    assert outcome(calibration, 2, nodes).link_busy == near(1.0, 0.1)


def test_ranks_wait_for_each_other_and_share_each_update() -> None:
    options = {"fraction_workers": 1.0, "num_sgd_iter": 2}
    sums, exchange_s, learn_s, workers = 4, 0.001, 0.01, 4
    learning = (Learning(STEPS, learn_s, 2, sums, 64),)
    ranks = calibrated(
        "DDPPO", STEPS, options, wait_s=STEP_S, learning=learning, exchange_s=exchange_s
    )
    # One further sum adds up the numbers of steps. A sum over 4 ranks has 2 exchanges.
    round_s = STEPS * STEP_S + learn_s + (sums + 1) * 2 * exchange_s
    assert outcome(ranks, workers).env_steps_per_s == near(workers * STEPS / round_s)


def test_a_rank_that_waits_for_its_partner_wakes_up_late() -> None:
    options = {"fraction_workers": 1.0, "num_sgd_iter": 2}
    sums, exchange_s, wake_s = 9, 0.001, 0.002
    ranks = calibrated(
        "DDPPO",
        STEPS,
        options,
        wait_s=STEP_S,
        learning=(Learning(STEPS, 0.0, 2, sums, 64),),
        exchange_s=exchange_s,
        exchange_wait_s=wake_s,
    )
    # In each sum, one of the two ranks waits for the other.
    round_s = STEPS * STEP_S + (sums + 1) * (exchange_s + wake_s)
    assert outcome(ranks, 2).env_steps_per_s == near(2 * STEPS / round_s)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_partners_meet_as_often_as_each_other(size: int) -> None:
    met = {rank: Counter(partners(rank, size)) for rank in range(size)}
    for rank, own in met.items():
        assert all(met[partner][rank] == count for partner, count in own.items())
    if size == 6:
        assert partners(1, 6) == [5, 0, 3, 5], "rank 5 gives its values, and takes the sum"


def test_three_ranks_finish_their_sums() -> None:
    learning = (Learning(STEPS, 0.0, 1, 2, 64),)
    ranks = calibrated("DDPPO", STEPS, wait_s=STEP_S, learning=learning)
    assert outcome(ranks, 3).env_steps_per_s == near(3 / STEP_S, 0.1)


def test_fragments_of_stragglers_end_early() -> None:
    waits = np.random.default_rng(2).lognormal(math.log(STEP_S), 1.5, 5000)
    learning = (Learning(16, 0.0, 1, 1, 64),)
    rates = [
        outcome(
            calibrated("DDPPO", 16, {"fraction_workers": share}, wait_s=waits, learning=learning), 8
        ).env_steps_per_s
        for share in (1.0, 0.5)
    ]
    assert rates[1] > 1.15 * rates[0]


@pytest.mark.parametrize("workers", [4, 32])
def test_a_round_looks_at_each_rank_a_few_times(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, rounds = 0, 0
    pending, stop_early = Calls.pending, Calls.stop_early
    await_samples = DecentralizedAllReduce._await_samples

    def counted_pending(calls: Calls) -> list[Call]:
        nonlocal looked_at
        found = pending(calls)
        looked_at += len(found)
        return found

    def counted_stop(calls: Calls, stopped: Sequence[Call], keep_steps: int) -> None:
        nonlocal looked_at
        looked_at += len(stopped)
        stop_early(calls, stopped, keep_steps)

    def counted_round(optimizer: DecentralizedAllReduce) -> list[Reply]:
        nonlocal rounds
        rounds += 1
        return await_samples(optimizer)

    monkeypatch.setattr(Calls, "pending", counted_pending)
    monkeypatch.setattr(Calls, "stop_early", counted_stop)
    monkeypatch.setattr(DecentralizedAllReduce, "_await_samples", counted_round)
    waits = np.random.default_rng(2).lognormal(math.log(STEP_S), 1.5, 500)
    outcome(calibrated("DDPPO", 16, wait_s=waits), workers)
    assert looked_at / rounds <= 3 * workers


def test_an_answer_takes_as_much_work_to_simulate_among_many_ranks_as_among_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learning = (Learning(STEPS, 0.0, 1, 1, 64),)
    costs = MessageCosts(driver_s=0.001)  # so many answers have come when the driver looks
    ranks = calibrated("DDPPO", STEPS, wait_s=STEP_S, learning=learning, message=costs)
    lines = answers = 0
    arrived = VirtualTransport.arrived

    def counted(transport: VirtualTransport, ticket: Any) -> None:
        nonlocal answers
        answers += 1
        arrived(transport, ticket)

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    monkeypatch.setattr(VirtualTransport, "arrived", counted)
    per_answer: list[float] = []
    for workers in (32, 128):
        before, lines, answers = sys.gettrace(), 0, 0
        sys.settrace(count)
        try:
            outcome(ranks, workers)
        finally:
            sys.settrace(before)
        per_answer.append(lines / answers)
    # A rank has 7 partners among 128 ranks, and 5 among 32.
    assert per_answer[1] <= 1.05 * per_answer[0], per_answer


@pytest.mark.parametrize("preset", ["A2C", "IMPALA", "DQN", "ApexDQN"])
def test_every_strategy_without_costs_runs_as_fast_as_its_environments(preset: str) -> None:
    replay = {"buffer_size": 2000, "learning_starts": 50, "train_batch_size": 8}
    options = {**replay, "training_intensity": 1.0} if "DQN" in preset else {}
    if preset == "ApexDQN":
        options |= {"num_replay_shards": 1}
    rate = outcome(calibrated(preset, STEPS, options, wait_s=STEP_S), 3).env_steps_per_s
    assert rate == near(3 / STEP_S, 0.1)


# ---- the real step ------------------------------------------------------------------------------


def test_the_real_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration, steps = calibrated("A3C", STEPS, wait_s=STEP_S), []
    real = AsyncGradients.step

    def step(self: AsyncGradients) -> Any:
        steps.append(self)
        return real(self)

    monkeypatch.setattr(AsyncGradients, "step", step)
    outcome(calibration, 2)
    assert steps

    def slow(self: AsyncGradients) -> Any:  # a changed strategy changes the prediction
        self.workers.transport.scene.engine.spend(self.workers.transport.scene.driver_node, 1.0)
        return real(self)

    before = outcome(calibration, 2).env_steps_per_s
    monkeypatch.setattr(AsyncGradients, "step", slow)
    assert outcome(calibration, 2).env_steps_per_s < 0.9 * before


def test_the_drivers_own_code_takes_time() -> None:
    calibration = calibrated("A3C", STEPS)  # everything else costs nothing
    slow = predictions.simulate(calibration, 4, MANY, own_code=100.0).env_steps_per_s
    fast = predictions.simulate(calibration, 4, MANY, own_code=1.0).env_steps_per_s
    assert fast > 5.0 * slow


def test_answers_arrive_while_the_drivers_own_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "LEAST_ANSWERS", 200)
    replay = {"buffer_size": 2000, "learning_starts": 50, "train_batch_size": 8}
    calibration = calibrated("DQN", STEPS, replay, wait_s=1e-4)
    assert predictions.simulate(calibration, 1, MANY, own_code=20.0).env_steps_per_s > 0.0


def test_a_simulation_repeats_exactly() -> None:
    waits = np.random.default_rng(0).exponential(STEP_S, 100)
    calibration = calibrated("IMPALA", STEPS, wait_s=waits)
    assert outcome(calibration, 3) == outcome(calibration, 3)
