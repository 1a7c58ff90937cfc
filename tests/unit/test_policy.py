"""Policies: flat buffers, acting, losses against plain torch formulas, and learning together."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor
from toy_envs import TwoNumbers, make_policy, random_batch

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.policies import sgd
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPO
from polopt.policies.schedules import Schedule
from polopt.policies.sgd import LocalReducer, num_minibatches, shuffled

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
MODELS: dict[str, tuple[Space[Any], Space[Any], dict[str, Any]]] = {
    "default": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {}),
    "shared": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"vf_share_layers": True}),
    "relu": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_activation": "relu"}),
    "linear": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_hiddens": []}),
    "deep": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_hiddens": [8, 16, 4]}),
    "float64": (spaces.Box(-9.0, 9.0, (4,), np.float64), spaces.Discrete(3), {}),
    "image": (spaces.Box(0, 255, (4, 5, 3), np.uint8), spaces.MultiDiscrete([2, 3]), {}),
    "convolutions": (
        spaces.Box(0, 255, (2, 7, 9), np.uint8),
        spaces.Discrete(3),
        {"conv_filters": [[4, 3, 2], [5, 2, 1]], "post_fcnet_hiddens": [6]},
    ),
    "convolutions, channels last": (
        spaces.Box(-1.0, 1.0, (7, 9, 2)),
        spaces.Discrete(3),
        {"conv_filters": [[4, 3, 2]], "post_fcnet_hiddens": [], "vf_share_layers": False},
    ),
    "gaussian": (spaces.Box(-9.0, 9.0, (4,)), BOX, {"initial_log_std": -0.5}),
    "gaussian of the state": (spaces.Box(-9.0, 9.0, (4,)), BOX, {"free_log_std": False}),
    "squashed": (spaces.Box(-9.0, 9.0, (2, 2)), BOX, {"squash_actions": True}),
    "shared gaussian": (
        spaces.Box(-9.0, 9.0, (4,)),
        BOX,
        {"vf_share_layers": True, "fcnet_activation": "relu", "free_log_std": False},
    ),
}
every_model = pytest.mark.parametrize("key", MODELS)
every_policy = pytest.mark.parametrize("name", ["a2c", "ppo"])


class Spaces:
    """As much of an environment as a policy is made from."""

    def __init__(self, observations: Space[Any], actions: Space[Any]) -> None:
        self.observation_space = observations
        self.action_space = actions


def policy_of(key: str, name: str = "a2c", **options: Any) -> Policy:
    observations, actions, model = MODELS[key]
    return make_policy(name, Spaces(observations, actions), model=model, **options)


def observations_for(policy: Policy, rows: int, seed: int = 0) -> np.ndarray:
    space = policy.encoder.space
    space.seed(seed)
    return np.stack([space.sample() for _ in range(rows)])


def two_numbers(name: str, seed: int = 0, **options: Any) -> Policy:
    """A small policy over two numbers and three actions."""
    options = {"model": {"fcnet_hiddens": [8]}, **options}
    return make_policy(name, TwoNumbers(), seed=seed, **options)


def some_batch(policy: Policy, steps: int = 6, envs: int = 4, seed: int = 0) -> SampleBatch:
    return random_batch(policy, steps, envs, np.random.default_rng(seed))


def away(policy: Policy, seed: int = 5) -> Policy:
    """The policy with its weights moved a little, so that it is not the one that acted."""
    noise = torch.randn(policy.flat.params.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        policy.flat.params.add_(0.3 * noise)
    return policy


# ---- flat buffers -----------------------------------------------------------------------------


def check_everything_is_a_view(policy: Policy) -> None:
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
    check_everything_is_a_view(policy)
    batch = some_batch(policy)
    policy.learn_on_batch(batch)
    check_everything_is_a_view(policy)
    policy.apply_gradients(policy.compute_gradients(batch))
    check_everything_is_a_view(policy)
    policy.set_weights(policy_of(key, "ppo").get_weights())
    check_everything_is_a_view(policy)
    policy.set_state(policy.get_state())
    check_everything_is_a_view(policy)


@every_model
def test_network_is_its_flat_parameters(key: str) -> None:
    policy = policy_of(key)
    obs = observations_for(policy, 5)
    before = policy.torch_action_params(obs), policy.action_params(obs), policy.value(obs)
    away(policy)
    after = policy.torch_action_params(obs), policy.action_params(obs), policy.value(obs)
    for old, new in zip(before, after, strict=True):
        assert not np.allclose(old, new)


@every_policy
def test_set_weights_makes_policies_alike(name: str) -> None:
    one, other = two_numbers(name, seed=1), two_numbers(name, seed=2)
    one.learn_on_batch(some_batch(one))
    one.env_steps = 77
    weights = one.get_weights()
    other.set_weights(weights)
    obs = observations_for(one, 9)
    np.testing.assert_array_equal(one.action_params(obs), other.action_params(obs))
    np.testing.assert_array_equal(one.value(obs), other.value(obs))
    assert (other.version, other.env_steps) == (one.version, 77)
    assert other.coefficients == one.coefficients
    # What was given out is nobody's memory.
    away(one)
    away(other)
    np.testing.assert_array_equal(weights.flat, two_numbers_learned(name).flat)


def two_numbers_learned(name: str) -> Weights:
    policy = two_numbers(name, seed=1)
    policy.learn_on_batch(some_batch(policy))
    return policy.get_weights()


def test_weights_that_came_by_shared_memory_are_read_only_and_fine() -> None:
    policy, other = two_numbers("a2c"), two_numbers("a2c", seed=1)
    weights = policy.get_weights()
    weights.flat.flags.writeable = False
    other.set_weights(weights)
    away(other)
    np.testing.assert_array_equal(policy.get_weights().flat, weights.flat)


@every_model
def test_initial_weights_are_of_the_seed_alone(key: str) -> None:
    torch.manual_seed(1)
    first = policy_of(key).get_weights().flat
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = policy_of(key).get_weights().flat
    assert torch.equal(torch.get_rng_state(), state)  # nor does it touch the caller's numbers
    np.testing.assert_array_equal(first, second)


def test_initial_policy_is_near_uniform_and_layers_are_orthogonal() -> None:
    policy = policy_of("default")
    params = policy.action_params(observations_for(policy, 50))
    assert np.abs(params).max() < 0.2
    hidden = policy.model.policy_trunk[2].weight
    torch.testing.assert_close(hidden @ hidden.T, 2.0 * torch.eye(64), rtol=1e-4, atol=1e-4)


# ---- acting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [key for key in MODELS if "convolutions" not in key])
def test_acting_in_numpy_is_acting_in_torch(key: str) -> None:
    policy = away(policy_of(key))
    assert policy._numpy is not None
    obs = observations_for(policy, 64)
    params, same = policy.action_params(obs), policy.torch_action_params(obs)
    assert params.dtype == same.dtype == np.float32
    np.testing.assert_allclose(params, same, rtol=1e-4, atol=1e-4)
    noise = policy.dist.draw_noise(np.random.default_rng(1), len(obs))
    actions = policy.dist.sample(params, noise)
    np.testing.assert_allclose(actions, policy.dist.sample(same, noise), rtol=1e-4, atol=1e-3)

    through_torch = copy.copy(policy)
    through_torch._numpy = None
    for explore in (True, False):
        for one, other in zip(
            policy.compute_actions(obs, explore=explore, rng=np.random.default_rng(2)),
            through_torch.compute_actions(obs, explore=explore, rng=np.random.default_rng(2)),
            strict=True,
        ):
            if isinstance(one, np.ndarray):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(policy.value(obs), through_torch.value(obs), rtol=1e-4, atol=1e-4)
    _, values = policy.model(torch.as_tensor(obs))
    np.testing.assert_allclose(policy.value(obs), values.detach().numpy(), rtol=1e-4, atol=1e-4)


def test_acting_does_not_change_observations() -> None:
    for key in ("linear", "default"):
        policy = policy_of(key)
        obs = observations_for(policy, 3)
        before = obs.copy()
        policy.compute_actions(obs)
        policy.value(obs)
        np.testing.assert_array_equal(obs, before)


@pytest.mark.parametrize("numpy", [True, False])
def test_acting_builds_no_graph(numpy: bool) -> None:
    policy = policy_of("default")
    seen: list[Tensor] = []
    for module in policy.model.modules():
        module.register_forward_hook(lambda _module, _args, out: seen.append(out))
    if not numpy:
        policy._numpy = None
    obs = observations_for(policy, 3)
    policy.compute_actions(obs)
    policy.value(obs)
    assert bool(seen) != numpy  # in NumPy, torch is not even called
    assert all(out.grad_fn is None and not out.requires_grad for out in seen)
    assert torch.is_grad_enabled()


def test_explore_draws_and_not_exploring_does_not() -> None:
    policy = policy_of("gaussian")
    obs = observations_for(policy, 8)
    same = [policy.compute_actions(obs, explore=False)[0] for _ in range(2)]
    np.testing.assert_array_equal(*same)
    drawn = [policy.compute_actions(obs)[0] for _ in range(2)]
    assert not np.array_equal(*drawn)


# ---- losses -----------------------------------------------------------------------------------


def plain(policy: Policy, batch: SampleBatch) -> dict[str, Any]:
    """What a loss is made of, by `torch.distributions` and without the library's columns."""
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


