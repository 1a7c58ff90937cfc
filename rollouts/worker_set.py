"""`WorkerSet`: the local worker and the remote ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import ray

from polopt.policies.transport import Weights
from polopt.rollouts.envs import EnvSource
from polopt.rollouts.faults import FaultLog, WorkerFailure
from polopt.rollouts.worker import RolloutWorker, WorkerConfig

#: Larger weights go through the object store once for all workers; smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000
#: What a worker's process is made with; a change needs other processes.
_PROCESS_KEYS = (
    "num_workers",
    "num_workers_below",
    "num_cpus_per_worker",
    "num_gpus_per_worker",
    "custom_resources_per_worker",
    "memory_per_worker",
)


@dataclass(slots=True, eq=False)
class RemoteWorker:
    """A rollout worker in a process of its own.

    Attributes:
        index: its place, from 1; a replacement takes the same.
        actor: the Ray actor handle of a `RolloutWorker`.
        known_version: version of the weights last sent to it; None: none yet.
        last_answer_s: monotonic time of its last answer; None before the first.
    """

    index: int
    actor: Any
    known_version: int | None = None
    last_answer_s: float | None = None


@dataclass(frozen=True)
class WorkerSpec:
    """In what one worker differs from the others.

    Attributes:
        env: its environments; None: as the config says.
        num_envs: how many of them; None: as the config says.
        options: of its actor, over those that the config says (`num_cpus`, `num_gpus`, `memory`,
            `resources`, `runtime_env` and whatever else `ActorClass.options` takes).
    """

    env: EnvSource | None = None
    num_envs: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Published(NamedTuple):
    """Weights as workers get them.

    Attributes:
        version: of the weights.
        weights: themselves, on this side.
        argument: what calls are given: the weights, or a reference to one object of them.
    """

    version: int
    weights: Weights
    argument: Any


class WorkerSet:
    """The local worker, whose policy is the one that learns centrally, and the remote ones.

    Args:
        config: what every worker is made from.
        learner_device: device of the local worker's policy.
        specs: in what the first workers differ from it, in order of index; the local worker, where
            it is the only one, is made as the first.
        local: the local worker, if there is one already; the set does not stop it.

    Attributes:
        remote: in order of index. Indices count from 1; that of a removed worker is not used again.
        published: the weights last sent out.
    """

    #: What a remote worker is.
    actor_class: ClassVar[type[RolloutWorker]] = RolloutWorker

    def __init__(
        self,
        config: WorkerConfig,
        learner_device: str = "cpu",
        specs: Sequence[WorkerSpec] = (),
        local: RolloutWorker | None = None,
    ) -> None:
        self.config = config
        self.faults = _fault_log(config)
        self._incarnations: dict[int, int] = {}
        self._specs = {i + 1: spec for i, spec in enumerate(specs)}
        own = dataclasses.replace(self._config_of(1), device=learner_device)
        self._owns_local = local is None
        self.local = local or RolloutWorker(own, 0)
        self.published: Published | None = None
        self.remote = [self._start(i + 1) for i in range(config.rollout.num_workers)]
        self._last_index = len(self.remote)

    def _config_of(self, index: int) -> WorkerConfig:
        spec = self._specs.get(index, WorkerSpec())
        rollout = self.config.rollout
        if spec.num_envs is not None:
            rollout = rollout.model_copy(update={"num_envs_per_worker": spec.num_envs})
        return dataclasses.replace(
            self.config,
            rollout=rollout,
            env=self.config.env if spec.env is None else spec.env,
            incarnation=self._incarnations.get(index, 0),
        )

    def _start(self, index: int) -> RemoteWorker:
        config = self._config_of(index)
        rollout = config.rollout
        options: dict[str, Any] = {
            "num_cpus": rollout.num_cpus_per_worker,
            "num_gpus": rollout.num_gpus_per_worker,
            "resources": rollout.custom_resources_per_worker or None,
        }
        if rollout.memory_per_worker:
            options["memory"] = rollout.memory_per_worker
        if index in self._specs:
            options.update(self._specs[index].options)
        # A group of its own for calls that must get through while a long one runs.
        as_actor: Any = ray.remote  # its annotations do not know the option
        actor_class = as_actor(concurrency_groups={"control": 1})(self.actor_class)
        actor = actor_class.options(**options).remote(config, index)
        return RemoteWorker(index, actor)

    def num_envs_of(self, index: int) -> int:
        """N of the worker with this index; 0 is the local one."""
        return self._config_of(index or 1).rollout.num_envs_per_worker

    def add(self, specs: Iterable[WorkerSpec]) -> list[RemoteWorker]:
        """Starts more workers; does not wait for them."""
        added = []
        for spec in specs:
            self._last_index += 1
            self._specs[self._last_index] = spec
            added.append(self._start(self._last_index))
        self.remote += added
        return added

    def remove(self, workers: Iterable[RemoteWorker]) -> None:
        """Ends workers, whatever they are doing. Who has launched calls to them forgets those
        (`InFlight.drop`)."""
        for worker in workers:
            self.remote.remove(worker)
            self._specs.pop(worker.index, None)
            ray.kill(worker.actor, no_restart=True)

    def replace(self, worker: RemoteWorker, failure: WorkerFailure) -> RemoteWorker:
        """Ends a failed worker and starts another in its place; does not wait for it.

        Raises:
            WorkersFailedError: after too many failures in a row.
        """
        self.faults.failure(failure)
        ray.kill(worker.actor, no_restart=True)
        self._incarnations[worker.index] = self._incarnations.get(worker.index, 0) + 1
        self.faults.num_restarts += 1
        fresh = self._start(worker.index)
        self.remote[self.remote.index(worker)] = fresh
        return fresh

    def weights_for(self, worker: RemoteWorker) -> Any:
        """The local policy's weights as an argument for a call to `worker`: None if it has that
        version already; for large ones a reference to one object shared by all."""
        self.publish()
        return self.published_for(worker)

    def publish(self) -> Published:
        """Takes a copy of the local policy's weights, unless that version is out already."""
        version = self.local.policy.version
        if self.published is None or self.published.version != version:
            weights = self.local.get_weights()
            large = weights.flat.nbytes > INLINE_BYTES
            self.published = Published(version, weights, ray.put(weights) if large else weights)
        return self.published

    def published_for(self, worker: RemoteWorker) -> Any:
        """The weights last published, whatever the local policy has become since, as
        `weights_for` gives them."""
        published = self.published or self.publish()
        if worker.known_version == published.version:
            return None
        worker.known_version = published.version
        return published.argument

    def begin_life(self, life: int) -> None:
        """The local worker, and whatever replacement may come, begins another life of the run (see
        `RolloutWorker.begin_life`); the remote workers have to be called."""
        self.config = dataclasses.replace(self.config, life=life)
        self.local.begin_life(life)

    def forget_sent_weights(self) -> None:
        """To be called when the local policy's weights change without a new version, as after a
        restore: everybody needs them anew."""
        self.published = None
        for worker in self.remote:
            worker.known_version = None

    def reconfigure(self, config: WorkerConfig, learner_device: str = "cpu") -> bool:
        """Makes all workers anew inside the processes they have, which saves starting those.

        Returns:
            False, with nothing done, if the new config wants other workers or other resources.

        Raises:
            WorkersFailedError: if a worker does not come up with the new config.
        """
        old, new = self.config.rollout, config.rollout
        if any(getattr(old, key) != getattr(new, key) for key in _PROCESS_KEYS):
            return False
        self.config = config
        if self._owns_local:
            self.local.stop()
            self.local = RolloutWorker(dataclasses.replace(config, device=learner_device), 0)
        self.faults = _fault_log(config)
        self._incarnations.clear()
        self._specs.clear()
        self.forget_sent_weights()
        calls = {w.actor.reconfigure.remote(config, w.index): w for w in self.remote}
        timeout_s = new.worker_startup_timeout_s
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
        for call, worker in calls.items():
            try:
                ray.get(call, timeout=0)
            except ray.exceptions.RayError as error:
                self.replace(worker, WorkerFailure.from_error(worker.index, error))
        return True

    def stats(self) -> dict[str, Any]:
        """For the `fault_tolerance/` result keys."""
        return {"num_healthy_workers": len(self.remote), **self.faults.stats()}

    def stop(self) -> None:
        """Ends all workers. Environments get a moment to close before their process goes."""
        goodbyes = [worker.actor.stop.remote() for worker in self.remote]
        if goodbyes:
            ray.wait(goodbyes, num_returns=len(goodbyes), timeout=1.0)
        for worker in self.remote:
            ray.kill(worker.actor, no_restart=True)
        self.remote = []
        if self._owns_local:
            self.local.stop()


def _fault_log(config: WorkerConfig) -> FaultLog:
    rollout = config.rollout
    return FaultLog(rollout.max_consecutive_failures, rollout.max_consecutive_bad_numbers)
