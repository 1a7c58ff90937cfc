"""`WorkerSet`: the local worker and the remote ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import ray

from polopt.rollouts.transport.rpc_client import RpcClient, open_rpc
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure, WorkersFailedError
from polopt.rollouts.workers.in_flight import InFlight, wait_all
from polopt.rollouts.workers.placement import actor_argument, actor_options
from polopt.rollouts.workers.remote_worker import RemoteWorker, WeightSnapshot, WorkerSpec
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

#: Larger weights go through the object store once for all workers; smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000
#: Environments have this long to close before their process is killed.
STOP_TIMEOUT_S = 1.0
#: Options that a worker's process is started with; a change needs other processes.
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
        snapshot: the weights that were last sent.
        num_bytes_sent: bytes of the weights that calls were given, since the workers were made.
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
        self.faults = _fault_log(config)
        self._restart_counts: dict[int, int] = {}
        self._specs = {i + 1: spec for i, spec in enumerate(specs)}
        own = dataclasses.replace(self._config_of(1), device=learner_device)
        self._owns_local = local is None
        self.local = local or RolloutWorker(own, 0)
        self.snapshot: WeightSnapshot | None = None
        self.num_bytes_sent = 0
        self.rpc: RpcClient | None = None
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
        # Calls in the group "control" run while a long call runs in the default group.
        as_actor: Any = ray.remote  # its annotations lack the option
        actor_class = as_actor(concurrency_groups={"control": 1})(self.actor_class)
        actor = actor_class.options(**options).remote(actor_argument(config), index)
        return RemoteWorker(index, actor)

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

    # ---- calls to all workers -------------------------------------------------------------------

    def call_each(
        self, method: str, args: Mapping[int, tuple[Any, ...]], is_work: bool = False
    ) -> dict[int, Any]:
        """Calls a method of several remote workers and waits for all of them.

        Args:
            method: name of the method.
            args: its arguments, by worker index. Workers that are missing here are not called.
            is_work: see `InFlight`.

        Returns:
            return values by worker index. Workers that failed are replaced, and missing.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        calls = InFlight(self, is_work)
        for worker in self.remote:
            if worker.index in args:
                calls.launch(worker, getattr(worker.actor, method).remote(*args[worker.index]))
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

        Returns:
            return values by worker index. Workers that failed are replaced, and missing.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        if not self.remote:
            return {0: self.local.apply(fn, *args)}
        everyone = {worker.index: (fn, *args) for worker in self.remote}
        return self.call_each("apply", everyone, is_work=True)

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

    def num_envs_of(self, index: int) -> int:
        """N of the worker with this index; 0 is the local one."""
        return self._config_of(index or 1).rollout.num_envs_per_worker

    def add_workers(self, more: int | Iterable[WorkerSpec]) -> list[RemoteWorker]:
        """Starts more workers, also while a run continues, and does not wait for them. Optimizers
        use them once they are up.

        Args:
            more: number of workers, or the difference of each from the config.

        Raises:
            ValueError: if `more` is negative.
        """
        if isinstance(more, int):
            if more < 0:
                raise ValueError(f"number of workers to add: got {more}. Allowed: 0 or more")
            more = [WorkerSpec()] * more
        added = []
        for spec in more:
            self._last_index += 1
            self._specs[self._last_index] = spec
            added.append(self._start(self._last_index))
        self.remote += added
        return added

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
        present = {worker.index: worker for worker in self.remote}
        if isinstance(which, int):
            if not 0 <= which <= len(present):
                raise ValueError(
                    f"number of workers to remove: got {which}. Allowed: 0 to {len(present)}"
                )
            which = list(present)[len(present) - which :]
        leaving = [present[index] for index in dict.fromkeys(which)]
        for worker in leaving:
            self._forget(worker)
        _stop(leaving)
        return [worker.index for worker in leaving]

    def _forget(self, worker: RemoteWorker) -> None:
        worker.removed = True
        self.remote.remove(worker)
        self._specs.pop(worker.index, None)

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
        worker.close_channel()
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
                "a success in between (max_consecutive_failures) while others succeeded; "
                f"{len(self.remote)} workers remain, min_workers is {allowed}. The last failure "
                f"({failure.kind}):\n{failure.message}"
            )
        self.faults.give_up(worker.index)

    # ---- weights --------------------------------------------------------------------------------

    def weights_for(self, worker: RemoteWorker) -> Any:
        """The local policy's weights as an argument for a call to `worker`: None if it has that
        version; a reference to one shared object for large weights."""
        self.take_snapshot()
        return self.snapshot_for(worker)

    def take_snapshot(self) -> WeightSnapshot:
        """Copies the local policy's weights, unless the snapshot has that version already."""
        version = self.local.policy.version
        if self.snapshot is None or self.snapshot.version != version:
            weights = self.local.get_weights()
            large = weights.flat.nbytes > INLINE_BYTES and self.rpc is None
            self.snapshot = WeightSnapshot(version, weights, ray.put(weights) if large else weights)
        return self.snapshot

    def snapshot_for(self, worker: RemoteWorker) -> Any:
        """As `weights_for`, but with the weights of the last snapshot."""
        snapshot = self.snapshot or self.take_snapshot()
        if worker.known_version == snapshot.version:
            return None
        worker.known_version = snapshot.version
        self.num_bytes_sent += snapshot.weights.flat.nbytes
        return snapshot.argument

    def forget_sent_weights(self) -> None:
        """Sends weights anew to all workers. Needed when the local policy's weights change without
        a new version, as after a restore."""
        self.snapshot = None
        for worker in self.remote:
            worker.known_version = None

    # ---- life cycle -----------------------------------------------------------------------------

    def reconfigure(self, config: WorkerConfig, learner_device: str = "cpu") -> bool:
        """Makes all workers anew in their processes, which saves the start of processes.

        Returns:
            False, with nothing changed, if the new config needs other workers or resources.

        Raises:
            WorkersFailedError: if workers keep failing with the new config.
        """
        old, new = self.config.rollout, config.rollout
        if len(self.remote) != new.num_workers or any(
            getattr(old, key) != getattr(new, key) for key in _PROCESS_KEYS
        ):
            return False
        self.config = config
        self.close_rpc()
        self.num_bytes_sent = 0
        if self._owns_local:
            self.local.stop()
            self.local = RolloutWorker(dataclasses.replace(config, device=learner_device), 0)
        self.faults = _fault_log(config)
        self._restart_counts.clear()
        self._specs.clear()
        self.forget_sent_weights()
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
        _stop(self.remote)
        self.close_rpc()
        self.remote = []
        if self._owns_local:
            self.local.stop()


def _stop(workers: Sequence[RemoteWorker]) -> None:
    wait_all([worker.actor.stop.remote() for worker in workers], STOP_TIMEOUT_S)
    for worker in workers:
        worker.close_channel()
        ray.kill(worker.handle, no_restart=True)


def _fault_log(config: WorkerConfig) -> FaultLog:
    rollout = config.rollout
    return FaultLog(rollout.max_consecutive_failures, rollout.max_consecutive_non_finite)
