"""Losses and their gradients equal plain formulas in torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import (
    every_model,
    every_policy,
    gradient_of,
    make_batch,
    moved,
    policy_of,
    small_policy,
)
from torch import Tensor
from toy_envs import TwoNumbers, make_policy

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.policies.gae import standardized
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.policy import Policy


def plain(policy: Policy, batch: SampleBatch) -> dict[str, Any]:
    """Computes the terms of the losses from the prepared batch, with `torch.distributions`."""
    batch = policy.prepare_batch(batch)
    obs = torch.from_numpy(batch.flat("obs"))
    params, values = policy.model(obs)
    old = torch.distributions.Categorical(logits=torch.from_numpy(batch.flat("action_dist_inputs")))
    new = torch.distributions.Categorical(logits=params)
    actions = torch.from_numpy(batch.flat("actions"))
    return {
        "log_prob": new.log_prob(actions),
        "old_log_prob": old.log_prob(actions),
        "entropy": new.entropy().mean(),
        "kl": torch.distributions.kl_divergence(old, new).mean(),
        "values": values,
        "advantages": torch.from_numpy(batch.flat("advantages")),
        "targets": torch.from_numpy(batch.flat("value_targets")),
        "old_values": torch.from_numpy(batch.flat("values")),
    }


def assert_same_gradient(policy: Policy, batch: SampleBatch, loss: Tensor) -> dict[str, float]:
    """Checks that the gradient of the policy equals the gradient of `loss`. Returns the statistics
    of the policy's gradient."""
    gradients = policy.compute_gradients(batch)
    assert gradients.rows == batch.env_steps
    np.testing.assert_allclose(gradients.flat, gradient_of(loss, policy), rtol=1e-3, atol=1e-6)
    assert gradients.stats["total_loss"] == pytest.approx(loss.item(), rel=1e-4)
    return gradients.stats


