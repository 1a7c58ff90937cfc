"""Gradients in NumPy are those that autograd finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from test_policy import MODELS, Spaces, away, observations_for, policy_of, some_batch
from torch import Tensor
from toy_envs import make_policy

from polopt.policies.fast_cpu import numpy_mlp
from polopt.policies.fast_cpu.numpy_mlp import NumpyActorCritic
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPO, PPOConfig

PERCEPTRONS = [key for key in MODELS if "convolutions" not in key]
every_perceptron = pytest.mark.parametrize("key", PERCEPTRONS)


def flat_gradient(policy: Policy, loss: Any) -> Tensor:
    policy.flat.zero_grads()
    loss(policy).backward()
    return policy.flat.grads.clone()


def both(policy: Policy, loss: Any) -> tuple[Tensor, Tensor]:
    """The gradient in NumPy, and torch's."""
    twin = policy._numpy
    assert twin is not None
    assert twin.learns
    mine = flat_gradient(policy, loss)
    policy._numpy = None
    try:
        return mine, flat_gradient(policy, loss)
    finally:
        policy._numpy = twin


def check_close(mine: Tensor, torchs: Tensor) -> None:
    # Sums in another order: what is small beside the terms it is a sum of differs more.
    torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5 * float(torchs.abs().max()))


LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "a2c": ("a2c", {"entropy_coeff": 0.05, "vf_loss_coeff": 0.7}),
    "a2c, no entropy": ("a2c", {"entropy_coeff": 0.0}),
    "ppo": ("ppo", {"entropy_coeff": 0.05, "vf_loss_coeff": 0.7}),
    "ppo, KL penalty": ("ppo", {"entropy_coeff": 0.0, "kl_coeff": 0.3}),
    "ppo, clipped values": ("ppo", {"vf_clip_param": 0.1, "clip_param": 0.05}),
}


def backward_both_ways(policy: Policy) -> tuple[Tensor, Tensor]:
    """The gradient in closed form, and autograd's; statistics are the same."""
    batch = some_batch(policy, steps=16)
    away(policy)
    rows = policy.training_rows(batch)
    twin = policy._numpy
    stats = policy.backward(rows)
    mine = policy.flat.grads.clone()
    policy._numpy = None
    expected = policy.backward(rows)
    torchs = policy.flat.grads.clone()
    policy._numpy = twin
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-5)
    return mine, torchs


@every_perceptron
@pytest.mark.parametrize("losses", LOSSES)
def test_gradient_of_each_loss(key: str, losses: str) -> None:
    name, options = LOSSES[losses]
    policy = policy_of(key, name, **options)
    mine, torchs = backward_both_ways(policy)
    assert torchs.abs().max() > 1e-3
    check_close(mine, torchs)


def test_autograd_is_not_asked_where_there_is_a_closed_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("asked")

    for name in ("a2c", "ppo"):
        for key in ("default", "image", "gaussian", "gaussian of the state"):
            policy = policy_of(key, name)
            rows = policy.training_rows(some_batch(policy))
            monkeypatch.setattr(policy, "loss", refuse)
            policy.backward(rows)
    squashed = policy_of("squashed", "ppo")
    rows = squashed.training_rows(some_batch(squashed))
    monkeypatch.setattr(squashed, "loss", refuse)
    with pytest.raises(AssertionError, match="asked"):
        squashed.backward(rows)


def test_whoever_changes_the_loss_gets_its_gradient() -> None:
    class Half(PPO):
        def loss(self, rows: Any) -> Any:
            loss, stats = super().loss(rows)
            return 0.5 * loss, stats

    class Other(Half):
        def slopes(self, terms: Any, values: Any, rows: Any) -> Any:
            raise NotImplementedError

    env = Spaces(*MODELS["default"][:2])
    gradients = []
    for policy_class in (PPO, Half, Other):
        policy = policy_class(env.observation_space, env.action_space, PPOConfig())
        mine, torchs = backward_both_ways(policy)
        check_close(mine, torchs)
        gradients.append(mine)
    check_close(2.0 * gradients[1], gradients[0])
    check_close(gradients[2], gradients[1])


