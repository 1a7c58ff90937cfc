"""Weight updates: clipping, learning rate, skipped gradients, schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import (
    fixed_gradient,
    small_policy,
)

from polopt.policies.learning.schedules import Schedule


def test_gradient_is_clipped_by_global_norm() -> None:
    policy = small_policy("a2c", grad_clip=0.5)
    gradients = fixed_gradient(policy)
    norm = float(np.linalg.norm(gradients.flat))
    assert norm > 0.5
    stats = policy.apply_gradients(gradients)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    clipped = policy.flat.grads.numpy()
    np.testing.assert_allclose(clipped, gradients.flat * 0.5 / norm, rtol=1e-4)
    # Adam's first moment (beta 0.9) shows the applied gradient.
    moment = policy.get_state()["adam"]["network"]["exp_avg"].numpy()
    np.testing.assert_allclose(moment, 0.1 * clipped, rtol=1e-4)


@pytest.mark.parametrize("grad_clip", [None, 1e6])
def test_small_gradient_is_not_clipped(grad_clip: float | None) -> None:
    policy = small_policy("a2c", grad_clip=grad_clip)
    gradients = fixed_gradient(policy)
    policy.apply_gradients(gradients)
    np.testing.assert_array_equal(policy.flat.grads.numpy(), gradients.flat)


def test_update_is_adam() -> None:
    policy = small_policy("a2c", lr=0.01, adam_epsilon=1e-3, grad_clip=None)
    reference = torch.nn.Parameter(policy.flat.params.detach().clone())
    adam = torch.optim.Adam([reference], lr=0.01, eps=1e-3, fused=True)
    for seed in range(5):
        gradients = fixed_gradient(policy, seed)
        policy.apply_gradients(gradients)
        reference.grad = torch.from_numpy(gradients.flat.copy())
        adam.step()
    assert torch.equal(policy.flat.params.detach(), reference.detach())
    assert policy.version == 5
    moments = policy.get_state()["adam"]["network"]
    for key, moment in adam.state[reference].items():
        assert torch.equal(moments[key], moment)


def test_lr_scale_scales_the_update() -> None:
    steps = []
    for scale in (1.0, 0.25):
        policy = small_policy("a2c")
        before = policy.get_weights().flat
        stats = policy.apply_gradients(fixed_gradient(policy), lr_scale=scale)
        assert stats["default_optimizer_learning_rate"] == pytest.approx(1e-3 * scale)
        steps.append(policy.get_weights().flat - before)
    np.testing.assert_allclose(steps[1], 0.25 * steps[0], rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_gradient_is_counted_and_skipped(bad: float) -> None:
    policy, untouched = small_policy("a2c"), small_policy("a2c")
    for each in (policy, untouched):
        each.apply_gradients(fixed_gradient(each, 0))
    broken = fixed_gradient(policy, 1)
    broken.flat[3] = bad
    stats = policy.apply_gradients(broken)
    assert "grad_norm" not in stats
    assert policy.progress.skipped_updates == 1
    assert policy.version == 1
    # Adam's moments are unchanged, too, so the next update is the same as without the skipped one.
    for each in (policy, untouched):
        each.apply_gradients(fixed_gradient(each, 2))
    np.testing.assert_array_equal(policy.get_weights().flat, untouched.get_weights().flat)
    assert untouched.progress.skipped_updates == 0


@pytest.mark.parametrize(
    ("env_steps", "value"), [(0, 1.0), (10, 1.0), (15, 0.75), (20, 0.5), (60, 0.25), (100, 0.0)]
)
def test_schedule_is_piecewise_linear(env_steps: int, value: float) -> None:
    schedule = Schedule([(10, 1.0), (20, 0.5), (100, 0.0)])
    assert schedule(env_steps) == pytest.approx(value)
    assert schedule(10**9) == 0.0
    assert Schedule(0.3)(env_steps) == 0.3
    assert Schedule([(50, 0.3)])(env_steps) == 0.3


def test_lr_schedule_reaches_the_optimizer() -> None:
    policy = small_policy("a2c", lr=[[0, 0.01], [100, 0.0]])
    for env_steps, lr in ((0, 0.01), (50, 0.005), (100, 0.0), (200, 0.0)):
        before = policy.get_weights()
        policy.set_weights(before._replace(env_steps=env_steps))  # as a worker does
        stats = policy.apply_gradients(fixed_gradient(policy))
        assert stats["default_optimizer_learning_rate"] == pytest.approx(lr)
        step = np.abs(policy.get_weights().flat - before.flat).max()
        assert step == pytest.approx(lr, rel=0.05)  # Adam with a constant gradient


@pytest.mark.parametrize(
    ("name", "value", "torch_optimizer"),
    [
        ("lr", 0.5, "adam"),
        ("lr", [[0, 0.5], [100, 0.0]], "adam"),
        ("adam_epsilon", 0.5, "adam"),
        ("grad_clip", 0.01, "rmsprop"),
        ("rmsprop_alpha", 0.5, "rmsprop"),
        ("rmsprop_epsilon", 0.5, "rmsprop"),
    ],
)
def test_changed_option_is_used_by_the_next_update(
    name: str, value: Any, torch_optimizer: str
) -> None:
    options = {"torch_optimizer": torch_optimizer}
    changed, unchanged = (small_policy("a2c", **options) for _ in range(2))
    expected = small_policy("a2c", **options, **{name: value})
    changed.set_option(name, value)
    for policy in (changed, unchanged, expected):
        policy.apply_gradients(fixed_gradient(policy))
    weights = changed.get_weights().flat
    np.testing.assert_array_equal(weights, expected.get_weights().flat)
    assert not np.allclose(weights, unchanged.get_weights().flat)
