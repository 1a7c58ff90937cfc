"""`WorkerConfig`, the arguments of a rollout worker, and `make_worker_config`, which makes it."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import ray
from gymnasium import Space

from polopt.common.config import Config, ConfigError, shown
from polopt.common.sample_batch import SampleBatch
from polopt.policies.policy_group import GroupConfig, Member, PolicyGroup
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.envs.agent_policies import AgentPolicies
from polopt.rollouts.envs.env_errors import described
from polopt.rollouts.envs.env_sources import EnvSource, resolve_env
from polopt.rollouts.envs.vector_env import ENV_KEYS, probe_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Transport
from polopt.rollouts.workers.callbacks import Callbacks


@dataclass(frozen=True)
class WorkerConfig:
    """The arguments of a worker. They do not include the weights, which calls carry later.

    Attributes:
        rollout: options of sampling.
        env: result of `polopt.rollouts.envs.env_sources.resolve_env`.
        policy_class: class of the policy, or an adapter from `polopt.collectors.non_learning` for a
            policy that does not learn.
        policy: the options of the policy.
        observation_space: observation space of one environment.
        action_space: action space of one environment.
        num_agents: the number of possible agents of one environment.
        seed: seed of the run. Each worker derives its own seeds from this seed.
        restart_count: number of earlier workers with this index. A replacement uses random numbers
            that no earlier worker with this index has used.
        restore_count: number of times the run was restored from a checkpoint. After each restore,
            workers use new random numbers.
        device: torch device of the policy's networks.
        postproc: a function of the user. A `Collector`'s worker applies this function to each batch
            as the last step.
        callbacks: class of the user's callbacks. None if the user has no callbacks.
        in_evaluation: True if the worker plays episodes for evaluation, and not for learning.
        env_index_offset: `EnvContext.worker_index` is the index of the worker plus this number.
        wrap_transport: a function that wraps the transport of a worker set, as
            `wrap(transport, rollout)`. An add-on sets it to see every message of a run. None means
            that nothing is wrapped.
        repeatable: True if the same replies in the same order must give the same run. Workers then
            seed the global random generators even without `seed`, and each record has the
            statistics of the environments.
    """

    rollout: RolloutConfig
    env: EnvSource
    policy_class: type[Any]
    policy: Config
    observation_space: Space[Any]
    action_space: Space[Any]
    seed: int
    num_agents: int = 1
    restart_count: int = 0
    restore_count: int = 0
    device: str = "cpu"
    postproc: Callable[[SampleBatch], SampleBatch] | None = None
    callbacks: type[Callbacks] | None = None
    in_evaluation: bool = False
    env_index_offset: int = 0
    wrap_transport: Callable[[Transport, RolloutConfig], Transport] | None = None
    repeatable: bool = False

    @property
    def who(self) -> str:
        """The noun for a worker with this config in messages. The index of the worker follows."""
        return "evaluation worker" if self.in_evaluation else "worker"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the config together with the `sys.path` of this process. A worker adds these
        entries to its own `sys.path` before it unpickles the options. So a worker can import
        modules from the user's directory, if this directory exists on the worker's node."""
        path = [os.path.abspath(entry) for entry in sys.path]
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return _unpickle, (path, ray.cloudpickle.dumps(options))


