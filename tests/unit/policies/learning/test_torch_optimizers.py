"""Adam and RMSprop equal the classes of torch.optim, and import no compiler."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from policy_helpers import fixed_gradient, small_policy

from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.weight_updater import TORCH_OPTIMIZERS

CONFIG = PolicyConfig(adam_beta1=0.7, adam_epsilon=1e-5, rmsprop_alpha=0.9, rmsprop_epsilon=1e-3)
CLASSES: dict[str, Any] = {
    "adam": lambda params: torch.optim.Adam(params, betas=(0.7, 0.999), eps=1e-5, fused=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, alpha=0.9, eps=1e-3, foreach=False),
}
every_optimizer = pytest.mark.parametrize("name", CLASSES)


@every_optimizer
def test_equals_class_bit_for_bit_through_a_restore(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(1000, generator=generator)
    reference = torch.nn.Parameter(params.clone())
    grads = torch.zeros(1000)
    ours = TORCH_OPTIMIZERS[name](params, grads)
    expected = CLASSES[name]([reference])
    assert ours.get_state() == {}
    for i in range(20):
        grads.copy_(torch.randn(1000, generator=generator))
        reference.grad = grads.clone()
        lr = 0.1 / (i + 1)
        expected.param_groups[0]["lr"] = lr
        expected.step()
        if i == 10:
            state = ours.get_state()
            ours = TORCH_OPTIMIZERS[name](params, grads)
            ours.set_state(state)
        ours.step(lr, CONFIG)
        assert torch.equal(params, reference.data)
    for key, tensor in expected.state_dict()["state"][0].items():
        assert torch.equal(ours.get_state()[key], tensor)


@every_optimizer
def test_state_of_other_parameters_is_refused(name: str) -> None:
    other = TORCH_OPTIMIZERS[name](torch.zeros(4), torch.zeros(4))
    other.step(0.1, CONFIG)
    optimizer = TORCH_OPTIMIZERS[name](torch.zeros(3), torch.zeros(3))
    with pytest.raises(ValueError, match=rf"{name} must have shape \[3\]; got \[4\]"):
        optimizer.set_state(other.get_state())


def test_rmsprop_equals_closed_form() -> None:
    """The closed form is `v = alpha v + (1 - alpha) g^2`, `w -= lr g / (sqrt(v) + epsilon)`. Here
    epsilon is added to the root. Mnih et al. (2016) add epsilon to `v` instead."""
    options = {"rmsprop_alpha": 0.9, "rmsprop_epsilon": 0.1, "lr": 0.01, "grad_clip": None}
    policy = small_policy("a2c", torch_optimizer="rmsprop", **options)
    weights = policy.get_weights().flat.astype(np.float64)
    inside = weights.copy()
    square = np.zeros_like(weights)
    for seed in range(5):
        gradients = fixed_gradient(policy, seed)
        policy.apply_gradients(gradients)
        square = 0.9 * square + 0.1 * gradients.flat.astype(np.float64) ** 2
        weights -= 0.01 * gradients.flat / (np.sqrt(square) + 0.1)
        inside -= 0.01 * gradients.flat / np.sqrt(square + 0.1)
    np.testing.assert_allclose(policy.get_weights().flat, weights, rtol=1e-4, atol=1e-6)
    assert np.abs(weights - inside).max() > 1e-3
    assert policy.get_state()["rmsprop"]["network"]["square_avg"].shape == policy.flat.params.shape


def test_rmsprop_state_resumes_exactly() -> None:
    policy, resumed = (small_policy("a2c", seed, torch_optimizer="rmsprop") for seed in (1, 2))
    policy.apply_gradients(fixed_gradient(policy, 0))
    resumed.set_state(policy.get_state())
    for each in (policy, resumed):
        each.apply_gradients(fixed_gradient(each, 1))
    np.testing.assert_array_equal(policy.get_weights().flat, resumed.get_weights().flat)


def test_updates_import_no_compiler() -> None:
    """The constructors of the classes of torch.optim import the compiler, which takes seconds in
    each process."""
    script = """
import sys
import torch
from polopt.policies.learning.policy_config import PolicyConfig
from polopt.policies.learning.weight_updater import TORCH_OPTIMIZERS
for cls in TORCH_OPTIMIZERS.values():
    cls(torch.zeros(3), torch.zeros(3)).step(0.1, PolicyConfig())
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