def gradient_of(loss: Tensor, policy: Policy) -> np.ndarray:
    parameters = list(policy.model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(parameters, grads, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).ravel() for p, g in pairs]).numpy()


def assert_same_gradient(policy: Policy, batch: SampleBatch, loss: Tensor) -> dict[str, float]:
    """Returns the statistics that came with the gradient."""
    gradients = policy.compute_gradients(batch)
    assert gradients.rows == batch.env_steps
    np.testing.assert_allclose(gradients.flat, gradient_of(loss, policy), rtol=1e-3, atol=1e-6)
    assert gradients.stats["total_loss"] == pytest.approx(loss.item(), rel=1e-4)
    return gradients.stats


def test_a2c_loss_is_the_formula() -> None:
    policy = two_numbers("a2c", vf_loss_coeff=0.7, entropy_coeff=0.3)
    batch = some_batch(policy)
    away(policy)
    x = plain(policy, batch)
    policy_loss = -(x["log_prob"] * x["advantages"]).mean()
    vf_loss = 0.5 * ((x["values"] - x["targets"]) ** 2).mean()
    stats = assert_same_gradient(policy, batch, policy_loss + 0.7 * vf_loss - 0.3 * x["entropy"])
    assert stats["policy_loss"] == pytest.approx(policy_loss.item(), rel=1e-4)
    assert stats["vf_loss"] == pytest.approx(vf_loss.item(), rel=1e-4)
    assert stats["entropy"] == pytest.approx(x["entropy"].item(), rel=1e-4)


