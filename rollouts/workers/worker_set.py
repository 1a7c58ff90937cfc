"""`WorkerSet`: the local worker and the remote ones."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import ray as real_ray
from ray import cloudpickle

from polopt.common.weights import Weights
from polopt.rollouts.transport.rpc_client import LargeCallError, RpcClient, RpcFuture, open_rpc
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure, WorkersFailedError, logger
from polopt.rollouts.workers.placement import describe_resources, waiting_for_resources
from polopt.rollouts.workers.rollout_worker import Answer, RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import (
    WorkerHandle,
    WorkerProcesses,
    WorkerSpec,
    same_processes,
    select,
    specs_of,
)

#: Larger weights go through the object store once for all workers; smaller ones inside each call,
#: which is what Ray does with arguments up to about this size anyway.
INLINE_BYTES = 100_000
#: First interval between checks of workers that are starting; it grows with each warning.
CHECK_INTERVAL_S = 5.0
MAX_CHECK_INTERVAL_S = 60.0


class WeightSnapshot(NamedTuple):
    """A copy of the weights, as workers receive it.

    Attributes:
        number: serial number. A version may come again with other weights, after a restore or when
            a user sets older ones.
        weights: the copy in this process.
        argument: argument of calls: the weights, or a reference to one object of them.
    """

    number: int
    weights: Weights
    argument: Any


class WeightSnapshots:
    """Snapshots of the weights of one `WorkerSet`.

    Args:
        workers: the local worker's policy is copied; remote workers receive the copies.

    Attributes:
        last: the snapshot that was taken last; None: none yet.
        num_bytes_sent: bytes of the weights that were given to calls, since the workers were made.
    """

    def __init__(self, workers: WorkerSet) -> None:
        self._workers = workers
        self._count = 0
        self.last: WeightSnapshot | None = None
        self.num_bytes_sent = 0

    def take(self, force: bool = False) -> WeightSnapshot:
        """Copies the local policy's weights, unless the last snapshot has that version already.

        Args:
            force: copy them anyway: they may have changed without a new version, as after a
                restore.
        """
        version = self._workers.local.policy.version
        if force or self.last is None or self.last.weights.version != version:
            weights = self._workers.local.get_weights()
            large = weights.flat.nbytes > INLINE_BYTES and self._workers.rpc is None
            argument = self._workers.ray.put(weights) if large else weights
            self._count += 1
            self.last = WeightSnapshot(self._count, weights, argument)
        return self.last

    def argument_for(self, worker: WorkerHandle) -> Any:
        """The last snapshot as an argument for a call to `worker`: None if the worker has it; a
        reference to one shared object for large weights."""
        snapshot = self.last or self.take()
        if worker.sent_weights == snapshot.number:
            return None
        worker.sent_weights = snapshot.number
        self.num_bytes_sent += snapshot.weights.flat.nbytes
        return snapshot.argument


class WorkerSet:
    """The local worker, whose policy learns centrally, and the remote ones.

    A new worker, also one that replaces another, gets a `ping` call, which stays pending until its
    process has started. It is up once it has answered that, and has run its set-up calls. Only
    workers that are up are given work.

    Args:
        config: what every worker is made from.
        learner_device: device of the local worker's policy.
        specs: differences of the first workers from `config`, in order of index. A local worker
            that is the only one is made from the first.
        local: the local worker, if it exists already; the set does not stop it.
        ray: the module, or a fake of it.
        clock: seconds of a monotonic clock.

    Attributes:
        remote: in order of index. Indices count from 1; the index of a removed worker is not used
            again.
        here: handle of the local worker, with index 0.
        owns_local: this set has made the local worker, and stops it.
        starting: pending `ping` or set-up call of each worker that is not up, by reference.
        changes: number of times that a worker came up, was replaced or removed.
        started: at least once as many workers were up as the run needs.
        snapshots: the weights that workers receive.
        env_statistics: the last running statistics of the environments of each worker, by index.
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
        ray: Any = real_ray,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.ray = ray
        self.clock = clock
        self.faults = FaultLog.from_config(config.rollout, config.who)
        self._processes = WorkerProcesses(ray, self.actor_class, specs)
        own = dataclasses.replace(self._processes.config_of(config, 1), device=learner_device)
        self.owns_local = local is None
        self.local = local or RolloutWorker(own, 0)
        self.here = WorkerHandle(0, None, last_answer_s=clock())
        self.snapshots = WeightSnapshots(self)
        self.env_statistics: dict[int, dict[str, Any]] = {}
        self.rpc: RpcClient | None = None
        self.started = False
        self.starting: dict[Any, WorkerHandle] = {}
        self.changes = 0
        self._last_up_s = clock()
        self._checked_s = self._warned_s = clock()
        self._check_interval_s = CHECK_INTERVAL_S
        # Calls of two processes must not have the same number: a gradient worker runs calls of the
        # driver and makes calls of its own.
        self._call_numbers = itertools.count(secrets.randbits(48))
        self.remote = [self._start(i + 1) for i in range(config.rollout.num_workers)]
        self._last_index = len(self.remote)

    def _start(self, index: int) -> WorkerHandle:
        """Starts the process of a worker, and the `ping` that it answers once it runs."""
        worker = self._processes.start(self.config, index, self.clock())
        statistics = self.env_statistics.get(index)
        if statistics:  # of the worker that it replaces
            worker.set_up.append((call_method, ("set_statistics", statistics)))
        self.starting[worker.actor.ping.remote()] = worker
        return worker

    # ---- calls ----------------------------------------------------------------------------------

    def use_transport(self, message_bytes: int) -> None:
        """Chooses what calls go through, as the config's `transport` says; see `open_rpc`.

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
        """Path of calls: `zmq`, `ray`, or `zmq, ray` if some workers cannot connect."""
        if self.rpc is None:
            return "ray"
        through_ray = [w.channel is not None and w.channel.refused for w in self.remote]
        if not any(through_ray):
            return "zmq"
        return "ray" if all(through_ray) else "zmq, ray"

    @property
    def num_large_messages(self) -> int:
        """Calls and answers so far that were too large for ZeroMQ, and went through Ray."""
        return 0 if self.rpc is None else self.rpc.num_large_messages

    def next_call_number(self) -> int:
        """A number that no other call has."""
        return next(self._call_numbers)

    def start_call(
        self,
        worker: WorkerHandle,
        number: int,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        ended: deque[RpcFuture],
    ) -> Any:
        """Has a worker run a function, through Ray or over ZeroMQ; see `use_transport`. Until the
        worker has connected, its first calls go through Ray, as do calls with references and those
        that are too large for ZeroMQ. Cloudpickle encodes function and arguments together.

        Args:
            worker: it is up.
            number: of the call.
            name: of the function, for messages.
            function: `fn(worker, *args)`.
            args: its arguments.
            ended: gets the future of a call over ZeroMQ once it is done.

        Returns:
            the call's `ray.ObjectRef` or `RpcFuture`.
        """
        has_reference = any(isinstance(a, self.ray.ObjectRef) for a in args)
        if self.rpc is not None and not has_reference:
            channel = self.rpc.channel(worker.channel, worker.actor, f"worker {worker.index}")
            worker.channel = channel
            if not channel.connected:
                self.rpc.poll(0.0)
            if channel.connected:
                with contextlib.suppress(LargeCallError):
                    return channel.call(number, name, function, args, ended)
        if worker.channel is not None:
            worker.channel.pause()  # a worker answers calls through Ray after it has served
        if has_reference:  # Ray resolves those that are arguments themselves
            return worker.actor.run.remote(number, cloudpickle.dumps(function), *args)
        # Ray encodes each argument on its own, which takes longer than all of them together.
        return worker.actor.run_encoded.remote(cloudpickle.dumps((number, function, args)))

    def weights_for(self, worker: WorkerHandle) -> Any:
        """The local policy's weights as an argument for a call to `worker`: None if it has them; a
        reference to one shared object for large weights. Always None for the local worker."""
        if worker.index == 0:
            return None
        self.snapshots.take()
        return self.snapshots.argument_for(worker)

    # ---- workers start, join, leave and are replaced --------------------------------------------

    def up(self) -> list[WorkerHandle]:
        """The workers that can be given work, in order of index; with `num_workers` of 0 the local
        one.

        The first call waits until enough workers are up for the run to begin; later calls wait only
        if no worker is up.

        Raises:
            WorkersFailedError: if workers keep failing, or there are none.
        """
        while True:
            if self.starting:
                self.take_started(0.0)
            if not self.remote:
                if self.config.rollout.num_workers == 0:
                    return [self.here]
                raise WorkersFailedError("no workers remain; see WorkerSet.add_workers")
            if self.enough_up():
                self.started = True
                return [worker for worker in self.remote if worker.up]
            self.take_started(CHECK_INTERVAL_S)

    def take_started(self, timeout_s: float) -> None:
        """Takes note of workers that have started or failed to; waits for the first."""
        refs = list(self.starting)
        if refs:
            if timeout_s:
                self.ray.wait(refs, num_returns=1, timeout=timeout_s)
            for ref in self.ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                self.note_started(ref)
        self.check_starting()

    def note_started(self, ref: Any) -> None:
        """Takes the answer to the `ping` or set-up call of a worker that is starting."""
        worker = self.starting.pop(ref)
        if worker.removed:
            return
        try:
            answer = self.ray.get(ref, timeout=self.config.rollout.worker_timeout_s)
        except Exception as error:  # also exception classes of the worker
            self.replace(worker, WorkerFailure.from_error(worker.index, error))
            return
        problem = answer.error if isinstance(answer, Answer) else None
        if problem is not None:
            failure = WorkerFailure("exception", worker.index, problem.message, at_start=True)
            self.replace(worker, failure)
            return
        now_s = self.clock()
        self._last_up_s = worker.started_s = now_s
        if worker.set_up:
            fn, args = worker.set_up.pop(0)
            call = self.next_call_number(), cloudpickle.dumps(fn)
            self.starting[worker.actor.run.remote(*call, *args)] = worker
            return
        worker.last_answer_s = now_s
        self.changes += 1

    def check_starting(self) -> None:
        """Replaces workers that take too long to start, and warns of those that wait for resources,
        at growing intervals. Time in which Ray has no resources for a worker counts only if the run
        cannot continue without it, and so does time in which other workers come up: many processes
        that start at once take longer."""
        now_s = self.clock()
        if now_s - self._checked_s < min(CHECK_INTERVAL_S, self._startup_timeout_s):
            return
        self._checked_s = now_s
        starting = [worker for worker in self.starting.values() if not worker.removed]
        waiting, number = self.waiting_for_resources(starting)
        late = []
        may_wait = self.config.in_evaluation or self.enough_up()  # training goes on
        for worker in starting:
            waits = worker in waiting
            if waits and now_s - worker.started_s >= CHECK_INTERVAL_S:
                late.append(worker.index)
            since_s = now_s - max(worker.started_s, self._last_up_s)
            if since_s >= self._startup_timeout_s and not (waits and may_wait):
                why = "it has not started"
                if waits:
                    why = (
                        f"Ray did not place it: {describe_resources(self.config.rollout, self.ray)}"
                    )
                message = f"no answer for {now_s - worker.started_s:.1f} s: {why}"
                self.replace(worker, WorkerFailure("hang", worker.index, message))
        if not late:
            self._check_interval_s = CHECK_INTERVAL_S
        elif now_s >= self._warned_s + self._check_interval_s:
            self._warned_s = now_s
            self._check_interval_s = min(2.0 * self._check_interval_s, MAX_CHECK_INTERVAL_S)
            if self.config.in_evaluation:
                effect = "Training goes on; no evaluation ends without them."
            elif self.enough_up():
                effect = "The run continues without them."
            else:
                effect = "The run waits for them."
            logger.warning(
                "Ray has no resources yet for %s%s%s %s: %s. %s",
                f"{number} of " if number < len(late) else "",
                self.config.who,
                "s" * (len(late) > 1),
                ", ".join(map(str, late)),
                describe_resources(self.config.rollout, self.ray),
                effect,
            )

    @property
    def _startup_timeout_s(self) -> float:
        return self.config.rollout.worker_startup_timeout_s

    def waiting_for_resources(
        self, starting: Sequence[WorkerHandle]
    ) -> tuple[list[WorkerHandle], int]:
        """See `placement.waiting_for_resources`."""
        return waiting_for_resources(starting)

    def enough_up(self) -> bool:
        """Whether enough workers have answered for a run to begin (`min_workers`), or to
        continue (one)."""
        up = sum(worker.up for worker in self.remote)
        needed = self.config.rollout.min_workers or len(self.remote)
        return up >= (1 if self.started else min(needed, len(self.remote)))

    def num_envs_of(self, index: int) -> int:
        """N of the worker with this index; 0 is the local one."""
        return self._processes.config_of(self.config, index or 1).rollout.num_envs_per_worker

    def add_workers(self, more: int | Iterable[WorkerSpec]) -> list[WorkerHandle]:
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

    def _add(self, spec: WorkerSpec) -> WorkerHandle:
        self._last_index += 1
        self._processes.specs[self._last_index] = spec
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
        self._processes.stop(leaving)
        return [worker.index for worker in leaving]

    def _remove(self, worker: WorkerHandle) -> None:
        self._retire(worker)
        self.remote.remove(worker)
        self._processes.specs.pop(worker.index, None)
        self.env_statistics.pop(worker.index, None)

    def _retire(self, worker: WorkerHandle) -> None:
        worker.removed = True
        self.changes += 1
        self.starting = {ref: one for ref, one in self.starting.items() if one is not worker}

    def replace(self, worker: WorkerHandle, failure: WorkerFailure) -> WorkerHandle | None:
        """Kills a failed worker and starts another with the same index; does not wait for it.

        Returns:
            the replacement; None if the worker was removed before, or is given up because it
            fails again and again while others succeed.

        Raises:
            WorkersFailedError: after too many consecutive failures, of all workers, or of one
                without which there are too few.
        """
        if worker.removed:
            return None
        self.faults.failure(failure)
        self._processes.kill_failed(worker)
        if self.faults.is_unrecoverable(worker.index):
            self._remove(worker)
            self.faults.give_up(failure, len(self.remote), self.config.rollout.min_workers)
            return None
        self.faults.num_restarts += 1
        self._retire(worker)
        replacement = self._start(worker.index)
        self.remote[self.remote.index(worker)] = replacement
        return replacement

    def reconfigure(self, config: WorkerConfig, learner_device: str = "cpu") -> bool:
        """Makes all workers from another config in their processes, which need no restart. Workers
        that are starting are replaced.

        Returns:
            False, with nothing changed, if the new config needs other workers or resources.

        Raises:
            WorkersFailedError: if workers keep failing with the new config.
        """
        new = config.rollout
        if len(self.remote) != new.num_workers or not same_processes(self.config.rollout, new):
            return False
        self.take_started(0.0)
        self.config = config
        self.close_rpc()
        self.snapshots.num_bytes_sent = 0
        self.env_statistics.clear()
        if self.owns_local:
            self.local.stop()
            self.local = RolloutWorker(dataclasses.replace(config, device=learner_device), 0)
        self.faults = FaultLog.from_config(new, config.who)
        self._processes = WorkerProcesses(self.ray, self.actor_class, ())
        self.snapshots.last = None
        for i, worker in enumerate(self.remote):
            if worker.up:
                worker.last_answer_s = worker.sent_weights = None
                worker.started_s = self.clock()
                self.starting[worker.actor.reconfigure.remote(config, worker.index)] = worker
            else:
                self._retire(worker)
                self._processes.stop([worker])
                self.remote[i] = self._start(worker.index)
        self.started = False
        self.changes += 1
        return True

    def __repr__(self) -> str:
        """The number of workers, and how many of them are up."""
        up = sum(worker.up for worker in self.remote)
        return f"WorkerSet({up} of {len(self.remote)} remote workers up)"

    def stats(self) -> dict[str, Any]:
        """For the `fault_tolerance/` result keys."""
        up = sum(worker.up for worker in self.remote)
        return {"num_healthy_workers": up, **self.faults.stats()}

    def stop(self) -> None:
        """Stops all workers."""
        for worker in self.remote:
            self._retire(worker)
        self._processes.stop(self.remote)
        self.close_rpc()
        self.remote = []
        if self.owns_local:
            self.local.stop()


def call_method(worker: RolloutWorker, method: str, *args: Any) -> Any:
    """Runs in a worker: calls one of its methods."""
    return getattr(worker, method)(*args)
