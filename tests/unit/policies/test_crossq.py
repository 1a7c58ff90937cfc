"""CrossQ and batch renormalisation equal closed forms in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from replay_helpers import BOX, replay_policy, shaken, transitions
from torch.nn import functional as F

from polopt.common.config import ConfigError
from polopt.policies.crossq import CrossQPolicy
from polopt.policies.networks.batch_renorm import BatchRenorm
from polopt.trainers.trainer import PolicyOptimizerTrainer

EPSILON = 1e-3


def arrays(module: Any) -> dict[str, np.ndarray]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().double().numpy().copy() for name, tensor in named}


def normalised(x: np.ndarray, parts: dict[str, np.ndarray], at: str, trains: bool) -> np.ndarray:
    """Batch normalisation `[B, D]`, before the correction of batch renormalisation begins."""
    mean, variance = parts[at + ".mean"], parts[at + ".variance"]
    if trains:
        mean, variance = x.mean(axis=0), x.var(axis=0)
    return (x - mean) / np.sqrt(variance + EPSILON) * parts[at + ".weight"] + parts[at + ".bias"]


def outputs(network: Any, x: np.ndarray, trains: bool) -> tuple[np.ndarray, np.ndarray]:
    """Both outputs, `[B, P]` and `[B]`, of an MLP with one hidden layer."""
    parts = arrays(network)
    x = normalised(x, parts, "policy_trunk.0", trains)
    x = np.maximum(x @ parts["policy_trunk.1.weight"].T + parts["policy_trunk.1.bias"], 0.0)
    x = normalised(x, parts, "policy_trunk.3", trains)
    params = x @ parts["policy_head.weight"].T + parts["policy_head.bias"]
    return params, (x @ parts["value_head.weight"].T + parts["value_head.bias"])[:, 0]


def critic_values(policy: Any, obs: np.ndarray, actions: np.ndarray, trains: bool) -> np.ndarray:
    inputs = np.concatenate([obs, actions], axis=1)
    return np.stack([outputs(n, inputs, trains)[1] for n in policy.critics.networks])


def soft_sample(
    policy: Any, obs: np.ndarray, noise: np.ndarray, trains: bool
) -> tuple[np.ndarray, np.ndarray]:
    mean, log_std = np.split(outputs(policy.model, obs, trains)[0], 2, axis=1)
    actions = np.tanh(mean + np.exp(log_std) * noise)
    gaussian = -0.5 * noise**2 - log_std - 0.5 * math.log(2.0 * math.pi)
    return actions, (gaussian - np.log(1.0 - actions**2)).sum(axis=1)


def made(**options: Any) -> Any:
    """A policy whose weights and running statistics differ from their initial values."""
    policy = replay_policy("crossq", **options)
    for seed in range(3):
        policy.learn_on_batch(transitions(policy, 32, 100 + seed))
    flat = policy.flat.get_params()
    rng = np.random.default_rng(1)
    for name in ("network", "critics"):
        part = policy.flat.segments[name]
        flat[part] += rng.normal(0.0, 0.1, part.stop - part.start).astype(np.float32)
    policy.flat.set_params(flat)
    return policy


def noise_of(policy: Any, rows: int, count: int) -> list[np.ndarray]:
    """The noise that the policy will draw next. The generator stays unchanged."""
    state = policy.shuffle.bit_generator.state
    drawn = [policy.shuffle.standard_normal((rows, 2), dtype=np.float32) for _ in range(count)]
    policy.shuffle.bit_generator.state = state
    return drawn


def values_and_targets(
    policy: Any, rows: Any, noise: np.ndarray, jointly: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The values `[K, B]` of critics in training mode, and their targets `[B]`."""
    next_obs = np.where(rows.discounts[:, None] > 0.0, rows.next_obs, rows.obs)
    actions, log_prob = soft_sample(policy, next_obs, noise, trains=False)
    stored = np.tanh(rows.actions)
    if jointly:
        both = critic_values(
            policy, np.concatenate([rows.obs, next_obs]), np.concatenate([stored, actions]), True
        )
        values, following = np.split(both, 2, axis=1)
    else:
        values = critic_values(policy, rows.obs, stored, True)
        following = critic_values(policy, next_obs, actions, True)
    alpha = policy.log_alpha.exp().item()
    targets = rows.rewards + rows.discounts * (following.min(axis=0) - alpha * log_prob)
    return values, targets


