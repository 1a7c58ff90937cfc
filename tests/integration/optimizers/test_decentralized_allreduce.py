"""`DecentralizedAllReduce`: several learners give the same result as one learner."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from typing import Any

import numpy as np
import pytest
import ray
from fakes import (
    CheckedWorker,
    SlowFourthWorkerDrift,
    worker_config,
)
from rank_helpers import LEARNING, Pool, learned_state, make_decentralized, on_ranks, run_on

from polopt.common.config import ConfigError
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.decentralized_allreduce import (
    DecentralizedAllReduce,
    DecentralizedAllReduceConfig,
    sample_and_keep,
)
from polopt.optimizers.rank_group import checksum
from polopt.policies.learning.schedules import Schedule
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.control_page import EarlyStopRequest
from polopt.rollouts.workers.call import Reply


def spy_on_replies(optimizer: DecentralizedAllReduce) -> list[Reply]:
    """Returns a list that receives all later replies to the driver."""
    replies: list[Reply] = []
    take = optimizer.calls.next

    def spy(count: bool = True) -> Reply:
        replies.append(take(count))
        return replies[-1]

    optimizer.calls.next = spy  # type: ignore[method-assign]
    return replies


def test_without_remote_workers_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"decentralized_allreduce.*num_workers=0"):
        DecentralizedAllReduce.check_options(
            RolloutConfig(num_workers=0), DecentralizedAllReduceConfig()
        )


# ---- several learners equal one ----------------------------------------------------------


def test_two_learners_on_split_data_equal_one_learner(worker_pool: Pool) -> None:
    """Trains two ranks, and a single learner on the samples of both ranks.

    In each round, the single learner begins with the weights of the ranks, so that it learns from
    the same rows. It has its own Adam moments. `test_ranks_and_one_learner.py` shows the same for
    minibatches, normalisation and schedules, without processes."""
    # Reset rows do not count, so the ranks have different numbers of rows.
    rollout = {"rollout_fragment_length": 20, "autoreset_mode": "next_step"}
    learning = {"sgd_minibatch_size": 0, "kl_coeff": 0.2}
    optimizer = make_decentralized(worker_pool, rollout=rollout, learning=learning)
    one_config = worker_config("ppo", rollout=rollout, **{**LEARNING, **learning})
    samplers = [CheckedWorker(one_config, index) for index in (1, 2)]
    one = PPOPolicy(
        one_config.observation_space, one_config.action_space, one_config.policy, one_config.seed
    )
    for _ in range(3):
        one.set_weights(weights := optimizer.policy.get_weights())
        # With the version that the samplers already have, they would not set these weights.
        again = weights._replace(version=-1 - weights.version)
        for sampler in samplers:
            sampler.set_weights(again)
        fragments = [sampler.sample() for sampler in samplers]
        rows = [fragment.env_steps for fragment in fragments]
        assert rows[0] != rows[1]
        batch = SampleBatch.concat(fragments)
        one.env_steps += batch.env_steps
        one.learn_on_batch(batch)
        result = optimizer.step()
        assert result == (sum(rows), sum(rows), 3)
        difference = optimizer.policy.get_weights().flat - one.get_weights().flat
        assert np.abs(difference).max() < 2e-5


@pytest.mark.usefixtures("compare_every_round")
def test_ranks_share_the_moments_of_all_their_samples(worker_pool: Pool) -> None:
    learning = {"normalize_observations": True, "normalize_rewards": True}
    optimizer = make_decentralized(worker_pool, learning=learning)
    config = worker_config("ppo", **LEARNING, **learning)
    expected = Moments.zero(4)
    for worker in [CheckedWorker(config, index) for index in (1, 2)]:
        worker.set_weights(optimizer.policy.get_weights())
        worker.sample()
        expected = expected.merge(worker.record.moments)
    optimizer.step()
    moments = optimizer.policy.get_weights().moments
    assert moments.rows == expected.rows == optimizer.metrics.num_env_steps_sampled
    np.testing.assert_allclose(moments.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(moments.m2, expected.m2, rtol=1e-12)
    optimizer.step()
    # After two steps, a third round is in flight. `on_ranks` drains the optimizer, which ends it.
    first, second = on_ranks(optimizer, lambda worker: worker.policy.get_weights().moments)
    driver = optimizer.policy.get_weights().moments
    assert first.rows == optimizer.metrics.num_env_steps_sampled == 3 * 20
    for one, same, own in zip(first, second, driver, strict=True):
        assert np.array_equal(one, same)
        assert np.array_equal(one, own)
    assert optimizer.stats()["num_checksums"] == optimizer.num_rounds
    assert optimizer.stats()["num_resynchronized"] == 0

    def disturb(worker: Any) -> None:
        normalizer = worker.policy.normalizer
        normalizer.moments = normalizer.moments._replace(m2=1.01 * normalizer.moments.m2)

    run_on(optimizer.group.ranks[:1], disturb)
    with pytest.raises(RuntimeError, match=r"after round 4\. The relative difference is 0"):
        optimizer.step()


def disturb_first_rank(optimizer: DecentralizedAllReduce, factor: float) -> None:
    """Multiplies the largest weight of one rank by a factor."""
    optimizer.drain()

    def disturb(worker: Any) -> None:
        params = worker.policy.flat.params.data
        params[params.abs().argmax()] *= factor

    run_on(optimizer.group.ranks[:1], disturb)


@pytest.mark.usefixtures("compare_every_round")
def test_all_ranks_stay_equal_and_unequal_ones_are_found(worker_pool: Pool) -> None:
    optimizer = make_decentralized(worker_pool)
    for _ in range(5):
        optimizer.step()
    # After five steps, a sixth round is in flight. `on_ranks` drains the optimizer, which ends it.
    first, second = on_ranks(optimizer, learned_state)
    assert first == second
    assert optimizer.stats()["num_checksums"] == optimizer.num_rounds == 6
    assert optimizer.stats()["num_resynchronized"] == 0
    disturb_first_rank(optimizer, 1.01)
    with pytest.raises(RuntimeError, match=r"after round 7\. The relative difference is 0"):
        optimizer.step()


@pytest.mark.usefixtures("compare_every_round")
def test_ranks_that_round_differently_get_the_weights_of_one(
    worker_pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = make_decentralized(worker_pool)
    optimizer.step()
    with caplog.at_level(logging.WARNING, logger="polopt"):
        for round_index in range(2):
            disturb_first_rank(optimizer, 1.0 + 1e-6)
            assert optimizer.step().updates > 0
            assert optimizer.stats()["num_resynchronized"] == round_index + 1
            optimizer.step()
            first, second = on_ranks(optimizer, learned_state)
            assert first == second, "also Adam's moments and the coefficients must be equal"
    assert sum("round differently" in line for line in caplog.messages) == 1
    assert optimizer.stats()["num_broken_rounds"] == 0
    assert optimizer.workers.faults.num_restarts == 0


def test_schedules_and_adapted_coefficients_reach_every_rank(worker_pool: Pool) -> None:
    lr, entropy = [[0, 1e-2], [400, 1e-3]], [[0, 0.1], [400, 0.0]]
    learning = {"lr": lr, "entropy_coeff": entropy, "kl_coeff": 1.0, "kl_target": 1e-6}
    optimizer = make_decentralized(worker_pool, learning=learning)

    def read(worker: Any) -> tuple[Any, ...]:
        policy = worker.policy
        return policy.env_steps, policy.entropy_coeff, policy.coefficients["kl_coeff"]

    replies = spy_on_replies(optimizer)
    seen = set()
    for _ in range(3):
        optimizer.step()
        first, second = on_ranks(optimizer, read)
        assert first == second
        steps = optimizer.metrics.num_env_steps_sampled
        used = [r.counts.learned["default_optimizer_learning_rate"] for r in replies[-2:]]
        assert used == pytest.approx([Schedule(lr)(steps)] * 2), "both ranks use this learning rate"
        assert first[0] == steps
        assert first[1] == pytest.approx(Schedule(entropy)(steps))
        seen.add(first[2])
        assert optimizer.policy.coefficients["kl_coeff"] == first[2]
    assert len(seen) == 3, "the KL coefficient is adapted in every round"


def test_two_workers_are_reproducible_bit_for_bit(worker_pool: Pool) -> None:
    def run() -> tuple[bytes, dict[str, Any]]:
        optimizer = make_decentralized(worker_pool)
        for _ in range(4):
            optimizer.step()
        return optimizer.policy.get_weights().flat.tobytes(), optimizer.metrics.episodes.get_state()

    assert run() == run()


# ---- data that pass through the driver ---------------------------------------------------


def test_local_weights_stay_in_sync_or_are_fetched_on_save(worker_pool: Pool) -> None:
    optimizer = make_decentralized(worker_pool)
    optimizer.step()
    checksums = on_ranks(optimizer, checksum)
    assert set(checksums) == {checksum(optimizer.workers.local)}

    optimizer = make_decentralized(worker_pool, keep_local_weights_in_sync=False)
    before = checksum(optimizer.workers.local)
    replies = spy_on_replies(optimizer)
    for _ in range(3):
        optimizer.step()
    assert checksum(optimizer.workers.local) == before
    assert all(r.value.weights is None for r in replies if r.tag == "learn")
    state = optimizer.get_state()
    (expected, version, *_), _ = on_ranks(optimizer, learned_state)
    assert checksum(optimizer.workers.local) == expected
    assert state["policy"]["version"] == version == optimizer.metrics.num_updates > 0
    assert state["policy"]["adam"]["network"]["exp_avg"].abs().sum() > 0


def test_data_and_gradients_bypass_the_driver(worker_pool: Pool) -> None:
    rollout = {"rollout_fragment_length": 200, "num_envs_per_worker": 4}
    learning = {"sgd_minibatch_size": 200, "model": {"fcnet_hiddens": (64, 64)}}
    optimizer = make_decentralized(worker_pool, rollout=rollout, learning=learning)
    replies = spy_on_replies(optimizer)
    for _ in range(2):
        optimizer.step()
    weights = optimizer.policy.get_weights().flat
    assert len(replies) == 2 * 2 * 2, "two calls to each of two ranks in each of two rounds"
    with_weights = 0
    for reply in replies:
        value, counts = reply.value, copy.copy(reply.counts)
        counts.episodes = EpisodeStats()
        if reply.tag == "learn":
            with_weights += value.weights is not None
            value = value._replace(weights=None)
        # A fragment would have 200 * 4 rows, and a gradient the size of the weights.
        assert len(ray.cloudpickle.dumps((value, counts))) < 1000 < weights.nbytes / 10
    assert with_weights == 2, "one rank sends its weights once per round"


# ---- slow ranks --------------------------------------------------------------------------


def with_slow_rank(pool: Pool, **options: Any) -> tuple[Any, list[int], float]:
    """Runs two rounds of four ranks, the fourth of which is slow. Returns the optimizer, the
    lengths of the fragments of the slow rank, and the seconds of the faster round."""
    rollout = {"num_workers": 4, "num_envs_per_worker": 1, "rollout_fragment_length": 40}
    optimizer = make_decentralized(pool, env=SlowFourthWorkerDrift, rollout=rollout, **options)
    replies = spy_on_replies(optimizer)
    durations_s = []
    for _ in range(2):
        started_s = time.monotonic()
        result = optimizer.step()
        durations_s.append(time.monotonic() - started_s)
        assert result.env_steps_trained == result.env_steps_sampled > 0
    steps: dict[int, list[int]] = {1: [], 2: [], 3: [], 4: []}
    for reply in replies:
        if reply.tag == "sample":
            steps[reply.worker.index].append(reply.counts.env_steps)
    assert optimizer.metrics.num_env_steps_trained == sum(itertools.chain(*steps.values()))
    assert steps[1] == steps[2] == steps[3] == [40, 40]
    assert len({state[0] for state in on_ranks(optimizer, learned_state)}) == 1
    return optimizer, steps[4], min(durations_s)


@pytest.mark.usefixtures("compare_every_round")
def test_slow_rank_stops_early_and_its_rows_are_trained_on(worker_pool: Pool) -> None:
    optimizer, steps, _ = with_slow_rank(worker_pool, fraction_samples=0.25)
    assert all(10 <= count < 40 for count in steps)
    assert optimizer.metrics.num_early_stopped >= 2


@pytest.mark.usefixtures("compare_every_round")
def test_no_rank_stops_early_if_fraction_workers_is_1(worker_pool: Pool) -> None:
    optimizer, steps, duration_s = with_slow_rank(worker_pool, fraction_workers=1.0)
    assert steps == [40, 40]
    assert optimizer.metrics.num_early_stopped == 0
    assert duration_s > 40 * 0.03


def test_early_stop_applies_to_one_call() -> None:
    worker = CheckedWorker(worker_config("ppo"), 1)
    worker.set_weights(worker.get_weights())

    def stop(call: int) -> None:
        worker.control.request_stop(EarlyStopRequest(call, keep_steps=2))

    def steps_of(call: int) -> int:
        answer = worker.run(call, sample_and_keep)
        assert answer.error is None
        length: int = worker.state["batch"].shape[0]
        assert answer.record.num_early_stopped == (length < 5)
        return length

    stop(3)  # the request arrives before its call
    assert [steps_of(2), steps_of(3), steps_of(4)] == [5, 2, 5]
    stop(4)  # the request arrives after its call
    assert steps_of(5) == 5
    stop(5)
    assert worker.sample().shape[0] == 5
    # Another optimizer, whose calls have other numbers, has sent this request.
    worker.control.request_stop(EarlyStopRequest(900, 2))
    assert steps_of(6) == 5


def test_optimizers_of_the_same_workers_share_no_call_number(worker_pool: Pool) -> None:
    numbers: list[set[int]] = []
    for _ in range(2):
        optimizer = make_decentralized(worker_pool)
        mine: set[int] = set()
        for _ in range(2):
            optimizer.step()
            mine |= {call.number for call in optimizer.calls.pending()}
        optimizer.drain()
        numbers.append(mine)
    assert len(numbers[0]) == len(numbers[1]) == 2 * 2 * 2
    assert not numbers[0] & numbers[1], "a late early stop would end another fragment"


# ---- state -------------------------------------------------------------------------------


def test_state_is_read_from_ranks_and_restored_to_all(worker_pool: Pool) -> None:
    optimizer = make_decentralized(worker_pool)
    for _ in range(2):
        optimizer.step()
    state = optimizer.get_state()
    saved = on_ranks(optimizer, learned_state)
    counts = optimizer.metrics.counts()
    for _ in range(2):
        optimizer.step()
    assert on_ranks(optimizer, learned_state)[0] != saved[0]
    optimizer.set_state(state)
    assert optimizer.metrics.counts() == counts
    optimizer.group.ensure()
    assert on_ranks(optimizer, learned_state) == saved
    assert saved[0] == saved[1]

    elsewhere = make_decentralized(worker_pool)  # this could also be in other processes
    elsewhere.set_state(state)
    elsewhere.group.ensure()
    assert on_ranks(elsewhere, learned_state) == saved
    elsewhere.step()
    assert elsewhere.policy.version == saved[0][1] + elsewhere.metrics.num_updates - counts[2]
