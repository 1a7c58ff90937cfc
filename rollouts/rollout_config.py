"""Options of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from polopt.common.compression import DataCodec, GradientCodec
from polopt.common.config import Config
from polopt.rollouts.resources import Amount, Resources


def sockets_for_zmq(value: Any) -> Any:
    """The option's value in configs of version 0.3 and before, by its present name."""
    return "socket" if value == "zmq" else value


class RolloutConfig(Config):
    """Options of sampling: environments, workers, their resources and their failures.

    "RLlib" names the key of RLlib with the same meaning. "0.8" the key of that release, where
    today's differs. Keys of RLlib in `aliases` are accepted as they are.

    Attributes:
        env: a Gymnasium id, `module:id` or `module:callable`, a name registered with
            `ray.tune.registry.register_env`, or a callable that makes an environment. See
            `polopt.rollouts.envs.env_sources.resolve_env`. RLlib: `env`.
        env_config: options of the environment, a dict. Each environment gets a copy. A callable
            gets it as `EnvContext`, which also tells the environment where it is, or as keyword
            arguments (see `polopt.rollouts.envs.creators.call_creator`), a Gymnasium id as
            arguments of `gymnasium.make`. RLlib: `env_config`.
        num_workers: number of remote rollout workers. 0 samples in the driver's process. RLlib:
            `num_env_runners` (0.8: `num_workers`).
        min_workers: number of workers that have to be up before a run starts, and that have to
            remain when workers are given up (see `max_consecutive_failures`). The run grows to
            `num_workers` as resources become free, for example in an autoscaling cluster. None:
            `num_workers`.
        num_workers_below: number of remote rollout workers below each remote worker, which then
            does not sample itself, but computes gradients from their fragments
            (`GradientWorker`).
        collection: how a process that computes gradients gathers the fragments of several workers.
            `sync`: one fragment of each, sampled with the newest weights. `overlapped`: the same,
            while the next ones are sampled with weights that are one batch older. `async`: one
            fragment at a time, in order of arrival.
        fraction_workers_below: in synchronous collection below a worker, share of the workers there
            that have to finish before the fragments of the others are ended early, in (0, 1]. 1:
            no fragment ends early.
        fraction_samples_below: share of its steps that a fragment which is ended early keeps at
            least, in [0, 1].
        compress_data: codec of fragments on the network. See `polopt.common.compression`. RLlib
            0.8: `compress_observations`.
        compress_gradients: codec of gradients on the network.
        topk_share: share of the elements that `compress_gradients: topk` sends, in (0, 1].
        num_envs_per_worker: number of environments of one worker, N. RLlib:
            `num_envs_per_env_runner` (0.8: `num_envs_per_worker`).
        rollout_fragment_length: steps of each environment in one fragment, T. A fragment holds
            T * N environment steps. RLlib: `rollout_fragment_length`.
        vectorization_mode: `sync` steps the environments of a worker one after another, `async`
            steps each in a process of its own, `vector_entry_point` uses the environment's own
            vector implementation. As in `gymnasium.make_vec`. None: the own implementation if there
            is one, else `sync`. Processes start as is Python's default, from 3.14 on with
            `forkserver`: a script that samples in its own process then needs
            `if __name__ == "__main__":`. RLlib: `gym_env_vectorize_mode`.
        autoreset_mode: when an environment is reset after the end of an episode: in the
            `same_step`, in the `next_step`, or by the sampler (`disabled`), as in
            `gymnasium.vector.AutoresetMode`. None: the mode of the environment's own vector
            implementation, else `same_step`, which loses no row to resets.
        max_frames_per_traj: environment steps after which an episode is truncated. None: the
            environment's own limit alone. RLlib 0.8: `horizon`.
        num_cpus_per_worker: Ray CPUs of each remote worker: a fraction of 1, or a whole number.
            RLlib: `num_cpus_per_env_runner`.
        num_gpus_per_worker: Ray GPUs of each remote worker: a fraction of 1, or a whole number.
            Above 0 its policy is on CUDA. RLlib: `num_gpus_per_env_runner`.
        custom_resources_per_worker: amounts of other Ray resources of each remote worker, by name.
            RLlib: `custom_resources_per_env_runner`.
        memory_per_worker: bytes of memory that Ray reserves for each remote worker. 0: none. RLlib
            0.8: `memory_per_worker`.
        transport: path of the calls of a training round. `ray`: actor calls. `socket`: Unix
            sockets, which need less processor time, to workers on the driver's node. A worker on
            another node is an error. `auto`: sockets, and Ray for workers on other nodes. Either
            way, calls that are too large for the kernel's buffers (about 100 KB) go through Ray.
            Collectors that belong to no optimizer, and those below gradient workers, use Ray.
            (Until version 0.3, `zmq` was the name of `socket`. It is accepted.)
        worker_timeout_s: seconds without progress after which a call counts as hanging and its
            worker is replaced. Progress is a step of an environment, or the beginning or end of a
            phase of the call, so a fragment may take longer. RLlib: `sample_timeout_s`, which
            bounds the whole call and does not replace the worker.
        worker_startup_timeout_s: the same for the first call of a new worker, in seconds. Time in
            which Ray has no resources for the worker counts only if the run cannot continue
            without it.
        max_consecutive_failures: failed calls without a success in between that end the run. A
            worker that fails this often, its replacements included, while others succeed, is not
            replaced again. The run continues without it if `min_workers` are left, and ends
            otherwise. RLlib: `max_num_env_runner_restarts`, a total.
        max_consecutive_env_faults: exceptions of one environment without a successful step in
            between that end the run. Before that the environment is replaced in its worker. RLlib:
            `restart_failed_sub_environments`, without a limit.
        max_consecutive_non_finite: consecutive fragments of one worker, or consecutive updates,
            that are not finite and end the run. Before that they are discarded.
        seed: seed of all random numbers, from 0 to 2**63 - 1. None draws one. Each worker derives
            seeds of its environments, of their spaces, and of the global generators of `random`,
            NumPy and torch in its process. The driver's own process, where environments run with
            `num_workers=0`, has its global generators seeded only if `seed` is given. RLlib:
            `seed`.
        record_arrivals: record everything in which timing decides, in the file
            `arrivals_000000.jsonl.gz` beside the results, so that `polopt rerun` can repeat the run
            bit for bit. The file has about 30 bytes for each gradient or fragment.
    """

    env: Any = None
    env_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    num_workers: int = pydantic.Field(default=2, ge=0, le=100_000)
    min_workers: int | None = pydantic.Field(default=None, ge=1, le=100_000)
    num_workers_below: int = pydantic.Field(default=0, ge=0, le=100_000)
    collection: Literal["sync", "overlapped", "async"] = "sync"
    fraction_workers_below: float = pydantic.Field(default=1.0, gt=0.0, le=1.0)
    fraction_samples_below: float = pydantic.Field(default=0.25, ge=0.0, le=1.0)
    compress_data: DataCodec = "none"
    compress_gradients: GradientCodec = "none"
    topk_share: float = pydantic.Field(default=0.1, gt=0.0, le=1.0)
    num_envs_per_worker: int = pydantic.Field(default=8, ge=1, le=100_000)
    rollout_fragment_length: int = pydantic.Field(default=20, ge=1, le=10**7)
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None = None
    max_frames_per_traj: int | None = pydantic.Field(default=None, ge=1)
    num_cpus_per_worker: Amount = 1.0
    num_gpus_per_worker: Amount = 0.0
    custom_resources_per_worker: Resources = pydantic.Field(default_factory=dict)
    memory_per_worker: int = pydantic.Field(default=0, ge=0, le=2**50)
    transport: Annotated[
        Literal["ray", "socket", "auto"], pydantic.BeforeValidator(sockets_for_zmq)
    ] = "auto"
    worker_timeout_s: float = pydantic.Field(default=60.0, gt=0.0, le=1e7)
    worker_startup_timeout_s: float = pydantic.Field(default=120.0, gt=0.0, le=1e7)
    max_consecutive_failures: int = pydantic.Field(default=10, ge=1)
    max_consecutive_env_faults: int = pydantic.Field(default=10, ge=1)
    max_consecutive_non_finite: int = pydantic.Field(default=5, ge=1)
    seed: int | None = pydantic.Field(default=None, ge=0, lt=2**63)
    record_arrivals: bool = False

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

    @property
    def last_worker_index(self) -> int:
        """The largest `EnvContext.worker_index` of training."""
        return self.num_workers * max(self.num_workers_below, 1)

    renamed: ClassVar[Mapping[str, str]] = {"fast_sync": "fast_cpu"}
    aliases: ClassVar[Mapping[str, str]] = {
        "num_env_runners": "num_workers",
        "num_envs_per_env_runner": "num_envs_per_worker",
        "num_cpus_per_env_runner": "num_cpus_per_worker",
        "num_gpus_per_env_runner": "num_gpus_per_worker",
        "custom_resources_per_env_runner": "custom_resources_per_worker",
        "num_rollout_workers": "num_workers",
        "gym_env_vectorize_mode": "vectorization_mode",
        "sample_batch_size": "rollout_fragment_length",
    }
