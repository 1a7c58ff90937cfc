"""Toy environments whose values have a closed form, and functions that sample from them."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.policies.a2c import A2CPolicy
from polopt.policies.appo import AppoPolicy
from polopt.policies.decoupled_ppo import DecoupledPPOPolicy
from polopt.policies.impala import ImpalaPolicy
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.seeds import worker_seeds

# One thread, as in workers, because more threads than cores slow each other down.
limit_threads(1)

POLICIES: dict[str, type[Policy]] = {
    "a2c": A2CPolicy,
    "appo": AppoPolicy,
    "decoupled_ppo": DecoupledPPOPolicy,
    "impala": ImpalaPolicy,
    "ppo": PPOPolicy,
}
AUTORESET = ("next_step", "same_step", "disabled")


class Clock(gymnasium.Env[int, int]):
    """An environment with the reward 1 at every step. The observation is the time since the reset.

    Args:
        length: the number of steps in an episode.
        ends: how an episode ends: `terminated`, `truncated` or `both`.
        longest: the largest time in the observation space. The default is `length`.
    """

    def __init__(self, length: int, ends: str = "truncated", longest: int | None = None) -> None:
        self.observation_space = spaces.Discrete((longest or length) + 1)
        self.action_space = spaces.Discrete(2)
        self.length = length
        self.ends = ends
        self.time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.time += 1
        over = self.time >= self.length
        terminated = over and self.ends in ("terminated", "both")
        truncated = over and self.ends in ("truncated", "both")
        return self.time, 1.0, terminated, truncated, {}


class Drift(gymnasium.Env[np.ndarray, int]):
    """A random walk that actions shift. Episodes end at random. The state of the environment can be
    saved and restored.

    Args:
        config: the config, which is stored as `context` and not used.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = spaces.Discrete(3, start=-1)

    def __init__(self, config: Any = None) -> None:
        self.context = config
        self.position = np.zeros(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.position = self.np_random.normal(size=3)
        return self.position.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.position = self.position + 0.1 * float(action) + self.np_random.normal(size=3)
        fate = self.np_random.random()
        obs = self.position.astype(np.float32)
        return obs, float(self.position[0]), bool(fate < 0.1), bool(fate > 0.9), {}

    def get_checkpoint_state(self) -> dict[str, Any]:
        return {"rng": self.np_random.bit_generator.state, "position": self.position.tolist()}

    def set_checkpoint_state(self, state: dict[str, Any]) -> None:
        self.np_random.bit_generator.state = state["rng"]
        self.position = np.array(state["position"])


class GlobalRandom(gymnasium.Env[np.ndarray, int]):
    """An environment that draws numbers from the global generators of `random`, NumPy and torch and
    from its spaces, but not from its own generator. An observation `[5]` has one number from each
    of these sources, and one number that the constructor has drawn.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (5,), np.float32)
        self.action_space = spaces.Discrete(1000)
        self.layout = np.random.random()  # noqa: NPY002

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        return self.draw(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return self.draw(), random.random(), False, random.random() < 0.1, {}

    def draw(self) -> np.ndarray:
        numbers = [
            random.random(),
            np.random.random(),  # noqa: NPY002
            torch.rand(()).item(),
            self.action_space.sample() / 1000 + self.observation_space.sample()[0],
            self.layout,
        ]
        return np.array(numbers, dtype=np.float32)


class TwoNumbers(gymnasium.Env[np.ndarray, Any]):
    """An environment that only has spaces, for policies and `random_batch`."""

    def __init__(self, action_space: gymnasium.Space[Any] | None = None) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(3)


def sync_clocks(lengths: list[int], ends: str, autoreset: str) -> SyncVectorEnv:
    """Makes a vector of clocks with different lengths. Their episodes end at different steps."""
    makers = [lambda n=n: Clock(n, ends, longest=max(lengths)) for n in lengths]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[autoreset.upper()])


def make_policy(name: str, env: Any, seed: int = 0, **options: Any) -> Policy:
    """Makes a policy for an environment or a vector environment. `options` has the keys of a user's
    config."""
    cls = POLICIES[name]
    observations = getattr(env, "single_observation_space", env.observation_space)
    actions = getattr(env, "single_action_space", env.action_space)
    return cls(observations, actions, cls.config_class.parse(options), seed=seed)


def make_sampler(env: Any, policy: Policy, length: int, seed: int = 0) -> VectorSampler:
    """Makes a sampler of fragments with `length` steps."""
    return VectorSampler(env, policy, length, worker_seeds(seed, 0, 0, env.num_envs))


def set_value_function(policy: Policy, values: Any) -> None:
    """Sets the value function. If `values` is a number, the value function is constant. If `values`
    is a table `[D]`, the policy must have one-hot observations and no hidden layers. All other
    parameters become 0."""
    with torch.no_grad():
        policy.flat.params.zero_()
        if np.ndim(values) == 0:
            policy.model.value_head.bias.fill_(float(values))
        else:
            policy.model.value_head.weight[0] = torch.as_tensor(values, dtype=torch.float32)


def random_batch(
    policy: Policy, steps: int, envs: int, rng: np.random.Generator, valid_share: float = 1.0
) -> SampleBatch:
    """Makes a postprocessed batch with random observations, random episode ends, and actions of
    `policy`."""
    all_obs = rng.normal(size=(steps + 1, envs, *policy.encoder.shape)).astype(np.float32)
    flat_obs = all_obs[:-1].reshape(steps * envs, *policy.encoder.shape)
    params = policy.action_params(flat_obs)
    actions = policy.dist.sample(params, policy.dist.draw_noise(rng, len(params)))
    columns = {
        "actions": actions.reshape(steps, envs, *policy.dist.action_shape),
        "rewards": rng.normal(size=(steps, envs)).astype(np.float32),
        "terminated": rng.random((steps, envs)) < 0.1,
        "truncated": np.zeros((steps, envs), dtype=bool),
        "valid": rng.random((steps, envs)) < valid_share,
        "action_dist_inputs": params.reshape(steps, envs, -1),
    }
    none = np.zeros(0, dtype=np.int64)
    batch = SampleBatch(all_obs, columns, none, all_obs[:0, 0], version=policy.version)
    if policy.normalizer is not None:
        batch.per_env |= policy.normalizer.per_env(envs)
    if policy.state_size:
        state = rng.normal(size=(envs, policy.state_size))
        batch.per_env["state"] = state.astype(np.float32)
    return policy.postprocess(batch)


NESTED = spaces.Dict(
    {
        "at": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
        "picture": spaces.Box(0, 255, (3, 3, 1), np.uint8),
        "pair": spaces.Tuple([spaces.Discrete(3, start=4), spaces.MultiDiscrete([2, 3])]),
        "time": spaces.Box(-np.inf, np.inf, (), np.float64),
    }
)


class Samples(gymnasium.Env[Any, int]):
    """An environment that returns random observations of a space. Episodes have four steps."""

    action_space = spaces.Discrete(2)

    def __init__(self, space: Space[Any], spoiled: bool = False) -> None:
        self.observation_space, self.spoiled = space, spoiled

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self.look(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.look(), 1.0, False, self.time >= 4, {}

    def look(self) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        observation = self.observation_space.sample()
        if self.spoiled and self.time == 2:
            observation["at"][1, 0] = np.nan
        return observation


class TimestampEnv(gymnasium.Env[np.ndarray, int]):
    """An environment whose observations are `[time, process id]`. The time is the monotonic clock,
    which all processes of a machine share.

    Args:
        step_s: the number of seconds that a step takes.
        slow: the index of the slow worker.
        slow_s: the number of seconds that a step takes in the slow worker.
        length: the number of steps in an episode.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)

    def __init__(self, config: Any) -> None:
        slow = config.get("slow") == config.worker_index
        self.step_s = config.get("slow_s" if slow else "step_s", 0.0)
        self.length = config.get("length", 10**9)
        self.time = 0

    def _obs(self) -> np.ndarray:
        return np.array([time.monotonic(), os.getpid()])

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.step_s)
        self.time += 1
        return self._obs(), float(action), self.time >= self.length, False, {}
