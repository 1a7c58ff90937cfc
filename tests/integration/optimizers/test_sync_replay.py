"""`SyncReplay`: training intensity is exact, runs are reproducible, and no row spans a gap."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from fakes import (
    FakeTransport,
    FakeWorkerSet,
    RandomDelayDrift,
    make_optimizer,
    pid_of,
    worker_config,
)
from gymnasium import spaces
from simulated_channel import Script, oldest_first, shuffled_by

from polopt.common.config import ConfigError
from polopt.metrics.record import Record
from polopt.optimizers.sync_replay import SyncReplay, SyncReplayConfig
from polopt.policies.dqn import DQNPolicy
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
BATCH, STARTS = 8, 30
REPLAY = {
    "buffer_size": 200,
    "learning_starts": STARTS,
    "train_batch_size": BATCH,
    "training_intensity": 2.0,
}
PRIORITIZED = {"prioritized_replay": True, "prioritized_replay_alpha": 1.0}
THREE = {"num_workers": 3}


def make(
    rollout: dict[str, Any] | None = None,
    seed: int = 0,
    script: Script = oldest_first,
    env: Any = None,
    up: bool = True,
    n_step: int = 1,
    **options: Any,
) -> Any:
    """Returns an optimizer with fake remote workers, or without remote workers if
    `num_workers=0`."""
    changes = {} if env is None else {"env": env}
    config = worker_config(
        DQNPolicy,
        seed=seed,
        rollout={**THREE, **(rollout or {})},
        lr=1e-2,
        n_step=n_step,
        gamma=0.9,
        target_network_update_freq=3,
        **changes,
    )
    fake = FakeTransport()
    fake.script = script
    workers = FakeWorkerSet(config, fake, up=up)
    return make_optimizer(SyncReplay, workers, **{**REPLAY, **options})


def weights(optimizer: Any) -> bytes:
    return optimizer.policy.get_weights().flat.tobytes()  # type: ignore[no-any-return]


class Meter:
    """Records the batches from which an optimizer learns. Counts their rows independently of the
    optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.batches: list[Any] = []
        learn = optimizer.policy.learn_on_transitions

        def counted(rows: Any) -> Any:
            self.batches.append(rows)
            return learn(rows)

        optimizer.policy.learn_on_transitions = counted

    @property
    def learned(self) -> int:
        return sum(rows.num_rows for rows in self.batches)


# ---- exact intensity --------------------------------------------------------------------------


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("intensity", [0.3, 1.0, 8.0])
def test_intensity_differs_by_less_than_a_batch_at_every_step(
    num_workers: int, intensity: float, autoreset: str
) -> None:
    rollout = {"num_workers": num_workers, "autoreset_mode": autoreset}
    optimizer = make(rollout, training_intensity=intensity)
    meter = Meter(optimizer)
    for _ in range(25):
        result = optimizer.step()
        sampled = optimizer.metrics.num_env_steps_sampled
        owed = Fraction(intensity).limit_denominator(1000) * max(0, sampled - STARTS)
        assert 0 <= owed - meter.learned < BATCH
        assert result.env_steps_trained == result.updates * BATCH
    assert meter.learned == optimizer.metrics.num_env_steps_trained > 0
    delivered = optimizer.stats()["training_intensity"]
    assert delivered == meter.learned / (sampled - STARTS)
    assert abs(delivered - intensity) < BATCH / (sampled - STARTS)


def test_rows_before_learning_starts_earn_nothing() -> None:
    optimizer = make({"num_workers": 1}, learning_starts=25)  # fragments of 10 rows
    # In the third fragment, 5 rows give credit for 10 rows. In the fourth, all rows give credit.
    assert [optimizer.step().updates for _ in range(4)] == [0, 0, 1, 2]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("saves", [True, False])
