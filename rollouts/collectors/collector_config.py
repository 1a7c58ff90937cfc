"""Options of a `Collector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import torch

from polopt.common.config import Automatic, Config, ConfigError, differ, shown
from polopt.rollouts.sampling.sample_request import Exploration


def _known_device(name: str) -> str:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ValueError("names of torch devices, such as cpu or cuda:0") from error
    return name


C = TypeVar("C", bound="CollectorConfig")
#: TorchRL's classes that collect in one process, as a worker does.
_SINGLE_COLLECTORS = ("Collector", "SyncDataCollector")

#: A name that `torch.device` accepts. This machine need not have such a device.
DeviceName = Annotated[str, pydantic.AfterValidator(_known_device)]


class CollectingConfig(Config):
    """Options of a collector that do not depend on how its workers were made.

    Attributes:
        frames_per_batch: number of environment steps in one batch, rounded up so that all
            environments make the same number of steps. With `sync`, these are the environments of
            all collectors, otherwise of one collector. None: each fragment has
            `rollout_fragment_length` steps.
        total_frames: the iterator ends with the batch that brings the number of returned
            environment steps to this number. -1: it never ends.
        sync: True puts a fragment of every collector into each batch, in order of the collectors.
            False makes each fragment a batch, in order of arrival.
        init_random_frames: until this many environment steps have been requested, fragments are
            sampled with actions that are uniform over the action space. -1: the policy always acts.
        reset_at_each_iter: reset the environments before each batch.
        split_trajs: cut batches into trajectories. `padded` (or True) gives a batch
            `[longest, number of trajectories]` whose mask is `valid`. `list` gives a list of
            batches `[length, 1]`.
        exploration_type: how actions are chosen from the policy's distribution.
        storing_device: device of the tensors that `SampleBatch.to_tensordict` makes.
        update_after_each_batch: send weights before each fragment, and start no fragment before
            that. In synchronous collection, every batch is then sampled with the current weights.
        broadcast_interval: send weights again after this many batches. 0: only the other options
            decide when weights are sent.
        max_weight_update_interval: maximum lag, in batches, of the weights with which a worker
            acts. Workers receive new weights in time. A fragment that would exceed the lag is
            stopped early before the next batch is returned. -1: no limit.
        fraction_workers: in synchronous collection, the last fragments of a batch stop early once
            this share of the collectors has finished. 1: every fragment has its full length.
        fraction_samples: a fragment that stops early keeps at least this share of its steps.
    """

    frames_per_batch: Automatic = pydantic.Field(default=None, ge=0, le=10**9)
    total_frames: int = pydantic.Field(default=-1, ge=-1, lt=2**63)
    sync: bool = False
    init_random_frames: int = pydantic.Field(default=-1, ge=-1, lt=2**63)
    reset_at_each_iter: bool = False
    split_trajs: pydantic.StrictBool | Literal["padded", "list"] = False
    exploration_type: Exploration = "random"
    storing_device: DeviceName = "cpu"
    update_after_each_batch: bool = False
    broadcast_interval: int = pydantic.Field(default=0, ge=0)
    max_weight_update_interval: int = pydantic.Field(default=-1, ge=-1)
    fraction_workers: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(default=0.25, ge=0.0, le=1.0)

    @pydantic.model_validator(mode="after")
    def _check_together(self) -> CollectingConfig:
        if self.max_weight_update_interval == 0:
            raise ValueError(
                "key 'max_weight_update_interval': got 0. Allowed: -1, or 1 or more "
                "(update_after_each_batch sends new weights before each batch)"
            )
        if self.fraction_workers < 1.0 and not self.sync:
            raise ValueError(
                f"key 'fraction_workers': got {self.fraction_workers} with sync=False, where "
                "no batch waits for all collectors. Allowed: 1.0, or sync=True"
            )
        return self


class CollectorConfig(CollectingConfig):
    """Options of a collector that makes its own workers, besides environments and policy.

    `parse` also takes three arguments of TorchRL's RayCollector:

    - `collector_class`, if it is TorchRL's class for one process.
    - `collector_kwargs`, whose options are taken as if they were given here.
    - `device`, which sets both `policy_device` and `storing_device`.

    Attributes:
        num_collectors: number of collectors, each a Ray actor. None: one for each given
            environment. 0: this process collects, without Ray.
        num_envs: environments of one collector.
        num_workers_per_collector: multiplies the number of environments. If it is over 1, each
            environment is in a process of its own (Gymnasium's `AsyncVectorEnv`).
        create_env_kwargs: passed to the environment.
        max_frames_per_traj: episodes are truncated after this many steps. -1: never.
        policy_device: device of the collectors' copies of the policy.
        postproc: a callable on each fragment, `SampleBatch -> SampleBatch`, run in the worker.
        remote_configs: options of the collectors' actors, as `ray.remote` takes them (`num_cpus`,
            `num_gpus`, `memory`, `resources`, `runtime_env`, ...). A list has one for each.
        ray_init_config: arguments of `ray.init`, unless this process is connected to Ray already.
            None: attach to a running cluster if there is one, else start Ray here.
        seed: source of all random numbers. None: a random seed.
        record_to: a new file in which the collector writes down everything that timing decides. It
            needs a `seed`. See docs/rerun.md.
        rerun_of: such a file. The same program, with this argument instead of `record_to`, collects
            the same batches in the same order.
        vectorization_mode, autoreset_mode, worker_timeout_s, worker_startup_timeout_s,
            max_consecutive_failures, max_consecutive_env_faults, max_consecutive_non_finite: as in
            `RolloutConfig`.
    """

    frames_per_batch: int = pydantic.Field(ge=1, le=10**9)
    num_collectors: int | None = pydantic.Field(default=None, ge=0, le=100_000)
    num_envs: int = pydantic.Field(default=1, ge=1, le=100_000)
    num_workers_per_collector: int = pydantic.Field(default=1, ge=1, le=1000)
    create_env_kwargs: dict[str, Any] = pydantic.Field(default_factory=dict)
    max_frames_per_traj: int = pydantic.Field(default=-1, ge=-1)
    policy_device: DeviceName = "cpu"
    postproc: Callable[[Any], Any] | None = None
    remote_configs: dict[str, Any] | list[dict[str, Any]] = pydantic.Field(default_factory=dict)
    ray_init_config: dict[str, Any] | None = None
    seed: int | None = pydantic.Field(default=None, ge=0, lt=2**63)
    record_to: Path | None = None
    rerun_of: Path | None = None
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None = None
    worker_timeout_s: float = pydantic.Field(default=60.0, gt=0.0, le=1e7)
    worker_startup_timeout_s: float = pydantic.Field(default=120.0, gt=0.0, le=1e7)
    max_consecutive_failures: int = pydantic.Field(default=10, ge=1)
    max_consecutive_env_faults: int = pydantic.Field(default=10, ge=1)
    max_consecutive_non_finite: int = pydantic.Field(default=5, ge=1)

    @pydantic.model_validator(mode="after")
    def _check_record(self) -> CollectorConfig:
        if self.record_to is not None and self.rerun_of is not None:
            raise ValueError(
                f"key 'rerun_of': got {str(self.rerun_of)!r}, and record_to. Allowed: one of them"
            )
        if (self.record_to or self.rerun_of) and self.seed is None:
            raise ValueError(
                "key 'seed': got None. Allowed with record_to and rerun_of: an integer, because a "
                "rerun begins with the same random numbers"
            )
        return self

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """As `Config.parse`, after TorchRL's arguments have become options. See the class."""
        return super().parse(_without_torchrls_keys(options, where), where)

    @property
    def envs_per_collector(self) -> int:
        """N of one collector."""
        return self.num_envs * self.num_workers_per_collector


