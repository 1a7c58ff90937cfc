"""Tests of AsyncReplay with simulated samplers and shards.

They cover priorities across fragments, the limiter at every step, the data that pass through the
driver, failures and restores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fakes import FakeChannel, FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from simulated_channel import Reference, shuffled_by
from simulated_replay import BATCH, GAMMA, OPTIONS, credit, make
from toy_envs import Drift, sync_clocks
from toy_envs import make_sampler as sampler_of

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.lag import DoublingHistogram
from polopt.optimizers import async_replay, replay_shards
from polopt.optimizers.async_replay import (
    AsyncReplay,
    AsyncReplayConfig,
    sample_with_priorities,
)
from polopt.optimizers.replay_shards import Report, add
from polopt.optimizers.sync_replay import SyncReplay
from polopt.policies.dqn import DQNPolicy
from polopt.policies.policy_group import DEFAULT_POLICY as ONE
from polopt.replay.n_step import windows_of
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import LostProcessError, LostReferenceError
from polopt.rollouts.workers.rollout_worker import RolloutWorker


def channels(optimizer: Any, who: str) -> list[Any]:
    """Returns the channels to the running processes of one kind."""
    group = optimizer.shards if who == "replay shard" else optimizer.workers
    return [handle.channel for handle in group.remote if handle.up and handle.channel.alive]


# ---- windows ----------------------------------------------------------------------------------


def window_of(batch: SampleBatch, t: int, n: int, n_step: int) -> tuple[float, float, Any] | None:
    """Computes reward, discount and next observation of a row, step by step. Returns None if the
    row is a reset row, or if its window ends after the fragment."""
    steps, envs = batch.shape
    own = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
    if not batch["valid"][t, n]:
        return None
    reward, discount = 0.0, 1.0
    for k in range(n_step):
        row = t + k
        reward += GAMMA**k * float(batch["rewards"][row, n])
        discount *= GAMMA
        following = own.get(row * envs + n, batch.all_obs[row + 1, n])
        if batch["terminated"][row, n]:
            return reward, 0.0, None
        ended = batch["truncated"][row, n] or row * envs + n in own
        if ended or (row + 1 < steps and not batch["valid"][row + 1, n]) or k == n_step - 1:
            return reward, discount, following
        if row + 1 == steps:
            return None
    raise AssertionError


@pytest.mark.parametrize("n_step", [1, 3, 7])
@pytest.mark.parametrize("ends", ["terminated", "truncated", "both"])
@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
def test_windows_equal_their_definition(mode: str, ends: str, n_step: int) -> None:
    env = sync_clocks([2, 3, 5, 20], ends, mode)
    batch = sampler_of(env, _clock_policy(env), 11).sample()
    batch["rewards"] = np.arange(44, dtype=np.float32).reshape(11, 4)
    batch["valid"][5, 3] = False  # as if an environment had raised
    windows = windows_of(batch, GAMMA, n_step)
    rows, count = windows.rows, 0
    for t in range(11):
        for n in range(4):
            expected = window_of(batch, t, n, n_step)
            assert windows.complete[t, n] == (expected is not None)
            if expected is None:
                continue
            reward, discount, following = expected
            assert rows.indices[count] == t * 4 + n
            np.testing.assert_array_equal(rows.obs[count], batch.obs[t, n])
            assert rows.rewards[count] == pytest.approx(reward, rel=1e-6)
            assert rows.discounts[count] == pytest.approx(discount, rel=1e-6)
            if following is not None:
                np.testing.assert_array_equal(rows.next_obs[count], following)
            count += 1
    assert count == rows.num_rows > 10


def _clock_policy(env: Any) -> Any:
    return DQNPolicy(
        env.single_observation_space, env.single_action_space, DQNPolicy.config_class()
    )


# ---- priorities of samplers -------------------------------------------------------------------


def number_of_window(policy: Any, rows: Any) -> np.ndarray:
    """Replaces the TD error by a number that depends on the whole window."""
    return np.abs(rows.rewards) + 10.0 * rows.discounts + np.abs(rows.next_obs).sum(-1)


def without_last_steps(worker: Any, weights: Any, prioritized: bool) -> Any:
    """A wrong variant of `sample`, in which windows end with the fragment."""
    worker.state.pop("last_steps", None)
    return sample_with_priorities(worker, weights, prioritized)


@pytest.mark.parametrize("n_step", [1, 3, 8])
@pytest.mark.parametrize("right", [True, False])
def test_priorities_across_fragments_are_those_of_whole_windows(
    n_step: int, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard stores each row with the priority that the row would have in one long fragment. This
    is also true for windows that are longer than a fragment of five steps."""
    monkeypatch.setattr(DQNPolicy, "td_errors", number_of_window)
    config = worker_config(DQNPolicy, n_step=n_step, gamma=GAMMA)
    worker = RolloutWorker(config, 1)
    function: Callable[..., Any] = sample_with_priorities if right else without_last_steps
    fragments = [function(worker, None, True) for _ in range(8)]
    buffer = ReplayBuffer(1000, GAMMA, n_step, alpha=1.0, priority_epsilon=1e-9)
    given: dict[tuple[float, ...], float] = {}
    for fragment in fragments:
        buffer.add(fragment.batch, fragment.priorities)
    rows = buffer.sample(20_000)
    leaves = buffer._priorities.tree.leaves[rows.indices % 1000]  # type: ignore[union-attr]
    for obs, leaf in zip(rows.obs, leaves, strict=True):
        given[tuple(obs.tolist())] = leaf
    batch = joined([fragment.batch for fragment in fragments])
    whole = windows_of(batch, GAMMA, n_step).rows
    expected = number_of_window(None, whole)
    drawable = {tuple(obs.tolist()): e for obs, e in zip(whole.obs, expected, strict=True)}
    wrong = [key for key, leaf in given.items() if leaf != pytest.approx(drawable[key], rel=1e-6)]
    assert len(given) > 40
    assert bool(wrong) == (not right and n_step > 1)


