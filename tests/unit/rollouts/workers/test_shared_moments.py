"""Each sample enters the driver's moments (mean and variance of observations and discounted
returns) once. Workers receive the moments with the weights."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import (
    CheckedWorker,
    FakeTransport,
    FakeWorkerSet,
    make_optimizer,
    worker_config,
)
from faulty_envs import Spoiled
from gymnasium import spaces
from policy_helpers import BOTH, assert_equal_moments
from simulated_channel import Script, oldest_first, shuffled_by
from toy_envs import Drift

import polopt
from polopt.common.moments import Moments
from polopt.common.weights import Weights
from polopt.metrics.record import Record
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.errors import NonFiniteError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.trainers.checkpoints import read_checkpoint, write_checkpoint
from polopt.trainers.trainer import PolicyOptimizerTrainer

GAMMA = 0.9
EVERY: dict[str, tuple[Any, dict[str, Any]]] = {
    "sync_samples": (SyncSamples, {"train_batch_size": 40}),
    "async_samples": (AsyncSamples, {"max_requests_in_flight_per_worker": 2}),
    "sync_gradients": (SyncGradients, {"grads_per_step": 6}),
    # Nearly all gradients are stale, so the driver drops them.
    "async_gradients": (AsyncGradients, {"grads_per_step": 8, "max_policy_lag": 0}),
}


class NotesRows(CheckedWorker):
    """A worker that records all observations, and all discounted returns by their definition."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: list[list[float]] = []
        self.running: Any = 0.0

    def sample(self, *args: Any) -> Any:
        batch = super().sample(*args)
        for t in range(batch.shape[0]):
            self.running = GAMMA * self.running + batch["rewards"][t].astype(np.float64)
            for n in np.flatnonzero(batch["valid"][t]):
                self.rows.append([*batch.obs[t, n].tolist(), self.running[n]])
            self.running = self.running * ~(batch["terminated"][t] | batch["truncated"][t])
        return batch


def make(
    cls: Any, script: Script = oldest_first, env: Any = Drift, policy: str = "ppo", **options: Any
) -> Any:
    fake = FakeTransport()
    fake.script = script
    config = worker_config(
        policy,
        env,
        rollout={"num_workers": 3, **options.pop("rollout", {})},
        gamma=GAMMA,
        sgd_minibatch_size=5,
        num_sgd_iter=2,
        lr=1e-2,
        **BOTH,
    )
    return make_optimizer(cls, FakeWorkerSet(config, fake, NotesRows), **options)


def moments_of(policy: Any) -> Moments:
    moments = policy.get_weights().moments
    assert moments is not None
    return moments


def count_what_waits(optimizer: Any) -> None:
    optimizer.drain()
    optimizer.calls.all()


def rows_of(optimizer: Any) -> np.ndarray:
    return np.array([row for channel in optimizer.workers.channels for row in channel.target.rows])


# ---- once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_workers_moments_equal_those_of_all_their_rows(name: str) -> None:
    """The rows of gradients that the driver drops because they are stale count, too."""
    cls, options = EVERY[name]
    optimizer = make(cls, shuffled_by(1), **options)
    for _ in range(4):
        optimizer.step()
    count_what_waits(optimizer)
    expected = Moments.of(rows_of(optimizer))
    assert expected.rows == optimizer.metrics.num_env_steps_sampled
    assert_equal_moments(moments_of(optimizer.policy), expected)
    if name == "async_gradients":
        assert optimizer.metrics.num_gradients_stale > 10


def samples_and_raises(worker: RolloutWorker, weights: Weights | None, fails: bool) -> None:
    """A function of a strategy that samples, and then raises if `fails` is set."""
    worker.set_weights(weights)
    worker.next_batch()
    if fails:
        raise ValueError("after the sample")


def test_samples_of_a_call_that_raises_count_once() -> None:
    optimizer = make(SyncGradients)  # this optimizer drops the call of a failed worker
    calls = optimizer.calls
    for fails in (False, True, False):
        calls.send(optimizer.workers.remote[0], samples_and_raises, WEIGHTS, fails)
        calls.drain()
    calls.all()
    assert optimizer.workers.faults.num_restarts == 1
    assert_equal_moments(moments_of(optimizer.policy), Moments.of(rows_of(optimizer)))


def test_fragment_that_is_not_finite_never_enters() -> None:
    env = functools.partial(spoiled, what="nan observation", after=3, times=1)
    optimizer = make(SyncSamples, env=env)
    for _ in range(3):
        optimizer.step()
    assert optimizer.workers.faults.counts["non_finite"] > 0
    moments = moments_of(optimizer.policy)
    assert moments.is_finite
    assert moments.rows == optimizer.metrics.num_env_steps_sampled
    # This holds only for observations. Discounted returns continue over discarded fragments.
    rows = rows_of(optimizer)[:, :3]
    np.testing.assert_allclose(moments.mean[:3], rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance[:3], rows.var(0), rtol=1e-12)


def spoiled(context: Any, **config: Any) -> Spoiled:
    env = Spoiled(config)
    env.context = context
    return env


