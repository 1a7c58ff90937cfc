"""From a checked experiment to what workers are made from, and everything that can still be wrong
with it before a process starts."""

from __future__ import annotations

import secrets

from polopt.common.config import ConfigError
from polopt.rollouts.envs.making import probe_spaces
from polopt.rollouts.envs.resolving import resolve_env
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.trainers.config import Experiment


def prepare(experiment: Experiment) -> WorkerConfig:
    """Makes and closes one environment, and one policy for its spaces.

    Raises:
        ConfigError: unknown environment, one that can not be made, or a space that is not
            supported.
    """
    rollout = experiment.rollout
    env = resolve_env(rollout.env)
    try:
        observation_space, action_space = probe_spaces(env, rollout)
    except ConfigError:
        raise
    except Exception as error:  # whatever somebody's environment raises
        raise ConfigError(
            f"key 'env': {rollout.env!r} can not be made with env_config {rollout.env_config}: "
            f"{type(error).__name__}: {error}"
        ) from error
    seed = rollout.seed
    config = WorkerConfig(
        rollout=rollout.model_copy(update={"env": None}),  # `env` below is what is made of it
        env=env,
        policy_class=experiment.policy_class,
        policy=experiment.policy,
        observation_space=observation_space,
        action_space=action_space,
        seed=secrets.randbits(31) if seed is None else seed,
        device="cuda" if rollout.num_gpus_per_worker else "cpu",
    )
    # A policy is cheap, and refuses what it does not support before any process starts.
    experiment.policy_class(observation_space, action_space, experiment.policy)
    return config