def joined(batches: list[SampleBatch]) -> SampleBatch:
    batch = batches[0]
    for one in batches[1:]:
        batch = async_replay.join_in_time(batch, one)
    return batch


def test_fragment_after_a_gap_brings_no_priorities_of_the_steps_before() -> None:
    worker = RolloutWorker(worker_config(DQNPolicy, n_step=3), 1)
    first, second = (sample_with_priorities(worker, None, True) for _ in range(2))
    # With three-step windows, the second fragment completes the windows of two earlier steps.
    assert (len(first.priorities), len(second.priorities)) == (5, 7)
    worker.next_batch()  # this fragment is lost
    assert len(sample_with_priorities(worker, None, True).priorities) == 5
    worker.clear_state()  # as a restore does
    assert len(sample_with_priorities(worker, None, True).priorities) == 5
    assert sample_with_priorities(worker, None, False).priorities is None


@pytest.mark.filterwarnings("error")
def test_fragment_shorter_than_a_window_has_no_priorities_yet() -> None:
    rollout = {"rollout_fragment_length": 2, "num_envs_per_worker": 1}
    worker = RolloutWorker(worker_config(DQNPolicy, rollout=rollout, n_step=3), 1)
    first, second = (sample_with_priorities(worker, None, True) for _ in range(2))
    assert np.isnan(first.priorities).all()
    np.testing.assert_array_equal(np.isnan(second.priorities), [[False], [False], [True], [True]])


# ---- one run ----------------------------------------------------------------------------------


def under_way(optimizer: Any) -> int:
    """Returns the number of rows that were sampled and not stored yet."""
    return sum(task.rows for task in optimizer._tasks() if task.kind == "stored")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("intensity", [0.3, 2.0, 8.0])
def test_learning_stays_within_the_stated_buffer_at_every_step(seed: int, intensity: float) -> None:
    optimizer = make(shuffled_by(seed), training_intensity=intensity)
    stored = 0
    for _ in range(600):
        optimizer.step()
        assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer
        waiting = sum(task.kind == "batch" for task in optimizer._tasks())
        assert waiting <= optimizer.config.prefetch_batches
        stored = optimizer.shards.num_rows(ONE)
    sampled = optimizer.metrics.num_env_steps_sampled
    assert sampled == stored + under_way(optimizer)
    assert optimizer.metrics.num_updates > 20
    stats = optimizer.stats()
    assert stats["training_intensity"] == pytest.approx(intensity, rel=0.35)
    assert (stats["num_batches_lost"], stats["num_rows_lost"]) == (0, 0)


