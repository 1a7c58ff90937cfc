"""`WorkerSet`: the local worker and the remote ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from polopt.rollouts.transport.rpc_client import RpcClient, open_rpc
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.placement import waits_for_resources
from polopt.rollouts.workers.remote_worker import RemoteWorker, WorkerSpec, select, specs_of
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.weight_snapshots import WeightSnapshots
from polopt.rollouts.workers.worker_actors import WorkerActors, same_processes
from polopt.rollouts.workers.worker_config import WorkerConfig


class WorkerSet:
    """The local worker, whose policy learns centrally, and the remote ones.

    Args:
        config: what every worker is made from.
        learner_device: device of the local worker's policy.
        specs: differences of the first workers from `config`, in order of index. A local worker
            that is the only one is made from the first.
        local: the local worker, if it exists already; the set does not stop it.

    Attributes:
        remote: in order of index. Indices count from 1; the index of a removed worker is not used
            again.
        started: at least once as many workers were up as the run needs.
        snapshots: the weights that workers receive.
        rpc: client for calls over ZeroMQ; None: all calls go through Ray.
    """

    #: Class of the remote workers.
    actor_class: ClassVar[type[RolloutWorker]] = RolloutWorker

    def __init__(
        self,
        config: WorkerConfig,
        learner_device: str = "cpu",
        specs: Sequence[WorkerSpec] = (),
        local: RolloutWorker | None = None,
    ) -> None:
        self.config = config
        self.faults = FaultLog.from_config(config.rollout)
        self._actors = WorkerActors(self.actor_class, specs)
        own = dataclasses.replace(self._actors.config_of(config, 1), device=learner_device)
        self._owns_local = local is None
        self.local = local or RolloutWorker(own, 0)
        self.snapshots = WeightSnapshots(self)
        self.rpc: RpcClient | None = None
        self.started = False
        self.remote = [self._start(i + 1) for i in range(config.rollout.num_workers)]
        self._last_index = len(self.remote)

    def _start(self, index: int) -> RemoteWorker:
        return self._actors.start(self.config, index)

    def use_transport(self, message_bytes: int) -> None:
        """Chooses what `call` goes through, as the config's `transport` says; see `open_rpc`.

        Args:
            message_bytes: size of the larger one of a typical call and its answer.
        """
        self.close_rpc()
        rollout = self.config.rollout
        self.rpc = open_rpc(rollout.transport, message_bytes, rollout.worker_timeout_s)

    def close_rpc(self) -> None:
        """All calls go through Ray again."""
        for worker in self.remote:
            worker.close_channel()
        if self.rpc is not None:
            self.rpc.close()
            self.rpc = None

    @property
    def transport(self) -> str:
        """Path of `call`: `zmq`, `ray`, or `zmq, ray` if some workers cannot connect."""
        if self.rpc is None:
            return "ray"
        through_ray = [w.channel is not None and w.channel.refused for w in self.remote]
        if not any(through_ray):
            return "zmq"
        return "ray" if all(through_ray) else "zmq, ray"

    def call(self, worker: RemoteWorker, method: str, *args: Any) -> Any:
        """Calls a method of a worker, through Ray or over ZeroMQ; see `use_transport`. Until the
        worker has connected, its first calls go through Ray.

        Returns:
            argument for `InFlight.launch`.
        """
        if self.rpc is not None:
            name = f"worker {worker.index}"
            channel = worker.channel = self.rpc.channel(worker.channel, worker.handle, name)
            if not channel.connected:
                self.rpc.poll(0.0)
            if channel.connected:
                return channel.call(method, args)
        return getattr(worker.actor, method).remote(*args)

    def call_each(
        self, method: str, args: Mapping[int, tuple[Any, ...]], is_work: bool = False
    ) -> dict[int, Any]:
        """Calls a method of several remote workers and waits for all of them.

        Args:
            method: name of the method.
            args: its arguments, by worker index. Workers that are missing here are not called.
            is_work: see `InFlight`.

        Returns:
            return values by worker index; not of workers that failed, which are replaced, nor of
            those that `continues_without` names: they run the call later, unless it is work.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        calls = InFlight(self, is_work)
        for worker in self.remote:
            absent = self.continues_without(worker)
            if worker.index not in args or (absent and is_work):  # work would queue without limit
                continue
            call = getattr(worker.actor, method).remote(*args[worker.index])
            if not absent:
                calls.launch(worker, call)
        return calls.gather()

    def call_all(self, method: str, *args: Any) -> dict[int, Any]:
        """As `call_each`, with the same arguments for every remote worker."""
        return self.call_each(method, {worker.index: args for worker in self.remote})

    def apply(self, fn: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """Runs `fn(worker, *args)` in the process of every remote worker, where `worker` is the
        `RolloutWorker`; without remote workers, on the local one, whose index is 0.

        Args:
            fn: a function that cloudpickle can send.
            args: further arguments; `ray.put` large ones once, and pass the reference.

        Returns and raises as `call_each`.
        """
        if not self.remote:
            return {0: self.local.apply(fn, *args)}
        calls = {worker.index: (fn, *args) for worker in self.remote}
        return self.call_each("apply", calls, is_work=True)

    def begin_restored_run(self, restore_count: int) -> None:
        """All workers, and later replacements, begin new episodes with random numbers that were
        not used before the restore; see `RolloutWorker.begin_restored_run`."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        if self._owns_local:
            self.local.begin_restored_run(restore_count)
        for worker in self.remote:
            if not worker.up:  # runs before any other call, once the worker is up
                worker.actor.begin_restored_run.remote(restore_count)
        up = {worker.index: (restore_count,) for worker in self.remote if worker.up}
        self.call_each("begin_restored_run", up)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy in all remote workers, and later replacements."""
        self.config = dataclasses.replace(self.config, policy=self.local.policy.config)
        self.call_all("update_algorithm_parameter", name, value)

    # ---- workers join, leave and are replaced ---------------------------------------------------

    def enough_up(self) -> bool:
        """Whether enough workers have answered for a run to begin (`min_workers`), or to
        continue (one)."""
        up = sum(worker.up for worker in self.remote)
        needed = self.config.rollout.min_workers or len(self.remote)
        return up >= (1 if self.started else min(needed, len(self.remote)))

    def continues_without(self, worker: RemoteWorker) -> bool:
        """Whether Ray has not placed this worker yet, and there are enough others."""
        return not worker.up and waits_for_resources(worker) and self.enough_up()

    def num_envs_of(self, index: int) -> int:
        """N of the worker with this index; 0 is the local one."""
        return self._actors.config_of(self.config, index or 1).rollout.num_envs_per_worker

    def add_workers(self, more: int | Iterable[WorkerSpec]) -> list[RemoteWorker]:
        """Starts more workers, also while a run continues, and does not wait for them. Optimizers
        use them once they are up.

        Args:
            more: number of workers, or the difference of each from the config.

        Raises:
            ValueError: if `more` is negative.
        """
        added = [self._add(spec) for spec in specs_of(more)]
        self.remote += added
        return added

    def _add(self, spec: WorkerSpec) -> RemoteWorker:
        self._last_index += 1
        self._actors.specs[self._last_index] = spec
        return self._start(self._last_index)

    def remove_workers(self, which: int | Iterable[int]) -> list[int]:
        """Stops workers permanently, also while a run continues. Their pending calls are lost; to
        keep them, drain the optimizer first.

        Args:
            which: number of workers, the latest first; or their indices.

        Returns:
            the indices of the removed workers.

        Raises:
            KeyError: for an index that does not exist.
            ValueError: for more workers than there are.
        """
        leaving = select(self.remote, which)
        for worker in leaving:
            self._remove(worker)
        self._actors.stop(leaving)
        return [worker.index for worker in leaving]

    def _remove(self, worker: RemoteWorker) -> None:
        worker.removed = True
        self.remote.remove(worker)
        self._actors.specs.pop(worker.index, None)

    def replace(self, worker: RemoteWorker, failure: WorkerFailure) -> RemoteWorker | None:
        """Kills a failed worker and starts another with the same index; does not wait for it.

        Returns:
            the replacement; None if the worker was removed before, or is given up because it
            fails again and again while others succeed.

        Raises:
            WorkersFailedError: after too many consecutive failures, of all workers, or of one
                without which there are too few.
        """
        if worker not in self.remote:
            return None
        self.faults.failure(failure)
        self._actors.kill_failed(worker)
        if self.faults.is_unrecoverable(worker.index):
            self._remove(worker)
            self.faults.give_up(failure, len(self.remote), self.config.rollout.min_workers)
            return None
        self.faults.num_restarts += 1
        fresh = self._start(worker.index)
        self.remote[self.remote.index(worker)] = fresh
        return fresh

    def weights_for(self, worker: RemoteWorker) -> Any:
        """The local policy's weights as an argument for a call to `worker`: None if it has that
        version; a reference to one shared object for large weights."""
        self.snapshots.take()
        return self.snapshots.argument_for(worker)

    def reconfigure(self, config: WorkerConfig, learner_device: str = "cpu") -> bool:
        """Makes all workers from another config in their processes, which need no restart.

        Returns:
            False, with nothing changed, if the new config needs other workers or resources.

        Raises:
            WorkersFailedError: if workers keep failing with the new config.
        """
        new = config.rollout
        if len(self.remote) != new.num_workers or not same_processes(self.config.rollout, new):
            return False
        self.config = config
        self.close_rpc()
        self.snapshots.num_bytes_sent = 0
        if self._owns_local:
            self.local.stop()
            self.local = RolloutWorker(dataclasses.replace(config, device=learner_device), 0)
        self.faults = FaultLog.from_config(new)
        self._actors = WorkerActors(self.actor_class, ())
        self.snapshots.clear()
        calls = InFlight(self, is_work=False)
        for worker in self.remote:
            call = worker.actor.reconfigure.remote(config, worker.index)
            calls.launch(worker, call, extra_timeout_s=new.worker_startup_timeout_s)
        calls.gather()
        return True

    def stats(self) -> dict[str, Any]:
        """For the `fault_tolerance/` result keys."""
        up = sum(worker.up for worker in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Stops all workers."""
        self._actors.stop(self.remote)
        self.close_rpc()
        self.remote = []
        if self._owns_local:
            self.local.stop()
