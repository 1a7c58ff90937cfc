"""Plays whole episodes with a policy.

`WholeEpisodes` plays them with any sampler. Evaluation during training uses it (`evaluation.py`).
`play` plays them in one environment of this process, for `polopt evaluate`, `polopt.evaluate` and
`trainer.evaluate`."""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformObservation, TransformReward

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.common.faults import Fault, Faults, non_finite_values, one_per_kind
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.agent_policies import AgentPolicies
from polopt.rollouts.envs.agent_vector_env import (
    AgentVectorEnv,
    FaultTolerantAgents,
    num_copies,
)
from polopt.rollouts.envs.agents_env import AgentsEnv
from polopt.rollouts.envs.env_api import reward_of, space_that_differs
from polopt.rollouts.envs.env_errors import close_env, missing_package
from polopt.rollouts.envs.env_sources import env_name
from polopt.rollouts.envs.env_state import saved_statistics, set_evaluation_statistics
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, cast_floats
from polopt.rollouts.envs.vector_env import make_one_env, policies_of_agents
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.group_sampler import GroupSampler
from polopt.rollouts.sampling.non_finite import find_non_finite
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.seeds import Seeds, seeds_from
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.saved_policy import MISFITS

#: The maximum number of steps in one fragment. The last fragment continues to its full length after
#: the last episode has ended, and these steps are wasted. Short fragments waste fewer steps.
_MOST_STEPS = 64
#: Seconds after which a line reports that an episode has not ended yet.
_LONG_S = 10.0


def shares(total: int, parts: int) -> list[int]:
    """Divides `total` into `parts` numbers that differ by at most 1, the larger numbers first."""
    return [total // parts + (part < total % parts) for part in range(parts)]


class WholeEpisodes:
    """Plays K whole episodes with a sampler. The environments of the sampler must be at the start
    of an episode.

    The number of episodes for each environment is fixed in advance. The first K episodes that end
    would give a biased mean: short episodes end first, and their returns may be lower or higher
    than the returns of long episodes. If an environment plays more episodes than this number, the
    additional episodes are not used. If an environment raises, its current episode is discarded. If
    a value of an environment is not finite, all its episodes in the fragment are discarded. The
    environment then plays other episodes instead.

    Args:
        sampler: the sampler, whose policy chooses the actions.
        num_episodes: the number K of episodes of all environments together.
        explore: whether to sample actions. If False, the most likely actions are used.

    Attributes:
        episodes: the episodes that have been played so far.
    """

    def __init__(
        self,
        sampler: VectorSampler | GroupSampler,
        num_episodes: int,
        explore: bool = False,
    ) -> None:
        self._sampler = sampler
        self._explore = explore
        self._left = shares(num_episodes, num_copies(sampler.env))
        self.episodes: list[Episode] = []

    @property
    def done(self) -> bool:
        """Whether all episodes have been played."""
        return not any(self._left)

    def play(self) -> Faults:
        """Samples one fragment, and adds the episodes that end in it to `episodes`.

        Returns:
            the exceptions of environments in the fragment, and its non-finite values.

        Raises:
            EnvironmentFailedError, Exception: see `VectorSampler.sample`.
        """
        sampler = self._sampler
        sampler.ended = []
        batch = sampler.sample(self._explore, min(sampler.fragment_length, _MOST_STEPS))
        ended, sampler.ended = sampler.ended, None
        problem, bad = self._find_non_finite(batch)
        if problem:
            sampler.reset_some(bad)
        # With agents, `bad` describes slots.
        of_envs = bad.reshape(len(self._left), -1).sum(axis=1)
        for episode in ended:
            if self._left[episode.env_index] and not of_envs[episode.env_index]:
                self._left[episode.env_index] -= 1
                self.episodes.append(episode)
        if not problem:
            return batch.faults
        fault = Fault("non_finite", sampler.faults.source + problem)
        return one_per_kind([*batch.faults.values(), fault])

    def _find_non_finite(self, batch: Any) -> tuple[str, np.ndarray]:
        """See `find_non_finite`. With several policies, all environments are bad if one is."""
        if not isinstance(batch, MultiAgentBatch):
            return find_non_finite(batch)
        problems = [find_non_finite(part)[0] for part in batch.parts.values()]
        problem = next(filter(None, problems), "")
        return problem, np.full(len(self._left), bool(problem))


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """The episodes that were played with a policy.

    Attributes:
        episodes: the episodes in the order in which they were played.
    """

    episodes: Sequence[Episode]

    @property
    def episode_return_mean(self) -> float:
        """Mean return."""
        return float(np.mean([episode.episode_return for episode in self.episodes]))

    @property
    def episode_return_std(self) -> float:
        """Standard deviation of the returns."""
        return float(np.std([episode.episode_return for episode in self.episodes]))

    @property
    def episode_len_mean(self) -> float:
        """Mean number of environment steps in an episode."""
        return float(np.mean([episode.episode_len for episode in self.episodes]))

    def __repr__(self) -> str:
        return (
            f"<EvaluationResult: episode_return_mean {self.episode_return_mean:.2f}, "
            f"episode_return_std {self.episode_return_std:.2f}, "
            f"episode_len_mean {self.episode_len_mean:.1f}, {len(self.episodes)} episodes>"
        )


def check_episodes(episodes: Any) -> None:
    """Checks that `episodes` is an integer of 1 or more.

    Raises:
        ConfigError: `episodes` is not such an integer.
    """
    if not isinstance(episodes, int) or isinstance(episodes, bool) or episodes < 1:
        raise ConfigError(f"episodes: got {shown(episodes)}. Allowed: whole numbers of 1 or more")


def check_env_fits(policy: Policy, env: Any) -> None:
    """Checks that the observation space and the action space of an environment fit the policy.

    Raises:
        CheckpointError: a space of the environment does not fit the policy.
    """
    if isinstance(env, AgentsEnv):
        return  # `_agents_sampler` checks the spaces of each agent
    spaces = env.observation_space, env.action_space
    if isinstance(policy, PolicyGroup):
        raise CheckpointError(
            "the checkpoint has several policies, but the environment has one agent. Load one of "
            "them with polopt.load(checkpoint, policy=NAME)"
        )
    if space_that_differs(spaces, (policy.encoder.space, policy.action_space)):
        raise CheckpointError(
            "the environment does not fit the checkpoint's policy. The environment has observation "
            f"space {env.observation_space!s:.200} and action space {env.action_space!s:.200}. "
            f"The policy needs {policy.encoder.space!s:.200} and {policy.action_space!s:.200}"
        )


def restore_env_statistics(state: Mapping[str, Any], env: Any) -> None:
    """Copies the running statistics of the training environments from a checkpoint to the wrappers
    of an environment. See `set_evaluation_statistics`.

    Args:
        state: the state of the checkpoint, from `read_trainer_state`.
        env: an environment for evaluation.

    Raises:
        CheckpointError: the wrappers of the environment differ from the wrappers in training.
    """
    try:
        parts = saved_statistics(state["optimizer"].get("workers", {}).values())
        if parts:
            set_evaluation_statistics(env, parts)
    except MISFITS as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            "the running statistics in the checkpoint do not fit the wrappers of the environment. "
            "As `env` (on the command line: --env), give an environment with the same wrappers as "
            f"in training ({why})"
        ) from error


