"""IMPALA, APPO and decoupled PPO: losses, ratios and target network."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import fixed_gradient, gradient_of, make_batch, moved, small_policy
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from toy_envs import TwoNumbers

from polopt.common.sample_batch import SampleBatch
from polopt.policies.appo import AppoPolicy
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.impala import ImpalaPolicy
from polopt.policies.policy import Policy
from polopt.policies.vtrace import VTraceConfig, vtrace

OFF_POLICY = ["appo", "decoupled_ppo", "impala"]
every_off_policy = pytest.mark.parametrize("name", OFF_POLICY)


def stale_batch(policy: Policy, seed: int = 0) -> SampleBatch:
    """Returns a batch whose actions were chosen with other weights than the current ones."""
    batch = make_batch(policy, steps=10, envs=4, seed=seed)
    moved(policy)
    return batch


def log_prob(params: np.ndarray, batch: SampleBatch) -> Tensor:
    """Computes log-probabilities `[T, N]` for parameters `[T, N, P]` with `torch.distributions`."""
    return Categorical(logits=torch.as_tensor(params)).log_prob(torch.as_tensor(batch["actions"]))


def expected_vtrace(policy: Any, batch: SampleBatch, log_ratios: Tensor) -> tuple[Any, Any]:
    """Computes targets and advantages `[T * N]` with the values of the policy's network."""
    with torch.no_grad():
        values = policy.model(torch.as_tensor(batch.all_obs.reshape(-1, 2)))[1]
    values = values.reshape(batch.shape[0] + 1, batch.shape[1]).numpy()
    following = np.where(batch["terminated"], 0.0, values[1:]).astype(np.float32)
    parts = vtrace(batch, log_ratios.numpy(), values[:-1], following, policy.config)
    return tuple(torch.as_tensor(part.reshape(-1)) for part in parts)


# ---- losses -----------------------------------------------------------------------------------


def test_impala_loss_equals_formula() -> None:
    policy = small_policy("impala", vf_loss_coeff=0.7, entropy_coeff=0.3, **{"lambda": 0.9})
    batch = stale_batch(policy)
    params, values = policy.model(torch.as_tensor(batch.flat("obs")))
    new = Categorical(logits=params)
    learned = new.log_prob(torch.as_tensor(batch.flat("actions")))
    acted = log_prob(batch["action_dist_inputs"], batch)
    logs = learned.detach().reshape(batch.shape) - acted
    assert logs.abs().max() > 0.1
    targets, advantages = expected_vtrace(policy, batch, logs)
    loss = -(learned * advantages).mean() - 0.3 * new.entropy().mean()
    loss = loss + 0.7 * 0.5 * (values - targets).square().mean()
    gradients = policy.compute_gradients(batch)
    np.testing.assert_allclose(gradients.flat, gradient_of(loss, policy), rtol=1e-3, atol=1e-6)
    assert gradients.stats["total_loss"] == pytest.approx(loss.item(), rel=1e-4)