def ppo_loss(
    x: dict[str, Any], clip: float, vf_clip: float | None, kl_coeff: float, standardize: bool
) -> Tensor:
    advantages = x["advantages"]
    if standardize:
        advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
    terms = []
    for log_prob, old, advantage in zip(x["log_prob"], x["old_log_prob"], advantages, strict=True):
        ratio = (log_prob - old).exp()
        # Nothing to gain once the ratio has gone far enough in the advantage's direction.
        too_far = ratio > 1.0 + clip if advantage > 0 else ratio < 1.0 - clip
        bound = 1.0 + clip if advantage > 0 else 1.0 - clip
        terms.append(-advantage * bound if too_far else -advantage * ratio)
    errors = (x["values"] - x["targets"]) ** 2
    if vf_clip is not None:
        near = torch.maximum(
            torch.minimum(x["values"], x["old_values"] + vf_clip), x["old_values"] - vf_clip
        )
        errors = torch.maximum(errors, (near - x["targets"]) ** 2)
    loss = torch.stack(terms).mean() + 0.5 * 0.5 * errors.mean()
    return loss - 0.01 * x["entropy"] + kl_coeff * x["kl"]


@pytest.mark.parametrize("vf_clip", [None, 0.05])
@pytest.mark.parametrize("kl_coeff", [0.0, 0.4])
@pytest.mark.parametrize("standardize", [False, True])
def test_ppo_loss_is_the_formula(vf_clip: float | None, kl_coeff: float, standardize: bool) -> None:
    policy = two_numbers(
        "ppo",
        vf_clip_param=vf_clip,
        kl_coeff=kl_coeff,
        standardize_advantages=standardize,
        clip_param=0.1,
    )
    batch = some_batch(policy, steps=10)
    away(policy)
    x = plain(policy, batch)
    ratio = (x["log_prob"] - x["old_log_prob"]).exp()
    assert (ratio > 1.1).any()
    assert (ratio < 0.9).any()  # or clipping is not looked at
    stats = assert_same_gradient(policy, batch, ppo_loss(x, 0.1, vf_clip, kl_coeff, standardize))
    assert stats["mean_kl_loss"] == pytest.approx(x["kl"].item(), rel=1e-4)


