"""Policies with every kind of network, distribution and loss, and batches for these policies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor
from toy_envs import POLICIES, TwoNumbers, make_policy, random_batch

from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.metrics import EpisodeStats
from polopt.policies.policy import Policy

BOX = spaces.Box(-1.0, 1.0, (2,), np.float32)
MODELS: dict[str, tuple[Space[Any], Space[Any], dict[str, Any]]] = {
    "default": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {}),
    "shared": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"vf_share_layers": True}),
    "relu": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_activation": "relu"}),
    "linear": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_hiddens": []}),
    "deep": (spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3), {"fcnet_hiddens": [8, 16, 4]}),
    "float64": (spaces.Box(-9.0, 9.0, (4,), np.float64), spaces.Discrete(3), {}),
    "image": (
        spaces.Box(0, 255, (4, 5, 3), np.uint8),
        spaces.MultiDiscrete([2, 3]),
        {"conv_filters": []},
    ),
    "image, several bounds": (
        spaces.Box(0, np.arange(12, dtype=np.uint8).reshape(2, 2, 3), (2, 2, 3), np.uint8),
        spaces.Discrete(3),
        {},
    ),
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
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


class FakeEnv:
    """An object that has only the spaces of an environment. This is enough to make a policy."""

    def __init__(self, observations: Space[Any], actions: Space[Any]) -> None:
        self.observation_space = observations
        self.action_space = actions


def policy_of(key: str, name: str = "a2c", **options: Any) -> Policy:
    observations, actions, model = MODELS[key]
    return make_policy(name, FakeEnv(observations, actions), model=model, **options)


def observations_for(policy: Policy, rows: int, seed: int = 0) -> np.ndarray:
    space = policy.encoder.space
    space.seed(seed)
    return np.stack([space.sample() for _ in range(rows)])


def small_policy(name: str, seed: int = 0, **options: Any) -> Policy:
    """Makes a policy with a small network, observations of two numbers, and three actions."""
    options = {"model": {"fcnet_hiddens": [8]}, **options}
    return make_policy(name, TwoNumbers(), seed=seed, **options)


def make_batch(policy: Policy, steps: int = 6, envs: int = 4, seed: int = 0) -> SampleBatch:
    return random_batch(policy, steps, envs, np.random.default_rng(seed))


def moved(policy: Policy, seed: int = 5) -> Policy:
    """Adds noise to the weights of the policy, so that they differ from the weights that acted."""
    noise = torch.randn(policy.flat.params.shape, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        policy.flat.params.add_(0.3 * noise)
    return policy


def fixed_gradient(policy: Policy, seed: int = 0) -> Gradients:
    """Returns a random gradient that claims to be the mean over 10 rows."""
    flat = np.random.default_rng(seed).normal(size=len(policy.flat.grads)).astype(np.float32)
    return Gradients(flat, policy.version, 10, {})


def made_batch(steps: int, envs: int, mode: str, seed: int) -> SampleBatch:
    """Makes a batch like a batch of the sampler. Episodes end at random, by termination, truncation
    or both. In autoreset mode `next_step`, the row after an episode end only resets. In the other
    modes, the last observation of an episode is in `successor_obs`."""
    rng = np.random.default_rng(seed)
    terminated = rng.random((steps, envs)) < 0.2
    truncated = rng.random((steps, envs)) < 0.2
    valid = np.ones((steps, envs), dtype=bool)
    index = np.zeros(0, dtype=np.int64)
    if mode == "next_step":
        valid[0] = rng.random(envs) < 0.8  # False if an episode ended in the previous fragment
        for t in range(1, steps):
            valid[t] = ~(terminated[t - 1] | truncated[t - 1]) | ~valid[t - 1]
            terminated[t] &= valid[t]
            truncated[t] &= valid[t]
        terminated[0] &= valid[0]
        truncated[0] &= valid[0]
    else:
        # Some rows without an episode end also have a successor. Padding makes such rows.
        index = np.flatnonzero(terminated | truncated | (rng.random((steps, envs)) < 0.1))
    columns = {
        "actions": rng.integers(0, 3, (steps, envs)),
        "rewards": rng.normal(size=(steps, envs)).astype(np.float32),
        "terminated": terminated,
        "truncated": truncated,
        "valid": valid,
        "action_dist_inputs": rng.normal(size=(steps, envs, 3)).astype(np.float32),
    }
    all_obs = rng.normal(size=(steps + 1, envs, 2)).astype(np.float32)
    successors = rng.normal(size=(len(index), 2)).astype(np.float32)
    episodes = EpisodeStats([0.0, 1.0, 2.0], [0, 1, 2])
    return SampleBatch(all_obs, columns, index, successors, seed % 7, seed % 3, episodes)


def value_of(obs: np.ndarray) -> np.ndarray:
    """A value function of the observations of `made_batch`. It is linear."""
    return 2.0 * obs[..., 0] - 3.0 * obs[..., 1] + 1.0


#: Policies with options for each term of their losses.
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "a2c": ("a2c", {"entropy_coeff": 0.05, "vf_loss_coeff": 0.7}),
    "a2c, no entropy": ("a2c", {"entropy_coeff": 0.0}),
    "ppo": ("ppo", {"entropy_coeff": 0.05, "vf_loss_coeff": 0.7}),
    "ppo, KL penalty": ("ppo", {"entropy_coeff": 0.0, "kl_coeff": 0.3}),
    "ppo, clipped values": ("ppo", {"vf_clip_range": 0.1, "clip_param": 0.05}),
    "ppo, clipped errors": ("ppo", {"vf_clip_param": 0.5, "vf_clip_range": 0.1}),
    "appo, clipped errors": ("appo", {"vf_clip_param": 0.5}),
    "impala": ("impala", {"entropy_coeff": 0.05, "torch_optimizer": "adam"}),
    "appo": ("appo", {"entropy_coeff": 0.05, "kl_coeff": 0.3}),
    "decoupled ppo": ("decoupled_ppo", {"entropy_coeff": 0.05, "kl_coeff": 0.3}),
}


def split(column: np.ndarray, batches: list[SampleBatch]) -> list[np.ndarray]:
    """Splits a column `[max T, sum of N, ...]` into the parts of each batch."""
    bounds = np.cumsum([0] + [batch.shape[1] for batch in batches])
    return [
        column[: b.shape[0], low:][:, : b.shape[1]]
        for b, low in zip(batches, bounds[:-1], strict=True)
    ]


def gradient_of(loss: Tensor, policy: Policy) -> np.ndarray:
    parameters = list(policy.model.parameters())
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    pairs = zip(parameters, grads, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).ravel() for p, g in pairs]).numpy()


#: Normalisation of observations and of rewards.
BOTH = {"normalize_observations": True, "normalize_rewards": True}


def assert_equal_moments(got: Moments | None, expected: Moments) -> None:
    assert got is not None
    assert got.rows == expected.rows
    np.testing.assert_allclose(got.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(got.m2, expected.m2, rtol=1e-12)