def _without_torchrls_keys(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replaces TorchRL's options by polopt's. See `CollectorConfig`.

    Raises:
        ConfigError: they have no counterpart, or contradict other options.
    """
    options = dict(options)
    kind = options.pop("collector_class", None)
    if kind is not None and getattr(kind, "__name__", kind) not in _SINGLE_COLLECTORS:
        raise ConfigError(
            f"{where}: key 'collector_class': got {shown(kind)}. Allowed: "
            f"{', '.join(_SINGLE_COLLECTORS)}; num_workers_per_collector puts each environment "
            "into a process of its own"
        )
    inner = options.pop("collector_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"{where}: key 'collector_kwargs': got {shown(inner)}. Allowed: a dict for all "
            "collectors; environments and remote_configs can be lists"
        )
    inner = dict(inner)
    for given in (inner, options):
        if "device" in given and given["device"] is None:  # TorchRL's default
            del given["device"]
    for key, value in inner.items():
        if key in options and differ(options[key], value):
            raise ConfigError(
                f"{where}: key {key!r} is {shown(options[key])}, and {shown(value)} in "
                "collector_kwargs. Give only one of them"
            )
        options[key] = value
    if "device" in options:
        device = str(options.pop("device"))
        for key in ("policy_device", "storing_device"):
            options.setdefault(key, device)
    return options
