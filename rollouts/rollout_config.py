"""The options of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from polopt.common.compression import DataCodec, GradientCodec
from polopt.common.config import Config
from polopt.rollouts.resources import Amount, Resources


def sockets_for_zmq(value: Any) -> Any:
    """Replaces "zmq" by "socket". Configs from before the first release use the name "zmq"."""
    return "socket" if value == "zmq" else value


def named_policies(value: Any) -> Any:
    """Converts a list of names, and names without options, to a dict of options."""
    if isinstance(value, list | tuple | set | frozenset):
        # The order of a set differs between processes.
        names = sorted(value) if isinstance(value, set | frozenset) else value
        return {name: {} for name in names}
    if isinstance(value, Mapping):
        return {name: {} if options is None else options for name, options in value.items()}
    return value


#: The type of the option `clip_raw_rewards`.
_Clip = Annotated[
    Literal["sign"] | Annotated[float, pydantic.Field(gt=0.0, le=1e6)] | None,
    pydantic.Field(description="`sign`, a number above 0, at most 1e+06, or None"),
]


class RolloutConfig(Config):
    """The options of sampling: environments, workers, resources and limits for failures.

    "RLlib:" gives the key in RLlib with the same or a similar meaning. "0.8:" gives the key in
    RLlib 0.8, if it differs.

    Attributes:
        env: a Gymnasium id, `module:id` or `module:callable`, a name registered with
            `ray.tune.registry.register_env`, or a callable that makes an environment. See
            `docs/environments.md`. RLlib: `env`.
        env_config: a dict with the options of the environment. Each environment receives a copy. A
            Gymnasium id receives the options as arguments of `gymnasium.make`. A callable receives
            them as keyword arguments, or as an `EnvContext`, which also holds the indices of the
            environment (see `docs/environments.md`). RLlib: `env_config`.
        num_workers: the number of remote rollout workers. 0 means that the driver's process
            samples. RLlib: `num_env_runners` (0.8: `num_workers`).
        min_workers: the minimum number of workers. A run starts when this number of workers is up,
            and ends if failures leave fewer (see `max_consecutive_failures`). The run starts more
            workers, up to `num_workers`, as resources become free, for example in an autoscaling
            cluster. `None` means `num_workers`.
        num_workers_below: the number of remote rollout workers below each remote worker. If this is
            greater than 0, the remote worker is a gradient worker: it does not sample itself, but
            computes gradients from the fragments of the workers below.
        collection: how a process that computes gradients, such as the driver or a gradient worker,
            collects fragments from several workers. With `sync`, it waits for the fragments of all
            workers, which are sampled with the newest weights. With `overlapped`, the workers
            sample the next fragments while the process learns, with weights that are one batch
            older than with `sync`. With `async`, the process takes one fragment at a time, in order
            of arrival.
        fraction_workers_below: a share in (0, 1] of the workers below a gradient worker. When this
            share has finished, the fragments of the other workers below are stopped early. 1 means
            that no fragment is stopped early. This option applies to `sync` and `overlapped`
            collection.
        fraction_samples_below: a fragment that is stopped early keeps at least this share of its
            steps, in [0, 1].
        compress_data: the codec that compresses fragments before they are sent. `fp16` and `bf16`
            halve the bytes and round. `lz4` does not round, and is useful for images. RLlib 0.8:
            `compress_observations`.
        compress_gradients: the codec that compresses gradients before they are sent. `fp16` and
            `bf16` halve the bytes and round. `topk` sends the largest elements, and adds the rest
            to the next gradient.
        topk_share: the share of the elements that `compress_gradients: topk` sends, in (0, 1].
        num_envs_per_worker: the number N of environments of one worker. RLlib:
            `num_envs_per_env_runner` (0.8: `num_envs_per_worker`).
        rollout_fragment_length: the number T of steps that each environment makes in one fragment.
            A fragment has T * N environment steps. RLlib: `rollout_fragment_length`.
        vectorization_mode: how a worker steps its environments, as in `gymnasium.make_vec`. `sync`
            steps them one after another. `async` runs each environment in its own process.
            `vector_entry_point` uses the environment's own vector implementation. `None` means
            `vector_entry_point` if the environment has such an implementation and
            `max_frames_per_traj` is not set, and `sync` otherwise. With `async`, processes start
            with Python's default method. From Python 3.14, this is `forkserver`, and a script that
            samples in its own process then needs `if __name__ == "__main__":`. RLlib:
            `gym_env_vectorize_mode`.
        autoreset_mode: when an environment is reset after the end of an episode, as in
            `gymnasium.vector.AutoresetMode`: in the same step (`same_step`), in the next step
            (`next_step`), or by the sampler (`disabled`). With `None`, an environment's own
            vector implementation and a vector that a callable makes keep their own mode. For all
            other environments, `None` means `same_step`, in which no rows are lost to resets.
        max_frames_per_traj: the number of environment steps after which an episode is truncated.
            `None` means that only the environment's own limit applies. RLlib 0.8: `horizon`.
        clip_raw_rewards: how the rewards of the environment are changed for learning. `sign` keeps
            only their sign, as in the DQN of Atari. A number is the largest absolute value of a
            reward. Returns in results, and the variance of `normalize_rewards`, are computed from
            the unchanged rewards. RLlib: `clip_rewards`.
        num_cpus_per_worker: the Ray CPUs of each remote worker: a fraction of 1, or a whole number.
            RLlib: `num_cpus_per_env_runner`.
        num_gpus_per_worker: the Ray GPUs of each remote worker: a fraction of 1, or a whole number.
            If this is greater than 0, the worker's policy is on CUDA. RLlib:
            `num_gpus_per_env_runner`.
        custom_resources_per_worker: a dict with the amounts of custom Ray resources of each remote
            worker. RLlib: `custom_resources_per_env_runner`.
        memory_per_worker: the bytes of memory that Ray reserves for each remote worker. 0 means
            that Ray reserves no memory. RLlib 0.8: `memory_per_worker`.
        transport: how the driver sends the calls of an iteration to the workers. `ray` uses actor
            calls. `socket` uses Unix sockets, which need less processor time. With `socket`, all
            workers must be on the driver's node. `auto` uses sockets for workers on the driver's
            node, and Ray for workers on other nodes. The start of a worker decides this.
            Calls to evaluation workers, to the workers below gradient workers, and to the workers
            of a Collector without an optimizer always use Ray. The old name of `socket`, `zmq`, is
            still accepted.
        worker_timeout_s: the number of seconds without progress after which a call counts as
            hanging, and its worker is replaced. A step of an environment is progress, and so is the
            start or end of a phase of the call. A fragment may therefore take longer than this
            limit. RLlib: `sample_timeout_s`, which limits the whole call and does not replace the
            worker.
        worker_startup_timeout_s: the limit in seconds for the start of a worker. The limit begins
            again whenever any worker has started. While Ray has no resources for the worker, the
            limit applies only if the run cannot continue without this worker.
        max_consecutive_failures: the run ends after this number of consecutive failed calls. If
            one worker and its replacements fail this often while other workers succeed, the worker
            is not replaced again. The run then continues without this worker if at least
            `min_workers` workers remain, and ends otherwise. RLlib: `max_num_env_runner_restarts`,
            which limits the total number of restarts.
        max_consecutive_env_faults: the worker fails after this number of exceptions of one
            environment without a successful step between them. Until then, the worker replaces the
            environment after each exception. The driver replaces a remote worker that fails (see
            `max_consecutive_failures`). The run ends if no call has succeeded before, or if the
            environment is in the driver. RLlib: `restart_failed_sub_environments`, which has no
            limit.
        max_consecutive_non_finite: the run ends after this number of consecutive non-finite
            fragments or gradients of one worker, or of consecutive non-finite updates. Until then,
            each of them is discarded.
        seed: the seed of all random numbers, from 0 to 2**63 - 1. `None` draws a seed. From this
            seed, each worker derives the seeds of its environments, of the spaces of these
            environments, and of the global generators of `random`, NumPy and torch in the worker's
            process. With `num_workers=0`, environments run in the driver's process. The global
            generators of this process are seeded only if `seed` is set.
            RLlib: `seed`.
        policies: the policies of an environment with several agents: a list of names, or a dict
            from names to options that differ from the options of the run, such as
            `{"hunters": {"lr": 1e-3}, "prey": {}}`. The option `policy` is the name or class of
            another algorithm. `None` means one policy for all agents with the same spaces. See
            `docs/many-agents.md`. RLlib: `policies`.
        policy_mapping_fn: which policy acts for an agent: a function `(agent_id, ...) -> name`,
            `module:function`, or a dict of patterns such as `{"adversary_*": "hunters"}`, of which
            the first that fits counts. It is asked when an agent appears in an episode. A function
            may also take `rng`, a generator of NumPy, `episode`, and `worker`, the index of the
            worker. RLlib: `policy_mapping_fn`.
        policies_to_train: the names of the policies that learn. `None` means all. RLlib:
            `policies_to_train`.
        count_steps_by: what `train_batch_size` counts in an environment with several agents:
            `env_steps`, or `agent_steps`, the steps of all agents. RLlib: `count_steps_by`.
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
    clip_raw_rewards: _Clip = None
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
    policies: Annotated[
        dict[str, dict[str, Any]] | None, pydantic.BeforeValidator(named_policies)
    ] = None
    policy_mapping_fn: Any = None
    policies_to_train: list[str] | None = None
    count_steps_by: Literal["env_steps", "agent_steps"] = "env_steps"

    @pydantic.model_validator(mode="after")
    def _check_policies(self) -> RolloutConfig:
        names, trained = self.policies, self.policies_to_train
        if names is not None and not names:
            raise ValueError("key 'policies': got no policy; allowed: one name or more, or None")
        for name in names or ():
            if not name or "/" in name:
                raise ValueError(
                    f"key 'policies': got the name {name!r}; allowed: a name without '/'"
                )
        if trained is not None:
            unknown = [name for name in trained if name not in (names or {})]
            if unknown or not trained:
                raise ValueError(
                    f"key 'policies_to_train': got {trained}; allowed: one or more of "
                    f"{list(names or {})}, the names in 'policies'"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _check_workers(self) -> RolloutConfig:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            raise ValueError(
                f"key 'min_workers': got {self.min_workers} with num_workers={self.num_workers}; "
                "allowed: 1 to num_workers, or None for all workers"
            )
        return self

    @property
    def workers_needed(self) -> int:
        """The number of workers that a run needs to start. The run also needs this number of
        workers to continue when a failed worker is no longer replaced."""
        return self.num_workers if self.min_workers is None else self.min_workers

    @property
    def last_worker_index(self) -> int:
        """The largest `EnvContext.worker_index` of a training worker."""
        return self.num_workers * max(self.num_workers_below, 1)

    renamed: ClassVar[Mapping[str, str]] = {"fast_sync": "fast_cpu"}
