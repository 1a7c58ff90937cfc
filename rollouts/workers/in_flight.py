"""`InFlight`: pending calls to workers; every wait for them has a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from polopt.common.tracing import TRACER
from polopt.metrics.load import LoadMeter
from polopt.rollouts.transport.mixed_wait import wait_any
from polopt.rollouts.transport.rpc_client import RpcClient
from polopt.rollouts.transport.rpc_future import RpcFuture
from polopt.rollouts.workers.failures import FaultLog, WorkerFailure
from polopt.rollouts.workers.placement import describe_resources, waits_for_resources
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_config import WorkerConfig

#: Handle of a pending call: `ray.ObjectRef`, or `RpcFuture`.
Call = Any


class Workers(Protocol):
    """The part of `WorkerSet` that pending calls depend on."""

    config: WorkerConfig
    faults: FaultLog
    rpc: RpcClient | None

    def continues_without(self, worker: RemoteWorker) -> bool: ...

    def replace(self, worker: RemoteWorker, failure: WorkerFailure) -> RemoteWorker | None: ...


@dataclass(slots=True)
class _Call:
    worker: RemoteWorker
    tag: Any
    launched_s: float
    extra_timeout_s: float
    latest_s: float = math.inf


@dataclass(slots=True)
class Arrival:
    """One call that has ended.

    Attributes:
        worker: the worker that was called. After a failure its process is no longer used;
            `WorkerSet.replace` starts another.
        tag: the tag given to `launch`.
        value: return value; None after a failure.
        failure: cause of the failure; None after success.
        lost_tags: after a failure: tags of the worker's other pending calls, which are lost.
    """

    worker: RemoteWorker
    tag: Any
    value: Any = None
    failure: WorkerFailure | None = None
    lost_tags: tuple[Any, ...] = ()


class InFlight:
    """Pending calls, served in the order in which they end.

    A worker has failed when a call raised, when its process died, and when it has not answered for
    `worker_timeout_s` (`worker_startup_timeout_s` before its first answer; time during which Ray
    has no resources for it counts only if the run cannot continue without it). Calls to removed
    workers are dropped.

    Args:
        workers: the workers that are called.
        is_work: a call that succeeds shows that its worker works, and resets the count of
            consecutive failures. False for calls that any process could answer, or whose success
            is decided elsewhere.

    Attributes:
        load: number of pending calls when one of them has ended, which is included.
    """

    def __init__(self, workers: Workers, is_work: bool = True) -> None:
        self._workers = workers
        self._is_work = is_work
        self._calls: dict[Call, _Call] = {}
        self.load = LoadMeter()

    def __len__(self) -> int:
        self._forget_removed()
        return len(self._calls)

    def launch(
        self,
        worker: RemoteWorker,
        ref: Call,
        tag: Any = None,
        extra_timeout_s: float = 0.0,
    ) -> None:
        """Adds a call that was just made.

        Args:
            worker: the worker that was called.
            ref: result of the call (`WorkerSet.call`, or a Ray method's `remote`).
            tag: returned with the arrival.
            extra_timeout_s: added to the limit, for a call that itself waits for other workers.
        """
        self._calls[ref] = _Call(worker, tag, time.monotonic(), extra_timeout_s)

    def tighten_deadline(self, worker: RemoteWorker, within_s: float) -> None:
        """Limits the worker's pending calls to `within_s` seconds from now, unless their limit is
        earlier."""
        for call in self._calls.values():
            if call.worker is worker:
                call.latest_s = min(call.latest_s, time.monotonic() + within_s)

    def count(self, worker: RemoteWorker) -> int:
        """Number of pending calls to this worker."""
        return sum(call.worker is worker for call in self._calls.values())

    def tags(self) -> list[Any]:
        """Tags of all pending calls, oldest first."""
        self._forget_removed()
        return [call.tag for call in self._calls.values()]

    def pending(self) -> list[tuple[RemoteWorker, Any]]:
        """`(worker, tag)` of all pending calls, oldest first. May be called by any thread."""
        return [(call.worker, call.tag) for call in list(self._calls.values())]

    def any_ready(self) -> bool:
        """Whether `wait` would return at once."""
        if not len(self):
            return False
        return bool(self._ready(list(self._oldest()), 0.0)) or self._overdue() is not None

    def wait(self) -> Arrival:
        """The next call to end, in success or failure, at the latest at its deadline.

        Raises:
            RuntimeError: if no call is pending: the wait would never end.
        """
        while True:
            arrival = self.wait_for(math.inf)
            if arrival is not None:
                return arrival

    def gather(self) -> dict[int, Any]:
        """Waits for all pending calls, and replaces workers that fail.

        Returns:
            return value of the last call to each worker, by worker index, in ascending order.
            Failed workers are missing.

        Raises:
            WorkersFailedError: if workers keep failing.
        """
        values: dict[int, Any] = {}
        while len(self):
            arrival = self.wait()
            if arrival.failure is None:
                values[arrival.worker.index] = arrival.value
            else:
                self._workers.replace(arrival.worker, arrival.failure)
        return dict(sorted(values.items()))

    def wait_for(self, duration_s: float) -> Arrival | None:
        """As `wait`, but None if no call ends within `duration_s` seconds.

        Raises:
            RuntimeError: if no call is pending.
        """
        if not len(self):
            raise RuntimeError("no call is pending: the wait would never end")
        until_s = time.monotonic() + duration_s
        while True:
            oldest = self._oldest()
            limit_s = min(until_s, *(self._deadline_s(call) for call in oldest.values()))
            # The dict keeps the order of launching, so no worker starves behind the others.
            ready = self._ready(list(oldest), max(0.0, limit_s - time.monotonic()))
            # Check deadlines even when results are ready; a busy queue could hide a hang.
            overdue = self._overdue() if time.monotonic() >= limit_s else None
            if overdue is not None:
                return self._fail(overdue, self._hang(overdue))
            if ready:
                return self._arrive(ready[0])
            if time.monotonic() >= until_s:
                return None

    def _ready(self, calls: list[Call], timeout_s: float) -> list[Call]:
        """The first call that has ended, in a list; empty after `timeout_s` seconds."""
        rpc = self._workers.rpc
        if rpc is not None and any(isinstance(call, RpcFuture) for call in calls):
            return wait_any(rpc, calls, timeout_s)
        ready: list[Call] = ray.wait(calls, num_returns=1, timeout=timeout_s)[0]
        return ready

    def drop(self, worker: RemoteWorker) -> tuple[Any, ...]:
        """Drops the pending calls to a worker; returns their tags."""
        mine = [ref for ref, call in self._calls.items() if call.worker is worker]
        return tuple(self._calls.pop(ref).tag for ref in mine)

    @property
    def num_begun(self) -> int:
        """Number of pending calls to workers that are up. Calls to the other workers begin once
        those are up."""
        self._forget_removed()
        return sum(call.worker.up for call in self._calls.values())

    def clear(self) -> None:
        """Drops all pending calls; their results are lost."""
        self._calls.clear()

    def _arrive(self, ref: Call) -> Arrival:
        call = self._calls[ref]
        timeout_s = self._workers.config.rollout.worker_timeout_s
        try:
            value = ref.result() if isinstance(ref, RpcFuture) else ray.get(ref, timeout=timeout_s)
        except Exception as error:  # also exception classes of the task
            return self._fail(call, WorkerFailure.from_error(call.worker.index, error))
        TRACER.span(f"request {call.worker.index}", "request", call.launched_s)
        self.load.add(len(self._calls))
        del self._calls[ref]
        call.worker.last_answer_s = time.monotonic()
        if self._is_work:
            self._workers.faults.success(call.worker.index)
        return Arrival(call.worker, call.tag, value)

    def _oldest(self) -> dict[Call, _Call]:
        """The first pending call of each worker. A worker answers in order, but its answers need
        not become visible in order, and optimizers that apply gradients depend on the order."""
        seen: set[int] = set()
        oldest = {}
        for ref, call in self._calls.items():
            if call.worker.index not in seen:
                seen.add(call.worker.index)
                oldest[ref] = call
        return oldest

    def _overdue(self) -> _Call | None:
        """A call that is past its limit and has not ended. Of each worker only the oldest call
        counts: those behind it wait for it, or the driver has not yet taken note of its end."""
        now_s = time.monotonic()
        late = {r: call for r, call in self._oldest().items() if self._deadline_s(call) <= now_s}
        if not late:
            return None
        pending: list[Call] = [
            ref for ref in late if isinstance(ref, RpcFuture) and not self._ready([ref], 0.0)
        ]
        if others := [ref for ref in late if not isinstance(ref, RpcFuture)]:
            # A result on another node counts as arrived before it is fetched.
            pending += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[1]
        return next((late[ref] for ref in pending if not self._is_waiting(late[ref])), None)

    def _is_waiting(self, call: _Call) -> bool:
        """Whether the run continues without the worker; if so, the call's time limit starts
        again."""
        if not self._workers.continues_without(call.worker):
            return False
        call.launched_s = time.monotonic()
        return True

    def _forget_removed(self) -> None:
        gone = [ref for ref, call in self._calls.items() if call.worker.removed]
        for ref in gone:
            del self._calls[ref]

    def _fail(self, call: _Call, failure: WorkerFailure) -> Arrival:
        tags = list(self.drop(call.worker))
        tags.remove(call.tag)
        return Arrival(call.worker, call.tag, failure=failure, lost_tags=tuple(tags))

    def _deadline_s(self, call: _Call) -> float:
        rollout = self._workers.config.rollout
        answered_s = call.worker.last_answer_s
        if answered_s is None:
            limit_s = call.launched_s + rollout.worker_startup_timeout_s
        else:
            # A queued call starts when the call before it has ended.
            limit_s = max(call.launched_s, answered_s) + rollout.worker_timeout_s
        return min(limit_s + call.extra_timeout_s, call.latest_s)

    def _hang(self, call: _Call) -> WorkerFailure:
        silent_s = time.monotonic() - max(call.launched_s, call.worker.last_answer_s or 0.0)
        message = f"no answer for {silent_s:.1f} s"
        if not call.worker.up and waits_for_resources(call.worker):
            resources = describe_resources(self._workers.config.rollout)
            message = f"Ray did not place it within {silent_s:.1f} s: {resources}"
        return WorkerFailure("hang", call.worker.index, message)


def wait_all(refs: Sequence[Any], timeout_s: float) -> None:
    """Waits until all Ray calls have ended, in success or failure, for at most `timeout_s`
    seconds."""
    if refs:
        ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
