"""CrossQ, DQN, SAC and TD3 act and learn in NumPy as in torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from policy_helpers import moved
from replay_helpers import BOX, replay_policy, shaken, transitions

from polopt.policies.networks.batch_renorm import BatchRenorm

MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": BOX})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits BLAS to one thread, as in a trainer and in workers. Policies learn in NumPy only
    then."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def forwards(policy: Any) -> list[Any]:
    """Returns a list to which the networks add each output that torch computes."""
    calls: list[Any] = []
    for segment in policy.segments.values():
        for module in segment.module.modules():
            module.register_forward_hook(lambda _module, _args, out: calls.append(out))
    return calls


@pytest.mark.parametrize("loss", ["huber", "mse"])
@pytest.mark.parametrize("dueling", [True, False])
def test_updates_of_dqn_in_numpy_equal_updates_in_torch(dueling: bool, loss: str) -> None:
    options = {"dueling": dueling, "td_error_loss_fn": loss, "target_network_update_freq": 2}
    fast, slow = (shaken(replay_policy("dqn", fast_cpu=fast, **options)) for fast in (True, False))
    calls = forwards(fast)
    for seed in range(5):
        rows = transitions(fast, 32, seed)
        (stats, errors), (expected, others) = (p.learn_on_transitions(rows) for p in (fast, slow))
        np.testing.assert_allclose(errors, others, rtol=1e-3, atol=1e-4)
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-4)
        np.testing.assert_allclose(fast.flat.get_grads(), slow.flat.get_grads(), atol=1e-4)
    assert calls == []
    moved = np.abs(fast.get_weights().flat - shaken(replay_policy("dqn")).get_weights().flat)
    assert moved.max() > 1e-3
    np.testing.assert_allclose(fast.get_weights().flat, slow.get_weights().flat, atol=2e-4)
    np.testing.assert_allclose(
        fast.action_params(rows.obs), slow.action_params(rows.obs), rtol=1e-3, atol=1e-3
    )


def masked_rows(policy: Any, masks: np.ndarray, next_masks: np.ndarray) -> Any:
    rows = transitions(policy, len(masks), discounts=np.full(len(masks), 0.9, np.float32))
    rows.obs[:, :3], rows.next_obs[:, :3] = masks, next_masks
    return rows


@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("dueling", [True, False])
def test_gradients_of_dqn_in_numpy_equal_gradients_in_torch_with_a_mask(
    dueling: bool, double_q: bool
) -> None:
    options = {"dueling": dueling, "double_q": double_q, "target_network_update_freq": 2}
    fast, slow = (
        shaken(replay_policy("dqn", MASKED, fast_cpu=fast, **options)) for fast in (True, False)
    )
    calls = forwards(fast)
    rng = np.random.default_rng(1)
    for number in range(3):
        masks, following = rng.integers(0, 2, (2, 40, 3))
        following[0] = 0  # allows no action, so the value is 0
        rows = masked_rows(fast, masks, following)
        masks[np.arange(40), rows.actions] = 1
        rows = masked_rows(fast, masks, following)
        for policy in (fast, slow):
            policy.flat.zero_grads()
        stats, expected = (policy.backward(rows)[0] for policy in (fast, slow))
        assert stats == pytest.approx(expected, rel=1e-5, abs=1e-6)
        right = slow.flat.get_grads()
        np.testing.assert_allclose(
            fast.flat.get_grads(), right, atol=1e-6 * max(1.0, np.abs(right).max())
        )
        for policy in (fast, slow):
            moved(policy, number)
    assert calls == []


@pytest.mark.parametrize("target", ["auto", None])
def test_updates_of_sac_in_numpy_equal_updates_in_torch(target: Any) -> None:
    """The networks have two hidden layers. Some log standard deviations are beyond the bounds."""
    options = {"model": {"fcnet_hiddens": [9, 7]}, "target_entropy": target, "initial_alpha": 0.3}
    fast, slow = (shaken(replay_policy("sac", fast_cpu=fast, **options)) for fast in (True, False))
    bias = np.float32([0.0, 0.0, 2.0, -20.0])
    for policy in (fast, slow):
        with torch.no_grad():
            policy.model.policy_head.bias.copy_(torch.from_numpy(bias))
    calls = forwards(fast)
    for seed in range(5):
        rows = transitions(fast, 48, seed)
        log_std = slow.model.action_params(torch.as_tensor(rows.obs))[:, 2:]
        assert ((log_std > 2.0) | (log_std < -20.0)).any()
        assert ((log_std < 2.0) & (log_std > -20.0)).any()
        (stats, errors), (expected, others) = (p.learn_on_transitions(rows) for p in (fast, slow))
        np.testing.assert_allclose(errors, others, rtol=1e-3, atol=1e-3)
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-3)
        found, wanted = fast.flat.get_grads(), slow.flat.get_grads()
        for part in fast.flat.trained.values():
            limit = 2e-3 * float(np.abs(wanted[part]).max()) + 1e-6
            np.testing.assert_allclose(found[part], wanted[part], atol=limit)
    assert calls == []
    assert fast.shuffle.bit_generator.state == slow.shuffle.bit_generator.state
    np.testing.assert_allclose(fast.get_weights().flat, slow.get_weights().flat, atol=2e-3)


@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_updates_of_td3_in_numpy_equal_updates_in_torch(noise: float) -> None:
    """The noise of 1 exceeds its bound in many rows. The actor learns in every second update. The
    next observations of rows that end an episode mean nothing."""
    options = {"model": {"fcnet_hiddens": [9, 7]}, "target_noise": noise}
    fast, slow = (shaken(replay_policy("td3", fast_cpu=fast, **options)) for fast in (True, False))
    calls = forwards(fast)
    for seed in range(6):
        discounts = np.where(np.arange(48) % 3 == 0, 0.0, 0.9).astype(np.float32)
        rows = transitions(fast, 48, seed, discounts=discounts)
        rows.next_obs[::3] = np.nan
        (stats, errors), (expected, others) = (p.learn_on_transitions(rows) for p in (fast, slow))
        assert ("policy_loss" in stats) == bool(seed % 2)
        np.testing.assert_allclose(errors, others, rtol=1e-3, atol=1e-4)
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-4)
        found, wanted = fast.flat.get_grads(), slow.flat.get_grads()
        for name, part in fast.flat.trained.items():
            limit = 1e-3 * float(np.abs(wanted[part]).max()) + 1e-6
            np.testing.assert_allclose(found[part], wanted[part], atol=limit)
            assert np.any(wanted[part]) == (name == "critics" or bool(seed % 2))
    assert calls == []
    assert fast.shuffle.bit_generator.state == slow.shuffle.bit_generator.state
    np.testing.assert_allclose(fast.get_weights().flat, slow.get_weights().flat, atol=2e-4)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_updates_of_crossq_in_numpy_equal_updates_in_torch(activation: str) -> None:
    """The correction of batch renormalisation begins with the fourth batch, and its bounds matter.
    The actor learns in every second update. The next observations of rows that end an episode mean
    nothing."""
    options = {"model": {"fcnet_hiddens": [9, 7], "fcnet_activation": activation}}
    options |= {"policy_delay": 2, "initial_alpha": 0.3}
    fast, slow = (
        shaken(replay_policy("crossq", fast_cpu=fast, **options)) for fast in (True, False)
    )
    norms = []
    for policy in (fast, slow):
        flat = policy.flat.get_params()
        for name in ("network.buffers", "critics.buffers"):
            np.abs(flat[policy.flat.segments[name]], out=flat[policy.flat.segments[name]])
        policy.flat.set_params(flat)
        modules = (policy.model, policy.critics)
        norms = [m for each in modules for m in each.modules() if isinstance(m, BatchRenorm)]
        for norm in norms:
            norm.warm_up, norm.r_max, norm.d_max = 3, 1.3, 0.4
    calls = forwards(fast)
    for seed in range(8):
        discounts = np.where(np.arange(48) % 3 == 0, 0.0, 0.9).astype(np.float32)
        rows = transitions(fast, 48, seed, discounts=discounts)
        rows.next_obs[::3] = np.nan
        (stats, errors), (expected, others) = (p.learn_on_transitions(rows) for p in (fast, slow))
        assert ("policy_loss" in stats) == bool(seed % 2)
        np.testing.assert_allclose(errors, others, rtol=2e-3, atol=2e-4)
        assert stats == pytest.approx(expected, rel=2e-3, abs=2e-4)
        found, wanted = fast.flat.get_grads(), slow.flat.get_grads()
        for name, part in fast.flat.trained.items():
            limit = 2e-3 * float(np.abs(wanted[part]).max()) + 1e-6
            np.testing.assert_allclose(found[part], wanted[part], atol=limit)
            assert np.any(wanted[part]) == (name == "critics" or bool(seed % 2))
        np.testing.assert_allclose(fast.flat.get_buffers(), slow.flat.get_buffers(), rtol=1e-4)
        # Adam would make rounding errors of small gradients larger.
        fast.flat.set_params(slow.flat.get_params())
    assert calls == []
    assert norms[0].num_batches > 3
    assert fast.shuffle.bit_generator.state == slow.shuffle.bit_generator.state


@pytest.mark.parametrize("name", ["crossq", "sac", "td3"])
def test_acting_in_numpy_and_in_torch_is_equal(name: str) -> None:
    fast, slow = (shaken(replay_policy(name, fast_cpu=fast)) for fast in (True, False))
    obs = transitions(fast).obs
    np.testing.assert_allclose(fast.action_params(obs), slow.action_params(obs), rtol=1e-4)
    exported, _ = slow.act_in_torch(slow.model, torch.as_tensor(obs), torch.zeros(0))
    np.testing.assert_allclose(exported.detach(), slow.action_params(obs), rtol=1e-5)
