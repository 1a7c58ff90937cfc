"""Plays whole episodes of one environment in this process. `polopt evaluate`, `polopt.evaluate` and
`trainer.evaluate` use this module."""

from __future__ import annotations

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import TransformObservation, TransformReward

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.common.faults import non_finite_values
from polopt.policies.policy import Policy
from polopt.policies.policy_group import PolicyGroup
from polopt.rollouts.envs.agent_policies import AgentPolicies
from polopt.rollouts.envs.agent_vector_env import AgentVectorEnv, FaultTolerantAgents
from polopt.rollouts.envs.agents_env import AgentsEnv
from polopt.rollouts.envs.env_api import misfit, reward_of
from polopt.rollouts.envs.env_errors import close_env, missing_package
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.env_state import saved_statistics, set_evaluation_statistics
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, cast_floats
from polopt.rollouts.envs.vector_env import make_one_env, policies_of_agents
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.group_sampler import GroupSampler
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.seeds import Seeds, kept_global_generators, seeds_from
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.whole_episodes import WholeEpisodes

if TYPE_CHECKING:
    from polopt.optimizers.policy_optimizer import PolicyOptimizer
    from polopt.trainers.experiment import Experiment

#: Seconds after which a line reports that an episode has not ended yet.
_LONG_S = 10.0


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


def check_spaces(policy: Policy, env: Any) -> None:
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
    if misfit(spaces, (policy.encoder.space, policy.action_space)):
        raise CheckpointError(
            "the environment does not fit the checkpoint's policy. The environment has observation "
            f"space {env.observation_space!s:.200} and action space {env.action_space!s:.200}. "
            f"The policy needs {policy.encoder.space!s:.200} and {policy.action_space!s:.200}"
        )


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
        if misfit(found, (one.encoder.space, one.action_space)):
            raise CheckpointError(
                f"agents {shown(group.agents)} have the spaces {found[0]!s:.200} and "
                f"{found[1]!s:.200}. Policy {name!r} needs {one.encoder.space!s:.200} and "
                f"{one.action_space!s:.200}"
            )
        group.closed = True  # otherwise, the finalizer of the group would close `env`
    if isinstance(policy, PolicyGroup):
        return GroupSampler(vector, policy, 1, seeds, SamplerFaults())
    return VectorSampler(vector.groups[0], policy, 1, seeds)


def evaluate_now(
    experiment: Experiment,
    policy: Policy,
    optimizer: PolicyOptimizer,
    episodes: int | None,
    stochastic: bool | None,
    seed: int | None,
) -> EvaluationResult:
    """Plays episodes in an evaluation environment.

    The wrappers of this environment get the running statistics of the training environments. At
    the end, the global random generators of the process have the same states as before.

    Args:
        experiment: config of the trainer.
        policy: the policy that chooses actions.
        optimizer: the trainer's optimizer, from which the running statistics are taken.
        episodes: see `PolicyOptimizerTrainer.evaluate`.
        stochastic: see `PolicyOptimizerTrainer.evaluate`.
        seed: see `PolicyOptimizerTrainer.evaluate`.

    Raises:
        ConfigError: `episodes` is wrong, or the environment cannot be made or evaluated.
        ValueError: see `set_evaluation_statistics`.
        Exception: see `play`.
    """
    training, config = experiment.rollout, experiment.trainer
    if episodes is None:
        episodes = config.evaluation_duration
    if stochastic is None:
        stochastic = config.evaluation_config.explore
    check_episodes(episodes)
    changes = config.evaluation_config.changes(training)
    rollout = training.model_copy(update=changes)
    rollout = rollout.model_copy(update={"env": resolve_env(rollout.env)})
    statistics = saved_statistics(optimizer.get_driver_state()["workers"].values())
    with kept_global_generators(), environment(rollout) as env:
        if statistics:
            set_evaluation_statistics(env, statistics)
        played = play(policy, env, episodes, stochastic, seed, rollout=rollout)
        return EvaluationResult(played)