def test_critics_see_both_observations_in_one_batch() -> None:
    policy = made(initial_alpha=0.3)
    rows = transitions(policy, 64)
    (noise,) = noise_of(policy, 64, 1)
    errors, apart = (
        np.subtract(*values_and_targets(policy, rows, noise, jointly)) for jointly in (True, False)
    )
    stats, priorities = policy.learn_on_transitions(rows)
    expected = 0.5 * (rows.weights * np.square(errors).sum(axis=0)).mean()
    assert stats["vf_loss"] == pytest.approx(expected, rel=1e-3)
    np.testing.assert_allclose(priorities, np.abs(errors).mean(axis=0), rtol=1e-3, atol=1e-4)
    assert np.abs(apart - errors).max() > 0.05  # two batches would give other errors


def test_actor_and_temperature_learn_in_every_third_update() -> None:
    policy = made()  # three updates: the actor has learned once
    assert policy.version == 3
    parts = policy.flat.segments
    for update in range(1, 7):
        rows = transitions(policy, 64, update)
        learns = update % 3 == 0
        assert policy.resting == (() if learns else ("network", "temperature"))
        before = policy.flat.get_params()
        mean = arrays(policy.model)["policy_trunk.0.mean"]
        stats = policy.learn_on_batch(rows)
        after = policy.flat.get_params()
        changed = {n for n, part in parts.items() if (before[part] != after[part]).any()}
        rest = {"critics", "critics.buffers"}
        assert changed == (rest | {"network", "network.buffers", "temperature"} if learns else rest)
        assert ("policy_loss" in stats) == learns
        if learns:
            moved = arrays(policy.model)["policy_trunk.0.mean"]
            expected = mean + 0.01 * (rows.obs.mean(axis=0) - mean)
            np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)


def test_actor_loss_in_closed_form() -> None:
    policy = made()
    rows = transitions(policy, 64)
    (noise,) = noise_of(policy, 64, 1)
    actions, log_prob = soft_sample(policy, rows.obs, noise, trains=True)
    values = critic_values(policy, rows.obs, actions, trains=False).min(axis=0)
    alpha = policy.log_alpha.exp().item()
    with policy.training("network"):
        loss, _ = policy.actor_loss(policy.tensors(rows))
    assert loss.item() == pytest.approx((alpha * log_prob - values).mean(), rel=1e-3)


def test_gradient_does_not_flow_through_the_targets() -> None:
    """The gradient equals the gradient of the loss with constant targets. A gradient through the
    targets would differ."""
    policy = made()
    rows = policy.tensors(transitions(policy, 32))
    (noise,) = noise_of(policy, 32, 1)
    arrays_of = rows._make(column.numpy() for column in rows)
    _, expected_targets = values_and_targets(policy, arrays_of, noise)
    targets = torch.from_numpy(expected_targets).float()
    policy.flat.zero_grads()
    with policy.training("critics"):
        loss, _, _ = policy.critic_loss(rows)
        loss.backward()
    found = policy.flat.get_grads()[policy.flat.segments["critics"]]
    assert np.abs(policy.flat.get_grads()[policy.flat.segments["network"]]).max() == 0.0

    policy.flat.zero_grads()
    next_obs = torch.where(rows.discounts[:, None] > 0.0, rows.next_obs, rows.obs)
    actions = torch.from_numpy(
        soft_sample(policy, next_obs.numpy(), noise, trains=False)[0].astype(np.float32)
    )
    with policy.training("critics"):
        both = policy.critics(
            torch.cat([rows.obs, next_obs]), torch.cat([torch.tanh(rows.actions), actions])
        )
        errors = both.chunk(2, dim=1)[0] - targets
        (0.5 * (rows.weights * errors.square().sum(0)).mean()).backward()
    expected = policy.flat.get_grads()[policy.flat.segments["critics"]]
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-4)


def test_meaningless_next_observations_change_nothing() -> None:
    rows = transitions(made(), 32)
    ends = rows.discounts == 0.0
    spoiled = rows.next_obs.copy()
    spoiled[ends] = np.nan
    weights = []
    for next_obs in (rows.next_obs, spoiled):
        policy = made()
        policy.learn_on_batch(rows._replace(next_obs=next_obs))
        weights.append(policy.get_weights().flat)
    assert ends.any()
    np.testing.assert_array_equal(*weights)


def test_acting_and_priorities_use_the_running_statistics() -> None:
    policy = made()
    obs = transitions(policy, 5).obs
    np.testing.assert_allclose(
        policy.network_params(obs),
        outputs(policy.model, obs, trains=False)[0],
        rtol=1e-3,
        atol=1e-4,
    )
    before = policy.flat.get_params()
    rows = transitions(policy, 4)
    one = [policy.td_errors(rows) for _ in range(2)]
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(policy.flat.get_params(), before)  # they stay as they were
    copy = replay_policy("crossq", seed=9)
    copy.set_weights(policy.get_weights())
    np.testing.assert_array_equal(copy.network_params(obs), policy.network_params(obs))


