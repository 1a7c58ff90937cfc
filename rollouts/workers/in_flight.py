"""`InFlight`: the actor calls under way and whose they are.

Every pipeline is built on it; nobody else waits on a worker, and nothing waits without a limit.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import ray

from polopt.rollouts.transport.line import DirectCall
from polopt.rollouts.workers.failures import WorkerFailure
from polopt.rollouts.workers.placement import asked_and_free, waits_for_resources
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: What a call is known by: `ray.ObjectRef`, or `DirectCall`.
Call = Any


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
        worker: whose call it was. After a failure it is gone; `WorkerSet.replace` makes another.
        tag: what it was launched with.
        value: what it returned; None after a failure.
        failure: why it returned nothing; None after success.
        lost_tags: after a failure: tags of the worker's other calls, which are lost with it.
    """

    worker: RemoteWorker
    tag: Any
    value: Any = None
    failure: WorkerFailure | None = None
    lost_tags: tuple[Any, ...] = ()


class InFlight:
    """Launched calls, first ready first served.

    A worker has failed when a call raised or its process died, and also when it has answered
    nothing for `worker_timeout_s` (`worker_startup_timeout_s` before its first answer; while Ray
    has no resources for it that counts only if the run can not go on without it). Calls to workers
    that were removed are forgotten.

    Args:
        workers: whose calls these are.
        is_work: a call that succeeds shows that its worker works, and ends a row of failures.
            False for calls that any process could answer, or whose success is decided elsewhere.
    """

    def __init__(self, workers: WorkerSet, is_work: bool = True) -> None:
        self._workers = workers
        self._is_work = is_work
        self._calls: dict[Call, _Call] = {}

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
        """Takes note of a call that was just made.

        Args:
            worker: whose call it is.
            ref: what the call returned.
            tag: comes back with the arrival.
            extra_timeout_s: added to the limit, for a call that may itself have to wait for others.
        """
        self._calls[ref] = _Call(worker, tag, time.monotonic(), extra_timeout_s)

    def tighten_deadline(self, worker: RemoteWorker, within_s: float) -> None:
        """The worker's calls have to end within so many seconds, if their limit is not earlier."""
        for call in self._calls.values():
            if call.worker is worker:
                call.latest_s = time.monotonic() + within_s

    def count(self, worker: RemoteWorker) -> int:
        """How many calls to this worker are under way."""
        return sum(call.worker is worker for call in self._calls.values())

    def tags(self) -> list[Any]:
        """Tags of all calls under way, oldest first."""
        self._forget_removed()
        return [call.tag for call in self._calls.values()]

    def under_way(self) -> list[tuple[RemoteWorker, Any]]:
        """`(worker, tag)` of all calls under way, oldest first."""
        return [(call.worker, call.tag) for call in list(self._calls.values())]

    def any_ready(self) -> bool:
        """Whether `wait` would return at once."""
        if not len(self):
            return False
        return bool(self._ready(list(self._oldest()), 0.0)) or self._overdue() is not None

    def wait(self) -> Arrival:
        """The next call to end, in success or failure, at the latest when a limit is over.

        Raises:
            RuntimeError: if no call is under way, for then it would wait for ever.
        """
        while True:
            arrival = self.wait_for(math.inf)
            if arrival is not None:
                return arrival

    def wait_for(self, duration_s: float) -> Arrival | None:
        """As `wait`, but None if no call ends within `duration_s` seconds.

        Raises:
            RuntimeError: if no call is under way.
        """
        if not len(self):
            raise RuntimeError("nothing is in flight to wait for")
        until_s = time.monotonic() + duration_s
        while True:
            oldest = self._oldest()
            limit_s = min(until_s, *(self._deadline_s(call) for call in oldest.values()))
            # The dict keeps the order of launching, so nobody starves behind the others.
            ready = self._ready(list(oldest), max(0.0, limit_s - time.monotonic()))
            # Looked for even where others are ready: they might be for ever.
            overdue = self._overdue() if time.monotonic() >= limit_s else None
            if overdue is not None:
                return self._fail(overdue, self._hang(overdue))
            if ready:
                return self._arrive(ready[0])
            if time.monotonic() >= until_s:
                return None

    def _ready(self, calls: list[Call], timeout_s: float) -> list[Call]:
        """The first that has ended, if one does in time."""
        board = self._workers.switchboard
        if board is not None and any(isinstance(call, DirectCall) for call in calls):
            return board.wait(calls, timeout_s)
        ready: list[Call] = ray.wait(calls, num_returns=1, timeout=timeout_s)[0]
        return ready

    def drop(self, worker: RemoteWorker) -> tuple[Any, ...]:
        """Forgets the calls to a worker; returns their tags."""
        mine = [ref for ref, call in self._calls.items() if call.worker is worker]
        return tuple(self._calls.pop(ref).tag for ref in mine)

    @property
    def num_begun(self) -> int:
        """Calls under way to workers that are up. The others wait, maybe for long, until theirs
        is."""
        self._forget_removed()
        return sum(call.worker.up for call in self._calls.values())

    def clear(self) -> None:
        """Forgets all calls; what they return is lost."""
        self._calls.clear()

    def _arrive(self, ref: Call) -> Arrival:
        call = self._calls[ref]
        timeout_s = self._workers.config.rollout.worker_timeout_s
        try:
            direct = isinstance(ref, DirectCall)
            value = ref.result(timeout_s) if direct else ray.get(ref, timeout=timeout_s)
        except (ray.exceptions.RayError, Exception) as error:  # a task's own exception class
            return self._fail(call, WorkerFailure.from_error(call.worker.index, error))
        del self._calls[ref]
        call.worker.last_answer_s = time.monotonic()
        if self._is_work:
            self._workers.faults.success(call.worker.index)
        return Arrival(call.worker, call.tag, value)

    def _oldest(self) -> dict[Call, _Call]:
        """The first call under way of each worker. A worker answers in order; that its answers
        become known in order is not sure, and whoever applies gradients depends on it."""
        seen: set[int] = set()
        oldest = {}
        for ref, call in self._calls.items():
            if call.worker.index not in seen:
                seen.add(call.worker.index)
                oldest[ref] = call
        return oldest

    def _overdue(self) -> _Call | None:
        """A call that is past its limit and has not ended. Of each worker only the oldest call is
        asked after: those queued behind it are late because it is, or because the driver, busy
        elsewhere, has not yet taken note that it ended."""
        now_s = time.monotonic()
        late = {r: call for r, call in self._oldest().items() if self._deadline_s(call) <= now_s}
        if not late:
            return None
        direct = [ref for ref in late if isinstance(ref, DirectCall)]
        pending: list[Call] = [ref for ref in direct if not self._ready([ref], 0.0)]
        for ref in pending:
            # Its worker connected while the driver was busy elsewhere, and was asked just now.
            if ref.sent_s is not None:
                late[ref].launched_s = max(late[ref].launched_s, ref.sent_s)
        pending = [ref for ref in pending if self._deadline_s(late[ref]) <= time.monotonic()]
        if others := [ref for ref in late if not isinstance(ref, DirectCall)]:
            # What has ended on another node counts, fetched or not.
            pending += ray.wait(others, num_returns=len(others), timeout=0, fetch_local=False)[1]
        return next((late[ref] for ref in pending if not self._is_waiting(late[ref])), None)

    def _is_waiting(self, call: _Call) -> bool:
        """Whether Ray still looks for a place for the worker, and the run can go on meanwhile; then
        its time begins anew."""
        if call.worker.up or not waits_for_resources(call.worker.handle):
            return False
        if not self._workers.enough_up():
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
            # A call queued behind another starts when that one has ended.
            limit_s = max(call.launched_s, answered_s) + rollout.worker_timeout_s
        return min(limit_s + call.extra_timeout_s, call.latest_s)

    def _hang(self, call: _Call) -> WorkerFailure:
        silent_s = time.monotonic() - max(call.launched_s, call.worker.last_answer_s or 0.0)
        message = f"no answer for {silent_s:.1f} s"
        if not call.worker.up and waits_for_resources(call.worker.handle):
            asked = asked_and_free(self._workers.config.rollout)
            message = f"Ray found no place for it within {silent_s:.1f} s: workers {asked}"
        return WorkerFailure("hang", call.worker.index, message)
