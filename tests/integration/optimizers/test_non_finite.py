"""Non-finite data are detected at their source, named and dropped. They are never applied."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    FAULT_FILE,
    FakeWorkerSet,
    NonFiniteGradientPPO,
    UncheckedGradientPPO,
    make_optimizer,
    worker_config,
)
from faulty_envs import Spoiled, num_faults
from rank_helpers import Pool, on_ranks
from toy_envs import Drift, make_policy, random_batch

from polopt.common.faults import non_finite_values
from polopt.common.weights import Gradients
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.async_samples import AsyncSamples
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.rank_group import checksum
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.sampling.non_finite import all_finite, find_non_finite, non_finite_gradient
from polopt.rollouts.workers.errors import NonFiniteError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

KINDS = ["nan reward", "infinite reward", "huge reward", "nan observation", "infinite observation"]
every_kind = pytest.mark.parametrize("what", KINDS)


def non_finite_config(
    what: str, policy: str = "a2c", rollout: dict[str, Any] | None = None, **env: Any
) -> WorkerConfig:
    """Returns the config of two workers. The environments of the second worker return non-finite
    data after 12 steps."""
    env_config = {"what": what, "worker": 2, "after": 12, **env}
    return worker_config(policy, Spoiled, rollout={"env_config": env_config, **(rollout or {})})


def is_finite(policy: Any) -> bool:
    tensors = [policy.flat.params, *policy.get_state()["adam"]["network"].values()]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def step_often(optimizer: Any) -> None:
    for _ in range(30):
        optimizer.step()


# ---- detection --------------------------------------------------------------------------------


def test_every_column_is_checked() -> None:
    policy = make_policy("a2c", Drift())
    rng = np.random.default_rng(0)
    columns = {"rewards": "reward", "obs": "observation", "advantages": "advantage"}
    columns["value_targets"] = "value target"
    for name, label in columns.items():
        batch = random_batch(policy, 6, 4, rng)
        batch["valid"][:] = True
        assert find_non_finite(batch)[0] == ""
        batch[name][2, 3] = np.nan
        batch[name][4, 1] = -np.inf
        problem, envs = find_non_finite(batch)
        assert problem == f"{label} of environment 3 is nan at step 2 of the fragment"
        assert envs.tolist() == [False, True, False, True]
    batch = random_batch(policy, 6, 4, rng)
    batch.all_obs[6, 2, 1] = np.inf  # the observation after the last step
    problem, envs = find_non_finite(batch)
    assert problem == "observation of environment 2 is inf at step 6 of the fragment"
    batch = random_batch(policy, 6, 4, rng)
    batch.successor_index = np.array([3 * 4 + 1])
    batch.successor_obs = np.array([[0.0, np.nan, 0.0]], np.float32)
    problem, envs = find_non_finite(batch)
    assert problem == "last observation of environment 1 is nan at step 3 of the fragment"
    assert envs.tolist() == [False, True, False, False]


def test_finite_numbers_with_infinite_sum_are_finite() -> None:
    assert all_finite(np.full(100, 3e38, np.float32))
    assert all_finite(np.array([3e38, 3e38, -3e38, -3e38], np.float32))
    assert not all_finite(np.array([np.inf, -np.inf], np.float32))
    assert all_finite(np.arange(5))
    assert all_finite(np.zeros(0, np.float32))
    assert not all_finite(np.array([1.0, np.nan]))


def test_gradient_message_counts_non_finite_numbers() -> None:
    flat = np.zeros(10, np.float32)
    assert non_finite_gradient(Gradients(flat, 0, 5, {})) == ""
    flat[[2, 5]] = np.nan, np.inf
    assert non_finite_gradient(Gradients(flat, 0, 5, {})).startswith(
        "gradient: 2 of its 10 numbers"
    )


@every_kind
@pytest.mark.parametrize("mode", ["same_step", "next_step", "disabled"])
def test_environment_with_non_finite_data_is_reset(what: str, mode: str) -> None:
    config = non_finite_config(what, rollout={"autoreset_mode": mode}, times=1, worker=7)
    made = RolloutWorker(config, 7)
    batches = [made.next_batch() for _ in range(6)]
    counts = made.record
    # Each of the two environments returns one non-finite value. If both values are in one fragment,
    # they count once. Without a reset, a non-finite observation would also be the first observation
    # of the next fragment, and would count again.
    assert 1 <= num_faults(counts.faults, "non_finite", "bad_rows") <= 2
    assert non_finite_values(counts.faults).startswith("environment 'Spoiled' of worker 7: ")
    assert all(all_finite(batch.all_obs) for batch in batches)
    assert counts.env_steps == sum(batch.env_steps for batch in batches) > 0
    returns = np.concatenate([batch.episodes.returns for batch in batches])
    assert np.isfinite(returns).all()


# ---- sampling again ---------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [AsyncGradients, SyncGradients, SyncSamples, AsyncSamples])
@every_kind
def test_worker_samples_again_after_non_finite_data(
    caplog: pytest.LogCaptureFixture, what: str, cls: type
) -> None:
    workers = FakeWorkerSet(non_finite_config(what, times=1))
    optimizer = make_optimizer(cls, workers)
    optimizer.config = optimizer.config.model_copy(update={"grads_per_step": 20})
    samples = cls in (SyncSamples, AsyncSamples)
    with caplog.at_level(logging.WARNING, logger="polopt"):
        results = [optimizer.step() for _ in range(20 if samples else 1)]
    stats, metrics = workers.stats(), optimizer.metrics
    assert stats["num_non_finite"] in (1, 2)  # the worker has two environments
    assert stats["last_non_finite_worker"] == 2
    assert "'Spoiled' of worker 2" in stats["last_non_finite"]
    assert any("worker 2: data with non-finite values" in line for line in caplog.messages)
    assert all(result.updates for result in results)
    assert metrics.num_env_steps_trained == metrics.num_env_steps_sampled
    # 20 steps or gradients use one fragment of 10 rows each. A step of SyncSamples uses two.
    assert metrics.num_env_steps_sampled == (400 if cls is SyncSamples else 200)
    assert metrics.num_gradients_skipped == 0
    assert is_finite(optimizer.policy)
    absent = ("mean_kl_loss", "clip_fraction")  # A2C does not compute them
    report = metrics.learner.report()
    assert all(np.isfinite(value) for key, value in report.items() if key not in absent)


def test_sync_samples_in_one_process() -> None:
    config = non_finite_config("nan reward", rollout={"num_workers": 0}, times=1, worker=0)
    workers = WorkerSet(config)
    optimizer = make_optimizer(SyncSamples, workers)
    for _ in range(6):
        assert optimizer.step().env_steps_sampled == 10
    assert workers.stats()["num_non_finite"] in (1, 2)
    assert is_finite(optimizer.policy)


@pytest.mark.parametrize("cls", [AsyncGradients, SyncGradients, SyncSamples, AsyncSamples])
def test_five_in_a_row_of_one_worker_end_the_run(cls: type) -> None:
    workers = FakeWorkerSet(non_finite_config("nan reward"))
    optimizer = make_optimizer(cls, workers)
    with pytest.raises(NonFiniteError, match=r"worker 2: 5 fragments in a row.*'Spoiled'") as err:
        step_often(optimizer)
    assert "max_consecutive_non_finite=5" in str(err.value)
    assert workers.stats()["num_non_finite"] == 5
    assert workers.faults.num_restarts == 0
    assert is_finite(optimizer.policy)


@pytest.mark.parametrize("cls", [AsyncGradients, SyncGradients])
def test_non_finite_gradient_of_one_worker_is_skipped(cls: type) -> None:
    config = worker_config(NonFiniteGradientPPO, num_sgd_iter=1, sgd_minibatch_size=0)
    workers = FakeWorkerSet(config)
    optimizer = make_optimizer(cls, workers, grads_per_step=10)
    Path(FAULT_FILE).touch()
    result = optimizer.step()
    assert not Path(FAULT_FILE).exists()
    # The samples of this worker are finite, so they count, and the progress of schedules includes
    # them.
    assert result.env_steps_sampled == optimizer.policy.env_steps == 100
    assert result.env_steps_trained == 90
    assert result.updates == (9 if cls is AsyncGradients else 5)
    assert optimizer.stats()["num_gradients_skipped"] == 1
    stats = workers.stats()
    assert stats["num_non_finite"] == 1
    assert stats["last_non_finite"].startswith("gradient: 1 of its")
    assert is_finite(optimizer.policy)


class FirstGradientNeverFinite(PPOPolicy):
    """PPO whose gradient is not finite for the first of four minibatches of each rollout."""

    count = 0

    def backward(self, rows: Any) -> dict[str, float]:
        stats = super().backward(rows)
        self.count += 1
        if self.count % 4 == 1:
            self.flat.grads[0] = float("nan")
        return stats


def test_samples_of_a_rollout_whose_first_gradient_fails_count() -> None:
    learning = {"sgd_minibatch_size": 5, "num_sgd_iter": 2}  # ten rows give four gradients
    workers = FakeWorkerSet(worker_config(FirstGradientNeverFinite, **learning))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=4)
    for _ in range(8):
        optimizer.step()
    # Eight rollouts give 32 gradients. The first gradient of each rollout is skipped, and with it 5
    # of the 10 rows of the rollout.
    assert optimizer.metrics.num_updates == 24
    assert optimizer.metrics.num_env_steps_sampled == optimizer.policy.env_steps == 80
    assert optimizer.metrics.num_env_steps_trained == 40


def test_gradients_that_stay_non_finite_end_the_run() -> None:
    class NeverFinite(PPOPolicy):
        def backward(self, rows: Any) -> dict[str, float]:
            stats = super().backward(rows)
            self.flat.grads[0] = float("nan")
            return stats

    workers = FakeWorkerSet(worker_config(NeverFinite))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=40)
    with pytest.raises(NonFiniteError, match=r"worker [12]: 5 gradients in a row"):
        optimizer.step()
    assert is_finite(optimizer.policy)


def test_mean_with_infinite_norm_is_no_workers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 2}))
    optimizer = make_optimizer(SyncGradients, workers, grads_per_step=2)
    apply = optimizer.policy.apply_flat
    monkeypatch.setattr(optimizer.policy, "apply_flat", lambda *_: {})
    assert optimizer.step().updates == 0
    assert workers.stats()["last_non_finite_worker"] == 0
    monkeypatch.setattr(optimizer.policy, "apply_flat", apply)
    assert optimizer.step().updates > 0


def test_non_finite_gradient_of_a_batch_is_skipped() -> None:
    workers = WorkerSet(worker_config(NonFiniteGradientPPO, rollout={"num_workers": 0}))
    optimizer = make_optimizer(SyncSamples, workers)
    for _ in range(4):  # fewer than five, and a finite gradient follows each of them
        Path(FAULT_FILE).touch()
        assert optimizer.step().updates < optimizer.step().updates
    assert is_finite(optimizer.policy)


def test_gradient_too_large_for_adam_is_left_out() -> None:
    policy = make_policy("a2c", Drift(), grad_clip=None)
    before = policy.flat.params.clone()
    policy.flat.grads.fill_(1e20)
    policy.apply_flat()
    assert torch.equal(policy.flat.params, before)
    assert policy.progress.skipped_updates == 1
    policy.flat.grads.fill_(1e3)
    policy.apply_flat()
    assert is_finite(policy)
    assert not torch.equal(policy.flat.params, before)


# ---- several learners -------------------------------------------------------------------------


def learned(worker: Any) -> tuple[str, int, bool]:
    """Returns the hash of a worker's weights, their version, and whether the weights and Adam's
    moments are finite."""
    state = worker.policy.get_state()
    tensors = [state["params"], *state["adam"]["network"].values()]
    finite = all(bool(t.isfinite().all()) for t in tensors)
    return checksum(worker), worker.policy.version, finite


def decentralized(pool: Pool, config: WorkerConfig) -> Any:
    return make_optimizer(DecentralizedAllReduce, pool(config))


@pytest.mark.usefixtures("compare_every_round")
@pytest.mark.parametrize("what", ["nan reward", "nan observation"])
def test_nan_of_one_rank_reaches_no_other_rank_or_checkpoint(worker_pool: Pool, what: str) -> None:
    optimizer = decentralized(worker_pool, non_finite_config(what, "ppo", times=1))
    for _ in range(8):
        result = optimizer.step()
        assert result.env_steps_sampled == result.env_steps_trained
        assert result.updates > 0
        seen = on_ranks(optimizer, learned)
        assert len(set(seen)) == 1, "weights of ranks differ"
        assert all(finite for _, _, finite in seen)
    stats = optimizer.workers.stats()
    assert stats["num_non_finite"] in (1, 2)
    assert stats["last_non_finite_worker"] == 2
    assert "'Spoiled' of worker 2" in stats["last_non_finite"]
    state = optimizer.get_state()
    tensors = [state["policy"]["params"], *state["policy"]["adam"]["network"].values()]
    assert all(bool(torch.isfinite(t).all()) for t in tensors)


def with_non_finite_gradient(pool: Pool, policy: type) -> tuple[Any, list[Any]]:
    optimizer = decentralized(pool, worker_config(policy, num_sgd_iter=2))
    optimizer.step()
    optimizer.drain()
    Path(FAULT_FILE).touch()
    optimizer.step()
    seen = on_ranks(optimizer, learned)
    assert not Path(FAULT_FILE).exists()
    return optimizer, seen


@pytest.mark.usefixtures("compare_every_round")
def test_non_finite_gradient_of_one_rank_is_applied_by_none(worker_pool: Pool) -> None:
    optimizer, seen = with_non_finite_gradient(worker_pool, NonFiniteGradientPPO)
    assert len(set(seen)) == 1
    assert seen[0][2]
    stats = optimizer.workers.stats()
    assert stats["num_non_finite"] == 1
    assert stats["last_non_finite_worker"] in (1, 2)
    assert stats["last_non_finite"] == "gradient of a minibatch"
    assert optimizer.stats()["num_skipped_updates"] == 1
    assert optimizer.stats()["num_env_steps_trained"] == optimizer.metrics.num_env_steps_sampled
    before = optimizer.metrics.num_updates
    optimizer.step()
    assert optimizer.metrics.num_updates > before


@pytest.mark.usefixtures("compare_every_round")
def test_unchecked_gradient_reaches_all_ranks(worker_pool: Pool) -> None:
    _, seen = with_non_finite_gradient(worker_pool, UncheckedGradientPPO)
    assert [finite for _, _, finite in seen] == [False, False]


@pytest.mark.usefixtures("compare_every_round")
def test_five_non_finite_fragments_of_a_rank_end_the_run(worker_pool: Pool) -> None:
    optimizer = decentralized(worker_pool, non_finite_config("nan reward", "ppo"))
    with pytest.raises(NonFiniteError, match=r"worker 2.*in a row.*max_consecutive_non_finite=5"):
        step_often(optimizer)
    assert optimizer.workers.stats()["num_non_finite"] == 5
    assert optimizer.workers.faults.num_restarts == 0


class OneStep(Drift):
    """An environment whose episodes have one step."""

    def step(self, action: int) -> Any:
        obs, reward, _, _, info = super().step(action)
        return obs, reward, True, False, info


def test_rounds_without_a_valid_row_are_not_non_finite(worker_pool: Pool) -> None:
    # In next-step mode, every second step only resets the environment.
    rollout = {
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 1,
        "autoreset_mode": "next_step",
        "max_consecutive_non_finite": 1,
    }
    config = worker_config("ppo", OneStep, rollout=rollout)
    optimizer = make_optimizer(DecentralizedAllReduce, worker_pool(config), fraction_workers=1.0)
    results = [optimizer.step() for _ in range(11)]
    assert [result.env_steps_sampled for result in results] == [2, 0] * 5 + [2]
    assert all((result.updates > 0) == (result.env_steps_sampled > 0) for result in results)
    assert optimizer.workers.stats()["num_non_finite"] == 0
