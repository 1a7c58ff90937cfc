"""Tests of PQN: targets of Q(lambda) at episode ends, the loss, and layer normalisation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_helpers import FakeEnv
from torch import nn
from toy_envs import random_batch

from polopt.common.sample_batch import SampleBatch
from polopt.policies.pqn import PQNConfig, PQNPolicy
from polopt.trainers.trainer import PolicyOptimizerTrainer

SPACE = spaces.Box(-9.0, 9.0, (2,))


def make_pqn(observation_space: Any = SPACE, **options: Any) -> PQNPolicy:
    options = {"model": {"fcnet_hiddens": [8]}, **options}
    env = FakeEnv(observation_space, spaces.Discrete(3))
    return PQNPolicy(env.observation_space, env.action_space, PQNConfig.parse(options), seed=3)


def sampled(policy: PQNPolicy, steps: int = 7, envs: int = 3) -> SampleBatch:
    """Moves the weights of the policy. Returns a fragment with three kinds of episode ends:
    terminated, truncated before a row that only resets, and truncated with a separate
    successor."""
    rng = np.random.default_rng(1)
    flat = policy.flat.get_params()
    policy.flat.set_params(flat + rng.normal(0.0, 0.3, flat.shape).astype(np.float32))
    batch = random_batch(policy, steps, envs, rng)
    for t, n in ((2, 0), (4, 1)):
        batch["truncated"][t, n], batch["terminated"][t, n] = True, False
    batch["valid"][3, 0] = False
    batch.successor_index = np.array([4 * envs + 1])
    batch.successor_obs = rng.normal(size=(1, *policy.encoder.shape)).astype(np.float32)
    batch["action_dist_inputs"] = policy.dist_inputs(batch)
    return batch


def q_lambda(policy: PQNPolicy, batch: SampleBatch, lambda_: float) -> np.ndarray:
    """Computes the targets row by row, with the recursion of the paper."""
    gamma, (steps, envs) = policy.config.gamma, batch.shape
    successors = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
    targets = np.zeros((steps, envs))
    for n in range(envs):
        for t in reversed(range(steps)):
            own = successors.get(t * envs + n)
            over = batch["terminated"][t, n] or batch["truncated"][t, n]
            following = batch.all_obs[t + 1, n] if own is None else own
            best = policy.action_params(following[None])[0].max()
            if batch["terminated"][t, n]:
                best = 0.0
            later = best if over or own is not None or t == steps - 1 else targets[t + 1, n]
            mixed = (1.0 - lambda_) * best + lambda_ * later
            targets[t, n] = batch["rewards"][t, n] + gamma * mixed
    return targets


@pytest.mark.parametrize("lambda_", [0.0, 0.65, 1.0])
def test_targets_in_closed_form(lambda_: float) -> None:
    policy = make_pqn(**{"lambda": lambda_})
    batch = sampled(policy)
    assert batch["terminated"].any()
    policy.postprocess(batch)
    valid = batch["valid"]
    expected = q_lambda(policy, batch, lambda_)
    np.testing.assert_allclose(batch["value_targets"][valid], expected[valid], rtol=1e-4, atol=1e-4)
    taken = np.take_along_axis(batch["action_dist_inputs"], batch["actions"][..., None], -1)[..., 0]
    np.testing.assert_array_equal(batch["values"], taken)


def test_loss_is_half_the_mean_square_over_valid_rows() -> None:
    policy = make_pqn()
    batch = policy.postprocess(sampled(policy))
    gradients = policy.compute_gradients(batch)
    errors = (batch["values"] - batch["value_targets"])[batch["valid"]]
    assert gradients.stats["vf_loss"] == pytest.approx(0.5 * (errors**2).mean(), rel=1e-4)
    assert gradients.rows == batch["valid"].sum()


def test_targets_are_fixed_while_a_batch_is_learned() -> None:
    policy = make_pqn(num_sgd_iter=3, sgd_minibatch_size=None)
    batch = policy.postprocess(sampled(policy))
    before = batch["value_targets"].copy()
    stats = policy.learn_on_batch(batch)
    assert policy.version == 3
    assert stats["vf_target_mean"] == pytest.approx(before[batch["valid"]].mean(), rel=1e-4)
    np.testing.assert_array_equal(batch["value_targets"], before)


@pytest.mark.parametrize(
    ("space", "kinds"),
    [
        (SPACE, {nn.LayerNorm}),
        (spaces.Box(0, 255, (10, 10, 4), np.uint8), {nn.LayerNorm, nn.GroupNorm}),
    ],
)
def test_network_has_layer_normalisation(space: Any, kinds: set[type]) -> None:
    policy = make_pqn(space, model={})
    found = {type(module) for module in policy.model.modules()}
    assert kinds <= found
    plain = make_pqn(space, model={"layer_norm": False})
    assert not kinds & {type(module) for module in plain.model.modules()}
    # The outputs do not depend on the scale of the inputs of a layer.
    layers = next(m for m in policy.model.modules() if isinstance(m, nn.Sequential))
    inputs = torch.rand(4, 4, 10, 10) if len(space.shape) == 3 else torch.rand(4, 2)
    np.testing.assert_allclose(
        layers(inputs).detach(), layers(inputs * 100.0).detach(), rtol=0.02, atol=2e-3
    )


def test_pqn_learns_from_synchronous_samples() -> None:
    trainer = PolicyOptimizerTrainer(
        env="CartPole-v1",
        policy="pqn",
        optimizer="sync_samples",
        num_workers=0,
        rollout_fragment_length=64,
        min_sample_timesteps_per_iteration=15_000,
        epsilon=[[0, 1.0], [10_000, 0.05]],
        seed=1,
    )
    assert [trainer.train()["env_runners"]["episode_return_mean"] for _ in range(2)][-1] > 60.0
    trainer.stop()
