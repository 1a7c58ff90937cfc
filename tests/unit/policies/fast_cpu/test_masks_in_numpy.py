"""Policies with an action mask act and learn in NumPy as in torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from faulty_envs import guarded, num_faults
from masked_env import Masked, every_kind, masked_rows
from masked_policies import masked_policy, sampled
from policy_helpers import LOSSES, moved
from toy_envs import AUTORESET, make_sampler

from polopt.policies.fast_cpu.numpy_backend import numpy_network
from polopt.policies.fast_cpu.numpy_masked import NumpyMasked


def check_numpy(kind: str, losses: str) -> None:
    """Checks that a masked policy computes the same gradient in NumPy as in torch."""
    name, options = LOSSES[losses]
    fast, slow = (masked_policy(kind, name, fast_cpu=fast, **options) for fast in (True, False))
    batch = sampled(slow, kind)
    rows = slow.training_rows(slow.prepare_batch(batch))
    assert (rows["obs"][:, slow.mask.place] == 0.0).any()
    calls: list[Any] = []
    fast.model.network.register_forward_hook(lambda *_: calls.append(1))
    stats, expected = moved(fast).backward(rows), moved(slow).backward(rows)
    assert stats == pytest.approx(expected, rel=1e-5, abs=1e-6)
    computed, right = fast.flat.get_grads(), slow.flat.get_grads()
    assert np.abs(right).max() > 1e-3
    np.testing.assert_allclose(computed, right, atol=1e-6 * max(1.0, np.abs(right).max()))
    obs = batch.all_obs[0]
    np.testing.assert_allclose(fast.action_params(obs), slow.action_params(obs), rtol=1e-5)
    assert calls == []  # torch did not compute the gradient


@every_kind
@pytest.mark.parametrize("losses", LOSSES)
def test_closed_forms_with_a_mask_equal_torch(kind: str, losses: str) -> None:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        check_numpy(kind, losses)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("_masked", lambda self, params, allowed: params),
        ("_rest", lambda self, obs: np.roll(obs, 1, axis=1)[:, : obs.shape[1] - 4]),
        ("_allowed", lambda self, obs: np.roll(obs[:, self._place], 1, axis=1) > 0.5),
    ],
)
def test_wrong_mask_in_numpy_is_detected(
    method: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NumpyMasked, method, wrong)
    with threadpoolctl.threadpool_limits(1, user_api="blas"), pytest.raises(AssertionError):
        check_numpy("discrete", "ppo, KL penalty")


@every_kind
def test_masked_outputs_in_numpy_have_no_gradient(kind: str) -> None:
    """The gradient is 0 even if the loss of a plugin has a gradient with respect to masked
    outputs."""
    policy = masked_policy(kind)
    obs, _ = masked_rows(kind)
    network = policy.model
    params = list(network.parameters())
    outputs = network.action_params(torch.from_numpy(np.asarray(obs, np.float32)))
    expected = torch.autograd.grad(outputs.sum(), params, allow_unused=True)
    for one in params:
        one.grad = torch.zeros_like(one)
    own = numpy_network(network)
    assert isinstance(own, NumpyMasked)
    *_, done = own.forward(np.asarray(obs, np.float32))
    own.backward(done, np.ones(tuple(outputs.shape), np.float32), None)
    for one, right in zip(params, expected, strict=True):
        wanted = 0.0 if right is None else right.numpy()
        np.testing.assert_allclose(one.grad.numpy(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", AUTORESET)
def test_sampling_without_the_mask_is_wrong(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyMasked, "_masked", lambda self, params, allowed: params)
    sampler = make_sampler(guarded([Masked] * 4, mode), masked_policy("discrete"), 50)
    assert num_faults(sampler.sample().faults, "raised") > 10
