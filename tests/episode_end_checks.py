"""Checks of returns and counts at the ends of episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from toy_envs import make_policy

from polopt.common.sample_batch import SampleBatch
from polopt.policies.policy import Policy
from polopt.rollouts.sampling.sampler import VectorSampler

GAMMA = 0.9
FOR_EVER = 1.0 / (1.0 - GAMMA)  # the value of reward 1 at every step
LENGTHS = [5, 7]  # the lengths of the episodes in two environments


def clock_policy(env: Any, name: str = "a2c", **options: Any) -> Policy:
    """Returns a policy without hidden layers. Its value function can be any table over time."""
    options = {"gamma": GAMMA, "model": {"fcnet_hiddens": []}, **options}
    return make_policy(name, env, **options)


def batches_of(sampler: VectorSampler, rows: int = 30) -> list[SampleBatch]:
    """Returns consecutive postprocessed fragments with at least `rows` steps per environment."""
    count = -(-rows // sampler.fragment_length)
    return [prepared(sampler.policy, sampler.sample()) for _ in range(count)]


def prepared(policy: Policy, batch: SampleBatch) -> SampleBatch:
    return policy.prepare_batch(policy.postprocess(batch))


def times(batch: SampleBatch) -> np.ndarray:
    """Returns the time since the reset, `[T, N]`. The one-hot observations contain it."""
    return batch.obs if batch.obs.ndim == 2 else batch.obs.argmax(-1)  # encoded


def check_nothing_to_learn(batches: list[SampleBatch]) -> None:
    """Checks that all advantages are 0, which is true for the true value function."""
    for batch in batches:
        valid = batch["valid"]
        np.testing.assert_allclose(batch["advantages"][valid], 0.0, atol=2e-5)
        np.testing.assert_allclose(batch["value_targets"][valid], batch["values"][valid], atol=2e-5)


def check_worth(batches: list[SampleBatch], worth: float) -> None:
    check_nothing_to_learn(batches)
    for batch in batches:
        np.testing.assert_allclose(batch["value_targets"][batch["valid"]], worth, rtol=1e-5)


def check_sums_to_the_end(batches: list[SampleBatch], lambda_: float, vtrace: bool = False) -> None:
    """Checks advantages if all values are 0 and all rewards are 1. The advantages are then the sums
    of rewards, discounted with gamma times lambda, up to the end of the episode or of the fragment,
    whichever comes first. With V-trace, the advantage is computed from one step and the next
    target, for every lambda."""
    decay = GAMMA * lambda_
    for batch in batches:
        to_fragment_end = np.arange(batch.shape[0], 0, -1)[:, None]
        steps_left = np.minimum(np.array(LENGTHS) - times(batch), to_fragment_end)
        exact = (1.0 - decay**steps_left) / (1.0 - decay)
        valid = batch["valid"]
        np.testing.assert_allclose(batch["value_targets"][valid], exact[valid], rtol=1e-5)
        if vtrace:
            later = np.maximum(steps_left - 1, 0)  # reset rows have no steps left
            exact = 1.0 + GAMMA * (1.0 - decay**later) / (1.0 - decay)
        np.testing.assert_allclose(batch["advantages"][valid], exact[valid], rtol=1e-5)


def check_counts(batches: list[SampleBatch], resets_cost_a_row: bool) -> None:
    """Checks that the steps of each environment form whole episodes of the right length and one
    unfinished episode."""
    rows = sum(batch.shape[0] for batch in batches)
    # An episode counts even if its reset row has not been sampled yet.
    episodes = [(rows + resets_cost_a_row) // (n + resets_cost_a_row) for n in LENGTHS]
    resets = sum(rows // (n + 1) for n in LENGTHS) if resets_cost_a_row else 0
    assert sum(batch.env_steps for batch in batches) == len(LENGTHS) * rows - resets
    lengths = np.concatenate([batch.episodes.lengths for batch in batches])
    returns = np.concatenate([batch.episodes.returns for batch in batches])
    expected = np.repeat(LENGTHS, episodes)
    np.testing.assert_array_equal(np.sort(lengths), expected)
    np.testing.assert_allclose(np.sort(returns), expected)
