"""`VectorSampler`: steps a vector environment with a policy and records the transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from polopt.common.episodes import Episode
from polopt.common.progress import PROGRESS
from polopt.common.sample_batch import SampleBatch
from polopt.policies.acting_policy import ActingPolicy
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.env_api import range_check
from polopt.rollouts.envs.env_errors import EnvironmentAPIError
from polopt.rollouts.envs.env_state import (
    get_env_state,
    get_env_statistics,
    set_env_state,
    set_env_statistics,
)
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY, INFO_KEY
from polopt.rollouts.envs.own_copy import own_copy
from polopt.rollouts.envs.random_state import seed_spaces
from polopt.rollouts.envs.vector_env import autoreset_mode
from polopt.rollouts.sampling.discounted_returns import DiscountedReturns
from polopt.rollouts.sampling.episode_counter import EpisodeCounter
from polopt.rollouts.sampling.episode_steps import EpisodeSteps
from polopt.rollouts.sampling.fragment_columns import FragmentColumns
from polopt.rollouts.sampling.non_finite import find_non_finite, replace_unused, surely_finite
from polopt.rollouts.sampling.sample_request import ActionChooser, Exploration, action_chooser
from polopt.rollouts.sampling.sampler_faults import (
    SamplerFaults,
    checks_each_env,
    has_sub_envs,
    seed_argument,
)
from polopt.rollouts.sampling.seeds import Seeds


class VectorSampler:
    """Samples fragments `[T, N]` (T steps of N environments), and records episode ends exactly in
    every autoreset mode of Gymnasium. A row is one step of one environment.

    - *next-step*: the step after the end of an episode only resets the environment. The row of this
      step is called a reset row, and its `valid` is False. Its observation is the last observation
      of the episode.
    - *same-step*: the sampler reads the last observation from `infos["final_obs"]`, and stores it
      in `SampleBatch.successor_obs`, as the next observation of the row in which the episode ended.
    - *disabled*: the sampler resets the environments whose episodes ended. It also stores the last
      observation in `SampleBatch.successor_obs`.

    The policy's memory is 0 at the first observation of each episode. In next-step mode, the policy
    also reads the last observation of each episode, in the reset row.

    If an environment raises an exception (see `FaultTolerantEnv`), its current episode ends,
    and is missing in the statistics of episodes. The exception loses at most one row, whose `valid`
    is False. The row before the lost row bootstraps from the value of its own next observation. If
    the vector environment itself raises, this happens to all N environments.

    Args:
        env: a vector of N environments. The sampler closes it.
        policy: the policy that chooses actions. Its encoder converts observations to rows.
        fragment_length: the number T of steps in one fragment.
        seeds: the seeds of the environments and of the action noise.
        faults: handles exceptions of the vector environment. `None` means that the exceptions
            propagate.

    Attributes:
        stop_after: a function that is called before each step. It returns the number of steps after
            which the fragment ends early, or None if the fragment does not end early. A fragment
            has at least one step.
        ended: a list to which the sampler adds the episodes that end, ordered by step and then by
            environment. `None` means that the sampler does not keep episodes.
        steps: an object that receives each step of each environment, except reset rows and lost
            steps. `None` means that no object receives the steps.

    Raises:
        EnvironmentFailedError: if the environments cannot be reset, or break Gymnasium's API.
        Exception: any exception of the vector environment, if `faults` was not passed.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        policy: ActingPolicy,
        fragment_length: int,
        seeds: Seeds,
        faults: SamplerFaults | None = None,
    ) -> None:
        self.env = env
        self.policy = policy
        self.fragment_length = fragment_length
        self._mode = autoreset_mode(env)
        self._next_step = self._mode == AutoresetMode.NEXT_STEP
        self.stop_after: Callable[[], int | None] = lambda: None
        self.ended: list[Episode] | None = None
        self.steps: EpisodeSteps | None = None
        self._strict = True  # whether the user's `np.seterr` settings may raise exceptions
        self.faults = faults or SamplerFaults()
        self.faults.mask = policy.mask
        self.restart(seeds)

    def restart(self, seeds: Seeds) -> None:
        """Starts new episodes with new seeds. Discards the current episodes."""
        self._rng = np.random.default_rng(seeds.actions)
        self._seeds = seeds
        self._place = (int(seeds.actions.generate_state(1, np.uint64)[0]), 0)
        self.reset(seeds.envs)

    def reset(self, seeds: list[int] | None = None) -> None:
        """Starts new episodes in all environments. Discards the current episodes.

        Args:
            seeds: `[N]`, one seed for each environment. `None` means that the random generators of
                the environments continue without a new seed.
        """
        given: Any = None if seeds is None else seed_argument(self.env, seeds)
        if seeds is not None:
            seed_spaces(self.env, seeds[0])
        try:
            obs, infos = self.env.reset(seed=given)
            self.faults.check_masks(self.env, obs)
        except Exception as error:
            self.env, obs, infos = self.faults.rebuild(self.env, error, self._seeds)
        self.faults.check(self.env, obs)
        self.faults.note(infos)
        self._obs = self.policy.encoder.rows(obs).copy()
        self._resets_next = np.zeros(self.env.num_envs, dtype=bool)
        self._memory = self._no_memory()
        integers = range_check(self.env.single_observation_space) is not None
        self._checks_each_step = integers and not checks_each_env(self.env)
        self._episodes = EpisodeCounter(self.env.num_envs)
        self._returns = DiscountedReturns(self.env.num_envs)
        self.leave_gap()

    def sample(
        self,
        explore: bool | Exploration = True,
        steps: int | None = None,
        uniform: bool = False,
    ) -> SampleBatch:
        """Samples one fragment of `steps` steps, or fewer if `stop_after` ends it early.

        Args:
            explore: see `Exploration`. True means `random`, and False means `mode`.
            steps: the number T of steps. `None` means `fragment_length`.
            uniform: whether to ignore the policy and draw uniform actions. Without an action mask,
                `ActionDistribution.random` draws the actions, and `action_dist_inputs` are 0. With
                a mask, `ActionDistribution.random_allowed` returns both.

        Returns:
            a batch `[T, N]` with the columns of `SampleBatch` that exist before
            `Policy.postprocess`.

        Raises:
            EnvironmentFailedError: if an environment fails repeatedly, breaks Gymnasium's API, or
                needs a missing package.
            ConfigError: if `explore` is `mean`, but the actions have no mean.
            Exception: any exception of the vector environment, if `faults` was not passed. Also any
                exception of the object in the attribute `steps`.
        """
        length, envs = steps or self.fragment_length, self.env.num_envs
        self._strict = not {"ignore", "warn"}.issuperset(np.geterr().values())
        choose = action_chooser(self.policy, self._rng, explore, uniform, (length, envs))
        rows = FragmentColumns(length, self._obs, self.policy.dist)
        per_env = {"state": self._memory.copy()} if self.policy.state_size else {}
        if self.steps is not None:
            self.steps.begin_fragment(self._episodes.get_state())
        sampled = 0
        while sampled < length:
            keep_steps = self.stop_after()
            if keep_steps is not None and sampled >= max(1, keep_steps):
                break
            raw = self._step(sampled, rows, choose)
            PROGRESS.note()
            sampled += 1
        self.faults.step += sampled
        self.faults.check(self.env, raw)
        self._obs = rows.all_obs[sampled].copy()
        if self._next_step:
            self._resets_next = rows.mark_resets(sampled, self._resets_next)
        rows.discard_lost()
        columns, successors = rows.columns(sampled), rows.successors()
        if self._discard_non_finite(rows, columns, successors):
            successors = rows.successors()
        episodes, places = self._episodes.add(columns)
        if self.ended is not None:
            for (t, n), total, num_steps in zip(places, *episodes, strict=True):
                terminated = bool(columns["terminated"][t, n])
                info = rows.last_infos.get((t, n), {})
                told = self.steps
                data = {} if told is None else told.data_of.get((t, n), {})
                metrics = {} if told is None else told.metrics_of.get((t, n), {})
                self.ended.append(
                    Episode(
                        n, float(total), int(num_steps), terminated, info, data, metrics=metrics
                    )
                )
        normalizer = self.policy.normalizer
        if normalizer is not None:
            per_env |= normalizer.per_env(envs)
        batch = SampleBatch(
            all_obs=rows.all_obs[: sampled + 1],
            columns=columns,
            **successors,
            version=self.policy.version,
            episodes=episodes,
            faults=self.faults.take(),
            per_env=per_env,
            place=self._place,
        )
        self._place = (self._place[0], self._place[1] + sampled)
        if normalizer is not None:
            returns = self._returns.add(columns, normalizer.gamma)
            batch.moments = normalizer.moments_of(batch, returns)
        return batch

    def _discard_non_finite(
        self,
        rows: FragmentColumns,
        columns: dict[str, np.ndarray],
        successors: dict[str, Any],
    ) -> bool:
        """Discards the rows of environments with non-finite values, and begins new episodes there.
        The rows of the other environments stay. If the values of all environments are not finite,
        or if the vector cannot reset a single environment, the caller has to drop the fragment.

        Args:
            rows: the rows of the fragment.
            columns: the columns `[T, N, ...]` of the sampled steps, as views of `rows`.
            successors: what `rows.successors()` returned.

        Returns:
            whether rows were discarded.
        """
        steps = len(columns["rewards"])
        batch = SampleBatch(rows.all_obs[: steps + 1], columns, **successors, version=0)
        problem, bad = find_non_finite(batch)
        if not problem or bad.all():
            return False
        if not (has_sub_envs(self.env) or self._mode == AutoresetMode.DISABLED):
            return False
        self.faults.discarded(problem, rows.discard_envs(bad, steps))
        self._resets_next &= ~bad
        self.reset_some(bad)
        rows.all_obs[steps][bad] = self._obs[bad]
        return True

    def _step(self, t: int, rows: FragmentColumns, choose: ActionChooser) -> Any:
        """Steps all environments once, and records this step `t` and the next observations. Returns
        the next observations before encoding."""
        rewards, terminated, truncated = rows.rewards, rows.terminated, rows.truncated
        # The user's `np.seterr` settings should affect only the environments. Replacing the
        # settings takes time in each step, so they are replaced only if they may raise.
        choose_here = _quietly(self._choose) if self._strict else self._choose
        actions = choose_here(t, rows, choose)
        ended: Any = ()
        # An exception in this block counts as a fault of the environments, and ends their episodes.
        try:
            raw, given, terminated[t], truncated[t], infos = self.env.step(actions)
            if self._strict:
                _copy_into(rewards[t], given)
            else:
                rewards[t] = given
        except Exception as error:
            raw, infos = self._rebuild(error, t, rows)
        self._note_step(t, rows, infos)  # before a reset, so callbacks see how episodes end
        try:
            if not self._next_step:
                over = terminated[t] | truncated[t]
                if np.count_nonzero(over):
                    ended = over.nonzero()[0]
                    last_obs, raw = self._finish(ended, raw, infos)
            if self.faults.mask is not None:
                needed = ~(terminated[t] | truncated[t]) if self._next_step else True
                self.faults.check_masks(self.env, raw, needed)
        except Exception as error:
            raw, infos = self._rebuild(error, t, rows)
            ended = ()
            self._note_step(t, rows, infos)
        if len(ended):
            rows.add_last_observations(t, ended, last_obs)
        # Integers outside of their range would break the encoding. Observations with integers are
        # therefore checked in each step, and other observations once per fragment.
        if self._checks_each_step:
            self.faults.check(self.env, raw)
        rows.all_obs[t + 1] = obs = self.policy.encoder.rows(raw)
        if self._next_step and np.count_nonzero(terminated[t]) and not surely_finite(obs):
            over, (used, last) = terminated[t], rows.all_obs[t : t + 2]
            last[over] = replace_unused(used[over], last[over])
        if self.policy.state_size:
            self._memory[self._begins(t + 1, rows)] = 0.0
        return raw

    def _rebuild(
        self, error: Exception, t: int, rows: FragmentColumns
    ) -> tuple[Any, dict[str, Any]]:
        """Replaces the vector environment after an exception in step `t`, which is lost. Returns
        the first observations of the new vector, and infos that say so."""
        self.env, raw, infos = self.faults.rebuild(self.env, error, self._seeds, t)
        rows.rewards[t], rows.terminated[t], rows.truncated[t] = 0.0, False, False
        return raw, infos

    def _note_step(self, t: int, rows: FragmentColumns, infos: Mapping[str, Any]) -> None:
        """Keeps the infos and the faults of step `t`, and passes the step to callbacks."""
        if self.ended is not None:
            for n in (rows.terminated[t] | rows.truncated[t]).nonzero()[0].tolist():
                rows.last_infos[t, n] = self._info(infos, n, is_last=True)
        if FAULT_KEY in infos:
            rows.lost[t] = self.faults.note(infos)
        if self.steps is not None:
            self._tell(t, rows, infos, self.steps)

    def _choose(self, t: int, rows: FragmentColumns, choose: ActionChooser) -> Any:
        """Chooses and records the actions of step `t`, and returns them for the environment."""
        rows.params[t], actions, self._memory = choose(t, rows.all_obs[t], self._memory)
        rows.actions[t] = actions
        return self.policy.dist.to_env(actions)

    def _begins(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool, True for each environment in which an episode begins with the
        observation before step `t`. `t` is at least 1. `gae.episode_starts` computes the same for a
        whole batch."""
        if not self._next_step:
            begins = rows.terminated[t - 1] | rows.truncated[t - 1]
        elif t == 1:
            begins = self._resets_next
        else:
            begins = rows.terminated[t - 2] | rows.truncated[t - 2]
        return begins | rows.lost[t - 1] if t - 1 in rows.lost else begins

    def _no_memory(self) -> np.ndarray:
        return np.zeros((self.env.num_envs, self.policy.state_size), dtype=np.float32)

    def _finish(
        self, ended: np.ndarray, raw: Any, infos: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], Any]:
        """Handles episodes that ended, in the modes same-step and disabled.

        Args:
            ended: `[K]`, the indices of the environments whose episodes ended.
            raw: the observations of the step, as the environment returned them.
            infos: the infos of the step.

        Returns:
            the K last observations (as rows) of the ended episodes, and the current observations of
            all environments before encoding. In the K environments, the current observation is the
            first observation of the next episode.
        """
        if self._mode == AutoresetMode.SAME_STEP:
            return self._final_observations(ended, infos), raw
        last_obs = list(self.policy.encoder.rows(raw)[ended].copy())
        mask = np.zeros(self.env.num_envs, dtype=bool)
        mask[ended] = True
        raw, reset_infos = self.env.reset(options={"reset_mask": mask})
        self.faults.note(reset_infos)
        return last_obs, raw

    def _final_observations(self, ended: np.ndarray, infos: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the rows of the K observations in `infos["final_obs"]`. They are copies, because
        the environment may use its arrays again.

        Raises:
            EnvironmentAPIError: the infos do not contain such observations.
        """
        encoder = self.policy.encoder
        try:
            last = [_item(encoder.space, infos["final_obs"], n) for n in ended]
            return [encoder.row(one).copy() for one in last]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EnvironmentAPIError(
                f"{self.faults.place} has the autoreset mode same_step. If episodes end in a step, "
                "infos['final_obs'] of this step must contain the last observation of each of these"
                f" episodes: {type(error).__name__}: {error}"
            ) from error

    def _tell(
        self, t: int, rows: FragmentColumns, infos: Mapping[str, Any], steps: EpisodeSteps
    ) -> None:
        """Adds step `t` of each environment to `steps`. Skips reset rows, because they do not
        belong to an episode. Discards the episodes of environments whose step was lost."""
        terminated, done = rows.terminated[t], rows.terminated[t] | rows.truncated[t]
        lost = np.broadcast_to(rows.lost.get(t, np.False_), done.shape)
        resets = np.zeros_like(done)
        if self._next_step:
            resets = rows.terminated[t - 1] | rows.truncated[t - 1] if t else self._resets_next
        for n in range(self.env.num_envs):
            if lost[n]:
                steps.discard(n)
            elif not resets[n]:
                info = rows.last_infos.get((t, n)) if done[n] else None
                if info is None and (done[n] or steps.needs_infos):
                    info = self._info(infos, n, is_last=bool(done[n]))
                reward = float(rows.rewards[t, n])
                steps.add(t, n, reward, bool(terminated[n]), bool(done[n]), info or {})

    def _info(self, infos: Mapping[str, Any], n: int, is_last: bool) -> dict[str, Any]:
        """Returns the info of one step of environment `n`.

        Args:
            infos: the infos of all environments in this step.
            n: the index of the environment.
            is_last: whether the step ended the episode.
        """
        if is_last and self._mode == AutoresetMode.SAME_STEP:
            infos = infos.get("final_info", {})
        if not isinstance(infos, Mapping):
            infos = {}
        if INFO_KEY in infos:
            found: dict[str, Any] = infos[INFO_KEY][n].info
            return found
        # An environment's own vector implementation returns a dict of arrays [N, ...]. For an array
        # "x", it may also return "_x" [N] bool, which is True for the environments with a value.
        kept = {}
        for key, values in infos.items():
            if not isinstance(key, str) or key.startswith("_"):
                continue
            if isinstance(values, np.ndarray) and values.shape[:1] == (self.env.num_envs,):
                has: Any = infos.get(f"_{key}")
                if np.shape(has) != (self.env.num_envs,) or has[n]:
                    kept[key] = (
                        own_copy(values[n]) if values.dtype == object else np.array(values[n])
                    )
        return kept

    def reset_some(self, envs: np.ndarray) -> None:
        """Starts new episodes in some environments. Their current episodes are discarded.

        Args:
            envs: `[N]` bool, True for the environments to reset, at least one. If the vector can
                only reset all environments together, all environments are reset. The caller calls
                `leave_gap` unless the rows before the reset are not `valid`.
        """
        try:
            if has_sub_envs(self.env) or self._mode == AutoresetMode.DISABLED:
                raw, infos = self.env.reset(options={"reset_mask": envs.copy()})
            else:
                envs = np.ones_like(envs)
                raw, infos = self.env.reset()
            self.faults.check_masks(self.env, raw, envs)
        except Exception as error:
            envs = np.ones_like(envs)
            self.env, raw, infos = self.faults.rebuild(self.env, error, self._seeds)
            self.leave_gap()
        self.faults.note(infos)
        mask = envs.reshape(-1, *[1] * (self._obs.ndim - 1))
        self._obs = np.where(mask, self.policy.encoder.rows(raw), self._obs)
        self._resets_next = self._resets_next & ~envs
        self._memory = np.where(envs[:, None], np.float32(0.0), self._memory)
        self._episodes.discard(envs)
        self._returns.discard(envs)

    def leave_gap(self) -> None:
        """Changes the place of the next fragment (see `SampleBatch.place`). The next fragment then
        does not count as the continuation of the previous fragment."""
        self._place = (self._place[0], self._place[1] + 1)

    def get_state(self) -> dict[str, Any] | None:
        """Returns the state of the environments (see `polopt.rollouts.envs.env_state`), of the
        current episodes, and of the random generator. Returns None if the environments cannot
        return their state."""
        env_state = get_env_state(self.env)
        if env_state is None:
            return None
        return {
            "env": env_state,
            "obs": self._obs.copy(),
            "resets_next": self._resets_next.copy(),
            "memory": self._memory.copy(),
            **self._episodes.get_state(),
            "discounted_returns": self._returns.get_state(),
            "rng": self._rng.bit_generator.state,
            "place": list(self._place),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned. If the environments cannot restore their
        state, all environments begin new episodes. This is also the case if an environment has to
        be reset in its next step, but the autoreset mode is not next-step any more, and if an older
        version of polopt saved the observations in another dtype."""
        resets = np.asarray(state["resets_next"], dtype=bool)
        fits = len(resets) == self.env.num_envs and (self._next_step or not resets.any())
        obs = np.array(state["obs"])
        fits = fits and set_env_state(self.env, state["env"], resets)
        if not fits or (obs.dtype, obs.shape) != (self._obs.dtype, self._obs.shape):
            self.reset()
            return
        self._obs = obs
        self._resets_next = resets
        self._memory = np.asarray(state.get("memory", self._no_memory()))
        self._episodes.set_state(state)
        if "discounted_returns" in state:  # not in older states
            self._returns.set_state(state["discounted_returns"])
        self._rng.bit_generator.state = state["rng"]
        stream, step = state.get("place", self._place)  # not in older states
        self._place = (int(stream), int(step))

    def get_statistics(self) -> dict[str, Any]:
        """Returns the running statistics of the wrappers. See `get_env_statistics`."""
        return get_env_statistics(self.env)

    def set_statistics(self, saved: dict[str, Any]) -> None:
        """Restores statistics that `get_statistics` returned."""
        set_env_statistics(self.env, saved)

    def close(self) -> None:
        """Closes the environments. Exceptions that they raise are logged."""
        close_env(self.env, self.faults.place)


_quietly = np.errstate(all="ignore")


@_quietly  # a float64 reward may overflow in float32
def _copy_into(row: np.ndarray, values: Any) -> None:
    row[:] = values


def _item(space: spaces.Space[Any], batch: Any, index: int) -> Any:
    """Returns one observation of a batch. A batch of Dict or Tuple observations is an array of
    observations, or a dict or tuple of batches."""
    if isinstance(space, spaces.Dict) and isinstance(batch, Mapping):
        return {key: _item(part, batch[key], index) for key, part in space.items()}
    if isinstance(space, spaces.Tuple) and isinstance(batch, tuple):
        return tuple([_item(*both, index) for both in zip(space, batch, strict=True)])
    return batch[index]