def test_small_error_buffer_does_not_block_the_samplers_for_ever() -> None:
    least = BATCH + 2 * 10  # a batch, and the credit for a fragment of 10 rows
    optimizer = make(shuffled_by(3), error_buffer=least)
    for _ in range(600):
        optimizer.step()
        assert 0 <= credit(optimizer) <= least
    assert optimizer.metrics.num_updates > 50


def test_driver_receives_only_the_batches_that_it_learns_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[str, tuple[type, ...]]] = []
    send = FakeChannel.send

    def noted_send(channel: FakeChannel, message: Any) -> Any:
        sent.append((message.name.rpartition(".")[2], tuple(map(type, message.args))))
        return send(channel, message)

    monkeypatch.setattr(FakeChannel, "send", noted_send)
    optimizer = make(shuffled_by(0))
    for _ in range(400):
        optimizer.step()
    fragments = [kinds for name, kinds in sent if name == "add"]
    assert set(fragments) == {(Reference,)}, "the driver received a fragment"
    assert len(fragments) > 40
    # Both observations, action, reward, discount, weight, index, age, and version of the priority.
    row_bytes = 2 * 3 * 4 + 8 + 4 + 4 + 4 + 8 + 8 + 8
    learned = optimizer.metrics.num_updates
    assert optimizer.metrics.num_bytes_received == learned * BATCH * row_bytes
    assert optimizer.num_bytes_by_reference > 0
    assert Counter(name for name, _ in sent)["set_priorities"] == learned > 20


def test_large_batches_stay_with_the_shard_until_they_are_learned_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_replay, "REFERENCE_BYTES", 100)
    optimizer = make()
    for _ in range(300):
        optimizer.step()
    values = [value for c in channels(optimizer, "replay shard") for value in c.values]
    by_value = sum(isinstance(value, replay_shards.Batch) for value in values)
    assert by_value <= optimizer.config.prefetch_batches, "their size was not known yet"
    assert sum(isinstance(value, Reference) for value in values) > 50
    assert optimizer.metrics.num_updates > 50


def test_priorities_flow_back_to_the_shard_they_came_from() -> None:
    optimizer = make(shuffled_by(1))
    while optimizer.metrics.num_updates < 60:
        optimizer.step()
    for shard in channels(optimizer, "replay shard"):
        drawn = [v for v in shard.values if isinstance(v, replay_shards.Batch)]
        given = [args for name, args in shard.calls if name == "set_priorities"]
        for batch, (_, indices, errors, version) in zip(drawn, given, strict=False):
            np.testing.assert_array_equal(batch.rows.indices, indices)
            assert (errors >= 0.0).all()
            assert version > 0
        _, indices, errors, version = given[-1]
        buffer = shard.target.buffers[ONE]
        last = dict(zip(indices.tolist(), errors.tolist(), strict=True))
        for index, error in last.items():
            leaf = buffer._priorities.tree.leaves[index % buffer.capacity]
            assert leaf == pytest.approx((error + 1e-6) ** 0.6, rel=1e-5)
            assert shard.target.priority_versions[ONE][index % buffer.capacity] == version


