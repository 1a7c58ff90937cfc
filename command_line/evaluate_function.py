"""`evaluate`: plays episodes with a policy or with the policy of a checkpoint, without Ray."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gymnasium
from gymnasium.wrappers import TimeLimit

from polopt.command_line.evaluate_command import load
from polopt.common.config import ConfigError, shown
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.find_checkpoint import checkpoint_path, find_checkpoint, read_whole
from polopt.trainers.play_episodes import (
    EvaluationResult,
    check_env_fits,
    check_episodes,
    environment,
    play,
    restore_env_statistics,
)
from polopt.trainers.saved_policy import policy_of


def evaluate(
    policy: Any,
    env: Any = None,
    episodes: int = 10,
    *,
    stochastic: bool = False,
    seed: int | None = None,
    **options: Any,
) -> EvaluationResult:
    """Plays whole episodes with a trained policy in this process. Does the same as `polopt
    evaluate`.

        polopt.evaluate("runs/a", episodes=20).episode_return_mean
        polopt.evaluate(trainer.get_policy(), gymnasium.make("CartPole-v1"))

    Args:
        policy: a policy, a checkpoint, a directory that contains checkpoints, or the return value
            of `trainer.save` or `polopt.train`.
        env: a value that the option `env` accepts, or an environment that is already made. It must
            not be a vector environment. `None` means the environment in the checkpoint, and is not
            allowed if `policy` is a policy. If the checkpoint names a module, give
            `env="module:id"`, because a module that only a checkpoint names is not imported.
        episodes: number of episodes.
        stochastic: True samples actions. False takes the mode of the policy's distribution.
        seed: seed of the environment and of the actions. `None` draws a seed.
        options: the options `env_config` and `max_frames_per_traj`. If `policy` is a checkpoint, an
            option that is not given has the value in the checkpoint. This does not apply to an
            environment that is already made, for which `env_config` is not allowed.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or the environment does not fit the
            policy.
        ConfigError: an argument is wrong, the class of the policy or network is unknown, or the
            environment cannot be made or evaluated.
        Exception: the environment raised this exception in an episode.
    """
    check_episodes(episodes)
    RolloutConfig.parse(_only_of_environment(options))
    state: dict[str, Any] | None = None
    made = isinstance(env, gymnasium.Env)
    if made and "env_config" in options:
        raise ConfigError(
            f"env_config: got {shown(options['env_config'])} with an environment that is already "
            "made. Make the environment with these options, or give its name as `env`"
        )
    if isinstance(policy, Policy):
        if env is None:
            raise ConfigError("env: got None with a policy. Allowed: an environment, or its name")
        rollout = RolloutConfig.parse({"env": None if made else resolve_env(env), **options})
    else:
        directory = find_checkpoint(checkpoint_path(policy))
        if made:
            state, rollout = read_whole(directory), RolloutConfig.parse(options)
        else:
            state, experiment = load(directory, env, options)
            rollout = experiment.rollout
        policy = policy_of(state, directory)
    limit = rollout.max_frames_per_traj
    given = TimeLimit(env, limit) if made and limit else env
    with nullcontext(given) if made else environment(rollout) as single_env:
        check_env_fits(policy, single_env)
        if state is not None:
            restore_env_statistics(state, single_env)
        return EvaluationResult(
            play(policy, single_env, episodes, stochastic, seed, rollout=rollout)
        )


def _only_of_environment(options: dict[str, Any]) -> dict[str, Any]:
    for key in options:
        if key not in ("env_config", "max_frames_per_traj"):
            raise ConfigError(
                f"key {key!r} has no effect on evaluation. Allowed: env_config, max_frames_per_traj"
            )
    return options