def test_value_clipping_changes_the_loss() -> None:
    policy = two_numbers("ppo")
    batch = some_batch(policy, steps=10)
    away(policy)
    x = plain(policy, batch)
    losses = [ppo_loss(x, 0.1, vf_clip, 0.0, True).item() for vf_clip in (None, 0.05, 100.0)]
    assert losses[0] < losses[1]  # it can only slow the value down
    assert losses[0] == losses[2]


def test_ppo_and_a2c_have_one_gradient_where_nothing_moved() -> None:
    options: dict[str, Any] = {
        "standardize_advantages": False,
        "lambda": 0.9,
        "model": {"fcnet_hiddens": [8]},
    }
    ppo, a2c = (make_policy(name, TwoNumbers(), **options) for name in ("ppo", "a2c"))
    batch = some_batch(ppo)
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
def test_gradient_does_not_scale_with_the_batch(name: str, key: str) -> None:
    policy = policy_of(key, name)
    batch = some_batch(policy)
    once, doubled = policy.compute_gradients(batch), policy.compute_gradients(twice(batch))
    assert doubled.rows == 2 * once.rows
    scale = np.abs(once.flat).max()
    np.testing.assert_allclose(doubled.flat, once.flat, rtol=1e-3, atol=1e-4 * scale)
    assert doubled.stats == pytest.approx(once.stats, rel=1e-3, abs=1e-4)


def test_standardised_advantages_do_not_depend_on_the_scale_of_rewards() -> None:
    policy = two_numbers("ppo", vf_loss_coeff=0.0)
    batch = some_batch(policy)
    before = policy.compute_gradients(batch).flat
    batch["advantages"] = 1000.0 * batch["advantages"] - 5.0
    np.testing.assert_allclose(policy.compute_gradients(batch).flat, before, rtol=1e-2, atol=1e-5)


def test_equal_advantages_are_standardised_to_zero() -> None:
    values = sgd.standardized(torch.full((5,), 3.0), LocalReducer())
    assert values.tolist() == [0.0] * 5


@every_policy
def test_nothing_is_learned_from_no_rows(name: str) -> None:
    policy = two_numbers(name)
    policy.learn_on_batch(some_batch(policy))
    state = policy.get_state()
    batch = some_batch(policy, seed=1)
    batch["valid"][:] = False
    gradients = policy.compute_gradients(batch)
    assert gradients.rows == 0
    assert not gradients.flat.any()
    policy.learn_on_batch(batch)
    assert policy.version == state["version"]
    assert torch.equal(policy.flat.params, state["params"])
    assert torch.equal(policy.get_state()["adam"]["exp_avg"], state["adam"]["exp_avg"])


# ---- updates ----------------------------------------------------------------------------------


def fixed_gradient(policy: Policy, seed: int = 0) -> Gradients:
    flat = np.random.default_rng(seed).normal(size=len(policy.flat.grads)).astype(np.float32)
    return Gradients(flat, policy.version, 10, {})


def test_gradient_is_clipped_by_its_global_norm() -> None:
    policy = two_numbers("a2c", grad_clip=0.5)
    gradients = fixed_gradient(policy)
    norm = float(np.linalg.norm(gradients.flat))
    assert norm > 0.5
    stats = policy.apply_gradients(gradients)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = policy.flat.grads.numpy()
    np.testing.assert_allclose(clipped, gradients.flat * 0.5 / norm, rtol=1e-4)
    # In Adam's first moment (beta 0.9) stands what was applied.
    moment = policy.get_state()["adam"]["exp_avg"].numpy()
    np.testing.assert_allclose(moment, 0.1 * clipped, rtol=1e-4)


@pytest.mark.parametrize("grad_clip", [None, 1e6])
def test_small_gradient_is_applied_as_it_is(grad_clip: float | None) -> None:
    policy = two_numbers("a2c", grad_clip=grad_clip)
    gradients = fixed_gradient(policy)
    policy.apply_gradients(gradients)
    np.testing.assert_array_equal(policy.flat.grads.numpy(), gradients.flat)


