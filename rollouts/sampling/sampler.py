"""`VectorSampler`: steps a vector environment with a policy and writes down what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from polopt.common.episodes import EpisodeStats, episodes_of
from polopt.common.sample_batch import SampleBatch
from polopt.policies.actors import Actor
from polopt.rollouts.envs.guarding import FAULT_KEY
from polopt.rollouts.envs.making import autoreset_mode
from polopt.rollouts.envs.random_state import seed_spaces
from polopt.rollouts.envs.saving import (
    get_env_state,
    get_env_statistics,
    set_env_state,
    set_env_statistics,
)
from polopt.rollouts.sampling.fault_handling import SamplerFaults, env_seeds, has_parts
from polopt.rollouts.sampling.requests import Exploration
from polopt.rollouts.sampling.seeding import Seeds


class VectorSampler:
    """Makes fragments `[T, N]`, written step by step into arrays made once for each fragment.

    Episode ends are exact in every autoreset mode of Gymnasium:

    - *next-step*: the row after an end only resets; it is marked not `valid`. The observation it
      starts from is the true last one of the episode, so nothing else is needed.
    - *same-step*: the true last observation is taken from `infos["final_obs"]` and kept as the
      successor of the row that ended.
    - *disabled*: likewise, and the sampler resets what has ended itself.

    An environment that raises (see `FaultTolerantEnv`) costs its episode, which is in no
    statistics, and at most one row, which is not `valid`; the row before is bootstrapped from the
    observation it led to. A vector implementation of the environment's own that raises costs that
    for each of its environments.

    Args:
        env: of N environments. The sampler owns it and closes it.
        policy: acts; its encoder turns observations into arrays.
        fragment_length: T.
        seeds: for the environments and for action noise.
        faults: what to do about environments that raise; None: what a vector environment raises
            is raised.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: Actor,
        fragment_length: int,
        seeds: Seeds,
        faults: SamplerFaults | None = None,
    ) -> None:
        self.env = env
        self.policy = policy
        self.fragment_length = fragment_length
        self._mode = autoreset_mode(env)
        self._keep_steps: int | None = None
        self.faults = faults or SamplerFaults()
        self.restart(seeds)

    def restart(self, seeds: Seeds) -> None:
        """Begins new episodes and new random numbers; those under way are dropped."""
        self._rng = np.random.default_rng(seeds.actions)
        self._seeds = seeds
        self.reset(seeds.envs)

    def reset(self, seeds: list[int] | None = None) -> None:
        """Begins new episodes in all environments; what was under way is not counted as one.

        Args:
            seeds: one for each environment; None: the environments' random numbers go on.
        """
        given: Any = None if seeds is None else env_seeds(self.env, seeds)
        if seeds is not None:
            seed_spaces(self.env, seeds[0])
        try:
            obs, infos = self.env.reset(seed=given)
        except Exception as error:
            self.env, obs, infos = self.faults.rebuild(self.env, error, self._seeds)
        self.faults.check(self.env, obs)
        self.faults.note(infos)
        self._obs = self.policy.encoder.encode(obs).copy()
        self._resets_next = np.zeros(self.env.num_envs, dtype=bool)
        self._returns = np.zeros(self.env.num_envs)
        self._lengths = np.zeros(self.env.num_envs, dtype=np.int64)

    def stop_early(self, keep_steps: int) -> None:
        """Ends the fragment under way (or, if there is none, the next one) as soon as it has
        `keep_steps` steps. Called from another thread than `sample`'s."""
        self._keep_steps = max(1, keep_steps)

    def go_on(self) -> None:
        """Takes `stop_early` back."""
        self._keep_steps = None

    def sample(
        self,
        explore: bool | Exploration = True,
        steps: int | None = None,
        uniform: bool = False,
    ) -> SampleBatch:
        """One fragment of `fragment_length` steps, fewer if `stop_early` was called.

        Args:
            explore: how actions are chosen; True is `random`, False is `mode`.
            steps: T, instead of `fragment_length`.
            uniform: ignores the policy; actions are uniform over the action space. Their
                `action_dist_inputs` are 0 (which for categories is that distribution).

        Returns:
            `[T, N]`, with the columns that `SampleBatch` lists as made by sampling.
        """
        length, envs = steps or self.fragment_length, self.env.num_envs
        dist, encode = self.policy.dist, self.policy.encoder.encode
        choose = self._chooser(explore, uniform, length)
        all_obs = np.empty((length + 1, *self._obs.shape), dtype=self._obs.dtype)
        params = np.empty((length, envs, dist.num_params), dtype=np.float32)
        actions = np.empty((length, envs, *dist.action_shape), dtype=dist.action_dtype)
        rewards = np.empty((length, envs), dtype=np.float32)
        terminated = np.empty((length, envs), dtype=bool)
        truncated = np.empty((length, envs), dtype=bool)
        valid = np.ones((length, envs), dtype=bool)
        successors: list[tuple[int, np.ndarray]] = []  # (row number, observation)

        obs = all_obs[0] = self._obs
        resets = self._resets_next
        next_step = self._mode == AutoresetMode.NEXT_STEP
        sampled = length
        for t in range(length):
            if self._keep_steps is not None and t >= self._keep_steps:
                sampled = t
                break
            params[t], step_actions = choose(t, obs)
            actions[t] = step_actions
            try:
                raw, rewards[t], terminated[t], truncated[t], infos = self.env.step(
                    dist.to_env(step_actions)
                )
                if next_step:
                    valid[t] = ~resets
                    resets = terminated[t] | truncated[t]
                elif np.count_nonzero(over := terminated[t] | truncated[t]):
                    ended = np.flatnonzero(over)
                    finals, raw = self._finish(ended, raw, infos)
                    rows = (t * envs + ended).tolist()
                    successors.extend(zip(rows, finals, strict=True))
            except Exception as error:
                self.env, raw, infos = self.faults.rebuild(self.env, error, self._seeds, t)
                rewards[t], terminated[t], truncated[t] = 0.0, False, False
                resets = truncated[t].copy()
            if FAULT_KEY in infos:
                lost = self.faults.note(infos)
                valid[t] &= ~lost
                truncated[t] |= lost
            obs = all_obs[t + 1] = encode(raw)
        self.faults.step += sampled
        self.faults.check(self.env, raw)
        self._keep_steps = None
        self._obs, self._resets_next = obs.copy(), resets

        columns = {
            "actions": actions[:sampled],
            "rewards": rewards[:sampled],
            "terminated": terminated[:sampled],
            "truncated": truncated[:sampled],
            "valid": valid[:sampled],
            "action_dist_inputs": params[:sampled],
        }
        if next_step:
            columns["rewards"][~columns["valid"]] = 0.0  # what a reset row reports is no reward
        empty = np.empty((0, *obs.shape[1:]), dtype=obs.dtype)
        return SampleBatch(
            all_obs=all_obs[: sampled + 1],
            columns=columns,
            successor_index=np.array([row for row, _ in successors], dtype=np.int64),
            successor_obs=np.stack([o for _, o in successors]) if successors else empty,
            version=self.policy.version,
            episodes=self._count_episodes(columns),
            faults=self.faults.take(),
        )

    def _chooser(
        self, explore: bool | Exploration, uniform: bool, length: int
    ) -> Callable[[int, np.ndarray], tuple[Any, np.ndarray]]:
        """`(t, observations) -> (distribution parameters, actions)`, with all random numbers of
        the fragment drawn at once."""
        policy, dist, envs = self.policy, self.policy.dist, self.env.num_envs
        if uniform:
            drawn = dist.random(self._rng, length, envs)
            return lambda t, obs: (0.0, drawn[t])
        if explore == "mean":

            def by_mean(t: int, obs: np.ndarray) -> tuple[Any, np.ndarray]:
                params = policy.action_params(obs)
                return params, dist.mean(params)

            return by_mean
        draws = explore in (True, "random")
        noise = dist.draw_noise(self._rng, length, envs) if draws else None

        def by_policy(t: int, obs: np.ndarray) -> tuple[Any, np.ndarray]:
            params = policy.action_params(obs)
            return params, dist.sample(params, None if noise is None else noise[t])

        return by_policy

    def _finish(
        self, ended: np.ndarray, raw: Any, infos: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], Any]:
        """The true last observations of the environments that ended, and the batch of
        observations with those of their next episodes in their place."""
        if self._mode == AutoresetMode.SAME_STEP:
            encode_one = self.policy.encoder.encode_one
            return [encode_one(infos["final_obs"][n]) for n in ended], raw
        finals = list(self.policy.encoder.encode(raw)[ended].copy())
        mask = np.zeros(self.env.num_envs, dtype=bool)
        mask[ended] = True
        raw, reset_infos = self.env.reset(options={"reset_mask": mask})
        self.faults.note(reset_infos)
        return finals, raw

    @np.errstate(over="ignore", invalid="ignore")  # whoever reads the numbers looks at them first
    def _count_episodes(self, columns: Mapping[str, np.ndarray]) -> EpisodeStats:
        """The episodes that ended, by time and then by environment; carries the rest over."""
        returns = self._returns + np.cumsum(columns["rewards"], axis=0, dtype=np.float64)
        lengths = self._lengths + np.cumsum(columns["valid"], axis=0)
        returns_before, lengths_before = [0.0] * self.env.num_envs, [0] * self.env.num_envs
        ended_returns, ended_lengths = [], []
        ends = np.nonzero(columns["terminated"] | columns["truncated"])
        told = (ends[1], returns[ends], lengths[ends], columns["valid"][ends])
        for n, total, length, valid in zip(*(column.tolist() for column in told), strict=True):
            if valid:  # else the environment raised: no end
                ended_returns.append(total - returns_before[n])
                ended_lengths.append(length - lengths_before[n])
            returns_before[n], lengths_before[n] = total, length
        self._returns = returns[-1] - returns_before
        self._lengths = lengths[-1] - lengths_before
        return episodes_of(ended_returns, ended_lengths)

    def reset_some(self, envs: np.ndarray) -> None:
        """Begins new episodes; those under way are in no statistics.

        Args:
            envs: `[N]` bool: in which environments. Where only all can be reset, all are.
        """
        try:
            if has_parts(self.env) or self._mode == AutoresetMode.DISABLED:
                raw, infos = self.env.reset(options={"reset_mask": envs.copy()})
            else:
                envs = np.ones_like(envs)
                raw, infos = self.env.reset()
        except Exception as error:
            envs = np.ones_like(envs)
            self.env, raw, infos = self.faults.rebuild(self.env, error, self._seeds)
        self.faults.note(infos)
        mask = envs.reshape(-1, *[1] * (self._obs.ndim - 1))
        self._obs = np.where(mask, self.policy.encoder.encode(raw), self._obs)
        self._resets_next = self._resets_next & ~envs
        self._returns[envs], self._lengths[envs] = 0.0, 0

    def get_state(self) -> dict[str, Any] | None:
        """Where the environments stand, if they can say so (see `env_state`); None if not, and
        then a restored sampler starts new episodes."""
        env_state = get_env_state(self.env)
        if env_state is None:
            return None
        return {
            "env": env_state,
            "obs": self._obs.copy(),
            "resets_next": self._resets_next.copy(),
            "returns": self._returns.copy(),
            "lengths": self._lengths.copy(),
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `get_state` gave."""
        set_env_state(self.env, state["env"])
        self._obs = np.asarray(state["obs"])
        self._resets_next = np.asarray(state["resets_next"])
        self._returns = np.asarray(state["returns"])
        self._lengths = np.asarray(state["lengths"])
        self._rng.bit_generator.state = state["rng"]

    def get_statistics(self) -> list[dict[str, Any]]:
        """What the environments' wrappers have learned; see `env_state`."""
        return get_env_statistics(self.env)

    def set_statistics(self, saved: list[dict[str, Any]]) -> None:
        """Takes back what `get_statistics` gave."""
        set_env_statistics(self.env, saved)

    def close(self) -> None:
        """Closes the environments."""
        self.env.close()