def test_importance_weights_have_the_exponent_of_the_moment_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exponent grows from 0.4 to 0.8 within the first 300 environment steps of the whole run.
    It is computed here from the weights and the priorities of each batch."""
    found: list[float] = []

    sample_of_buffer = ReplayBuffer.sample

    def watched_sample(buffer: Any, batch_size: int) -> Any:
        rows = sample_of_buffer(buffer, batch_size)
        leaves = buffer._priorities.tree.leaves[rows.indices % buffer.capacity]
        ratios, weights = np.log(leaves / leaves.min()), -np.log(rows.weights)
        if ratios.max() > 0.1:
            found.append(float(weights[ratios.argmax()] / ratios.max()))
        return rows

    monkeypatch.setattr(ReplayBuffer, "sample", watched_sample)
    optimizer = make(
        prioritized_replay_beta=0.4,
        final_prioritized_replay_beta=0.8,
        prioritized_replay_beta_annealing_timesteps=300,
    )
    counts = {0}
    while optimizer.metrics.num_env_steps_sampled < 600:
        optimizer.step()
        counts.add(optimizer.metrics.num_env_steps_sampled)
    allowed = np.array([0.4 + 0.4 * min(1.0, count / 300) for count in counts])
    assert all(np.abs(allowed - beta).min() < 1e-4 for beta in found)
    assert found[0] < 0.7
    assert found[-1] == pytest.approx(0.8, abs=1e-4)
    assert len({round(beta, 3) for beta in found}) > 5


def test_lag_of_priorities_counts_each_learned_row_once() -> None:
    optimizer = make()
    while optimizer.metrics.num_updates < 60:
        optimizer.step()
    lag = optimizer.stats()["priority_lag"]
    assert sum(lag["histogram"]) == 60 * BATCH
    assert 0 < lag["mean"] < 60
    assert optimizer.stats()["priority_lag"]["mean"] == 0, "no rows since the last report"


def test_samplers_have_a_call_while_the_learner_learns() -> None:
    optimizer = make(shuffled_by(2))
    for _ in range(200):
        optimizer.step()
        optimizer._request_fragments(optimizer._tasks())
        kinds = Counter(task.sampler for task in optimizer._tasks() if task.kind == "fragment")
        assert set(kinds.values()) <= {1, 2}
        stored = Counter(task.sampler for task in optimizer._tasks() if task.sampler)
        assert max(stored.values()) <= optimizer.config.most_fragments


def test_fragments_of_a_sampler_go_to_one_shard_in_order() -> None:
    optimizer = make(shuffled_by(5))
    for _ in range(300):
        optimizer.step()
    assert [report.num_gaps for report in optimizer.shards.totals()] == [0, 0]
    sources = [set(c.target.buffers[ONE]._tails) for c in channels(optimizer, "replay shard")]
    assert sources == [{1, 3}, {2}]


def test_shards_are_drawn_from_in_proportion_to_their_priorities() -> None:
    optimizer = make()
    one, two = optimizer.shards.up()
    optimizer.shards.note(one, {ONE: Report(weight=3.0)})
    optimizer.shards.note(two, {ONE: Report(weight=1.0)})
    drawn = [optimizer.shards.next_to_draw(ONE).index for _ in range(40)]
    assert Counter(drawn) == {1: 30, 2: 10}
    assert drawn[:4].count(2) == 1, "shard 2 is one of four draws"
    optimizer.shards.note(one, {ONE: Report()})
    assert {optimizer.shards.next_to_draw(ONE).index for _ in range(5)} == {2}
    optimizer.shards.note(two, {ONE: Report()})
    assert optimizer.shards.next_to_draw(ONE) is None


# ---- who waits --------------------------------------------------------------------------------


def test_learner_is_blocked_while_there_are_no_samples() -> None:
    optimizer = make()
    optimizer.step()
    clock = optimizer.workers.transport.clock

    def slow(pending: list[Any]) -> Any:
        clock.advance(1.0)
        return pending[0]

    optimizer.workers.transport.script = slow
    for _ in range(5):
        optimizer.step()
    stats = optimizer.stats()
    assert stats["learner_blocked_s"] == 5.0
    assert stats["samplers_blocked_s"] == stats["learner_blocked_by_shards_s"] == 0.0


def test_samplers_are_blocked_while_the_learner_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = make(error_buffer=BATCH + 20, training_intensity=2.0)
    clock = optimizer.workers.transport.clock
    learn = optimizer.learn_transitions

    def slow(rows: Any) -> Any:
        clock.advance(1.0)
        return learn(rows)

    monkeypatch.setattr(optimizer, "learn_transitions", slow)
    while optimizer.metrics.num_updates < 100:
        optimizer.step()
    stats = optimizer.stats()
    assert stats["samplers_blocked_s"] > 20.0
    assert stats["learner_blocked_s"] == 0.0


# ---- failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("by_reference", [False, True])
def test_shards_and_samplers_die_and_counters_stay_exact(
    seed: int, by_reference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_reference:
        monkeypatch.setattr(async_replay, "REFERENCE_BYTES", 100)
    optimizer = make(shuffled_by(seed), rollout={"num_workers": 4}, training_intensity=1.0)
    rng, kills = random.Random(seed), Counter[str]()
    steps = trained = 0
    for i in range(1000):
        before = optimizer.metrics.counts()
        result = optimizer.step()
        assert optimizer.metrics.counts_since(before) == result
        steps += result.env_steps_sampled
        trained += result.env_steps_trained
        assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer
        if i % 40 >= 20 and i < 900:  # kill a busy worker or shard, in turn
            who = "worker" if i % 80 < 40 else "replay shard"
            if kills[who] > i // 80:
                continue
            busy = [one for one in channels(optimizer, who) if one.under_way]
            if busy:
                victim = rng.choice(busy)
                for ticket in victim.tickets:
                    value = getattr(ticket.answer, "value", None)
                    if isinstance(value, Reference):
                        value.value = LostReferenceError("an argument is lost: its owner died")
                victim.die(LostProcessError("killed"))
                kills[who] += 1
    assert steps == optimizer.metrics.num_env_steps_sampled
    assert trained == optimizer.metrics.num_env_steps_trained > 200
    assert min(kills["worker"], kills["replay shard"]) >= 3
    stats = optimizer.stats()
    assert stats["num_replay_shard_restarts"] == kills["replay shard"]
    assert optimizer.workers.faults.num_restarts == kills["worker"]
    assert stats["num_rows_lost"] > 0
    assert optimizer.shards.num_rows(ONE) > 0
    assert stats["num_replay_shard_deaths"] == stats["num_replay_shard_restarts"]


def test_shard_that_dies_loses_its_rows_and_nothing_else() -> None:
    optimizer = make(shuffled_by(0))
    while optimizer.metrics.num_updates < 30:
        optimizer.step()
    one, two = optimizer.shards.remote
    rows = {shard: optimizer.shards.reports[shard][ONE].num_rows for shard in (one, two)}
    sampled, version = optimizer.metrics.num_env_steps_sampled, optimizer.policy.version
    one.channel.die(LostProcessError("killed"))
    for _ in range(3):
        optimizer.step()
    assert optimizer.stats()["num_rows_lost"] >= rows[one] > 0
    assert optimizer.shards.reports[two][ONE].num_rows >= rows[two]
    assert optimizer.metrics.num_env_steps_sampled >= sampled
    assert optimizer.policy.version >= version
    assert optimizer.workers.faults.num_restarts == 0
    while optimizer.metrics.num_updates < 60:
        optimizer.step()
    assert optimizer.shards.reports[optimizer.shards.remote[0]][ONE].num_rows > 0


def test_run_goes_on_where_all_shards_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers must continue although the learner is behind, because the learner has no rows from
    which it could catch up."""
    optimizer = make(shuffled_by(1), error_buffer=BATCH + 20)

    def samplers_are_blocked() -> bool:
        waiting = sum(task.rows for task in optimizer._tasks()) == 0
        return waiting and credit(optimizer) + 20 > optimizer.limiter.error_buffer

    while optimizer.metrics.num_updates < 30 or not samplers_are_blocked():
        optimizer.step()
    for shard in optimizer.shards.remote:
        shard.channel.die(LostProcessError("killed"))
    for _ in range(300):
        optimizer.step()
        assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer
    assert optimizer.metrics.num_updates > 60


