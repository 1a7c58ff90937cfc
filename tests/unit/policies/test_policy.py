"""Policies: flat parameters, acting, and state."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import (
    every_model,
    every_policy,
    make_batch,
    moved,
    observations_for,
    policy_of,
    small_policy,
)
from torch import Tensor
from toy_envs import TwoNumbers, make_policy

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.policy import Policy


def assert_views(policy: Policy) -> None:
    flat = policy.flat
    offset = 0
    for parameter in policy.model.parameters():
        size = parameter.numel()
        assert parameter.data_ptr() == flat.params[offset:].data_ptr()
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == flat.buffer[offset:].data_ptr()
        offset += size
    assert offset == len(flat.params) == len(flat.grads)
    assert flat.params.grad is not None
    assert flat.params.grad.data_ptr() == flat.grads.data_ptr() == flat.buffer.data_ptr()


@every_model
def test_parameters_and_gradients_stay_views(key: str) -> None:
    policy = policy_of(key, "ppo", num_sgd_iter=2, sgd_minibatch_size=5)
    assert_views(policy)
    batch = make_batch(policy)
    policy.learn_on_batch(batch)
    assert_views(policy)
    policy.apply_gradients(policy.compute_gradients(batch))
    assert_views(policy)
    policy.set_weights(policy_of(key, "ppo").get_weights())
    assert_views(policy)
    policy.set_state(policy.get_state())
    assert_views(policy)


@every_model
def test_flat_parameters_determine_the_network(key: str) -> None:
    policy = policy_of(key)
    obs = observations_for(policy, 5)
    before = policy.action_params(obs), policy.value(obs)
    moved(policy)
    after = policy.action_params(obs), policy.value(obs)
    for old, new in zip(before, after, strict=True):
        assert not np.allclose(old, new)


@every_policy
def test_set_weights_copies_the_policy(name: str) -> None:
    one, other = small_policy(name, seed=1), small_policy(name, seed=2)
    one.learn_on_batch(make_batch(one))
    one.env_steps = 77
    weights = one.get_weights()
    other.set_weights(weights)
    obs = observations_for(one, 9)
    np.testing.assert_array_equal(one.action_params(obs), other.action_params(obs))
    np.testing.assert_array_equal(one.value(obs), other.value(obs))
    assert (other.version, other.env_steps) == (one.version, 77)
    assert other.coefficients == one.coefficients
    # Weights are copies, so later updates do not change them.
    moved(one)
    moved(other)
    np.testing.assert_array_equal(weights.flat, learned_weights(name).flat)


def learned_weights(name: str) -> Weights:
    policy = small_policy(name, seed=1)
    policy.learn_on_batch(make_batch(policy))
    return policy.get_weights()


def test_read_only_weights_are_accepted() -> None:
    policy, other = small_policy("a2c"), small_policy("a2c", seed=1)
    weights = policy.get_weights()
    weights.flat.flags.writeable = False
    other.set_weights(weights)
    moved(other)
    np.testing.assert_array_equal(policy.get_weights().flat, weights.flat)


@every_model
def test_initial_weights_depend_on_the_seed_only(key: str) -> None:
    torch.manual_seed(1)
    first = policy_of(key).get_weights().flat
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = policy_of(key).get_weights().flat
    assert torch.equal(torch.get_rng_state(), state)  # the caller's generator is unchanged
    np.testing.assert_array_equal(first, second)


def test_creating_a_policy_does_not_seed_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    torch.manual_seed(1)
    assert seeds == [1]  # torch calls this function to seed CUDA
    small_policy("ppo", seed=7)
    assert seeds == [1]


def test_initial_policy_is_uniform_layers_orthogonal() -> None:
    policy = policy_of("default")
    params = policy.action_params(observations_for(policy, 50))
    assert np.abs(params).max() < 0.2
    hidden = policy.model.policy_trunk[2].weight
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(64), rtol=1e-4, atol=1e-4)


def test_acting_does_not_change_observations() -> None:
    for key in ("linear", "default"):
        policy = policy_of(key)
        obs = observations_for(policy, 3)
        before = obs.copy()
        policy.compute_actions(obs)
        policy.value(obs)
        np.testing.assert_array_equal(obs, before)


def test_acting_in_torch_builds_no_graph() -> None:
    policy = policy_of("default", fast_cpu=False)
    seen: list[Tensor] = []
    for module in policy.model.modules():
        module.register_forward_hook(lambda _module, _args, out: seen.append(out))
    obs = observations_for(policy, 3)
    policy.compute_actions(obs)
    policy.value(obs)
    assert seen
    assert all(out.grad_fn is None and not out.requires_grad for out in seen)
    assert torch.is_grad_enabled()


def test_explore_samples_and_mode_is_deterministic() -> None:
    policy = policy_of("gaussian")
    obs = observations_for(policy, 8)
    same = [policy.compute_actions(obs, explore=False)[0] for _ in range(2)]
    np.testing.assert_array_equal(*same)
    drawn = [policy.compute_actions(obs)[0] for _ in range(2)]
    assert not np.array_equal(*drawn)


def states(policy: Policy) -> Iterator[Any]:
    """Yields a state as a checkpoint stores it. Tensors are unchanged, and all other values go
    through JSON."""
    state = policy.get_state()
    tensors = {name: state.pop(name) for name in ("params", policy.config.torch_optimizer)}
    yield {**json.loads(json.dumps(state)), **copy.deepcopy(tensors)}


@every_policy
@pytest.mark.parametrize("rounds_before", [0, 2])
def test_state_resumes_exactly(name: str, rounds_before: int) -> None:
    options = {"num_sgd_iter": 3, "sgd_minibatch_size": 5, "lr": [[0, 0.01], [100, 0.001]]}
    policy = small_policy(name, seed=1, **options)
    batches = [make_batch(policy, seed=i) for i in range(5)]

    def learn(each: Policy, batch: SampleBatch) -> None:
        each.env_steps += 10
        each.learn_on_batch(batch)

    for batch in batches[:rounds_before]:
        learn(policy, batch)
    (state,) = states(policy)
    resumed = small_policy(name, seed=2, **options)
    learn(resumed, batches[4])  # the old state of `resumed` must not matter
    resumed.set_state(state)
    kept = copy.deepcopy(state)
    for batch in batches[rounds_before:]:
        learn(policy, batch)
        learn(resumed, batch)
        np.testing.assert_array_equal(policy.get_weights().flat, resumed.get_weights().flat)
    assert policy.get_weights()[1:] == resumed.get_weights()[1:]
    # Learning does not change the state that was passed to `set_state`.
    assert torch.equal(state["params"], kept["params"])
    moments, before = (each[policy.config.torch_optimizer]["network"] for each in (state, kept))
    assert all(torch.equal(moments[moment], before[moment]) for moment in before)


def test_weights_of_another_network_are_refused() -> None:
    policy = small_policy("a2c")
    other = make_policy("a2c", TwoNumbers(), model={"fcnet_hiddens": [9]})
    sizes = len(policy.flat.params), len(other.flat.params)
    with pytest.raises(ValueError, match=rf"\[{sizes[0]}\].*got \[{sizes[1]}\].*another network"):
        policy.set_weights(other.get_weights())
    with pytest.raises(ValueError, match="another network"):
        policy.set_state(other.get_state())


@every_policy
def test_name_of_the_network_class_may_change(name: str) -> None:
    policy, restored = small_policy(name, seed=1), small_policy(name, seed=2)
    policy.learn_on_batch(make_batch(policy))
    (state,) = states(policy)
    assert state["network"].startswith("MLPNetwork( (policy_trunk):")
    state["network"] = state["network"].replace("MLPNetwork", "Renamed")
    restored.set_state(state)
    np.testing.assert_array_equal(restored.get_weights().flat, policy.get_weights().flat)


def test_state_of_another_torch_optimizer_is_refused() -> None:
    adam, rmsprop = small_policy("a2c"), small_policy("a2c", torch_optimizer="rmsprop")
    adam.flat.params.data.fill_(1.0)
    before = rmsprop.flat.params.clone()
    with pytest.raises(ValueError, match="must be of torch_optimizer 'rmsprop'; got adam"):
        rmsprop.set_state(adam.get_state())
    assert torch.equal(rmsprop.flat.params, before)


def test_learning_rate_outside_its_range_names_the_range() -> None:
    with pytest.raises(ConfigError, match=r"'lr': .* a number from 0 to 10,"):
        small_policy("a2c", lr=1e9)


@pytest.mark.parametrize("key", ["model", "torch_optimizer", "fast_cpu"])
def test_fixed_options_cannot_be_changed(key: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}' cannot be changed"):
        small_policy("a2c").set_option(key, "rmsprop")


@pytest.mark.parametrize(
    ("option", "expected"), [(0.2, 0.3), (0.0, 0.0), (0.5, 0.5)], ids=["same", "zero", "mutated"]
)
def test_changed_kl_coeff_overrides_the_adapted_one(option: float, expected: float) -> None:
    policy = small_policy("ppo", kl_coeff=0.2)
    policy.on_learned({"mean_kl_loss": 1.0})
    assert policy.coefficients["kl_coeff"] == pytest.approx(0.3)
    (state,) = states(policy)
    restored = small_policy("ppo", kl_coeff=option)
    restored.on_learned({"mean_kl_loss": 1.0})  # the old coefficient must not matter
    restored.set_state(state)
    assert restored.coefficients["kl_coeff"] == pytest.approx(expected)


def test_kl_coeff_adapted_after_set_option_is_restored() -> None:
    policy = small_policy("ppo", kl_coeff=0.2)
    policy.set_option("kl_coeff", 0.4)
    policy.on_learned({"mean_kl_loss": 1.0})
    (state,) = states(policy)
    restored = small_policy("ppo", kl_coeff=0.4)
    restored.set_state(state)
    assert restored.coefficients["kl_coeff"] == pytest.approx(0.6)


def test_changed_options_are_used_from_the_next_update_on() -> None:
    policy = small_policy("ppo", grad_clip=None)
    batch = make_batch(policy)
    policy.set_option("lr", 0.25)
    policy.set_option("entropy_coeff", 0.5)
    policy.set_option("kl_coeff", 0.75)
    stats = policy.apply_gradients(policy.compute_gradients(batch))
    assert stats["default_optimizer_learning_rate"] == 0.25
    assert (policy.entropy_coeff, policy.coefficients["kl_coeff"]) == (0.5, 0.75)
    with pytest.raises(ConfigError, match="'gama'"):
        policy.set_option("gama", 0.5)
