"""`VectorSampler`: steps a vector environment with a policy and records the transitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
from gymnasium.vector import VectorEnv

from polopt.common.episodes import Episode, EpisodeStats
from polopt.common.progress import PROGRESS
from polopt.common.sample_batch import SampleBatch
from polopt.policies.acting_policy import ActingPolicy
from polopt.rollouts.envs.agent_vector_env import SlotGroup
from polopt.rollouts.envs.env_api import range_check
from polopt.rollouts.envs.env_errors import close_env
from polopt.rollouts.envs.env_sources import own_copy
from polopt.rollouts.envs.env_state import (
    get_env_state,
    get_env_statistics,
    set_env_state,
    set_env_statistics,
)
from polopt.rollouts.envs.fault_tolerant_env import FAULT_KEY, INFO_KEY
from polopt.rollouts.sampling.autoreset import NextStep, autoreset_of, item_of
from polopt.rollouts.sampling.fragment_columns import FragmentColumns
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.open_transitions import OpenTransitions
from polopt.rollouts.sampling.running_episodes import (
    DiscountedReturns,
    EpisodeCounter,
    EpisodeSteps,
)
from polopt.rollouts.sampling.sampler_faults import (
    SamplerFaults,
    checks_each_env,
    has_sub_envs,
    seed_argument,
)
from polopt.rollouts.seeds import Seeds, seed_spaces

#: How actions are chosen from the policy's distribution, with the names of TorchRL's
#: `ExplorationType`. `random` samples an action. `mode` and `deterministic` choose the most likely
#: action. `mean` chooses the mean of the distribution, which categorical actions do not have.
Exploration = Literal["random", "mode", "mean", "deterministic"]
#: A function `(t, observations [N, ...], memory [N, S]) -> (distribution parameters [N, P],
#: actions [N, ...], memory [N, S])`.
ActionChooser = Callable[[int, np.ndarray, np.ndarray], tuple[Any, np.ndarray, np.ndarray]]


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

    `autoreset` has one class for each mode.

    The policy's memory is 0 at the first observation of each episode. In next-step mode, the policy
    also reads the last observation of each episode, in the reset row.

    If an environment raises an exception (see `FaultTolerantEnv`), its current episode ends,
    and is missing in the statistics of episodes. The exception loses at most one row, whose `valid`
    is False. The row before the lost row bootstraps from the value of its own next observation. If
    the vector environment itself raises, this happens to all N environments.

    If the vector is a `SlotGroup`, each of its N slots is an environment for the sampler. A
    fragment then has a row for each transition that closed in its steps, and the rows of each slot
    follow each other without gaps. So T is the largest number of rows of a slot, and may be smaller
    than the number of steps.

    Args:
        env: a vector of N environments. The sampler closes it.
        policy: the policy that chooses actions. Its encoder converts observations to rows.
        fragment_length: the number T of steps in one fragment.
        seeds: the seeds of the environments and of the action noise.
        faults: handles exceptions of the vector environment. `None` means that the exceptions
            propagate.
        in_group: whether a `GroupSampler` steps and resets the environments.

    Attributes:
        stop_after: a function that is called before each step. It returns the number of steps after
            which the fragment ends early, or None if the fragment does not end early. A fragment
            has at least one step.
        ended: a list to which the sampler adds the episodes that end, ordered by step and then by
            environment. `None` means that the sampler does not keep episodes.
        steps: an object that receives each step of each environment, except reset rows and lost
            steps. `None` means that no object receives the steps.
        num_steps: the number of steps of the last fragment.
        act: chooses and records the actions of the next step of a fragment that has begun, and
            returns them for the environment.

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
        in_group: bool = False,
    ) -> None:
        self.env = env
        self._in_group = in_group
        self.policy = policy
        self.fragment_length = fragment_length
        self.stop_after: Callable[[], int | None] = lambda: None
        self.ended: list[Episode] | None = None
        self.steps: EpisodeSteps | None = None
        self.num_steps = 0
        self._length = 0
        # The observations after the last step or reset, before encoding. None if not known.
        self._raw: Any = None
        self._strict = True  # whether the user's `np.seterr` settings may raise exceptions
        self.faults = faults or SamplerFaults()
        self.faults.mask = policy.mask
        self._autoreset = autoreset_of(env, policy.encoder, self.faults)
        self.reseed(seeds)
        if not self._in_group:  # `GroupSampler` resets the environments of all policies together
            self.reset(seeds.envs)

    def restart(self, seeds: Seeds) -> None:
        """Starts new episodes with new seeds. Discards the current episodes."""
        self.reseed(seeds)
        self.reset(seeds.envs)

    def reseed(self, seeds: Seeds) -> None:
        """Draws actions from a new generator."""
        self._rng = np.random.default_rng(seeds.actions)
        self._seeds = seeds
        self._place = (int(seeds.actions.generate_state(1, np.uint64)[0]), 0)

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
        self.begin_episodes(obs, infos)

    def begin_episodes(self, obs: Any, infos: Mapping[str, Any]) -> None:
        """Begins with the results of a reset of all environments. Discards the current episodes."""
        self.faults.check(self.env, obs)
        self.faults.note(infos)
        self._raw = obs
        self._obs = self.policy.encoder.rows(obs).copy()
        self._autoreset.pending = np.zeros(self.env.num_envs, dtype=bool)
        self._memory = self._no_memory()
        integers = range_check(self.env.single_observation_space) is not None
        self._checks_each_step = integers and not checks_each_env(self.env)
        self._episodes = EpisodeCounter(self.env.num_envs)
        self._returns = DiscountedReturns(self.env.num_envs)
        self._open = OpenTransitions.of(self.env, self.policy)
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
        self.begin_fragment(explore, steps, uniform)
        while self.goes_on():
            self._step()
        return self.end_fragment()

    def begin_fragment(self, explore: bool | Exploration, steps: int | None, uniform: bool) -> None:
        """Begins a fragment. `sample` describes the arguments."""
        length = steps or self.fragment_length
        # The user's `np.seterr` settings should affect only the environments. Replacing the
        # settings takes time in each step, so they are replaced only if they may raise.
        self._strict = not {"ignore", "warn"}.issuperset(np.geterr().values())
        self.act = _quietly(self._choose) if self._strict else self._choose
        shape = (length, self.env.num_envs)
        self._chooser = action_chooser(self.policy, self._rng, explore, uniform, shape)
        self._rows = FragmentColumns(length, self._obs, self.policy.dist)
        self._per_env = {"state": self._first_memory()} if self.policy.state_size else {}
        if isinstance(self.env, SlotGroup) and not self._in_group:
            self.env.vector.steps = self.steps
        elif self.steps is not None:
            self.steps.begin_fragment(self._episodes.get_state())
            if self.steps.start is not None:
                self.act = self._starting(self.act, self.steps)
        self._length, self.num_steps = length, 0

    def goes_on(self) -> bool:
        """Returns whether the fragment has a further step. See `stop_after`."""
        if self.num_steps == self._length:
            return False
        keep_steps = self.stop_after()
        return keep_steps is None or self.num_steps < max(1, keep_steps)

    def end_fragment(self) -> SampleBatch:
        """Returns the fragment. See `sample`."""
        rows, envs, steps = self._rows, self.env.num_envs, self.num_steps
        self.faults.step += steps
        self.faults.check(self.env, self._raw)
        self._obs = rows.all_obs[steps].copy()
        self._autoreset.end_fragment(steps, rows)
        rows.discard_lost()
        if self._open is not None:
            steps = self._open.end_fragment(steps, rows)
        batch = self._finite_batch(rows, steps)
        batch.episodes, places = self._episodes.add(batch.columns)
        if isinstance(self.env, SlotGroup):
            self._take_agents(self.env, batch)
        elif self.ended is not None:
            self.ended += self._ended_episodes(rows, batch.episodes, places)
        batch.faults, batch.per_env, batch.place = self.faults.take(), self._per_env, self._place
        self._place = (self._place[0], self._place[1] + steps)
        normalizer = self.policy.normalizer
        if normalizer is not None:
            batch.per_env |= normalizer.per_env(envs)
            returns = self._returns.add(batch.columns, normalizer.gamma)
            batch.moments = normalizer.moments_of(batch, returns)
        return batch

    def _take_agents(self, env: SlotGroup, batch: SampleBatch) -> None:
        """Takes the episodes and the number of environment steps from environments with agents."""
        if self._in_group:
            batch.num_env_steps, batch.episodes = 0, EpisodeStats()  # `GroupSampler` takes them
            return
        batch.num_env_steps, env.vector.num_steps = env.vector.num_steps, 0
        ended, env.vector.episodes = env.vector.episodes, []
        batch.episodes = EpisodeStats.of(ended)
        if self.ended is not None:
            self.ended += ended

    def _first_memory(self) -> np.ndarray:
        """Returns the memory `[N, S]` before the first row of a fragment."""
        return self._memory.copy() if self._open is None else self._open.first_memory(self._memory)

    def _ended_episodes(
        self, rows: FragmentColumns, episodes: EpisodeStats, places: list[tuple[int, int]]
    ) -> Iterator[Episode]:
        """Describes the episodes that ended in a fragment, for `ended`.

        Args:
            rows: the rows of the fragment.
            episodes: their returns and lengths, from `EpisodeCounter.add`.
            places: the step and the environment at which each of them ended.
        """
        data, metrics = (
            ({}, {}) if self.steps is None else (self.steps.data_of, self.steps.metrics_of)
        )
        for place, total, num_steps in zip(places, episodes.returns, episodes.lengths, strict=True):
            yield Episode(
                place[1],
                float(total),
                int(num_steps),
                bool(rows.terminated[place]),
                rows.last_infos.get(place, {}),
                data.get(place, {}),
                metrics=metrics.get(place, {}),
            )

    def _finite_batch(self, rows: FragmentColumns, steps: int) -> SampleBatch:
        """Returns the batch of a fragment. Discards the rows of environments with non-finite
        values, and begins new episodes there. The rows of the other environments stay. If the
        values of all environments are not finite, or if the vector cannot reset a single
        environment, the caller has to drop the fragment.

        Args:
            rows: the rows of the fragment.
            steps: the number of sampled steps.
        """
        batch = rows.batch(steps, self.policy.version)
        problem, bad = find_non_finite(batch)
        if isinstance(self.env, SlotGroup):
            bad = self.env.whole_copies(bad)
        if problem and self._resets_some and not bad.all():
            self.faults.discarded(problem, rows.discard_envs(bad, steps))
            self._autoreset.pending &= ~bad
            self.reset_some(bad)
            rows.all_obs[steps][bad] = self._obs[bad]
            batch = rows.batch(steps, self.policy.version)
        return batch

    @property
    def _resets_some(self) -> bool:
        """Whether the vector can reset some of its environments without the others."""
        return not self._in_group and (self._autoreset.resets_some or has_sub_envs(self.env))

    def _step(self) -> None:
        """Steps all environments once."""
        actions = self.act()
        # An exception in these blocks counts as a fault of the environments, and ends their
        # episodes.
        try:
            results = self.env.step(actions)
            self._copy_results(results)
        except Exception as error:
            results = self._rebuild(error)
        self.take(results[0], results[4])

    def take_results(self, results: Any) -> None:
        """Records the results of a step. See `Env.step`."""
        self._copy_results(results)
        self.take(results[0], results[4])

    def _copy_results(self, results: Any) -> None:
        t, rows = self.num_steps, self._rows
        _, rewards, rows.terminated[t], rows.truncated[t], _ = results
        if self._strict:
            _copy_into(rows.rewards[t], rewards)
        else:
            rows.rewards[t] = rewards

    def take(self, raw: Any, infos: Mapping[str, Any]) -> None:
        """Records the results of a step.

        Args:
            raw: the observations of the step.
            infos: the infos of the step.
        """
        t, rows = self.num_steps, self._rows
        self._note_step(t, rows, infos, raw)  # before a reset, so callbacks see how episodes end
        try:
            raw = self._autoreset.end_episodes(self.env, t, rows, raw, infos)
            if self.faults.mask is not None:
                self.faults.check_masks(self.env, raw, self._autoreset.acts_next(t, rows))
        except Exception as error:
            raw, *_, infos = self._rebuild(error)
            self._note_step(t, rows, infos, raw)
        # Integers outside of their range would break the encoding. Observations with integers are
        # therefore checked in each step, and other observations once per fragment.
        if self._checks_each_step:
            self.faults.check(self.env, raw)
        rows.all_obs[t + 1] = self.policy.encoder.rows(raw)
        self._autoreset.observed(t, rows)
        if self.policy.state_size:
            self._memory[self._begins(t + 1, rows)] = 0.0
        self._raw = raw
        self.num_steps += 1
        PROGRESS.note()

    def lose_step(self, env: SlotGroup, raw: Any, infos: Mapping[str, Any]) -> None:
        """Continues with other environments. The current step is lost. See `GroupSampler`.

        Args:
            env: the slots in the new environments.
            raw: their first observations.
            infos: infos that report the lost step.
        """
        self.env, self._open = env, OpenTransitions.of(env, self.policy)
        self._rows.lose(self.num_steps)
        self.take(raw, infos)

    def _rebuild(self, error: Exception) -> tuple[Any, ...]:
        """Replaces the vector environment after an exception in the current step, which is lost.
        Returns the first observations of the new vector, and infos that say so, in the form of the
        results of a step."""
        t = self.num_steps
        self.env, raw, infos = self.faults.rebuild(self.env, error, self._seeds, t)
        self._open = OpenTransitions.of(self.env, self.policy)
        self._rows.lose(t)
        return raw, None, None, None, infos

    def _note_step(self, t: int, rows: FragmentColumns, infos: Mapping[str, Any], raw: Any) -> None:
        """Keeps the infos and the faults of step `t`, and passes the step to callbacks."""
        if self.ended is not None and self._open is None:
            for n in (rows.terminated[t] | rows.truncated[t]).nonzero()[0].tolist():
                rows.last_infos[t, n] = self._info(infos, n, is_last=True)
        if FAULT_KEY in infos:
            rows.lost[t] = self.faults.note(infos)
        if self._open is not None:
            self._open.note_rows(t, rows)
        elif self.steps is not None:
            self._tell(t, rows, infos, raw, self.steps)

    def _starting(self, act: Callable[[], Any], steps: EpisodeSteps) -> Callable[[], Any]:
        """Returns a function that first tells `steps` which episodes begin, and then calls
        `act`."""

        def act_after_starts() -> Any:
            resets = self._autoreset.reset_rows(self.num_steps, self._rows)
            for n in range(self.env.num_envs):
                if steps.begins(n) and not resets[n]:
                    steps.begin_episode(n, self._observation(self._raw, n))
            return act()

        return act_after_starts

    def _observation(self, raw: Any, n: int) -> Any:
        """Returns the observation of environment `n` from the observations of all environments. The
        next step may overwrite it."""
        return None if raw is None else item_of(self.env.single_observation_space, raw, n)

    def _choose(self) -> Any:
        t, rows, before = self.num_steps, self._rows, self._memory
        rows.params[t], actions, self._memory = self._chooser(t, rows.all_obs[t], before)
        rows.actions[t] = actions
        if self._open is not None:
            self._memory = self._open.hold(t, rows, before, self._memory)
            actions = rows.actions[t]
        return self.policy.dist.to_env(actions)

    def _begins(self, t: int, rows: FragmentColumns) -> np.ndarray:
        """Returns `[N]` bool, True for each environment in which an episode begins with the
        observation before step `t`. `t` is at least 1. `gae.episode_starts` computes the same for a
        whole batch."""
        begins = self._autoreset.begins(t, rows)
        return begins | rows.lost[t - 1] if t - 1 in rows.lost else begins

    def _no_memory(self) -> np.ndarray:
        return np.zeros((self.env.num_envs, self.policy.state_size), dtype=np.float32)

    def _tell(
        self,
        t: int,
        rows: FragmentColumns,
        infos: Mapping[str, Any],
        raw: Any,
        steps: EpisodeSteps,
    ) -> None:
        """Adds step `t` of each environment to `steps`. Skips reset rows, because they do not
        belong to an episode. Discards the episodes of environments whose step was lost."""
        terminated, done = rows.terminated[t], rows.terminated[t] | rows.truncated[t]
        lost = np.broadcast_to(rows.lost.get(t, np.False_), done.shape)
        resets = self._autoreset.reset_rows(t, rows)
        for n in range(self.env.num_envs):
            if lost[n]:
                steps.discard(n)
            elif not resets[n]:
                info = rows.last_infos.get((t, n)) if done[n] else None
                if info is None and (done[n] or steps.needs_infos):
                    info = self._info(infos, n, is_last=bool(done[n]))
                reward = float(rows.rewards[t, n])
                flags = bool(terminated[n]), bool(done[n])
                observation = self._autoreset.last_of(raw, infos, n) if done[n] else None
                if observation is None:
                    observation = self._observation(raw, n)
                steps.add(t, n, reward, *flags, info or {}, observation, rows.actions[t, n])

    def _info(self, infos: Mapping[str, Any], n: int, is_last: bool) -> dict[str, Any]:
        """Returns the info of one step of environment `n`.

        Args:
            infos: the infos of all environments in this step.
            n: the index of the environment.
            is_last: whether the step ended the episode.
        """
        if is_last:
            infos = self._autoreset.infos_of_ends(infos)
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
            if self._resets_some:
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
        self._raw = raw
        mask = envs.reshape(-1, *[1] * (self._obs.ndim - 1))
        self._obs = np.where(mask, self.policy.encoder.rows(raw), self._obs)
        self._autoreset.pending = self._autoreset.pending & ~envs
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
        if isinstance(self.env, SlotGroup):
            env_state = self.env.vector.get_state()
        else:
            env_state = get_env_state(self.env)
        return None if env_state is None else {"env": env_state, **self.get_own_state()}

    def get_own_state(self) -> dict[str, Any]:
        """Returns the state without the state of the environments."""
        return {
            "obs": self._obs.copy(),
            "resets_next": self._autoreset.pending.copy(),
            "memory": self._memory.copy(),
            **self._episodes.get_state(),
            "discounted_returns": self._returns.get_state(),
            "rng": self._rng.bit_generator.state,
            "place": list(self._place),
            **({} if self._open is None else {"open": self._open.get_state()}),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `get_state` returned. If the environments cannot restore their
        state, all environments begin new episodes. This is also the case if an environment has to
        be reset in its next step, but the autoreset mode is not next-step any more, and if an older
        version of polopt saved the observations in another dtype."""
        resets = np.asarray(state["resets_next"], dtype=bool)
        next_step = isinstance(self._autoreset, NextStep)
        fits = len(resets) == self.env.num_envs and (next_step or not resets.any())
        obs = np.array(state["obs"])
        if isinstance(self.env, SlotGroup):
            fits = fits and self.env.vector.set_state(state["env"])
        else:
            fits = fits and set_env_state(self.env, state["env"], resets)
        if not fits or (obs.dtype, obs.shape) != (self._obs.dtype, self._obs.shape):
            self.reset()
            return
        self.set_own_state(state)

    def set_own_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state without the state of the environments."""
        self._obs, self._raw = np.array(state["obs"]), None
        self._autoreset.pending = np.asarray(state["resets_next"], dtype=bool)
        self._memory = np.asarray(state.get("memory", self._no_memory()))
        self._episodes.set_state(state)
        if "discounted_returns" in state:  # not in older states
            self._returns.set_state(state["discounted_returns"])
        self._rng.bit_generator.state = state["rng"]
        if self._open is not None and "open" in state:
            self._open.set_state(state["open"])
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


def action_chooser(
    policy: ActingPolicy,
    rng: np.random.Generator,
    explore: bool | Exploration,
    uniform: bool,
    shape: tuple[int, int],
) -> ActionChooser:
    """Returns a function that chooses the actions of one fragment.

    Where possible, all random numbers of the fragment are drawn at once, because one call per
    fragment is faster than one call per step.

    Args:
        policy: the policy that computes the parameters of the action distribution.
        rng: the generator of the action noise.
        explore: see `Exploration`. True means `random`, and False means `mode`.
        uniform: whether to ignore the policy and draw uniform actions. See `VectorSampler.sample`.
        shape: `(T, N)`, the shape of the fragment.
    """
    dist = policy.dist
    mask = policy.mask
    uniform = uniform or (explore in (True, "random") and policy.samples_uniformly)
    if uniform and mask is not None:
        return lambda t, obs, state: (
            *dist.random_allowed(rng, mask.masked(0.0, policy.encoder.encode(obs))),
            state,
        )
    if uniform:
        drawn = dist.random(rng, *shape)
        return lambda t, obs, state: (0.0, drawn[t], state)
    if explore == "mean":

        def mean_action(
            t: int, obs: np.ndarray, state: np.ndarray
        ) -> tuple[Any, np.ndarray, np.ndarray]:
            params, state = policy.act(policy.to_act_on(obs), state)
            return params, dist.mean(params), state

        return mean_action
    noise = dist.draw_noise(rng, *shape) if explore in (True, "random") else None
    encoded = policy.encoder.is_box  # then rows are encoded observations

    def action(t: int, obs: np.ndarray, state: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        params, state = policy.act(obs if encoded else policy.to_act_on(obs), state)
        return params, dist.sample(params, None if noise is None else noise[t]), state

    return action


_quietly = np.errstate(all="ignore")


@_quietly  # a float64 reward may overflow in float32
def _copy_into(row: np.ndarray, values: Any) -> None:
    row[:] = values