def test_lost_fragment_is_counted_and_the_shard_goes_on() -> None:
    optimizer = make()
    while optimizer.metrics.num_updates < 5:
        optimizer.step()
    shard = optimizer.shards.remote[0]
    lost = Reference(LostReferenceError("an argument is lost: its owner has exited"))
    optimizer.calls.send(shard, add, lost, tag=async_replay.Task("stored", 1, 10))
    for _ in range(50):
        optimizer.step()
    stats = optimizer.stats()
    assert stats["num_replay_shard_lost_arguments"] == 1
    assert stats["num_replay_shard_restarts"] == 0
    assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer


# ---- restore ----------------------------------------------------------------------------------


def test_restored_run_fills_its_shards_and_learns_at_the_same_intensity() -> None:
    """The rows that fill the shards again give no credit. Otherwise they would allow a burst of
    updates on a few rows."""
    optimizer = make(shuffled_by(0), learning_starts=200)
    while optimizer.metrics.num_updates < 100:
        optimizer.step()
    state = optimizer.get_state()
    owed = credit(optimizer)
    while optimizer.metrics.num_updates < 130:  # the run continues after the save
        optimizer.step()

    other = make(shuffled_by(7), learning_starts=200)
    other.set_state(state)
    updates = other.metrics.num_updates
    begin = other.metrics.num_env_steps_sampled
    while other.metrics.num_updates == updates:
        if other.limiter.get_state()["missing"]:  # the shards are not filled again yet
            assert credit(other) == owed
        other.step()
    assert other.shards.num_rows(ONE) >= 200
    for _ in range(400):
        other.step()
        assert 0 <= credit(other) <= other.limiter.error_buffer
    sampled = other.metrics.num_env_steps_sampled - begin
    learned = BATCH * (other.metrics.num_updates - updates)
    assert learned <= 2 * (sampled - 200) + owed