@pytest.mark.parametrize("name", ["a2c", "ppo"])
@pytest.mark.parametrize("column", ["advantages", "value_targets", "obs"])
def test_nan_is_not_swallowed(name: str, column: str) -> None:
    policy = policy_of("relu", name)
    rows = policy.training_rows(some_batch(policy))
    rows[column][0] = float("nan")
    policy.backward(rows)
    assert not policy.flat.grads.isfinite().all()


WRONG: dict[str, Any] = {
    "entropy": lambda s: s._replace(entropy=-s.entropy),
    "KL": lambda s: s._replace(kl=1.1 * s.kl),
    "values": lambda s: s._replace(values=1.1 * s.values),
    "log-probability": lambda s: s._replace(log_prob=1.1 * s.log_prob),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_slopes_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PPO.slopes

    def wrong(self: PPO, *args: Any) -> Any:
        slopes, stats = right(self, *args)
        return WRONG[what](slopes), stats

    monkeypatch.setattr(PPO, "slopes", wrong)
    policy = policy_of("default", "ppo", entropy_coeff=0.05, kl_coeff=0.3)
    with pytest.raises(AssertionError, match="not close"):
        check_close(*backward_both_ways(policy))


@every_perceptron
def test_every_weight_has_one(key: str) -> None:
    """Of a loss that depends on each output of its own."""
    policy = away(policy_of(key))
    obs = torch.as_tensor(observations_for(policy, 32)) / 16.0
    by = [torch.randn(32, policy.dist.num_params), torch.randn(32)]

    def loss(p: Policy) -> Tensor:
        params, values = p.outputs(obs)
        return (by[0] * params).sum() + (by[1] * values).sum()

    mine, torchs = both(policy, loss)
    assert (torchs != 0.0).float().mean() > 0.5, "but for units of relu that are off"
    check_close(mine, torchs)


@pytest.mark.parametrize("key", ["default", "shared"])
def test_gradients_add_up(key: str) -> None:
    """A loss may ask for outputs twice, or use one of the two alone."""
    policy = away(policy_of(key))
    first, second = (torch.as_tensor(observations_for(policy, 8, seed)) for seed in (0, 1))
    losses = [
        lambda p: p.outputs(first)[0].sum() + 3.0 * p.outputs(second)[1].square().sum(),
        lambda p: p.outputs(first)[0].exp().sum(),
        lambda p: p.outputs(first)[1].sum(),
    ]
    for loss in losses:
        mine, torchs = both(policy, loss)
        check_close(mine, torchs)


def test_a_wrong_derivative_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_mlp._Layers.backward

    def wrong(self: Any, done: list[np.ndarray], gradient: np.ndarray, needed: bool) -> Any:
        return right(self, [done[0], *(0.9 * out for out in done[1:])], gradient, needed)

    monkeypatch.setattr(numpy_mlp._Layers, "backward", wrong)
    with pytest.raises(AssertionError, match="not close"):
        check_close(*backward_both_ways(policy_of("default")))


def test_without_gradients_there_is_no_graph() -> None:
    policy = policy_of("default")
    obs = torch.as_tensor(observations_for(policy, 8))
    with torch.no_grad():
        params, values = policy.outputs(obs)
    assert not params.requires_grad
    assert not values.requires_grad
    torch.testing.assert_close((params, values), policy.model(obs))


def test_with_several_threads_torch_learns() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        policy = policy_of("default")
    assert policy._numpy is not None
    assert not policy._numpy.learns
    assert policy_of("default")._numpy.learns


def test_large_networks_learn_through_torch() -> None:
    policy = policy_of("default")
    assert NumpyActorCritic(policy.model).learns
    env = Spaces(*MODELS["default"][:2])
    large = make_policy("a2c", env, model={"fcnet_hiddens": [512, 512]})
    assert large._numpy is not None
    assert not large._numpy.learns
    obs = torch.as_tensor(observations_for(large, 4))
    flat_gradient(large, lambda p: p.outputs(obs)[0].sum())
    assert large.flat.grads.abs().max() > 0.0
