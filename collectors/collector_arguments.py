"""`CollectorArguments`: checks the arguments of a `Collector`, and makes its workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import Space

from polopt.collectors.collector_config import CollectorConfig
from polopt.collectors.resolve_policy import resolve_policy
from polopt.common.config import ConfigError, nearest_of
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_sources import EnvSource, resolve_env
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.ray_session import attach_or_start
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.worker_config import check_picklable, make_worker_config
from polopt.rollouts.workers.worker_set import WorkerSet, WorkerSpec

if TYPE_CHECKING:
    from polopt.recording.collector_record import CollectorRecord

#: The options of `ActorClass.options` that a user may set.
REMOTE_OPTIONS = (
    "num_cpus",
    "num_gpus",
    "memory",
    "object_store_memory",
    "resources",
    "accelerator_type",
    "label_selector",
    "runtime_env",
    "scheduling_strategy",
)
#: The arguments of a Collector for the environment, its options and the number of environments.
#: Error messages name these arguments.
ENV_KEYS = ("create_env_fn", "create_env_kwargs", "num_envs")


class CollectorArguments:
    """Checks the arguments of a Collector, and makes its workers.

    Args:
        create_env_fn: see `Collector`.
        policy: see `Collector`.
        config: the options of the Collector.

    Raises:
        ConfigError: if an argument is invalid.
    """

    def __init__(self, create_env_fn: Any, policy: Any, config: CollectorConfig) -> None:
        self.config = config
        self._given = policy if isinstance(policy, Policy) else None
        envs = _as_list(create_env_fn, "create_env_fn")
        count = len(envs) if config.num_collectors is None else config.num_collectors
        if count == 0:
            _refuse_record(config)
        self.sources = [resolve_env(env) for env in _one_each(envs, max(1, count), "create_env_fn")]
        self.num_collectors = count
        if count == 0:
            _check_here(config.policy_device)
        self.options = [
            _checked_options(given)
            for given in _one_each(_as_list(config.remote_configs), max(1, count), "remote_configs")
        ]
        self.rollout = _rollout_config(config, count)
        self.policy_class, self.policy_config = resolve_policy(policy)
        self.worker_config = make_worker_config(
            self.rollout,
            self.policy_class,
            self.policy_config,
            env=self.sources[0],
            keys=ENV_KEYS,
            device=config.policy_device,
            postproc=config.postproc,
        )
        self.record = _record_of(config)
        if self.record is not None:
            self.worker_config = self.record.adapt(self.worker_config)
        self._check_spaces(self.sources[1:])
        if config.exploration_type == "mean":
            _check_mean(self.policy_class(*self._spaces, self.policy_config))

    def connect(self) -> bool:
        """Connects to Ray if there are remote workers. Returns whether this call connected. Raises
        the errors of `attach_or_start`."""
        if self.num_collectors == 0:
            return False
        cpus = sum(options.get("num_cpus", 1.0) for options in self.options)
        return attach_or_start(cpus, self.num_collectors, self.config.ray_init_config)

    def make_workers(self) -> WorkerSet:
        """Starts the workers. Opens the file `record_to` if the user asked for a record.

        Raises:
            ConfigError: if the file cannot be written.
        """
        specs = [
            WorkerSpec(env=env, options=options)
            for env, options in zip(self.sources, self.options, strict=True)
        ]
        workers = WorkerSet(self.worker_config, self._learner_device(), specs)
        if self.record is not None:
            self.record.begin(workers)
        if self._given is not None:
            workers.local.use_policy(self._given)
        return workers

    def more(
        self, create_env_fn: Any, num_collectors: int | None, num_envs: int | None, options: Any
    ) -> list[WorkerSpec]:
        """Makes the specs of additional workers. See `Collector.add_collectors`."""
        envs = [self.sources[0]] if create_env_fn is None else _as_list(create_env_fn)
        count = num_collectors or len(envs)
        sources = [resolve_env(env) for env in _one_each(envs, count, "create_env_fn")]
        self._check_spaces(sources)
        given = self.options[0] if options is None else options
        each = _one_each(_as_list(given), count, "remote_configs")
        times = self.config.num_workers_per_collector
        return [
            WorkerSpec(env, None if num_envs is None else num_envs * times, _checked_options(opts))
            for env, opts in zip(sources, each, strict=True)
        ]

    def _learner_device(self) -> str:
        if self._given is not None:
            return str(self._given.device)
        return self.config.policy_device if self.num_collectors == 0 else "cpu"

    @property
    def _spaces(self) -> tuple[Space[Any], Space[Any]]:
        return self.worker_config.observation_space, self.worker_config.action_space

    def _check_spaces(self, sources: Sequence[EnvSource]) -> None:
        for source in {id(source): source for source in sources}.values():
            if source is self.sources[0]:
                continue
            spaces = probe_env(source, self.rollout, ENV_KEYS)[:2]
            if spaces != self._spaces:
                raise ConfigError(
                    f"create_env_fn: got environments with spaces {self._spaces} and {spaces}. "
                    "Allowed: environments with the same spaces, because all collectors use one "
                    "policy"
                )
            if self.num_collectors:
                check_picklable(dataclasses.replace(self.worker_config, env=source), ENV_KEYS)


def _rollout_config(config: CollectorConfig, count: int) -> RolloutConfig:
    names = (
        "vectorization_mode",
        "autoreset_mode",
        "worker_timeout_s",
        "worker_startup_timeout_s",
        "max_consecutive_failures",
        "max_consecutive_env_faults",
        "max_consecutive_non_finite",
    )
    options = {name: getattr(config, name) for name in names}
    if config.num_workers_per_collector > 1:
        options["vectorization_mode"] = "async"
    if config.max_frames_per_traj > 0:
        options["max_frames_per_traj"] = config.max_frames_per_traj
    return RolloutConfig.parse(
        {
            **options,
            "env_config": config.create_env_kwargs,
            "num_workers": count,
            "num_envs_per_worker": config.envs_per_collector,
            "seed": config.seed,
            "transport": "ray",
        }
    )


def _refuse_record(config: CollectorConfig) -> None:
    for key in ("record_to", "rerun_of"):
        if (path := getattr(config, key)) is not None:
            raise ConfigError(
                f"key {key!r}: got {str(path)!r} with num_collectors=0. Allowed: num_collectors of "
                "at least 1. Without worker processes, the same seed already repeats the batches"
            )


def _record_of(config: CollectorConfig) -> CollectorRecord | None:
    """Returns the record that the options ask for. The record is an add-on of its own."""
    if config.record_to is None and config.rerun_of is None:
        return None
    try:
        from polopt.recording.collector_record import CollectorRecord
    except ImportError as error:
        key = "record_to" if config.record_to is not None else "rerun_of"
        raise ConfigError(
            f"key {key!r}: this installation of polopt has no folder `recording`. Allowed: None"
        ) from error
    return CollectorRecord(config.record_to, config.rerun_of)


def _as_list(given: Any, required: str = "") -> list[Any]:
    items = list(given) if isinstance(given, list | tuple) else [given]
    if required and not items:
        raise ConfigError(f"{required}: got an empty list. Allowed: one for each collector")
    return items


def _one_each(given: list[Any], count: int, name: str) -> list[Any]:
    """Returns a list with one item for each worker. A single item is repeated."""
    if len(given) == count:
        return given
    if len(given) == 1:
        return given * count
    raise ConfigError(f"{name}: got {len(given)} for {count} collectors. Allowed: 1 or {count}")


def _checked_options(options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ConfigError(f"remote_configs: got {options!r}. Allowed: dicts of actor options")
    for key in options:
        if key not in REMOTE_OPTIONS:
            raise ConfigError(
                f"remote_configs: unknown key {key!r}{nearest_of(key, REMOTE_OPTIONS)}"
            )
    return dict(options)


def _check_here(device: str) -> None:
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch without CUDA
        raise ConfigError(
            f"key 'policy_device': got {device!r}, not available here: {error}".splitlines()[0]
        ) from error


def _check_mean(policy: Any) -> None:
    policy.dist.mean(np.zeros((1, policy.dist.num_params), np.float32))
