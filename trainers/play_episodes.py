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
from polopt.rollouts.envs.env_api import misfit, reward_of
from polopt.rollouts.envs.env_errors import close_env, missing_package
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.env_state import set_evaluation_statistics
from polopt.rollouts.envs.fault_tolerant_env import cast_floats
from polopt.rollouts.envs.vector_env import make_one_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.seeds import kept_global_generators, seeds_from
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
    spaces = env.observation_space, env.action_space
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

    Raises:
        ConfigError: the environment returned values that are not finite.
        Exception: the environment raised this exception in an episode.
    """
    # With NEXT_STEP, the environment is reset only when the next episode is played. With SAME_STEP,
    # a video would show the beginning of one episode too many.
    space = env.observation_space
    cast = TransformObservation(env, lambda observation: cast_floats(observation, space), space)
    single = TransformReward(cast, reward_of)
    vector = SyncVectorEnv([lambda: single], copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    seeds = seeds_from([secrets.randbits(31) if seed is None else seed], 0)
    playing = WholeEpisodes(VectorSampler(vector, policy, 1, seeds), episodes, explore=stochastic)
    num_ended, steps, begun_s, wait_s = 0, 0, time.monotonic(), _LONG_S
    try:
        while not playing.done:
            problem = non_finite_values(playing.play())
            if problem:
                raise ConfigError(f"the environment cannot be evaluated: {problem}")
            steps, number = steps + 1, len(playing.episodes)
            if number > num_ended:
                last = playing.episodes[-1]
                say(
                    f"episode {number:<4}return {last.episode_return:.2f}  "
                    f"length {last.episode_len}"
                )
                num_ended, steps, begun_s, wait_s = number, 0, time.monotonic(), _LONG_S
            elif (elapsed_s := time.monotonic() - begun_s) >= wait_s:
                wait_s *= 2
                say(
                    f"episode {number + 1:<4}has not ended after {steps:,} steps ({elapsed_s:.0f} "
                    "s). max_frames_per_traj=STEPS limits the length of episodes"
                )
    finally:
        vector.closed = True  # otherwise, the finalizer of `vector` would close `env`
    return playing.episodes


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
    workers = optimizer.get_driver_state()["workers"].values()
    statistics = [one["statistics"] for one in workers if one.get("statistics")]
    with kept_global_generators(), environment(rollout) as env:
        if statistics:
            set_evaluation_statistics(env, statistics)
        return EvaluationResult(play(policy, env, episodes, stochastic, seed))