def test_update_is_adam() -> None:
    policy = two_numbers("a2c", lr=0.01, adam_epsilon=1e-3, grad_clip=None)
    reference = torch.nn.Parameter(policy.flat.params.detach().clone())
    adam = torch.optim.Adam([reference], lr=0.01, eps=1e-3, fused=True)
    for seed in range(5):
        gradients = fixed_gradient(policy, seed)
        policy.apply_gradients(gradients)
        reference.grad = torch.from_numpy(gradients.flat.copy())
        adam.step()
    assert torch.equal(policy.flat.params.detach(), reference.detach())
    assert policy.version == 5
    moments = policy.get_state()["adam"]
    for key, moment in adam.state[reference].items():
        assert torch.equal(moments[key], moment)


def test_scaled_update_is_so_much_smaller() -> None:
    steps = []
    for scale in (1.0, 0.25):
        policy = two_numbers("a2c")
        before = policy.get_weights().flat
        stats = policy.apply_gradients(fixed_gradient(policy), lr_scale=scale)
        assert stats["default_optimizer_learning_rate"] == pytest.approx(1e-3 * scale)
        steps.append(policy.get_weights().flat - before)
    np.testing.assert_allclose(steps[1], 0.25 * steps[0], rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradient_that_is_not_finite_is_counted_and_not_applied(bad: float) -> None:
    policy, untouched = two_numbers("a2c"), two_numbers("a2c")
    for each in (policy, untouched):
        each.apply_gradients(fixed_gradient(each, 0))
    broken = fixed_gradient(policy, 1)
    broken.flat[3] = bad
    stats = policy.apply_gradients(broken)
    assert "grad_norm" not in stats
    assert policy.skipped_updates == 1
    assert policy.version == 1
    # Adam's moments are clean too: the next update is as if nothing had been.
    for each in (policy, untouched):
        each.apply_gradients(fixed_gradient(each, 2))
    np.testing.assert_array_equal(policy.get_weights().flat, untouched.get_weights().flat)
    assert untouched.skipped_updates == 0


# ---- schedules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_steps", "value"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (60, 0.25), (100, 0.0)]
)
def test_schedule_is_linear_between_its_points(env_steps: int, value: float) -> None:
    schedule = Schedule([(10, 1.0), (20, 0.5), (100, 0.0)])
    assert schedule(env_steps) == pytest.approx(value)
    assert schedule(10**9) == 0.0
    assert Schedule(0.3)(env_steps) == 0.3
    assert Schedule([(50, 0.3)])(env_steps) == 0.3


def test_lr_schedule_reaches_the_optimizer() -> None:
    policy = two_numbers("a2c", lr=[[0, 0.01], [100, 0.0]])
    for env_steps, lr in ((0, 0.01), (50, 0.005), (100, 0.0), (200, 0.0)):
        before = policy.get_weights()
        policy.set_weights(before._replace(env_steps=env_steps))  # as it reaches a worker
        stats = policy.apply_gradients(fixed_gradient(policy))
        assert stats["default_optimizer_learning_rate"] == pytest.approx(lr)
        step = np.abs(policy.get_weights().flat - before.flat).max()
        assert step == pytest.approx(lr, rel=0.05)  # of Adam, under gradients that stay


@every_policy
def test_entropy_schedule_reaches_the_loss(name: str) -> None:
    policy = two_numbers(name, entropy_coeff=[[0, 0.0], [100, 0.5]])
    batch = some_batch(policy)
    away(policy)
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


# ---- epochs and minibatches -------------------------------------------------------------------


@pytest.mark.parametrize(("size", "parts"), [(0, 1), (5, 5), (7, 4), (24, 1), (100, 1)])
def test_each_epoch_takes_every_row_once_in_a_new_order(
    size: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = two_numbers("ppo", num_sgd_iter=3, sgd_minibatch_size=size)
    batch = some_batch(policy, steps=6, envs=4)
    policy._numpy = None  # which would not ask for the loss
    seen: list[Tensor] = []
    loss = policy.loss

    def spy(rows: dict[str, Tensor]) -> Any:
        seen.append(rows["obs"])
        assert {len(column) for column in rows.values()} == {len(rows["obs"])}
        return loss(rows)

    monkeypatch.setattr(policy, "loss", spy)
    policy.learn_on_batch(batch)
    assert policy.version == len(seen) == 3 * parts
    assert max(len(rows) for rows in seen) <= (size or 24)
    epochs = [torch.cat(seen[i : i + parts]).numpy() for i in range(0, len(seen), parts)]
    expected = np.sort(batch.flat("obs"), axis=0)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch, axis=0), expected)
    if parts > 1:
        assert not np.array_equal(epochs[0], epochs[1])


