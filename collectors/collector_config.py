"""The options of a `Collector`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import torch

from polopt.common.config import Automatic, Config, ConfigError, differ, shown
from polopt.rollouts.sampling.sampler import Exploration


def _known_device(name: str) -> str:
    try:
        torch.device(name)
    except RuntimeError as error:
        raise ValueError("names of torch devices, such as cpu or cuda:0") from error
    return name


C = TypeVar("C", bound="CollectorConfig")
#: The classes of TorchRL that collect in one process, like one of polopt's workers.
_SINGLE_COLLECTORS = ("Collector", "SyncDataCollector")

#: A name that `torch.device` accepts. The device may exist only on another machine.
DeviceName = Annotated[str, pydantic.AfterValidator(_known_device)]


class CollectingConfig(Config):
    """The options of a Collector that do not depend on how its workers were made.

    Attributes:
        frames_per_batch: the number of environment steps in one batch. A batch consists of one or
            more fragments. A fragment is what a worker samples for one request. A batch may have
            more steps, because all environments of a worker make the same number of steps. If
            fragments are stopped early, a batch may have fewer steps. `None` and 0 mean that each
            environment makes `rollout_fragment_length` steps in a fragment.
        total_frames: the Collector stops once the returned batches have at least this many
            environment steps. -1 means that the Collector never stops.
        sync: if True, each batch contains one fragment of every worker, in the order of the
            workers. If False, each fragment is a batch, and batches are returned in the order in
            which they arrive.
        init_random_frames: fragments are sampled with actions that are uniform over the action
            space, until this many environment steps have been requested. -1 or 0 means that the
            policy chooses all actions.
        reset_at_each_iter: whether workers reset their environments before each fragment.
        split_trajs: whether and how to cut batches into trajectories. `padded` (or True) returns a
            batch `[longest, number of trajectories]`, in which the column `valid` is False in the
            padding. `list` returns a list of batches `[length, 1]`.
        exploration_type: how actions are chosen from the policy's distribution. `random` samples an
            action. `mode` and `deterministic` choose the most likely action. `mean` chooses the
            mean, which categorical actions do not have.
        storing_device: the device of the tensors that `SampleBatch.to_tensordict` makes.
        update_after_each_batch: whether to send the current weights with the request for each
            fragment. Fragments are then requested only when the user asks for the next batch. In
            synchronous collection, every batch is therefore sampled with the current weights.
        broadcast_interval: the Collector sends new weights after this many batches. 0 means that
            only `update_after_each_batch`, `max_weight_update_interval` and calls of
            `update_policy_weights_` decide when weights are sent.
        max_weight_update_interval: the maximum lag of the weights with which a worker acts. The lag
            is the number of batches that the Collector has returned since the policy had these
            weights. Workers receive new weights before their weights exceed this lag. If the
            weights of a pending fragment would exceed this lag when the next batch is returned, the
            fragment is first stopped early. -1 means that the lag has no limit.
        fraction_workers: in synchronous collection, when this share of the workers has finished,
            the fragments of the other workers stop early. The batch then lacks the fragments of
            workers that are still starting. 1 means that this option stops no fragment.
        fraction_samples: a fragment that `fraction_workers` stops early has at least this share of
            its full length.
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
                f"key 'fraction_workers': got {self.fraction_workers} with sync=False, in which "
                "each batch comes from one collector. Allowed: 1.0, or sync=True"
            )
        return self


class CollectorConfig(CollectingConfig):
    """The options of a Collector that makes its own workers. These are all arguments of `Collector`
    except the environments and the policy.

    `parse` also accepts three arguments of TorchRL's `RayCollector`:

    - `collector_class`: only TorchRL's classes that collect in one process are accepted.
    - `collector_kwargs`: a dict of options, which have the same effect as if they were passed
      directly.
    - `device`: sets `policy_device` and `storing_device`, unless they are given separately.

    Attributes:
        num_collectors: the number of workers, each a Ray actor. `None` means one worker for each
            item of `create_env_fn`. 0 means that this process collects, without Ray.
        num_envs: the number of environments of one worker, if `num_workers_per_collector` is 1.
        num_workers_per_collector: the number of environments of one worker is `num_envs` times this
            number. If this number is greater than 1, each environment runs in its own process
            (Gymnasium's `AsyncVectorEnv`).
        create_env_kwargs: the options of each environment. A callable receives them as keyword
            arguments or as one dict, depending on its signature.
        max_frames_per_traj: episodes are truncated after this many steps. -1 or 0 means that this
            option truncates no episodes.
        policy_device: the device of the workers' copies of the policy. If `num_collectors` is 0,
            this is the device of the policy in this process, unless the user passed a Policy
            object.
        postproc: a callable `SampleBatch -> SampleBatch` that the worker applies to each fragment.
        remote_configs: the options of the workers' actors, with the names that `ray.remote` uses
            (`num_cpus`, `num_gpus`, `memory`, `resources`, `runtime_env`, ...). A list has one dict
            for each worker.
        ray_init_config: the arguments of `ray.init`. They are ignored if this process is already
            connected to Ray. With `None`, the Collector connects to a running cluster. If there is
            no running cluster, the Collector starts Ray on this machine.
        seed: the seed of all random numbers. `None` means a random seed.
        record_to: the path of a new file in which the Collector records all events whose order
            depends on timing. Requires `seed`. See docs/rerun.md.
        rerun_of: the path of a file that `record_to` has written. The same program, with `rerun_of`
            instead of `record_to`, collects the same batches in the same order.
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
                f"key 'rerun_of': got {str(self.rerun_of)!r} together with record_to. Allowed: "
                "only one of the two keys"
            )
        if (self.record_to or self.rerun_of) and self.seed is None:
            raise ValueError(
                "key 'seed': got None. Allowed with record_to and rerun_of: an integer, because a "
                "rerun must use the same random numbers"
            )
        return self

    @classmethod
    def parse(cls: type[C], options: Mapping[str, Any], where: str = "config") -> C:
        """Parses options like `Config.parse`. Arguments of TorchRL are first converted to options,
        as the docstring of the class describes."""
        return super().parse(_without_torchrls_keys(options, where), where)

    @property
    def envs_per_collector(self) -> int:
        """The number N of environments of one worker."""
        return self.num_envs * self.num_workers_per_collector


def _without_torchrls_keys(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replaces arguments of TorchRL by options of polopt. See `CollectorConfig`.

    Raises:
        ConfigError: if an argument has no counterpart, or contradicts another option.
    """
    options = dict(options)
    kind = options.pop("collector_class", None)
    if kind is not None and getattr(kind, "__name__", kind) not in _SINGLE_COLLECTORS:
        raise ConfigError(
            f"{where}: key 'collector_class': got {shown(kind)}. Allowed: "
            f"{', '.join(_SINGLE_COLLECTORS)}. To run each environment in its own process, set "
            "num_workers_per_collector"
        )
    inner = options.pop("collector_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise ConfigError(
            f"{where}: key 'collector_kwargs': got {shown(inner)}. Allowed: one dict for all "
            "collectors. Only create_env_fn and remote_configs can be lists"
        )
    inner = dict(inner)
    for given in (inner, options):
        if "device" in given and given["device"] is None:  # TorchRL's default
            del given["device"]
    for key, value in inner.items():
        if key in options and differ(options[key], value):
            raise ConfigError(
                f"{where}: key {key!r} is {shown(options[key])}, but {shown(value)} in "
                "collector_kwargs. Give only one of the two values"
            )
        options[key] = value
    if "device" in options:
        device = str(options.pop("device"))
        for key in ("policy_device", "storing_device"):
            options.setdefault(key, device)
    return options
