"""Whole episodes of one environment, played in this process: `polopt evaluate`, `polopt.evaluate`
and `trainer.evaluate`."""

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
from gymnasium.wrappers import TimeLimit, TransformObservation, TransformReward

from polopt.common.config import ConfigError, shown
from polopt.common.episodes import Episode
from polopt.policies.policy import Policy
from polopt.rollouts.envs.close_env import close_env
from polopt.rollouts.envs.creators import EnvContext, make_env
from polopt.rollouts.envs.env_api import reward_of, same_encoding
from polopt.rollouts.envs.env_sources import env_name, resolve_env
from polopt.rollouts.envs.env_state import set_evaluation_statistics
from polopt.rollouts.envs.fault_tolerant_env import cast_floats
from polopt.rollouts.envs.missing_packages import missing_package
from polopt.rollouts.envs.random_state import kept_global_generators
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeds import seeds_from
from polopt.rollouts.sampling.whole_episodes import WholeEpisodes
from polopt.trainers.checkpoints import CheckpointError

if TYPE_CHECKING:
    from polopt.optimizers.policy_optimizer import PolicyOptimizer
    from polopt.trainers.experiment import Experiment

#: Seconds of one episode after which a line says so.
_LONG_S = 10.0


@dataclass(frozen=True, repr=False)
class EvaluationResult:
    """Episodes that were played with a policy.

    Attributes:
        episodes: in the order in which they were played.
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
        """Mean number of environment steps."""
        return float(np.mean([episode.episode_len for episode in self.episodes]))

    def __repr__(self) -> str:
        return (
            f"<EvaluationResult: episode_return_mean {self.episode_return_mean:.2f}, "
            f"episode_return_std {self.episode_return_std:.2f}, "
            f"episode_len_mean {self.episode_len_mean:.1f}, {len(self.episodes)} episodes>"
        )


def check_episodes(episodes: Any) -> None:
    """Accepts whole numbers of episodes from 1 on.

    Raises:
        ConfigError: says so.
    """
    if not isinstance(episodes, int) or isinstance(episodes, bool) or episodes < 1:
        raise ConfigError(f"episodes: got {shown(episodes)}. Allowed: whole numbers of 1 or more")


def check_spaces(policy: Policy, env: Any) -> None:
    """Refuses an environment whose observations or actions do not fit the policy.

    Raises:
        CheckpointError: other spaces than in the checkpoint.
    """
    same = same_encoding(env.observation_space, policy.encoder.space)
    if not same or env.action_space != policy.action_space:
        raise CheckpointError(
            f"the checkpoint's policy does not fit observation space {env.observation_space!s:.200}"
            f" and action space {env.action_space!s:.200}: it is of {policy.encoder.space!s:.200} "
            f"and {policy.action_space!s:.200}"
        )


@contextmanager
def environment(rollout: RolloutConfig, video: Path | None = None) -> Iterator[Any]:
    """Makes one environment that is not vectorised, and closes it at the end.

    Args:
        rollout: its environment is what `resolve_env` returned.
        video: directory in which every episode is recorded.

    Raises:
        ConfigError: it cannot be made, or cannot be recorded.
    """
    source, options = rollout.env, dict(rollout.env_config)
    name = env_name(source)
    if video is not None:
        options["render_mode"] = "rgb_array"
        if importlib.util.find_spec("moviepy") is None:
            raise ConfigError("--video needs moviepy, which is not installed: pip install moviepy")
        # pygame needs neither a window nor a sound card.
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    try:
        if callable(source):
            index = rollout.last_worker_index + 1
            env = make_env(source, EnvContext(options, index, 0, 0, in_evaluation=True))
        else:
            env = gymnasium.make(source, **options)
    except Exception as error:  # an environment may raise anything
        problem = f"environment {name!r} cannot be made: {type(error).__name__}: {error}"
        raise ConfigError(missing_package(error, name) or problem) from error
    if isinstance(env, VectorEnv):
        raise ConfigError(
            f"{name!r} makes a vector environment; evaluation takes a single one: give --env"
        )
    if limit := rollout.max_frames_per_traj:
        env = TimeLimit(env, limit)
    try:
        if video is not None:
            if env.render_mode not in ("rgb_array", "rgb_array_list"):
                raise ConfigError(
                    "--video needs an environment with render_mode 'rgb_array'; "
                    f"got {env.render_mode!r}"
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
    """Plays complete episodes, as evaluation during training does.

    Args:
        policy: of the checkpoint.
        env: not vectorised. Not closed.
        episodes: number of episodes.
        stochastic: sample actions. Else the mode of the policy's distribution.
        seed: of the environment and of the actions. None draws one.
        say: gets a line for each episode as it ends, and one when an episode has gone on for
            10 s, 20 s, 40 s and so on.

    Raises:
        ConfigError: the environment returned values that are not finite.
    """
    # Reset by the step after an end, and stepped one by one: no episode begins that is not played,
    # which a video would show.
    space = env.observation_space
    cast = TransformObservation(env, lambda observation: cast_floats(observation, space), space)
    single = TransformReward(cast, reward_of)
    vector = SyncVectorEnv([lambda: single], copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    seeds = seeds_from([secrets.randbits(31) if seed is None else seed], 0)
    playing = WholeEpisodes(VectorSampler(vector, policy, 1, seeds), episodes, explore=stochastic)
    num_ended, steps, begun_s, wait_s = 0, 0, time.monotonic(), _LONG_S
    try:
        while not playing.done:
            problem = playing.play().non_finite
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
                    "s); max_frames_per_traj=STEPS bounds the length of episodes"
                )
    finally:
        vector.closed = True  # its finalizer would close the environment
    return playing.episodes


def evaluate_now(
    experiment: Experiment,
    policy: Policy,
    optimizer: PolicyOptimizer,
    episodes: int | None,
    stochastic: bool | None,
    seed: int | None,
) -> EvaluationResult:
    """Plays episodes in an environment of evaluation. It gets the running statistics of the
    environments of training. The global generators of the process are put back at the end.

    Args:
        experiment: of the trainer.
        policy: that plays.
        optimizer: of the trainer, for the statistics.
        episodes: see `PolicyOptimizerTrainer.evaluate`.
        stochastic: see `PolicyOptimizerTrainer.evaluate`.
        seed: see `PolicyOptimizerTrainer.evaluate`.

    Raises:
        ConfigError: `episodes` is wrong, or the environment cannot be made or evaluated.
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
