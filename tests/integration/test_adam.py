"""FlatAdam is torch's fused Adam, without what that imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from polopt.policies.adam import FlatAdam


def test_equals_torch_bit_for_bit_through_a_restore() -> None:
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(1000, generator=generator)
    reference = torch.nn.Parameter(params.clone())
    grads = torch.zeros(1000)
    ours = FlatAdam(params, grads, epsilon=1e-5)
    theirs = torch.optim.Adam([reference], eps=1e-5, fused=True)
    assert ours.get_state() == {}
    for i in range(20):
        grads.copy_(torch.randn(1000, generator=generator))
        reference.grad = grads.clone()
        theirs.param_groups[0]["lr"] = 0.1 / (i + 1)
        theirs.step()
        if i == 10:
            state = ours.get_state()
            ours = FlatAdam(params, grads, epsilon=1e-5)
            ours.set_state(state)
        ours.step(0.1 / (i + 1))
        assert torch.equal(params, reference.data)
    for key, tensor in theirs.state_dict()["state"][0].items():
        assert torch.equal(ours.get_state()[key], tensor)


def test_state_of_other_parameters_is_refused() -> None:
    grads = torch.zeros(3)
    other = FlatAdam(torch.zeros(4), torch.zeros(4), 1e-5)
    other.step(0.1)
    with pytest.raises(ValueError, match=r"must have shape \[3\]; got \[4\]"):
        FlatAdam(torch.zeros(3), grads, 1e-5).set_state(other.get_state())


def test_learning_does_not_import_torchs_compiler() -> None:
    """It takes a second, in the driver and in every worker."""
    script = """
import sys
from polopt.trainers.trainer import PolicyOptimizerTrainer
config = {"env": "CartPole-v1", "num_workers": 0, "min_sample_timesteps_per_iteration": 1}
PolicyOptimizerTrainer(config).train()
assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