def test_intensity_is_exact_across_a_restore(num_workers: int, saves: bool, tmp_path: Path) -> None:
    rollout = {"num_workers": num_workers, "num_envs_per_worker": 3}
    options: Any = {"training_intensity": 1.7, "save_replay_buffer": saves}
    optimizer = make(rollout, **options)
    first = Meter(optimizer)
    for _ in range(9):
        optimizer.step()
    state = optimizer.get_state()
    files, _ = optimizer.buffer_files.write(tmp_path / "replay")
    assert (tmp_path / "replay").exists() == saves

    restored = make(rollout, seed=5, **options)
    restored.step()
    restored.set_state(state)
    restored.buffer_files.read(tmp_path / "replay", files)
    second = Meter(restored)
    refilled, updates = 0 if saves else STARTS, []
    for _ in range(12):
        updates.append(restored.step().updates)
        sampled = restored.metrics.num_env_steps_sampled
        before = state["num_env_steps_sampled"]
        counted = before - STARTS + max(0, sampled - before - refilled)
        owed = Fraction(17, 10) * counted
        assert 0 <= owed - (first.learned + second.learned) < BATCH
    rows = 15 * max(num_workers, 1)
    assert max(updates) <= 1.7 * rows / BATCH + 1, "no burst of updates after the restore"
    assert (updates[0] > 0) == (saves or rows > STARTS)


def test_rows_of_another_buffer_size_are_refused_or_dropped(tmp_path: Path) -> None:
    rollout = {"num_workers": 0, "num_envs_per_worker": 3}
    optimizer = make(rollout, save_replay_buffer=True)
    for _ in range(9):
        optimizer.step()
    state = optimizer.get_state()
    files, _ = optimizer.buffer_files.write(tmp_path / "replay")
    restored = [make(rollout, save_replay_buffer=saves, buffer_size=500) for saves in (True, False)]
    for either in restored:
        either.set_state(state)
    with pytest.raises(ConfigError, match=r"buffer_size.*With save_replay_buffer=False"):
        restored[0].buffer_files.read(tmp_path / "replay", files)
    restored[1].buffer_files.read(tmp_path / "replay", files)
    assert restored[1].step().updates == 0
    assert restored[1].buffer.num_rows == 15
    while restored[1].step().updates == 0:
        assert restored[1].buffer.num_rows <= STARTS + 15


# ---- results do not depend on timing ----------------------------------------------------------


@pytest.mark.parametrize("collection", ["sync", "overlapped"])
@pytest.mark.parametrize("options", [{}, PRIORITIZED], ids=["uniform", "prioritized"])
def test_order_of_arrival_changes_nothing(collection: str, options: dict[str, Any]) -> None:
    def train(script: Script, seed: int = 0) -> bytes:
        optimizer = make({"collection": collection}, seed, script, n_step=3, **options)
        for _ in range(8):
            optimizer.step()
        assert optimizer.metrics.num_updates > 20
        return weights(optimizer)

    expected = train(oldest_first)
    assert all(train(shuffled_by(seed)) == expected for seed in range(3))
    assert train(oldest_first, seed=1) != expected


def test_overlapped_samples_are_one_step_older() -> None:
    lags = {}
    for collection in ("sync", "overlapped"):
        optimizer = make({"collection": collection})
        for _ in range(4):
            optimizer.step()
        optimizer.stats()
        optimizer.step()
        lags[collection] = optimizer.stats()["policy_lag_rollouts"]["max"]
    assert lags == {"sync": 0, "overlapped": 1}


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_restored_run_continues_bit_for_bit(
    num_workers: int, autoreset: str, tmp_path: Path
) -> None:
    rollout = {"num_workers": num_workers, "autoreset_mode": autoreset}
    options: Any = {**PRIORITIZED, "save_replay_buffer": True}

    def go_on(optimizer: Any) -> tuple[bytes, Any, Any, list[Any]]:
        meter = Meter(optimizer)
        for _ in range(12):
            optimizer.step()
        indices = [rows.indices.tolist() for rows in meter.batches]
        counts = optimizer.metrics.counts(), optimizer.metrics.episodes.get_state()
        return weights(optimizer), counts, optimizer.limiter.get_state(), indices

    original = make(rollout, n_step=3, **options)
    for _ in range(9):  # the ring buffer is then full and overwrites its first rows
        original.step()
    state, folder = original.get_state(), tmp_path / "replay"
    files, sums = original.buffer_files.write(folder)
    assert set(sums) == {path.name for path in folder.iterdir()}
    untouched = copy.deepcopy(state)
    expected = go_on(original)

    restored = make(rollout, seed=99, n_step=3, **options)
    for _ in range(2):
        restored.set_state(state)
        restored.buffer_files.read(folder, files)
        assert go_on(restored) == expected
    assert state["replay"] == untouched["replay"]

    empty = make(rollout, seed=99, n_step=3, **options)
    empty.set_state(state)
    assert go_on(empty) != expected, "the rows in the buffer matter"


# ---- rows -------------------------------------------------------------------------------------