def _unpickle(path: Sequence[str], options: bytes) -> WorkerConfig:
    # The entries are added at the end, so the worker's own entries keep their priority.
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
    """Makes the config of all workers, and checks that the policy supports the environment.

    For this check, the function makes and closes one environment, and makes one policy for the
    spaces of this environment.

    Args:
        rollout: options of sampling. If `seed` is None, the config gets a random seed.
        policy_class: see `WorkerConfig`.
        policy: options of the policy.
        env: result of `resolve_env`. None means that this function resolves `rollout.env`.
        keys: see `polopt.rollouts.envs.vector_env.ENV_KEYS`.
        device: torch device of the policy's networks. None means `cuda` if `num_gpus_per_worker` is
            above 0, and `cpu` otherwise.
        postproc: see `WorkerConfig`.
        callbacks: see `WorkerConfig`.

    Raises:
        ConfigError: the environment is unknown, cannot be made, or does not support an option, the
            policy does not support the spaces, or a value cannot be sent to remote workers.
    """
    source = resolve_env(rollout.env) if env is None else env
    found = probe_env(source, rollout, keys)
    if found.policies is not None:
        _check_group_options(rollout)
        policy = group_config(found.policies, rollout, policy_class, policy)
        policy_class = PolicyGroup
    elif rollout.policies and found.num_agents == 1:
        raise ConfigError(
            f"key 'policies': got {shown(list(rollout.policies))} for an environment with one agent"
        )
    policy_class(found.observation_space, found.action_space, policy)
    config = WorkerConfig(
        rollout=rollout.model_copy(update={"env": None}),  # workers use `WorkerConfig.env`
        env=source,
        policy_class=policy_class,
        policy=policy,
        observation_space=found.observation_space,
        action_space=found.action_space,
        num_agents=found.num_agents,
        seed=secrets.randbits(31) if rollout.seed is None else rollout.seed,
        device=device or ("cuda" if rollout.num_gpus_per_worker else "cpu"),
        postproc=postproc,
        callbacks=callbacks,
    )
    if rollout.num_workers:
        check_picklable(config, keys)
    return config


def _check_group_options(rollout: RolloutConfig) -> None:
    """Raises `ConfigError` for options that are not possible with several policies."""
    if rollout.compress_gradients == "topk":
        raise ConfigError(
            "key 'compress_gradients': got 'topk' with several policies. Allowed: 'none', 'fp16', "
            "'bf16', because the gradient of a small policy could be left out"
        )
    if rollout.num_workers_below:
        raise ConfigError(
            f"key 'num_workers_below': got {rollout.num_workers_below} with several policies. "
            "Allowed: 0"
        )


def group_config(
    plan: AgentPolicies, rollout: RolloutConfig, policy_class: type[Any], policy: Config
) -> GroupConfig:
    """Returns the options of each policy of a run with several agents.

    Args:
        plan: the policies.
        rollout: options of sampling. `policies` has the options of each policy.
        policy_class: the class of policies without another one.
        policy: the options of the run, which apply to every policy that does not change them.

    Raises:
        ConfigError: an option of a policy is wrong.
    """
    members = {}
    for name in plan.members:
        options = dict((rollout.policies or {}).get(name, {}))
        given = options.pop("policy", None)
        cls = policy_class if given is None else POLICIES.get(POLICIES.named(given))
        kept = {key: value for key, value in policy.to_dict().items() if cls is policy_class}
        trained = rollout.policies_to_train
        try:
            config = cls.config_class.parse({**kept, **options}, "policy")
        except ConfigError as error:
            raise ConfigError(f"policy {name!r} in 'policies': {error}") from error
        learns = trained is None or name in trained
        members[name] = Member(policy_class=cls, config=config, learns=learns)
    return GroupConfig(members=members)


def check_picklable(config: WorkerConfig, keys: tuple[str, str, str] = ENV_KEYS) -> None:
    """Checks that the user's values in a config can be sent to remote workers.

    Args:
        config: the config of remote workers.
        keys: see `polopt.rollouts.envs.vector_env.ENV_KEYS`.

    Raises:
        ConfigError: a value cannot be pickled. The message names the key of the value.
    """
    for key, value in (
        (keys[0], config.env),
        (keys[1], config.rollout.env_config),
        ("policy", config.policy_class),
        ("policy", config.policy),
        ("postproc", config.postproc),
        ("callbacks", config.callbacks),
        ("policy_mapping_fn", config.rollout.policy_mapping_fn),
    ):
        try:
            ray.cloudpickle.dumps(value)
        except Exception as error:  # pickling can raise anything
            raise ConfigError(
                f"key {key!r}: got {shown(value)}, which cannot be sent to remote workers: "
                f"{described(error)}. Allowed: a value that cloudpickle can pickle"
            ) from error