def clipped(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    bounded = torch.clamp(ratio, 1.0 - clip, 1.0 + clip)
    return -torch.minimum(ratio * advantages, bounded * advantages).mean()


@pytest.mark.parametrize("kl_coeff", [0.0, 0.4])
def test_appo_loss_equals_formula(kl_coeff: float) -> None:
    """The ratio is written as in the paper: `min(mu / target, 2) pi / mu`."""
    policy: Any = small_policy("appo", clip_param=0.1, kl_coeff=kl_coeff)
    target = small_policy("ppo")  # the same initial weights
    batch = make_batch(policy, steps=10, envs=4)
    batch["action_dist_inputs"] = batch["action_dist_inputs"] * np.float32(300.0)
    batch = policy.postprocess(batch)  # as if another policy had acted
    before = target_of(policy)
    moved(policy)
    policy.flat.params.data[policy.flat.segments["target"]] = torch.as_tensor(before)
    old_params = target.model(torch.as_tensor(batch.flat("obs")))[0].detach()
    params, values = policy.model(torch.as_tensor(batch.flat("obs")))
    old, new = Categorical(logits=old_params), Categorical(logits=params)
    actions = torch.as_tensor(batch.flat("actions"))
    acted = log_prob(batch["action_dist_inputs"], batch).reshape(-1)
    logs = (old.log_prob(actions) - acted).reshape(batch.shape)
    targets, advantages = expected_vtrace(policy, batch, logs)
    behaviour = torch.clamp((acted - old.log_prob(actions)).exp(), max=2.0)
    assert (behaviour == 2.0).any()
    assert (behaviour < 2.0).any()
    ratio = behaviour * (new.log_prob(actions) - acted).exp()
    loss = clipped(ratio, advantages, 0.1) + kl_coeff * kl_divergence(old, new).mean()
    loss = loss + 0.5 * 0.5 * (values - targets).square().mean() - 0.01 * new.entropy().mean()
    gradients = policy.compute_gradients(batch)
    np.testing.assert_allclose(gradients.flat, gradient_of(loss, policy), rtol=1e-3, atol=1e-6)
    assert gradients.stats["total_loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert gradients.stats["mean_kl_loss"] == pytest.approx(
        kl_divergence(old, new).mean().item(), rel=1e-3
    )


@pytest.mark.parametrize("standardize", [False, True])
def test_decoupled_loss_equals_formula(standardize: bool) -> None:
    """The objective is `pi_proximal / mu min(r A, clip(r) A)` with `r = pi / pi_proximal` (Hilton
    et al.)."""
    options = {"clip_param": 0.1, "kl_coeff": 0.4, "standardize_advantages": standardize}
    policy: Any = small_policy("decoupled_ppo", **options)
    batch = stale_batch(policy)
    prepared = policy.prepare_batch(batch)
    proximal_params = policy.action_params(batch.flat("obs"))
    moved(policy, seed=6)
    params, values = policy.model(torch.as_tensor(batch.flat("obs")))
    old, new = Categorical(logits=torch.as_tensor(proximal_params)), Categorical(logits=params)
    actions, advantages = (torch.as_tensor(batch.flat(n)) for n in ("actions", "advantages"))
    if standardize:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    acted = log_prob(batch["action_dist_inputs"], batch).reshape(-1)
    weights = (old.log_prob(actions) - acted).exp()
    ratio = (new.log_prob(actions) - old.log_prob(actions)).exp()
    assert ((ratio - 1.0).abs() > 0.1).any()
    assert ((weights - 1.0).abs() > 0.1).any()
    loss = clipped(ratio, weights * advantages, 0.1) + 0.4 * kl_divergence(old, new).mean()
    targets = torch.as_tensor(batch.flat("value_targets"))
    loss = loss + 0.5 * 0.5 * (values - targets).square().mean() - 0.01 * new.entropy().mean()
    policy.backward(policy.training_rows(prepared))
    expected = gradient_of(loss, policy)
    np.testing.assert_allclose(policy.flat.get_grads(), expected, rtol=1e-3, atol=1e-6)


def test_importance_weights_are_bounded() -> None:
    policy: Any = small_policy("decoupled_ppo")
    batch = make_batch(policy)
    batch["action_logp"] = batch["action_logp"] - np.float32(90.0)
    prepared = policy.prepare_batch(batch)
    np.testing.assert_allclose(prepared["importance_weights"], 100.0, rtol=1e-5)


# ---- without lag ------------------------------------------------------------------------------


def test_decoupled_ppo_without_lag_is_ppo() -> None:
    options = {"num_sgd_iter": 3, "sgd_minibatch_size": 7, "kl_coeff": 0.3, "lr": 0.01}
    decoupled, ppo = small_policy("decoupled_ppo", **options), small_policy("ppo", **options)
    before = ppo.get_weights().flat
    batch = make_batch(ppo)
    for policy in (decoupled, ppo):
        policy.learn_on_batch(batch)
    change = ppo.get_weights().flat - before
    atol = 1e-3 * np.abs(change).max()
    np.testing.assert_allclose(decoupled.get_weights().flat - before, change, atol=atol)
    assert decoupled.version == ppo.version > 3
    assert decoupled.coefficients == ppo.coefficients


def test_impala_without_lag_is_a2c_with_returns() -> None:
    impala, a2c = small_policy("impala"), small_policy("a2c", **{"lambda": 1.0})
    batch = make_batch(a2c)
    expected = a2c.compute_gradients(batch)
    gradients = impala.compute_gradients(impala.postprocess(batch))
    np.testing.assert_allclose(gradients.flat, expected.flat, rtol=1e-3, atol=1e-6)


def test_appo_without_lag_is_ppo_with_returns() -> None:
    appo = small_policy("appo")
    same = {"standardize_advantages": False, "lambda": 1.0, "clip_param": 0.4}
    ppo = small_policy("ppo", **same)
    batch = make_batch(ppo)
    expected = ppo.compute_gradients(batch)
    gradients = appo.compute_gradients(batch)
    np.testing.assert_allclose(gradients.flat, expected.flat, rtol=1e-3, atol=1e-6)


# ---- the policy that acted --------------------------------------------------------------------


@every_off_policy
def test_log_probabilities_use_the_weights_that_acted(name: str) -> None:
    policy = small_policy(name)
    batch = make_batch(policy)
    acted = log_prob(batch["action_dist_inputs"], batch).numpy()
    np.testing.assert_allclose(batch["action_logp"], acted, rtol=1e-5, atol=1e-6)
    before = batch["action_logp"].copy()
    moved(policy)
    later = policy.compute_gradients(batch).flat
    np.testing.assert_array_equal(batch["action_logp"], before)
    # In the wrong variant, the probabilities are under the weights that learn, so every ratio is 1.
    params = policy.action_params(batch.flat("obs")).reshape(*batch.shape, -1)
    batch["action_logp"] = log_prob(params, batch).numpy()
    assert not np.allclose(policy.compute_gradients(batch).flat, later, rtol=1e-2)


@every_off_policy
def test_learning_does_not_change_the_batch(name: str) -> None:
    policy = small_policy(name, num_sgd_iter=2, sgd_minibatch_size=9)
    batch = stale_batch(policy)
    before = {key: column.copy() for key, column in batch.columns.items()}
    policy.learn_on_batch(batch)
    assert batch.columns.keys() == before.keys()
    for key, column in before.items():
        np.testing.assert_array_equal(batch[key], column)


@every_off_policy
def test_minibatch_gradients_of_old_samples_equal_learning(name: str) -> None:
    options = {"num_sgd_iter": 2, "sgd_minibatch_size": 9}
    learning, applying = small_policy(name, **options), small_policy(name, **options)
    batch = stale_batch(learning)
    moved(applying)
    learning.learn_on_batch(batch)
    minibatches = MinibatchGradients(applying, batch)
    while not minibatches.done:
        applying.apply_gradients(minibatches.next_gradients())
    np.testing.assert_array_equal(applying.get_weights().flat, learning.get_weights().flat)
    # Two epochs. V-trace needs all rows of an environment together, so it has 4 minibatches of 10
    # rows. Decoupled PPO has 5 minibatches of at most 9 rows.
    assert applying.version == learning.version == 8 + 2 * (name == "decoupled_ppo")


def test_vtrace_uses_the_current_weights_for_each_minibatch() -> None:
    options = {"sgd_minibatch_size": 10, "lr": 0.05, "lambda": 1.0}
    seen: list[float] = []

    class Recording(ImpalaPolicy):
        def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
            prepared = super().prepare_batch(batch)
            expected = self.value(batch.flat("obs")).reshape(batch.shape)
            np.testing.assert_array_equal(prepared["values"], expected)
            seen.append(float(prepared["values"].mean()))
            return prepared

    policy = own(Recording, **options)
    policy.learn_on_batch(make_batch(policy, steps=10, envs=4))
    assert len(seen) == 4
    assert len(set(seen)) == 4


def own(cls: type[Policy], **options: Any) -> Any:
    """Like `small_policy`, but with a policy class of this test."""
    env = TwoNumbers()
    config = cls.config_class.parse({"model": {"fcnet_hiddens": [8]}, **options})
    return cls(env.observation_space, env.action_space, config)


# ---- target network ---------------------------------------------------------------------------


def target_of(policy: Policy) -> np.ndarray:
    return policy.get_weights().flat[policy.flat.segments["target"]]


def network_of(policy: Policy) -> np.ndarray:
    return policy.get_weights().flat[policy.flat.segments["network"]]


@pytest.mark.parametrize("fast_cpu", [True, False])
def test_target_follows_after_every_few_updates(fast_cpu: bool) -> None:
    policy: Any = small_policy("appo", target_network_update_freq=3, fast_cpu=fast_cpu)
    obs = make_batch(policy).flat("obs")
    initial = network_of(policy)
    np.testing.assert_array_equal(target_of(policy), initial)
    first = policy._target.action_params(obs)
    for version in range(1, 8):
        policy.apply_gradients(fixed_gradient(policy, version))
        assert policy.version == version
        if version % 3:
            assert not np.array_equal(target_of(policy), network_of(policy))
        else:
            np.testing.assert_array_equal(target_of(policy), network_of(policy))
            params = policy._target.action_params(obs)
            np.testing.assert_array_equal(params, policy.action_params(obs))
            assert not np.array_equal(params, first)
    policy.set_option("target_network_update_freq", 1)
    policy.apply_gradients(fixed_gradient(policy, 0))
    np.testing.assert_array_equal(target_of(policy), network_of(policy))


def test_target_is_sent_with_weights_and_has_no_gradient() -> None:
    policy, other = small_policy("appo", seed=1), small_policy("appo", seed=2)
    policy.apply_gradients(fixed_gradient(policy))
    other.set_weights(policy.get_weights())
    np.testing.assert_array_equal(target_of(other), target_of(policy))
    gradients = other.compute_gradients(make_batch(other))
    assert len(gradients.flat) == len(network_of(other))
    before = target_of(other)
    other.apply_gradients(gradients)  # update 2, which the target network follows by default
    assert not np.array_equal(target_of(other), before)
    assert list(other.get_state()["adam"]) == ["network"]


@pytest.mark.parametrize("name", ["ppo", "a2c"])
def test_appo_restores_other_policies_and_they_restore_it(name: str) -> None:
    appo, other = small_policy("appo", seed=1), small_policy(name, seed=2)
    appo.apply_gradients(fixed_gradient(appo))
    assert not np.array_equal(target_of(appo), network_of(appo))
    other.set_state(appo.get_state())
    np.testing.assert_array_equal(other.get_weights().flat, network_of(appo))
    moved(other)
    appo.set_state(other.get_state())
    np.testing.assert_array_equal(network_of(appo), other.get_weights().flat)
    np.testing.assert_array_equal(target_of(appo), network_of(appo))


def test_wrong_variants_of_the_appo_ratio_differ() -> None:
    """One variant lacks the bound of the ratio. The other variant uses the policy that acted
    instead of the target policy."""

    class Unbounded(AppoPolicy):
        def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
            prepared = super().prepare_batch(batch)
            prepared["action_logp"] = self.log_prob(batch, prepared["action_dist_inputs"])
            return prepared

    class Coupled(AppoPolicy):
        def prepare_batch(self, batch: SampleBatch) -> SampleBatch:
            prepared = super().prepare_batch(batch)
            prepared["action_logp"] = batch["action_logp"]
            return prepared

    right = small_policy("appo")
    batch = make_batch(right, steps=10)
    batch["action_logp"] = batch["action_logp"] + np.float32(math.log(3.0))
    expected = right.compute_gradients(batch).flat
    for wrong in (Unbounded, Coupled):
        assert not np.allclose(own(wrong).compute_gradients(batch).flat, expected, rtol=1e-2)


def test_default_torch_optimizer_of_impala_is_rmsprop() -> None:
    assert list(small_policy("impala").get_state()["rmsprop"]) == ["network"]
    adam = small_policy("impala", torch_optimizer="adam")
    assert list(adam.get_state()["adam"]) == ["network"]
    assert isinstance(adam.config, VTraceConfig)