@contextmanager
def environment(rollout: RolloutConfig, video: Path | None = None) -> Iterator[Any]:
    """Makes one environment that is not vectorised, and closes the environment at the end of the
    block.

    Args:
        rollout: options of the environment. `rollout.env` is a value that `resolve_env` returned.
        video: directory for videos of all episodes. `None` means that no videos are recorded.

    Raises:
        ConfigError: the environment cannot be made or recorded, is a vector environment, or raises
            an error of Gymnasium inside the block.
    """
    source, options = rollout.env, dict(rollout.env_config)
    name = env_name(source)
    if video is not None:
        options["render_mode"] = "rgb_array"
        if importlib.util.find_spec("moviepy") is None:
            raise ConfigError("--video needs moviepy, which is not installed: pip install moviepy")
        # With these drivers, pygame works on machines without a display or a sound card.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    try:
        alone = rollout.model_copy(update={"env_config": options, "num_workers": 0})
        env = make_one_env(source, alone, rollout.last_worker_index + 1, in_evaluation=True)
    except ConfigError:
        raise
    except Exception as error:  # an environment may raise anything
        problem = f"environment {name!r} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    try:
        if isinstance(env, VectorEnv):
            raise ConfigError(
                f"environment {name!r} is a vector environment, but evaluation needs a single "
                "environment. Give a single environment as `env` (on the command line: --env)"
            )
        if video is not None and isinstance(env, AgentsEnv):
            raise ConfigError("--video needs an environment with one agent")
        if video is not None:
            if env.render_mode not in ("rgb_array", "rgb_array_list"):
                raise ConfigError(
                    "--video needs an environment with render_mode 'rgb_array'. "
                    f"Got {env.render_mode!r}"
                )
            env = gymnasium.wrappers.RecordVideo(env, str(video), episode_trigger=lambda _: True)
        yield env
    except gymnasium.error.Error as error:  # rendering may fail at the first frame
        problem = f"environment {name!r}: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    finally:
        close_env(env, name)


