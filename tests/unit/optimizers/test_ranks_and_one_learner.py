"""Ranks that learn together for several rounds equal one learner with the samples of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fakes import worker_config
from learner_threads import Rank, on_threads

from polopt.optimizers.decentralized_allreduce import Learned, learn, sample_and_keep
from polopt.policies import fragment_policy, gae
from polopt.policies.learning.minibatches import shuffled
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.rollout_worker import RolloutWorker

ROUNDS = 3
MINIBATCH = 16
# Reset rows do not count, so the ranks have different numbers of rows.
ROLLOUT = {"rollout_fragment_length": 20, "autoreset_mode": "next_step"}
LEARNING: dict[str, Any] = {
    "num_sgd_iter": 2,
    "sgd_minibatch_size": MINIBATCH,
    "lr": [[0, 1e-2], [300, 0.0]],
    "entropy_coeff": [[0, 0.1], [300, 0.0]],
    "kl_coeff": 2.0,
    "normalize_observations": True,
    "normalize_rewards": True,
}


class OneLearner:
    """Samples what the ranks sample, and learns from all of it with one policy. Minibatch `i` has
    the rows of minibatch `i` of each rank.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        config = worker_config("ppo", rollout=ROLLOUT, **LEARNING, standardize_advantages=False)
        self.samplers = [RolloutWorker(config, index) for index in range(1, ranks + 1)]
        self.orders = [sampler.policy.shuffle for sampler in self.samplers]
        spaces = (config.observation_space, config.action_space)
        self.policy = PPOPolicy(*spaces, config.policy, config.seed)
        for sampler in self.samplers:
            sampler.use_policy(self.policy)

    def round(self) -> list[int]:
        """Samples and learns. Returns the number of rows of each sampler."""
        policy = self.policy
        rows = [policy.training_rows(sampler.next_batch()) for sampler in self.samplers]
        for sampler in self.samplers:
            policy.add_moments(sampler.new_moments)
            sampler.new_moments = None
        counts = [len(part["obs"]) for part in rows]
        policy.env_steps += sum(counts)
        advantages = np.concatenate([part["advantages"] for part in rows])
        for part in rows:
            part["advantages"] = (part["advantages"] - advantages.mean()) / advantages.std()
        parts = -(-sum(counts) // (MINIBATCH * len(rows)))
        for _ in range(LEARNING["num_sgd_iter"]):
            kl = []
            pairs = zip(rows, self.orders, strict=True)
            cuts = [list(shuffled(part, parts, order)) for part, order in pairs]
            for pieces in zip(*cuts, strict=True):
                union = {name: np.concatenate([p[name] for p in pieces]) for name in rows[0]}
                kl.append(policy.update(union, LocalReducer())["mean_kl_loss"])
        policy.on_learned({"mean_kl_loss": float(np.mean(kl))})
        return counts


def learn_round(reducer: Rank, worker: RolloutWorker, env_steps: int) -> Learned:
    worker.state["group"] = reducer
    return learn(worker, env_steps, want_weights=False, want_checksum=True)


def distance_from_one_learner(ranks: int) -> float:
    """Returns the largest distance between the weights of the ranks and the weights of one learner
    after any of `ROUNDS` rounds. The one learner never receives anything from the ranks."""
    config = worker_config("ppo", rollout=ROLLOUT, **LEARNING)
    workers = [RolloutWorker(config, index) for index in range(1, ranks + 1)]
    one, env_steps, distance = OneLearner(ranks), 0, 0.0
    for _ in range(ROUNDS):
        counts = one.round()
        assert len(set(counts)) > 1
        for worker in workers:
            sample_and_keep(worker)
        learned = on_threads(
            [functools.partial(learn_round, worker=w, env_steps=env_steps) for w in workers]
        )
        env_steps += sum(counts)
        for worker, each in zip(workers, learned, strict=True):
            assert each.broken is None
            assert worker.policy.version == one.policy.version
            difference = worker.policy.get_weights().flat - one.policy.get_weights().flat
            distance = max(distance, float(np.abs(difference).max()))
    return distance


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_equal_one_learner(ranks: int) -> None:
    assert distance_from_one_learner(ranks) < 1e-5


# ---- wrong variants ------------------------------------------------------------------------------


def own_advantages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank standardises its advantages by its own rows."""
    right = gae.standardized
    monkeypatch.setattr(gae, "standardized", lambda values, _: right(values, LocalReducer()))


def unweighted_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient is the mean over the ranks, although they have different numbers of rows."""
    right = fragment_policy.reduce_gradient

    def wrong(policy: Policy, count: int, stats: Any, reducer: Any) -> dict[str, float]:
        return right(policy, 1, stats, reducer)

    monkeypatch.setattr(fragment_policy, "reduce_gradient", wrong)


def own_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank normalises by the moments of its own samples."""
    right = Policy.add_moments
    monkeypatch.setattr(Policy, "add_moments", lambda self, moments, _=None: right(self, moments))


def late_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks normalise by the moments of all rounds but the last."""
    waiting: dict[Policy, Any] = {}
    right = Policy.add_moments

    def wrong(self: Policy, moments: Any, reducer: Any = None) -> None:
        right(self, waiting.get(self) if reducer else moments, reducer)
        waiting[self] = moments

    monkeypatch.setattr(Policy, "add_moments", wrong)


def own_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedules of a rank count its own steps of the round only."""
    right = Rank.sum_

    def wrong(self: Rank, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            right(self, tensor)

    monkeypatch.setattr(Rank, "sum_", wrong)


def constant_kl_coefficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks do not adapt the KL coefficient."""
    right = PPOPolicy.on_learned

    def wrong(self: PPOPolicy, stats: Any) -> None:
        if not self.config.standardize_advantages:  # the one learner
            right(self, stats)

    monkeypatch.setattr(PPOPolicy, "on_learned", wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        own_advantages,
        unweighted_mean,
        own_moments,
        late_moments,
        own_steps,
        constant_kl_coefficient,
    ],
)
def test_wrong_variants_differ_from_one_learner(
    wrong: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong(monkeypatch)
    assert distance_from_one_learner(2) > 5e-4