def test_rows_of_a_minibatch_belong_together() -> None:
    rows = {"obs": torch.arange(10.0), "actions": torch.arange(10) * 3}
    for part in shuffled(rows, 3, np.random.default_rng(0)):
        assert torch.equal(part["obs"] * 3, part["actions"].float())


@pytest.mark.parametrize(
    ("rows", "world_size", "size", "expected"),
    [(100, 1, 0, 1), (0, 1, 8, 1), (100, 1, 8, 13), (96, 1, 8, 12), (100, 2, 8, 7), (3, 2, 8, 1)],
)
def test_number_of_minibatches(rows: int, world_size: int, size: int, expected: int) -> None:
    assert num_minibatches(rows, world_size, size) == expected


def test_kl_stop_ends_the_epochs() -> None:
    options = {"num_sgd_iter": 10, "sgd_minibatch_size": 0, "lr": 0.01}
    patient = two_numbers("ppo", **options)
    patient.learn_on_batch(some_batch(patient))
    assert patient.version == 10
    hasty = two_numbers("ppo", kl_stop=1e-9, **options)
    stats = hasty.learn_on_batch(some_batch(hasty))
    # In the first epoch the policy is still the one that acted.
    assert hasty.version == 2
    assert stats["mean_kl_loss"] > 1e-9


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0, 0.5), (0.049, 0.5), (0.06, 1.0), (0.19, 1.0), (0.21, 1.5)]
)
def test_kl_coefficient_is_adapted(kl: float, factor: float) -> None:
    policy = two_numbers("ppo", kl_coeff=0.4, kl_target=0.1)
    policy.on_learned({"mean_kl_loss": kl})
    assert policy.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)


@pytest.mark.parametrize(("lr", "factor"), [(1e-7, 0.5), (0.05, 1.5)])
def test_kl_coefficient_follows_what_was_learned_and_travels(lr: float, factor: float) -> None:
    options = {"kl_coeff": 0.4, "lr": lr, "grad_clip": None}
    policy, other = two_numbers("ppo", **options), two_numbers("ppo", **options)
    batch = some_batch(policy)
    policy.learn_on_batch(batch)
    assert policy.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)
    other.set_weights(policy.get_weights())
    assert other.coefficients == policy.coefficients
    np.testing.assert_array_equal(
        other.compute_gradients(batch).flat, policy.compute_gradients(batch).flat
    )
    policy.coefficients["kl_coeff"] = 9.0  # a copy travelled
    assert other.coefficients["kl_coeff"] == pytest.approx(0.4 * factor)


@every_policy
def test_learning_improves_what_it_learns_from(name: str) -> None:
    policy = two_numbers(name, num_sgd_iter=60, lr=0.01, entropy_coeff=0.0)
    batch = some_batch(policy, steps=20)
    before = policy.compute_gradients(batch).stats
    policy.learn_on_batch(batch)
    after = policy.compute_gradients(batch).stats
    assert after["vf_loss"] < 0.95 * before["vf_loss"]
    assert after["policy_loss"] < before["policy_loss"]


# ---- state ------------------------------------------------------------------------------------


def states(policy: Policy) -> Iterator[Any]:
    """What a checkpoint does to a state: tensors stay, the rest passes through JSON."""
    state = policy.get_state()
    tensors = {"params": state.pop("params"), "adam": state.pop("adam")}
    yield {**json.loads(json.dumps(state)), **copy.deepcopy(tensors)}