def play(
    policy: Policy,
    env: Any,
    episodes: int,
    stochastic: bool = False,
    seed: int | None = None,
    say: Callable[[str], None] = lambda line: None,
    rollout: RolloutConfig | None = None,
) -> list[Episode]:
    """Plays complete episodes in the same way as evaluation during training.

    Args:
        policy: the policy that chooses actions.
        env: an environment that is not vectorised. This function does not close it.
        episodes: number of episodes.
        stochastic: True samples actions. False takes the mode of the policy's distribution.
        seed: seed of the environment and of the actions. `None` draws a seed.
        say: called with one line of text when an episode ends. Also called when an episode has
            lasted for 10 s, 20 s, 40 s, and after each further doubling of this time.
        rollout: the options that say which policy acts for which of several agents.

    Raises:
        ConfigError: the environment returned values that are not finite.
        Exception: the environment raised this exception in an episode.
    """
    # With NEXT_STEP, the environment is reset only when the next episode is played. With SAME_STEP,
    # a video would show the beginning of one episode too many.
    seeds = seeds_from([secrets.randbits(31) if seed is None else seed], 0)
    if isinstance(env, AgentsEnv):
        sampler = _agents_sampler(env, policy, seeds, rollout or RolloutConfig())
        return _play(WholeEpisodes(sampler, episodes, explore=stochastic), say)
    space = env.observation_space
    cast = TransformObservation(env, lambda observation: cast_floats(observation, space), space)
    single = TransformReward(cast, reward_of)
    vector = SyncVectorEnv([lambda: single], copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    try:
        sampler = VectorSampler(vector, policy, 1, seeds)
        return _play(WholeEpisodes(sampler, episodes, explore=stochastic), say)
    finally:
        vector.closed = True  # otherwise, the finalizer of `vector` would close `env`


def _play(playing: WholeEpisodes, say: Callable[[str], None]) -> list[Episode]:
    """Plays all episodes, and returns them. `play` describes `say` and the errors."""
    num_ended, steps, begun_s, wait_s = 0, 0, time.monotonic(), _LONG_S
    while not playing.done:
        problem = non_finite_values(playing.play())
        if problem:
            raise ConfigError(f"the environment cannot be evaluated: {problem}")
        steps, number = steps + 1, len(playing.episodes)
        if number > num_ended:
            last = playing.episodes[-1]
            of_agents = "".join(
                f"  {agent} {total:.2f}" for agent, total in last.agent_returns.items()
            )
            say(
                f"episode {number:<4}return {last.episode_return:.2f}  "
                f"length {last.episode_len}{of_agents}"
            )
            num_ended, steps, begun_s, wait_s = number, 0, time.monotonic(), _LONG_S
        elif (elapsed_s := time.monotonic() - begun_s) >= wait_s:
            wait_s *= 2
            say(
                f"episode {number + 1:<4}has not ended after {steps:,} steps ({elapsed_s:.0f} "
                "s). max_frames_per_traj=STEPS limits the length of episodes"
            )
    return playing.episodes


def _agents_sampler(
    env: AgentsEnv, policy: Policy, seeds: Seeds, rollout: RolloutConfig
) -> VectorSampler | GroupSampler:
    """Makes a sampler for an environment with several agents. The environment stays open.

    Raises:
        CheckpointError: the policies do not fit the agents.
    """
    guard = FaultTolerantAgents(lambda: env, EnvPlace("evaluation", 0, 0), 1, env)
    vector, plan = AgentVectorEnv([lambda: guard]), policies_of_agents(env, rollout)
    members = policy.policies if isinstance(policy, PolicyGroup) else {"default_policy": policy}
    if not isinstance(policy, PolicyGroup) and plan.is_group:
        plan = AgentPolicies({"default_policy": env.possible_agents})
    if list(plan.members) != list(members):
        raise CheckpointError(
            f"the agents of the environment need the policies {shown(list(plan.members))}, and the "
            f"checkpoint has {shown(list(members))}"
        )
    vector.divide(plan.members, plan.chooser(lambda: vector.rng, 0))
    for group, (name, one) in zip(vector.groups, members.items(), strict=True):
        found = group.single_observation_space, group.single_action_space
        if space_that_differs(found, (one.encoder.space, one.action_space)):
            raise CheckpointError(
                f"agents {shown(group.agents)} have the spaces {found[0]!s:.200} and "
                f"{found[1]!s:.200}. Policy {name!r} needs {one.encoder.space!s:.200} and "
                f"{one.action_space!s:.200}"
            )
        group.closed = True  # otherwise, the finalizer of the group would close `env`
    if isinstance(policy, PolicyGroup):
        return GroupSampler(vector, policy, 1, seeds, SamplerFaults())
    return VectorSampler(vector.groups[0], policy, 1, seeds)