class Stations(gymnasium.Env[np.ndarray, int]):
    """An environment with observations `[episode, time]`, where `episode` is a random number. Each
    reward is 1. Episodes end at random."""

    observation_space = spaces.Box(-1.0, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.episode, self.time = 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.time = int(self.np_random.integers(2**22)), 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        fate = self.np_random.random()
        obs = np.array([self.episode, self.time], np.float32)
        return obs, 1.0, bool(fate < 0.1), bool(fate > 0.9), {}


def assert_rows_are_of_one_episode(batches: list[Any], n_step: int, gamma: float = 0.9) -> int:
    """Checks each row in closed form. Returns the number of rows whose window is shorter than n
    steps although the episode does not end in it."""
    shorter = 0
    for rows in batches:
        for i in range(rows.num_rows):
            (episode, begin), (other, end) = rows.obs[i].tolist(), rows.next_obs[i].tolist()
            if rows.discounts[i] == 0.0:
                continue
            steps = int(end - begin)
            assert episode == other, "the row reaches into another episode"
            assert 1 <= steps <= n_step
            assert rows.rewards[i] == pytest.approx(sum(gamma**k for k in range(steps)))
            assert rows.discounts[i] == pytest.approx(gamma**steps)
            shorter += steps < n_step
    return shorter


@pytest.mark.parametrize("autoreset", ["same_step", "next_step", "disabled"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_rows_stay_in_their_episode(n_step: int, autoreset: str) -> None:
    rollout = {"autoreset_mode": autoreset}
    optimizer = make(rollout, env=Stations, n_step=n_step, script=shuffled_by(2))
    meter = Meter(optimizer)
    for _ in range(30):
        optimizer.step()
    assert meter.learned > 500
    assert_rows_are_of_one_episode(meter.batches, n_step)


def test_rows_do_not_reach_across_the_gap_of_a_dead_worker() -> None:
    optimizer = make({"num_envs_per_worker": 1}, env=Stations, n_step=3)
    meter = Meter(optimizer)
    for number in range(20):
        if number % 4 == 3:
            dying = optimizer.workers.remote[number % 3].channel
            dying.next_error = LostProcessError("the process died")
        optimizer.step()
    assert optimizer.workers.faults.num_restarts == 5
    assert_rows_are_of_one_episode(meter.batches, 3)
    assert optimizer.stats()["num_gaps"] >= 4


@pytest.mark.parametrize("up", [True, False], ids=["replaced at once", "replacement needs time"])
def test_fragments_of_a_failed_worker_are_reassigned(up: bool) -> None:
    optimizer = make(up=up)
    meter = Meter(optimizer)
    optimizer.step()
    optimizer.workers.remote[1].channel.next_error = LostProcessError("the process died")
    for _ in range(6):
        optimizer.step()
        sampled = optimizer.metrics.num_env_steps_sampled
        assert 0 <= 2 * max(0, sampled - STARTS) - meter.learned < BATCH
    assert optimizer.workers.faults.num_restarts == 1


# ---- results ----------------------------------------------------------------------------------


def test_results_describe_rows_and_priorities_of_the_buffer() -> None:
    optimizer = make(**PRIORITIZED, prioritized_replay_eps=1e-3)
    before = optimizer.stats()
    assert (before["buffer_rows"], before["training_intensity"]) == (0, 0.0)
    for _ in range(5):
        optimizer.step()
    stats = optimizer.stats()
    assert stats["buffer_rows"] == stats["num_env_steps_sampled"] == 150
    assert 0.75 <= stats["buffer_fill"] <= 1.0
    assert stats["buffer_bytes"] > 200 * (3 * 4 + 8 + 4)
    drawn = stats["num_env_steps_trained"]
    assert sum(stats["row_age"]["histogram"]) == drawn
    assert 0 < stats["row_age"]["mean"] < stats["row_age"]["max"] < 200
    assert 0.0 < stats["priority_mean"] < stats["priority_max"]
    assert sum(optimizer.stats()["row_age"]["histogram"]) == 0, (
        "only rows since the last report count"
    )
    uniform = make()
    uniform.step()
    assert np.isnan(uniform.stats()["priority_max"])


@pytest.mark.parametrize("collection", ["sync", "overlapped"])
def test_samplers_are_blocked_while_the_driver_learns(
    collection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = make({"collection": collection}, learning_starts=0)
    clock = optimizer.workers.clock
    learn = optimizer.policy.learn_on_transitions

    def slow(rows: Any) -> Any:
        clock.now_s += 0.5
        return learn(rows)

    monkeypatch.setattr(optimizer.policy, "learn_on_transitions", slow)
    busy_s = 1.0 if collection == "overlapped" else 0.0
    monkeypatch.setattr(Record, "end", with_seconds(busy_s))
    updates = [optimizer.step().updates for _ in range(4)]
    expected = sum(max(0.0, 0.5 * count - busy_s) for count in updates[:-1])
    assert optimizer.stats()["samplers_blocked_s"] == pytest.approx(expected)
    assert expected > 5.0


def with_seconds(sample_s: float) -> Callable[..., None]:
    """Returns a replacement of `Record.end`, which says that sampling took `sample_s` seconds."""
    end = Record.end

    def ended(record: Record, version: int, value: Any) -> None:
        end(record, version, value)
        record.seconds = {"sample": sample_s}

    return ended


# ---- options ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"learning_starts": 201}, "'learning_starts': got 201 with buffer_size=200"),
        ({"train_batch_size": 500}, "'train_batch_size': got 500 with buffer_size=200"),
        ({"training_intensity": 0.0}, "training_intensity"),
        ({"training_intensity": None}, "training_intensity.*got None.*a number"),
        (
            {"prioritized_replay_alpha": 0.5},
            "'prioritized_replay_alpha': got 0.5 with prioritized_replay=False",
        ),
        ({"final_prioritized_replay_beta": 0.5}, "with prioritized_replay=False"),
    ],
)
def test_bad_options_are_one_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SyncReplay.config_class.parse({**REPLAY, **options})


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"collection": "async"}, "'async' with optimizer 'sync_replay'.*'async_replay'"),
        ({"num_workers_below": 2}, "num_workers_below"),
        ({"compress_gradients": "fp16"}, "compress_gradients"),
    ],
)
def test_bad_sampling_is_one_error(rollout: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SyncReplay.check_options(RolloutConfig(**THREE, **rollout), SyncReplayConfig())


def test_names_of_rllib() -> None:
    given = {
        "num_steps_sampled_before_learning_starts": 7,
        "train_batch_size_per_learner": 5,
        "store_buffer_in_checkpoints": True,
    }
    config: Any = SyncReplay.config_class.parse(given)
    assert (config.learning_starts, config.train_batch_size) == (7, 5)
    assert config.save_replay_buffer


# ---- with processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("collection", ["sync", "overlapped"])
def test_processes_and_one_process_give_equal_bits(worker_pool: Pool, collection: str) -> None:
    rollout = {**THREE, "collection": collection}
    config = worker_config(DQNPolicy, RandomDelayDrift, rollout=rollout, lr=1e-2)
    learned = []
    for _ in range(2):
        optimizer = make_optimizer(SyncReplay, worker_pool(config), **REPLAY)
        optimizer.workers.up()
        for _ in range(5):
            optimizer.step()
        optimizer.drain()
        learned.append(weights(optimizer))
    assert learned[0] == learned[1]


@pytest.mark.parametrize("transport", ["socket", "ray"])
def test_run_survives_the_kill_of_a_worker(worker_pool: Pool, transport: str) -> None:
    rollout = {"transport": transport, "num_workers": 2}
    config = worker_config(DQNPolicy, Stations, rollout=rollout, n_step=3, gamma=0.9)
    optimizer = make_optimizer(SyncReplay, worker_pool(config), **REPLAY)
    optimizer.workers.up()
    meter = Meter(optimizer)
    optimizer.step()
    os.kill(pid_of(optimizer.workers.remote[0]), signal.SIGKILL)
    until_s = time.monotonic() + 120.0
    while optimizer.stats()["num_gaps"] == 0:  # ends once the replacement has added rows
        optimizer.step()
        sampled = optimizer.metrics.num_env_steps_sampled
        assert 0 <= 2 * max(0, sampled - STARTS) - meter.learned < BATCH
        assert time.monotonic() < until_s
    for _ in range(10):
        optimizer.step()
    stats = optimizer.stats()
    assert stats["learner_blocked_s"] > 0.0
    assert stats["samplers_blocked_s"] > 0.0
    assert optimizer.workers.faults.counts["death"] == 1
    assert stats["transport"] == transport
    assert_rows_are_of_one_episode(meter.batches, 3)