def test_a2c_loss_equals_formula() -> None:
    policy = small_policy("a2c", vf_loss_coeff=0.7, entropy_coeff=0.3)
    batch = make_batch(policy)
    moved(policy)
    x = plain(policy, batch)
    policy_loss = -(x["log_prob"] * x["advantages"]).mean()
    vf_loss = 0.5 * ((x["values"] - x["targets"]) ** 2).mean()
    stats = assert_same_gradient(policy, batch, policy_loss + 0.7 * vf_loss - 0.3 * x["entropy"])
    assert stats["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-4)
    assert stats["vf_loss"] == pytest.approx(vf_loss.item(), rel=1e-4)
    assert stats["entropy"] == pytest.approx(x["entropy"].item(), rel=1e-4)


@pytest.mark.parametrize("fast_cpu", [False, True])
def test_loss_without_a_critic_is_that_of_reinforce(fast_cpu: bool) -> None:
    """As in RLlib's PG, the return ends with the fragment. `lambda` has no effect."""
    options = {"gamma": 0.9, "lambda": 0.5, "vf_loss_coeff": 0.7, "fast_cpu": fast_cpu}
    policy = small_policy("a2c", use_critic=False, entropy_coeff=0.0, **options)
    batch = make_batch(policy, steps=10)
    returns = np.zeros(batch.shape)
    running = np.zeros(batch.shape[1])
    for t in reversed(range(10)):
        over = batch["terminated"][t] | batch["truncated"][t]
        returns[t] = running = batch["rewards"][t] + 0.9 * np.where(over, 0.0, running)
    np.testing.assert_allclose(batch["advantages"], returns, rtol=1e-5)
    x = plain(policy, batch)
    loss = -(x["log_prob"] * torch.from_numpy(returns.reshape(-1))).mean() + 0.0 * x["values"].sum()
    assert_same_gradient(policy, batch, loss)


def test_v_trace_needs_a_critic() -> None:
    for name in ("impala", "appo"):
        with pytest.raises(ConfigError, match="'use_critic': got False"):
            small_policy(name, use_critic=False)


def ppo_loss(
    x: dict[str, Any],
    clip: float,
    vf_range: float | None,
    kl_coeff: float,
    standardize: bool,
    vf_clip: float | None = None,
) -> Tensor:
    advantages = x["advantages"]
    if standardize:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    terms = []
    for log_prob, old, advantage in zip(x["log_prob"], x["old_log_prob"], advantages, strict=True):
        ratio = (log_prob - old).exp()
        # The objective does not grow beyond the clipped ratio in the direction of the advantage.
        too_far = ratio > 1.0 + clip if advantage > 0 else ratio < 1.0 - clip
        bound = 1.0 + clip if advantage > 0 else 1.0 - clip
        terms.append(-advantage * bound if too_far else -advantage * ratio)
    errors = (x["values"] - x["targets"]) ** 2
    if vf_range is not None:
        near = torch.maximum(
            torch.minimum(x["values"], x["old_values"] + vf_range), x["old_values"] - vf_range
        )
        errors = torch.maximum(errors, (near - x["targets"]) ** 2)
    if vf_clip is not None:
        errors = torch.clamp(errors, 0.0, vf_clip)  # as in RLlib's learner
    loss = torch.stack(terms).mean() + 0.25 * errors.mean()
    return loss - 0.01 * x["entropy"] + kl_coeff * x["kl"]


@pytest.mark.parametrize("vf_range", [None, 0.05])
@pytest.mark.parametrize("kl_coeff", [0.0, 0.4])
@pytest.mark.parametrize("standardize", [False, True])
def test_ppo_loss_equals_formula(
    vf_range: float | None, kl_coeff: float, standardize: bool
) -> None:
    policy = small_policy(
        "ppo",
        vf_clip_range=vf_range,
        kl_coeff=kl_coeff,
        standardize_advantages=standardize,
        clip_param=0.1,
    )
    batch = make_batch(policy, steps=10)
    moved(policy)
    x = plain(policy, batch)
    ratio = (x["log_prob"] - x["old_log_prob"]).exp()
    assert (ratio > 1.1).any()
    assert (ratio < 0.9).any()  # otherwise the test would not cover clipping
    stats = assert_same_gradient(policy, batch, ppo_loss(x, 0.1, vf_range, kl_coeff, standardize))
    assert stats["mean_kl_loss"] == pytest.approx(x["kl"].item(), rel=1e-4)
    outside = ((ratio > 1.1) | (ratio < 0.9)).float().mean().item()
    assert stats["clip_fraction"] == pytest.approx(outside)
    assert 0.0 < outside < 1.0


def test_value_clipping_changes_the_loss() -> None:
    policy = small_policy("ppo")
    batch = make_batch(policy, steps=10)
    moved(policy)
    x = plain(policy, batch)
    losses = [ppo_loss(x, 0.1, vf_range, 0.0, True).item() for vf_range in (None, 0.05, 100.0)]
    assert losses[0] < losses[1]  # clipping can only increase the error
    assert losses[0] == losses[2]


@pytest.mark.parametrize("fast_cpu", [False, True])
@pytest.mark.parametrize("vf_range", [None, 0.05])
def test_value_loss_of_ppo_equals_rllib(vf_range: float | None, fast_cpu: bool) -> None:
    """The options of a config of RLlib's PPO mean the same in polopt. The loss is `vf_loss_coeff`
    times the mean of the squared errors, each clipped to `vf_clip_param`."""
    options = {"vf_clip_range": vf_range, "clip_param": 0.1, "fast_cpu": fast_cpu}
    policy = small_policy("ppo", vf_clip_param=1.0, **options)
    batch = make_batch(policy, steps=10)
    moved(policy)
    x = plain(policy, batch)
    errors = (x["values"] - x["targets"]) ** 2
    assert (errors > 1.0).any()
    assert (errors < 1.0).any()
    stats = assert_same_gradient(policy, batch, ppo_loss(x, 0.1, vf_range, 0.0, True, 1.0))
    if vf_range is None:
        assert stats["vf_loss"] == pytest.approx(errors.clamp(max=1.0).mean().item(), rel=1e-4)
    free = small_policy("ppo", vf_clip_param=math.inf, **options)
    assert free.config.vf_clip_param is None, "infinity turns clipping off in RLlib"


def test_ppo_gradient_equals_a2c_gradient_on_policy() -> None:
    options: dict[str, Any] = {
        "standardize_advantages": False,
        "lambda": 0.9,
        "model": {"fcnet_hiddens": [8]},
    }
    ppo, a2c = (make_policy(name, TwoNumbers(), **options) for name in ("ppo", "a2c"))
    batch = make_batch(ppo)
    np.testing.assert_allclose(
        ppo.compute_gradients(batch).flat,
        a2c.compute_gradients(batch).flat,
        rtol=1e-3,
        atol=1e-6,
    )


def twice(batch: SampleBatch) -> SampleBatch:
    return SampleBatch.concat([batch, batch])


@every_policy
@every_model
def test_gradient_does_not_scale_with_batch(name: str, key: str) -> None:
    policy = policy_of(key, name)
    batch = make_batch(policy)
    once, doubled = policy.compute_gradients(batch), policy.compute_gradients(twice(batch))
    assert doubled.rows == 2 * once.rows
    scale = np.abs(once.flat).max()
    np.testing.assert_allclose(doubled.flat, once.flat, rtol=1e-3, atol=1e-4 * scale)
    assert doubled.stats == pytest.approx(once.stats, rel=1e-3, abs=1e-4)


def test_standardised_advantages_ignore_reward_scale() -> None:
    policy = small_policy("ppo", vf_loss_coeff=0.0)
    batch = make_batch(policy)
    before = policy.compute_gradients(batch).flat
    batch["advantages"] = 1000.0 * batch["advantages"] - 5.0
    np.testing.assert_allclose(policy.compute_gradients(batch).flat, before, rtol=1e-2, atol=1e-5)


def test_equal_advantages_are_standardised_to_zero() -> None:
    values = standardized(np.full(5, 3.0, np.float32), LocalReducer())
    assert values.tolist() == [0.0] * 5


@every_policy
def test_no_update_without_valid_rows(name: str) -> None:
    policy = small_policy(name, torch_optimizer="adam")
    policy.learn_on_batch(make_batch(policy))
    state = policy.get_state()
    batch = make_batch(policy, seed=1)
    batch["valid"][:] = False
    gradients = policy.compute_gradients(batch)
    assert gradients.rows == 0
    assert not gradients.flat.any()
    assert policy.learn_on_batch(batch) == {}
    assert policy.version == state["version"]
    assert torch.equal(policy.flat.params, state["params"])
    assert torch.equal(
        policy.get_state()["adam"]["network"]["exp_avg"], state["adam"]["network"]["exp_avg"]
    )


@every_policy
def test_entropy_schedule_reaches_the_loss(name: str) -> None:
    policy = small_policy(name, entropy_coeff=[[0, 0.0], [100, 0.5]])
    batch = make_batch(policy)
    moved(policy)
    grads, losses = [], []
    for env_steps in (0, 40):
        policy.set_weights(policy.get_weights()._replace(env_steps=env_steps))
        gradients = policy.compute_gradients(batch)
        grads.append(gradients.flat)
        losses.append(gradients.stats["total_loss"])
    entropy = plain(policy, batch)["entropy"]
    assert losses[0] - losses[1] == pytest.approx(0.2 * entropy.item(), rel=1e-3)
    np.testing.assert_allclose(
        grads[0] - grads[1], 0.2 * gradient_of(entropy, policy), rtol=1e-2, atol=1e-5
    )