@every_policy
@pytest.mark.parametrize("rounds_before", [0, 2])
def test_state_resumes_exactly(name: str, rounds_before: int) -> None:
    options = {"num_sgd_iter": 3, "sgd_minibatch_size": 5, "lr": [[0, 0.01], [100, 0.001]]}
    policy = two_numbers(name, seed=1, **options)
    batches = [some_batch(policy, seed=i) for i in range(5)]

    def learn(each: Policy, batch: SampleBatch) -> None:
        each.env_steps += 10
        each.learn_on_batch(batch)

    for batch in batches[:rounds_before]:
        learn(policy, batch)
    (state,) = states(policy)
    resumed = two_numbers(name, seed=2, **options)
    learn(resumed, batches[4])  # it has a past of its own, which must be gone
    resumed.set_state(state)
    kept = copy.deepcopy(state)
    for batch in batches[rounds_before:]:
        learn(policy, batch)
        learn(resumed, batch)
        np.testing.assert_array_equal(policy.get_weights().flat, resumed.get_weights().flat)
    assert policy.get_weights()[1:] == resumed.get_weights()[1:]
    # Learning goes on in the policy, not in the state it was given.
    assert torch.equal(state["params"], kept["params"])
    for moment in kept["adam"]:
        assert torch.equal(state["adam"][moment], kept["adam"][moment])


def test_weights_of_another_network_are_refused() -> None:
    policy = two_numbers("a2c")
    other = make_policy("a2c", TwoNumbers(), model={"fcnet_hiddens": [9]})
    sizes = len(policy.flat.params), len(other.flat.params)
    with pytest.raises(ValueError, match=rf"\[{sizes[0]}\].*got \[{sizes[1]}\].*another network"):
        policy.set_weights(other.get_weights())
    with pytest.raises(ValueError, match="another network"):
        policy.set_state(other.get_state())


# ---- learning together ------------------------------------------------------------------------


class Rank:
    """One of several threads that sum tensors with each other."""

    def __init__(self, index: int, slots: list[Tensor], barrier: threading.Barrier) -> None:
        self.world_size = len(slots)
        self._index = index
        self._slots = slots
        self._barrier = barrier

    def sum_(self, tensor: Tensor) -> None:
        self._slots[self._index] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(self._slots).sum(0)
        self._barrier.wait()
        tensor.copy_(total)