def test_restore_empties_shards_that_have_rows() -> None:
    optimizer = make()
    while optimizer.metrics.num_updates < 30:
        optimizer.step()
    state = optimizer.get_state()
    optimizer.set_state(state)
    assert optimizer.shards.num_rows(ONE) == 0
    assert [c.target.buffers[ONE].num_rows for c in channels(optimizer, "replay shard")] == [0, 0]
    assert optimizer.calls.idle
    updates = optimizer.metrics.num_updates
    while optimizer.metrics.num_updates < updates + 10:
        optimizer.step()
        assert 0 <= credit(optimizer) <= optimizer.limiter.error_buffer


def test_run_continues_with_sync_replay_at_the_same_intensity() -> None:
    """The credit and the counts of both strategies have the same meaning."""
    optimizer = make()
    while optimizer.metrics.num_updates < 30 or not credit(optimizer):
        optimizer.step()
    state = optimizer.get_state()
    workers = FakeWorkerSet(optimizer.workers.config, FakeTransport())
    options = {name: value for name, value in OPTIONS.items() if name != "num_replay_shards"}
    other = make_optimizer(SyncReplay, workers, **options)
    other.set_state(state)
    assert other.limiter.get_state() == {**state["limiter"], "missing": OPTIONS["learning_starts"]}


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "options", "message"),
    [
        ({"num_workers": 0}, {}, r"num_workers=0: this optimizer needs remote.*'sync_replay'"),
        ({"num_workers": 2}, {"num_replay_shards": 3}, r"'num_replay_shards': got 3 with num_wo"),
        (
            {"num_workers": 2},
            {"buffer_size": 100, "learning_starts": 9},
            r"'buffer_size': got 100.*640",
        ),
        ({"num_workers": 2}, {"error_buffer": 3}, r"'error_buffer': got 3; allowed: \d+ or more"),
        ({"collection": "overlapped"}, {}, r"'collection': got 'overlapped'.*Allowed: 'sync'"),
        ({"collection": "async"}, {}, r"'collection': got 'async'.*Allowed: 'sync'"),
        ({"num_workers_below": 2}, {}, r"'num_workers_below': got 2"),
    ],
)
def test_bad_options_are_refused_before_any_process_starts(
    rollout: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    config = RolloutConfig.parse({"env": Drift, "num_workers": 2, **rollout})
    with pytest.raises(ConfigError, match=message):
        AsyncReplay.check_options(config, AsyncReplayConfig.parse(options))


def test_shards_are_among_the_processes_of_a_run() -> None:
    options = {"num_replay_shards": 3, "num_cpus_per_replay_shard": 0.5}
    processes = AsyncReplay.further_processes(AsyncReplayConfig.parse(options))
    assert processes == [{"CPU": 0.5}] * 3


def test_doubling_histogram() -> None:
    histogram = DoublingHistogram(bins=5)
    histogram.add(np.array([0, 1, 2, 3, 4, 7, 8, 15, 16, 1000]))
    assert histogram.report() == {
        "mean": 105.6,
        "max": 1000,
        "histogram": [1, 1, 2, 2, 4],
    }
    assert histogram.report()["max"] == 0
