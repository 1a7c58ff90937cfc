"""Checks of an experiment that need an environment and a policy, before any process starts."""

from __future__ import annotations

import secrets

import torch

from polopt.common.config import ConfigError, shown
from polopt.rollouts.envs.making import probe_spaces, resolve_env
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.trainers.config import Experiment


def prepare(experiment: Experiment) -> WorkerConfig:
    """Returns the config of the workers. Makes and closes one environment, and makes one policy for
    its spaces.

    Raises:
        ConfigError: unknown environment, one that cannot be made, or an unsupported space.
    """
    rollout = experiment.rollout
    env = resolve_env(rollout.env)
    try:
        observation_space, action_space = probe_spaces(env, rollout)
    except ConfigError:
        raise
    except Exception as error:  # an environment may raise anything
        raise ConfigError(
            f"key 'env': {rollout.env!r} cannot be made with env_config "
            f"{shown(rollout.env_config)}: {type(error).__name__}: {error}"
        ) from error
    seed = rollout.seed
    config = WorkerConfig(
        rollout=rollout.model_copy(update={"env": None}),  # `env` below is the resolved one
        env=env,
        policy_class=experiment.policy_class,
        policy=experiment.policy,
        observation_space=observation_space,
        action_space=action_space,
        seed=secrets.randbits(31) if seed is None else seed,
        device="cuda" if rollout.num_gpus_per_worker else "cpu",
    )
    # Refuses unsupported spaces and models before any process starts.
    experiment.policy_class(observation_space, action_space, experiment.policy)
    return config


def check_learner_device(experiment: Experiment) -> str:
    """Returns the device that the driver learns on.

    Raises:
        ConfigError: `num_gpus` is above 0, and torch finds no GPU.
    """
    num_gpus = experiment.trainer.num_gpus
    if num_gpus and not torch.cuda.is_available():
        raise ConfigError(f"key 'num_gpus': got {num_gpus:g}, but torch finds no GPU. Allowed: 0")
    return "cuda" if num_gpus else "cpu"
