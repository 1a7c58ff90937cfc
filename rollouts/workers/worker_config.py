"""`WorkerConfig`: the arguments of a rollout worker, and their assembly from user options."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
from gymnasium import Space

from polopt.common.config import Config
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.envs.env_sources import EnvSource, resolve_env
from polopt.rollouts.envs.vector_env import ENV_KEYS, probe_spaces
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.callbacks import Callbacks


@dataclass(frozen=True)
class WorkerConfig:
    """Arguments of a worker. They are small, because weights are sent after construction.

    Attributes:
        rollout: options of sampling.
        env: result of `polopt.rollouts.envs.env_sources.resolve_env`.
        policy_class: the policy, or an adapter of `polopt.policies.non_learning`, which only acts.
        policy: the options of the policy.
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        seed: seed of the run. Workers derive their own seeds from it.
        restart_count: number of earlier workers with this index. A replacement uses other random
            numbers than the workers before it.
        restore_count: number of times the run was restored from a checkpoint. A restored run uses
            other random numbers than the run before it.
        device: where the policy learns.
        postproc: applied to each batch of a `Collector`'s worker, after everything else.
        callbacks: class of the user's callbacks. None without callbacks.
        in_evaluation: True if the worker plays episodes only for evaluation.
        env_index_offset: added to the index of the worker, to give `EnvContext.worker_index`.
        arrivals: in a rerun, the record of the calls that this process makes itself.
        is_below: True if a gradient worker makes these calls.
    """

    rollout: RolloutConfig
    env: EnvSource
    policy_class: type[Any]
    policy: Config
    observation_space: Space[Any]
    action_space: Space[Any]
    seed: int
    restart_count: int = 0
    restore_count: int = 0
    device: str = "cpu"
    postproc: Callable[[SampleBatch], SampleBatch] | None = None
    callbacks: type[Callbacks] | None = None
    in_evaluation: bool = False
    env_index_offset: int = 0
    arrivals: dict[str, Any] | None = None
    is_below: bool = False

    @property
    def who(self) -> str:
        """What messages call a worker, before its index."""
        return "evaluation worker" if self.in_evaluation else "worker"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles with the import path of this process, which `sys.path` gets before the rest is
        unpickled: modules of the user's directory can be imported on every worker."""
        path = [os.path.abspath(entry) for entry in sys.path]
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return _unpickle, (path, ray.cloudpickle.dumps(options))


def _unpickle(path: Sequence[str], options: bytes) -> WorkerConfig:
    # At the end: the worker's own entries keep their priority.
    sys.path += [entry for entry in path if entry not in sys.path]
    return WorkerConfig(**ray.cloudpickle.loads(options))


def make_worker_config(
    rollout: RolloutConfig,
    policy_class: type[Any],
    policy: Config,
    *,
    env: EnvSource | None = None,
    keys: tuple[str, str, str] = ENV_KEYS,
    device: str | None = None,
    postproc: Callable[[SampleBatch], SampleBatch] | None = None,
    callbacks: type[Callbacks] | None = None,
) -> WorkerConfig:
    """Checks that environment and policy fit together, and makes the config of all workers.

    Makes and closes one environment, and makes one policy for its spaces, which raises for spaces
    that it does not support.

    Args:
        rollout: options of sampling. `seed` None: a random seed.
        policy_class: see `WorkerConfig`.
        policy: options of the policy.
        env: result of `resolve_env`. None resolves `rollout.env`.
        keys: see `polopt.rollouts.envs.vector_env.ENV_KEYS`.
        device: where the policy learns. None: `cuda` for workers with a GPU, else `cpu`.
        postproc: see `WorkerConfig`.
        callbacks: see `WorkerConfig`.

    Raises:
        ConfigError: unknown environment, an environment that cannot be made, or spaces that the
            policy does not support.
    """
    source = resolve_env(rollout.env) if env is None else env
    observation_space, action_space = probe_spaces(source, rollout, keys)
    policy_class(observation_space, action_space, policy)
    return WorkerConfig(
        rollout=rollout.model_copy(update={"env": None}),  # `env` replaces it
        env=source,
        policy_class=policy_class,
        policy=policy,
        observation_space=observation_space,
        action_space=action_space,
        seed=secrets.randbits(31) if rollout.seed is None else rollout.seed,
        device=device or ("cuda" if rollout.num_gpus_per_worker else "cpu"),
        postproc=postproc,
        callbacks=callbacks,
    )
