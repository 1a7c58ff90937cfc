"""`WorkerSet`: the local worker and the remote ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import ray

from polopt.rollouts.transport.switchboard import Switchboard
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure, WorkersFailedError, logger
from polopt.rollouts.workers.placement import actor_argument, actor_options
from polopt.rollouts.workers.remote_worker import RemoteWorker, WeightSnapshot, WorkerSpec
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

#: Larger weights go through the object store once for all workers; smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000
#: What a worker's process is made with; a change needs other processes.
_PROCESS_KEYS = (
    "num_workers",
    "min_workers",
    "num_workers_below",
    "num_cpus_per_worker",
    "num_gpus_per_worker",
    "custom_resources_per_worker",
    "memory_per_worker",
)


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
        started: as many workers as the run needs have been up.
        snapshot: the weights last sent out.
        switchboard: makes direct calls; None: all go through Ray.
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
        self._restart_counts: dict[int, int] = {}
        self._specs = {i + 1: spec for i, spec in enumerate(specs)}
        own = dataclasses.replace(self._config_of(1), device=learner_device)
        self._owns_local = local is None
        self.local = local or RolloutWorker(own, 0)
        self.snapshot: WeightSnapshot | None = None
        self.switchboard: Switchboard | None = None
        self.started = False
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
            restart_count=self._restart_counts.get(index, 0),
        )

    def _start(self, index: int) -> RemoteWorker:
        config = self._config_of(index)
        options = actor_options(config.rollout, index)
        if index in self._specs:
            options.update(self._specs[index].options)
        # A group of its own for calls that must get through while a long one runs.
        as_actor: Any = ray.remote  # its annotations do not know the option
        actor_class = as_actor(concurrency_groups={"control": 1})(self.actor_class)
        actor = actor_class.options(**options).remote(actor_argument(config), index)
        return RemoteWorker(index, actor)

    def begin_direct_calls(self) -> None:
        """From now on `call` goes past Ray to workers that are up, if they can reach this machine
        at the address that Ray has for it."""
        if self.switchboard is None:
            host = ray.util.get_node_ip_address()
            try:
                self.switchboard = Switchboard(host, self.config.rollout.worker_timeout_s)
            except OSError as error:
                logger.warning(
                    "can not listen at %s (%s). All calls go through Ray, which takes longer.",
                    host,
                    error,
                )

    def end_direct_calls(self) -> None:
        """All calls go through Ray again."""
        for worker in self.remote:
            worker.close_line()
        if self.switchboard is not None:
            self.switchboard.close()
            self.switchboard = None

    def call(self, worker: RemoteWorker, method: str, *args: Any) -> Any:
        """Calls a method of a worker, for small arguments and results.

        Returns:
            what `InFlight.launch` takes.
        """
        if self.switchboard is None or self.switchboard.refused or not worker.up:
            return getattr(worker.actor, method).remote(*args)
        worker.line = self.switchboard.line(worker.line, worker.handle)
        return worker.line.ask(method, args)

    def enough_up(self) -> bool:
        """Whether so many workers have answered that a run can begin (`min_workers`), or go on."""
        up = sum(worker.up for worker in self.remote)
        needed = self.config.rollout.min_workers or len(self.remote)
        return up >= (1 if self.started else min(needed, len(self.remote)))

    def num_envs_of(self, index: int) -> int:
        """N of the worker with this index; 0 is the local one."""
        return self._config_of(index or 1).rollout.num_envs_per_worker

    def add_workers(self, more: int | Iterable[WorkerSpec]) -> list[RemoteWorker]:
        """Starts more workers, also while a run goes on; does not wait for them. Optimizers give
        them work once they are up.

        Args:
            more: how many, or in what each differs from the config.

        Raises:
            ValueError: if `more` is negative.
        """
        if isinstance(more, int):
            if more < 0:
                raise ValueError(f"number of workers to add: got {more}; allowed: 0 or more")
            more = [WorkerSpec()] * more
        added = []
        for spec in more:
            self._last_index += 1
            self._specs[self._last_index] = spec
            added.append(self._start(self._last_index))
        self.remote += added
        return added

    def remove_workers(self, which: int | Iterable[int]) -> list[int]:
        """Ends workers for good, also while a run goes on. What is in their hands is lost; who
        does not want that drains the optimizer first.

        Args:
            which: how many, of which the latest are taken; or their indices.

        Returns:
            the indices of those that were removed.

        Raises:
            KeyError: for an index that is not there.
            ValueError: for more workers than there are.
        """
        present = {worker.index: worker for worker in self.remote}
        if isinstance(which, int):
            if not 0 <= which <= len(present):
                raise ValueError(
                    f"number of workers to remove: got {which}; allowed: 0 to {len(present)}"
                )
            which = list(present)[len(present) - which :]
        leaving = [present[index] for index in dict.fromkeys(which)]
        for worker in leaving:
            self._forget(worker)
        _end(leaving)
        return [worker.index for worker in leaving]

    def _forget(self, worker: RemoteWorker) -> None:
        worker.removed = True
        self.remote.remove(worker)
        self._specs.pop(worker.index, None)

    def replace(self, worker: RemoteWorker, failure: WorkerFailure) -> RemoteWorker | None:
        """Ends a failed worker and starts another in its place; does not wait for it.

        Returns:
            the other; None if the worker is gone already, or is given up because it fails again
            and again while others succeed.

        Raises:
            WorkersFailedError: after too many failures in a row, of all workers, or of one without
                which there are too few.
        """
        if worker not in self.remote:
            return None
        worker.close_line()
        self.faults.failure(failure)
        ray.kill(worker.handle, no_restart=True)
        index = worker.index
        self._restart_counts[index] = self._restart_counts.get(index, 0) + 1
        if self.faults.is_unrecoverable(index):
            self._give_up(worker, failure)
            return None
        self.faults.num_restarts += 1
        fresh = self._start(index)
        self.remote[self.remote.index(worker)] = fresh
        return fresh

    def _give_up(self, worker: RemoteWorker, failure: WorkerFailure) -> None:
        rollout = self.config.rollout
        self._forget(worker)
        if rollout.min_workers is None or len(self.remote) < rollout.min_workers:
            allowed = "all of them" if rollout.min_workers is None else rollout.min_workers
            raise WorkersFailedError(
                f"worker {worker.index} failed {rollout.max_consecutive_failures} times without "
                "one success (max_consecutive_failures), while others succeeded, and without it "
                f"there are {len(self.remote)} workers; min_workers: {allowed}. The last failure "
                f"({failure.kind}):\n{failure.message}"
            )
        self.faults.give_up(worker.index)

    def weights_for(self, worker: RemoteWorker) -> Any:
        """The local policy's weights as an argument for a call to `worker`: None if it has that
        version already; for large ones a reference to one object shared by all."""
        self.take_snapshot()
        return self.snapshot_for(worker)

    def take_snapshot(self) -> WeightSnapshot:
        """Takes a copy of the local policy's weights, unless that version is out already."""
        version = self.local.policy.version
        if self.snapshot is None or self.snapshot.version != version:
            weights = self.local.get_weights()
            large = weights.flat.nbytes > INLINE_BYTES
            self.snapshot = WeightSnapshot(version, weights, ray.put(weights) if large else weights)
        return self.snapshot

    def snapshot_for(self, worker: RemoteWorker) -> Any:
        """The weights last published, whatever the local policy has become since, as
        `weights_for` gives them."""
        snapshot = self.snapshot or self.take_snapshot()
        if worker.known_version == snapshot.version:
            return None
        worker.known_version = snapshot.version
        return snapshot.argument

    def begin_restored_run(self, restore_count: int) -> None:
        """The local worker, and whatever replacement may come, begins another life of the run (see
        `RolloutWorker.begin_restored_run`); the remote workers have to be called."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        self.local.begin_restored_run(restore_count)

    def forget_sent_weights(self) -> None:
        """To be called when the local policy's weights change without a new version, as after a
        restore: everybody needs them anew."""
        self.snapshot = None
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
        if len(self.remote) != new.num_workers or any(
            getattr(old, key) != getattr(new, key) for key in _PROCESS_KEYS
        ):
            return False
        self.config = config
        self.end_direct_calls()
        if self._owns_local:
            self.local.stop()
            self.local = RolloutWorker(dataclasses.replace(config, device=learner_device), 0)
        self.faults = _fault_log(config)
        self._restart_counts.clear()
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
        up = sum(worker.up for worker in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Ends all workers. Environments get a moment to close before their process goes."""
        _end(self.remote)
        self.end_direct_calls()
        self.remote = []
        if self._owns_local:
            self.local.stop()


def _end(workers: Sequence[RemoteWorker]) -> None:
    goodbyes = [worker.actor.stop.remote() for worker in workers]
    if goodbyes:
        ray.wait(goodbyes, num_returns=len(goodbyes), timeout=1.0)
    for worker in workers:
        worker.close_line()
        ray.kill(worker.handle, no_restart=True)


def _fault_log(config: WorkerConfig) -> FaultLog:
    rollout = config.rollout
    return FaultLog(rollout.max_consecutive_failures, rollout.max_consecutive_non_finite)
