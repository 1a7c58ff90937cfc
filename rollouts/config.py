"""Options of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from polopt.common.compression import DataCodec, GradientCodec
from polopt.common.config import Config
from polopt.rollouts.resources import Amount, Resources


class RolloutConfig(Config):
    """Which environments are sampled, by how many workers, and what those may use.

    Attributes:
        env: a Gymnasium id, a name given to `ray.tune.registry.register_env`, or a callable that
            makes an environment; see `polopt.rollouts.envs.resolving.resolve_env`.
        env_config: passed to the environment.
        num_workers: remote rollout workers; 0 samples in the driver's own process.
        min_workers: a run starts once so many of them are there, and grows to `num_workers` as
            resources come, for example from a cluster that scales itself. None: all of them. It is
            also how few a run may be left with; see `max_consecutive_failures`.
        num_workers_below: remote rollout workers below each remote worker, which then samples
            nothing itself, but computes gradients from what they collect (`GradientWorker`).
        collection: how whoever computes gradients gets fragments of several workers. `sync`: one
            of each, made with the newest weights. `overlapped`: likewise, but the next ones are
            collected meanwhile, with weights that are one batch older. `async`: first ready,
            first served, one at a time.
        fraction_workers_below: in synchronous collection below a worker, the last fragments are cut
            short once this share of the workers there has finished; 1: never.
        fraction_samples_below: but a fragment that is cut short keeps at least this share.
        compress_data: how fragments travel: see `polopt.common.compression`.
        compress_gradients: how gradients travel.
        topk_share: of its elements that `compress_gradients: topk` sends at once.
        num_envs_per_worker: environments of one worker, N.
        rollout_fragment_length: steps of each environment in one fragment, T.
        vectorization_mode: as in `gymnasium.make_vec`; None takes the environment's own vector
            implementation where it has one, else `sync`.
        autoreset_mode: when an environment that ended is reset: in the `same_step`, in the
            `next_step`, or by the sampler (`disabled`). None: the mode of the environment's own
            vector implementation, else `same_step`, in which no row is lost to resets.
        max_frames_per_traj: an episode is truncated after so many steps, if it has not ended
            before; None: the environment's own limit alone.
        num_cpus_per_worker: Ray CPUs.
        num_gpus_per_worker: Ray GPUs; a worker with any acts and learns on CUDA.
        custom_resources_per_worker: other Ray resources.
        memory_per_worker: bytes that Ray reserves; 0: none.
        worker_timeout_s: a call that takes longer counts as hanging, and its worker is replaced.
        worker_startup_timeout_s: the same for the first call of a new worker. Time in which Ray has
            no place for it counts only if the run can not go on without it.
        max_consecutive_failures: so many failed calls without one success in between end the run.
            A worker that fails so often while others succeed (its replacements included) is not
            replaced again; the run goes on without it if at least `min_workers` are left, and
            else ends.
        max_consecutive_env_faults: so many exceptions of one environment without a step in between
            are too many. Until then it is made anew, and nothing else happens.
        max_consecutive_non_finite: so many fragments of one worker, or so many updates, in a row
            that are not finite end the run. Until then they are left out.
        seed: all random numbers derive from it; None takes a fresh one.
    """

    env: Any = None
    env_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    num_workers: int = pydantic.Field(2, ge=0, le=100_000)
    min_workers: int | None = pydantic.Field(None, ge=1, le=100_000)
    num_workers_below: int = pydantic.Field(0, ge=0, le=100_000)
    collection: Literal["sync", "overlapped", "async"] = "sync"
    fraction_workers_below: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    fraction_samples_below: float = pydantic.Field(0.25, ge=0.0, le=1.0)
    compress_data: DataCodec = "none"
    compress_gradients: GradientCodec = "none"
    topk_share: float = pydantic.Field(0.1, gt=0.0, le=1.0)
    num_envs_per_worker: int = pydantic.Field(8, ge=1, le=100_000)
    rollout_fragment_length: int = pydantic.Field(20, ge=1, le=10**7)
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None = None
    max_frames_per_traj: int | None = pydantic.Field(None, ge=1)
    num_cpus_per_worker: Amount = 1.0
    num_gpus_per_worker: Amount = 0.0
    custom_resources_per_worker: Resources = pydantic.Field(default_factory=dict)
    memory_per_worker: int = pydantic.Field(0, ge=0, le=2**50)
    worker_timeout_s: float = pydantic.Field(60.0, gt=0.0, le=1e7)
    worker_startup_timeout_s: float = pydantic.Field(120.0, gt=0.0, le=1e7)
    max_consecutive_failures: int = pydantic.Field(10, ge=1)
    max_consecutive_env_faults: int = pydantic.Field(10, ge=1)
    max_consecutive_non_finite: int = pydantic.Field(5, ge=1)
    seed: int | None = pydantic.Field(None, ge=0, lt=2**63)

    @pydantic.model_validator(mode="after")
    def _check_workers(self) -> RolloutConfig:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(
                f"key 'min_workers': got {self.min_workers} with num_workers={self.num_workers}; "
                "allowed: 1 to num_workers, or None for all of them"
            )
        return self

    @property
    def workers_needed(self) -> int:
        """Workers that have to be there for a run to start, and to go on after one is given up."""
        return self.num_workers if self.min_workers is None else self.min_workers

    aliases: ClassVar[Mapping[str, str]] = {
        "num_env_runners": "num_workers",
        "num_envs_per_env_runner": "num_envs_per_worker",
        "num_cpus_per_env_runner": "num_cpus_per_worker",
        "num_gpus_per_env_runner": "num_gpus_per_worker",
        "custom_resources_per_env_runner": "custom_resources_per_worker",
        "max_consecutive_bad_numbers": "max_consecutive_non_finite",
    }