def learn_together(
    learners: list[Policy], batches: list[SampleBatch]
) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """Each learns from its batch, in a thread; weights and statistics that they end with."""
    barrier = threading.Barrier(len(learners), timeout=20.0)
    slots = [torch.zeros(0)] * len(learners)
    stats: list[dict[str, float]] = [{} for _ in learners]
    errors: list[BaseException] = []

    def learn(index: int) -> None:
        try:
            rank = Rank(index, slots, barrier)
            stats[index] = learners[index].learn_on_batch(batches[index], rank)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=learn, args=(i,)) for i in range(len(learners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    if errors:
        raise errors[0]
    return [learner.get_weights().flat for learner in learners], stats


def uneven_batches(policy: Policy, shares: tuple[float, ...]) -> list[SampleBatch]:
    """Batches of one policy, of which the given shares of rows are valid, with advantages of
    different size and sign, so that who counts how much makes a difference."""
    batches = []
    for i, share in enumerate(shares):
        batch = random_batch(policy, 8, 3, np.random.default_rng(i), valid_share=share)
        batch["advantages"] = (batch["advantages"] + 2.0 * i) * (1.0 + i)
        batch["value_targets"] = batch["value_targets"] + 3.0 * i
        batches.append(batch)
    return batches


def check_together_equals_alone(name: str, shares: tuple[float, ...], **options: Any) -> None:
    options = {"num_sgd_iter": 4, "sgd_minibatch_size": 0, "lr": 1e-3, **options}
    alone = two_numbers(name, **options)
    batches = uneven_batches(alone, shares)
    learners = [two_numbers(name, **options) for _ in shares]
    for index, learner in enumerate(learners):
        learner.shuffle = np.random.default_rng(index)
    initial = alone.get_weights().flat
    expected_stats = alone.learn_on_batch(SampleBatch.concat(batches))
    expected = alone.get_weights().flat
    weights, stats = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert learner.version == alone.version == 4
    moved = np.abs(expected - initial).max()
    np.testing.assert_allclose(weights[0], expected, rtol=0.0, atol=0.01 * moved)
    for key in ("policy_loss", "vf_loss", "entropy", "total_loss", "grad_norm", "mean_kl_loss"):
        for each in stats:
            assert each[key] == pytest.approx(expected_stats.get(key, 0.0), rel=1e-3, abs=1e-5)


SHARES = [(1.0, 1.0), (0.9, 0.2), (1.0, 0.0), (0.3, 1.0, 0.0)]


@every_policy
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize("standardize", [False, True])
def test_several_learners_equal_one_on_the_whole_batch(
    name: str, shares: tuple[float, ...], standardize: bool
) -> None:
    check_together_equals_alone(name, shares, standardize_advantages=standardize)


def test_several_learners_share_the_kl_coefficient_and_its_stop() -> None:
    check_together_equals_alone("ppo", (0.9, 0.2), kl_coeff=0.3, kl_stop=1e9)


def plain_average(
    policy: Policy, count: int, stats: dict[str, float], reducer: Any
) -> dict[str, float]:
    """The mean of the learners' gradients, whatever they are made of."""
    reducer.sum_(policy.flat.buffer)
    policy.flat.buffer.div_(reducer.world_size)
    return stats


def own_standardisation(wrapped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each learner standardises its advantages by itself."""
    return lambda advantages, reducer: wrapped(advantages, LocalReducer())


@every_policy
def test_averaging_without_counts_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgd, "reduce_gradient", plain_average)
    with pytest.raises(AssertionError):
        check_together_equals_alone(name, (0.9, 0.2))


def test_standardising_each_its_own_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sgd, "standardized", own_standardisation(sgd.standardized))
    with pytest.raises(AssertionError):
        check_together_equals_alone("ppo", (1.0, 1.0))


@pytest.mark.parametrize("shares", [(1.0, 0.4), (1.0, 0.0), (0.1, 1.0)], ids=str)
def test_minibatches_of_several_learners_are_one(shares: tuple[float, ...]) -> None:
    """Minibatch `i` of all learners together is what one learner would have learned from."""
    options = {"num_sgd_iter": 3, "sgd_minibatch_size": 4}
    alone = two_numbers("ppo", **options)
    batches = uneven_batches(alone, shares)
    learners = [two_numbers("ppo", **options) for _ in shares]
    for index, learner in enumerate(learners):
        learner.shuffle = np.random.default_rng(index)

    rows = [alone.training_rows(batch) for batch in batches]
    total = sum(len(r["obs"]) for r in rows)
    everybody = torch.cat([r["advantages"] for r in rows])
    for r in rows:
        r["advantages"] = (r["advantages"] - everybody.mean()) / everybody.std(correction=0)
    parts = num_minibatches(total, len(shares), 4)
    assert parts > 1
    generators = [np.random.default_rng(index) for index in range(len(shares))]
    for _ in range(3):
        cuts = [list(shuffled(r, parts, g)) for r, g in zip(rows, generators, strict=True)]
        for pieces in zip(*cuts, strict=True):
            union = {name: torch.cat([piece[name] for piece in pieces]) for name in rows[0]}
            sgd.update(alone, union, LocalReducer())

    initial = two_numbers("ppo", **options).get_weights().flat
    weights, _ = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert learner.version == alone.version == 3 * parts
    expected = alone.get_weights().flat
    moved = np.abs(expected - initial).max()
    np.testing.assert_allclose(weights[0], expected, rtol=0.0, atol=0.02 * moved)


def test_gradient_of_one_learner_that_is_not_finite_stops_all_alike() -> None:
    learners = [two_numbers("ppo", num_sgd_iter=2, sgd_minibatch_size=0) for _ in range(2)]
    batches = uneven_batches(learners[0], (1.0, 0.5))
    batches[1]["value_targets"][batches[1]["valid"]] = np.nan
    initial = learners[0].get_weights().flat
    weights, _ = learn_together(learners, batches)
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, initial)
        assert (learner.version, learner.skipped_updates) == (0, 2)
    # What is left of it in one who then has no rows does not spoil the next.
    batches[1]["valid"][:] = False
    weights, _ = learn_together(learners, batches)
    assert np.isfinite(weights[0]).all()
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, weights[0])
        assert (learner.version, learner.skipped_updates) == (2, 2)


def test_nobody_has_a_row() -> None:
    learners = [two_numbers("ppo") for _ in range(2)]
    assert isinstance(learners[0], PPO)
    initial = learners[0].get_weights()
    weights, _ = learn_together(learners, uneven_batches(learners[0], (0.0, 0.0)))
    for each, learner in zip(weights, learners, strict=True):
        np.testing.assert_array_equal(each, initial.flat)
        assert (learner.version, learner.skipped_updates) == (0, 0)