class Far(Drift):
    """An environment with finite observations whose squares are not finite."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def step(self, action: int) -> Any:
        obs, *rest = super().step(action)
        return obs.astype(np.float64) * 1e200, *rest


def test_observations_too_large_to_square_end_the_run() -> None:
    with pytest.raises(NonFiniteError, match="squares of its observations are not finite"):
        make(SyncSamples, env=Far).step()


def test_record_adds_the_moments_of_workers_below() -> None:
    rows = np.random.default_rng(0).normal(size=(9, 2))
    record = Record()
    for part in np.split(rows, [4]):
        below = Record()
        below.moments = Moments.of(part)
        record.add_below(below)
    record.add_below(Record())
    assert_equal_moments(record.moments, Moments.of(rows))


# ---- order ------------------------------------------------------------------------------------


def numbers(optimizer: Any) -> bytes:
    weights = optimizer.policy.get_weights()
    return b"".join([weights.flat.tobytes(), *(part.tobytes() for part in weights.moments[1:])])


@pytest.mark.parametrize(
    ("name", "collection"),
    [("sync_samples", "sync"), ("sync_samples", "overlapped"), ("sync_gradients", "sync")],
)
def test_runs_do_not_depend_on_the_order_of_arrival(name: str, collection: str) -> None:
    cls, options = EVERY[name]

    def run(script: Script) -> bytes:
        optimizer = make(cls, script, rollout={"collection": collection}, **options)
        for _ in range(4):
            optimizer.step()
        return numbers(optimizer)

    assert run(shuffled_by(1)) == run(shuffled_by(2)) == run(oldest_first)


def test_max_rollout_lag_of_zero_equals_sync_samples_with_moments() -> None:
    def run(cls: Any, script: Script, **options: Any) -> bytes:
        optimizer = make(cls, script, train_batch_size=30, **options)
        for _ in range(4):
            optimizer.step()
        return numbers(optimizer)

    expected = run(SyncSamples, oldest_first)
    for seed in range(3):
        assert run(AsyncSamples, shuffled_by(seed), max_rollout_lag=0) == expected


# ---- workers ----------------------------------------------------------------------------------


def test_workers_act_with_the_moments_of_their_weights() -> None:
    optimizer = make(SyncSamples)
    seen: list[Any] = []
    learn = optimizer.policy.learn_on_batch

    def spy(batch: Any) -> Any:
        seen.append(batch.per_env["obs_mean"])
        return learn(batch)

    optimizer.policy.learn_on_batch = spy
    means = [np.zeros(3)]
    for _ in range(3):
        optimizer.step()
        means.append(moments_of(optimizer.policy).mean[:3])
    for used, mean in zip(seen, means, strict=False):
        np.testing.assert_array_equal(used, np.repeat(mean[None].astype(np.float32), 6, axis=0))


def test_replacement_begins_with_the_drivers_moments() -> None:
    optimizer = make(SyncSamples)
    for _ in range(2):
        optimizer.step()
    before = moments_of(optimizer.policy)
    optimizer.workers.remote[0].channel.next_error = LostProcessError("the process died")
    optimizer.step()
    optimizer.step()
    assert len(optimizer.workers.channels) == 4
    replacement = optimizer.workers.channels[-1].target
    assert moments_of(replacement.policy).rows > before.rows


def test_drivers_moments_survive_weights_that_workers_learned() -> None:
    optimizer = make(SyncSamples)
    learned = optimizer.policy.get_weights()
    optimizer.step()
    after = moments_of(optimizer.policy)
    optimizer.set_weights(learned)
    assert moments_of(optimizer.policy) is after


def test_learner_in_this_process_learns_what_acted() -> None:
    """The KL divergence in the only epoch is 0, although the driver's moments change before the
    learner learns."""
    options = {"num_sgd_iter": 1, "sgd_minibatch_size": 0, "gamma": GAMMA, "lr": 0.05, **BOTH}
    config = worker_config("ppo", rollout={"num_workers": 0}, **options)
    optimizer = make_optimizer(SyncSamples, FakeWorkerSet(config))
    kl = []
    learn = optimizer.policy.learn_on_batch

    def spy(batch: Any) -> Any:
        stats = learn(batch)
        kl.append(stats["mean_kl_loss"])
        return stats

    optimizer.policy.learn_on_batch = spy
    for _ in range(6):
        optimizer.step()
    assert max(map(abs, kl)) < 1e-6


# ---- saved and restored -----------------------------------------------------------------------


def test_restored_run_continues_bit_for_bit(tmp_path: Path) -> None:
    """The state includes the moments, and the discounted returns of unfinished episodes."""

    def one() -> Any:
        return make(SyncSamples)

    first, other = one(), one()
    for _ in range(3):
        first.step()
    write_checkpoint(tmp_path, first.get_state())
    other.set_state(read_checkpoint(tmp_path))
    assert numbers(first) == numbers(other)
    for _ in range(3):
        first.step()
        other.step()
    assert numbers(first) == numbers(other)


TRAINING = {
    "env": "Pendulum-v1",
    "policy": "ppo",
    "optimizer": "sync_samples",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 50,
    "min_sample_timesteps_per_iteration": 200,
    "seed": 3,
    "lr": 1e-2,
    "model": {"fcnet_hiddens": [8]},
    **BOTH,
}


def test_loaded_policy_acts_as_in_training_and_keeps_its_moments(tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer(TRAINING)
    trainer.train()
    trainer.save_checkpoint(str(tmp_path))
    trained = trainer.get_policy()
    loaded = polopt.load(tmp_path)
    obs = np.random.default_rng(0).normal(0.0, 3.0, (7, 3)).astype(np.float32)
    before = moments_of(loaded)
    assert before.rows >= 200
    np.testing.assert_array_equal(loaded.predict(obs)[0], trained.predict(obs)[0])
    plain = trained.compute_actions(obs, explore=False)[1]["action_dist_inputs"]
    np.testing.assert_array_equal(loaded.action_params(obs), plain)
    assert moments_of(loaded) is before, "acting does not change the moments"
    trainer.stop()


def test_results_have_returns_of_raw_rewards() -> None:
    trainer = PolicyOptimizerTrainer(TRAINING)
    result = trainer.train()
    while not np.isfinite(result["env_runners"]["episode_return_mean"]):
        result = trainer.train()
    trainer.stop()
    assert result["env_runners"]["episode_return_mean"] < -500.0