def test_state_restores_running_statistics_and_continues_bit_for_bit() -> None:
    policy, other = made(), replay_policy("crossq", seed=5)
    other.set_state(policy.get_state())
    for seed in range(4):
        for each in (policy, other):
            each.learn_on_batch(transitions(each, 16, seed))
    np.testing.assert_array_equal(policy.get_weights().flat, other.get_weights().flat)


def test_defaults_are_those_of_the_paper() -> None:
    config = CrossQPolicy.config_class()
    assert (config.lr, config.adam_beta1, config.policy_delay) == (1e-3, 0.5, 3)
    policy = replay_policy("crossq")
    assert not any("target" in name for name in policy.flat.segments)


@pytest.mark.parametrize(
    ("space", "model", "message"),
    [
        (spaces.Box(0, 255, (9, 9, 3), np.uint8), {"conv_filters": [[4, 3, 2]]}, "CNN"),
        (BOX, {"fcnet_hiddens": [8], "layer_norm": True}, "layer_norm"),
    ],
)
def test_other_networks_are_refused(space: Any, model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replay_policy("crossq", space, model=model)


def test_crossq_trains_from_a_replay_buffer(tmp_path: Any) -> None:
    config = {
        "env": "Pendulum-v1",
        "optimizer": "sync_replay",
        "policy": "crossq",
        "num_workers": 0,
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 8,
        "buffer_size": 1000,
        "learning_starts": 64,
        "train_batch_size": 32,
        "training_intensity": 32.0,
        "min_sample_timesteps_per_iteration": 128,
        "model": {"fcnet_hiddens": [16]},
        "seed": 0,
    }
    trainer, other = PolicyOptimizerTrainer(config), PolicyOptimizerTrainer(config)
    result = trainer.train()
    assert result["learners"]["default_policy"]["policy_loss"] != 0.0
    trainer.save_checkpoint(str(tmp_path))
    other.load_checkpoint(str(tmp_path))
    weights = [each.get_policy().get_weights().flat for each in (trainer, other)]
    np.testing.assert_array_equal(*weights)
    trainer.stop()
    other.stop()


# ---- the layer ------------------------------------------------------------------------------


def shifted(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.normal([1.0, -2.0], [3.0, 0.5], (64, 2)).astype(np.float32))


def test_batch_renorm_is_batch_norm_before_the_warm_up_ends() -> None:
    layer = BatchRenorm(2)
    inputs = shifted(np.random.default_rng(0))
    running = [torch.zeros(2), torch.ones(2)]
    for _ in range(3):
        expected = F.batch_norm(inputs, None, None, training=True, eps=EPSILON)
        torch.testing.assert_close(layer(inputs), expected, rtol=1e-5, atol=1e-5)
        running[0] = running[0] + 0.01 * (inputs.mean(0) - running[0])
        running[1] = running[1] + 0.01 * (inputs.var(0, correction=0) - running[1])
    torch.testing.assert_close(layer.mean, running[0])
    torch.testing.assert_close(layer.variance, running[1])
    assert layer.num_batches == 3
    layer.eval()
    expected = F.batch_norm(inputs, *running, training=False, eps=EPSILON)
    torch.testing.assert_close(layer(inputs), expected)
    assert layer.num_batches == 3


@pytest.mark.parametrize(("r_max", "d_max"), [(1e9, 1e9), (1.2, 0.3)])
def test_batch_renorm_corrects_towards_the_running_statistics(r_max: float, d_max: float) -> None:
    layer = BatchRenorm(2, warm_up=2, r_max=r_max, d_max=d_max)
    rng = np.random.default_rng(0)
    for _ in range(2):
        layer(shifted(rng))
    mean, variance = layer.mean.clone(), layer.variance.clone()
    inputs = shifted(rng).requires_grad_()
    found = layer(inputs)
    of_batch = F.batch_norm(inputs, None, None, training=True, eps=EPSILON)
    running = (variance + EPSILON).sqrt()
    with torch.no_grad():
        r = ((inputs.var(0, correction=0) + EPSILON).sqrt() / running).clamp(1 / r_max, r_max)
        d = ((inputs.mean(0) - mean) / running).clamp(-d_max, d_max)
    torch.testing.assert_close(found, of_batch * r + d, rtol=1e-4, atol=1e-4)
    if r_max > 1e6:  # without bounds, the result is normalised with the running statistics
        torch.testing.assert_close(found, (inputs - mean) / running, rtol=1e-4, atol=1e-4)
    # r and d are constants for the gradient.
    weights = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
    (one,) = torch.autograd.grad((found * weights).sum(), inputs, retain_graph=True)
    (two,) = torch.autograd.grad(((of_batch * r + d) * weights).sum(), inputs)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_shaken_policy_is_finite() -> None:
    policy = shaken(replay_policy("crossq"))
    assert all(np.isfinite([*policy.learn_on_batch(transitions(policy)).values()]))
