"""`Gatherer`: gathers fragments of remote workers, for `Collector` and the sample optimizers."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray

from polopt.rollouts.sampling.requests import Fragment, SampleRequest
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: No worker is a straggler; a fragment that is stopped anyway ends after its current step.
NO_STRAGGLERS = Stragglers(1.0, 0.0)


class CollectionInterrupted(RuntimeError):
    """`Gatherer.interrupt` was called while fragments were gathered."""


class Slot(NamedTuple):
    """Place of a fragment in its batch; fragments are concatenated in the order of their slots.

    Attributes:
        worker_index: the worker to which it was first assigned.
        round: number of earlier fragments of that worker in the batch.
    """

    worker_index: int
    round: int = 0


class Pending(NamedTuple):
    """Tag of a pending call.

    Attributes:
        slot: place of the fragment.
        number: number of the request.
        steps: T.
        frames: environment steps in it, without rows lost to resets or an early stop.
    """

    slot: Slot
    number: int
    steps: int
    frames: int


class Landed(NamedTuple):
    """A fragment that has arrived.

    Attributes:
        slot: its place.
        worker_index: the worker that made it.
        fragment: see `Fragment`.
    """

    slot: Slot
    worker_index: int
    fragment: Fragment


class Gatherer:
    """Launches fragments, at most one at a time for each worker, and keeps those that arrive.

    Assignment: either slots are dealt beforehand (`deal`, `wait_for_all`), so that results do not
    depend on timing, or each idle worker gets one and the first that arrives is taken (`launch`,
    `receive`).

    Failure rule: fragments of a failed worker are reassigned to workers that are up
    (`reassign_to`), or launched on the worker that replaces it. A worker samples a fragment with
    values that are not finite again.

    Args:
        workers: the workers; without remote ones, `sample_locally` uses the local one.
        request: makes the request for the worker with this index.
        weights_for: weights argument of a call to this worker; see `WorkerSet.weights_for`.
        reassign_to: returns the workers that are up; None: relaunch on the replacement.
        stragglers: decides which workers `wait_for_all` stops early.

    Attributes:
        in_flight: pending calls.
        landed: fragments that have arrived and were not taken, in order of arrival.
        interrupted: `receive` raises `CollectionInterrupted`.
        num_early_stopped: fragments that `wait_for_all` has stopped early.
    """

    def __init__(
        self,
        workers: WorkerSet,
        request: Callable[[int], SampleRequest],
        weights_for: Callable[[RemoteWorker], Any],
        reassign_to: Callable[[], Sequence[RemoteWorker]] | None = None,
        stragglers: Stragglers = NO_STRAGGLERS,
    ) -> None:
        self._workers = workers
        self._request = request
        self._weights_for = weights_for
        self._reassign_to = reassign_to
        self._stragglers = stragglers
        self._todo: defaultdict[int, deque[Slot]] = defaultdict(deque)  # by worker index
        self._local_number = 0  # of the request that this process is sampling
        self.in_flight = InFlight(workers)
        self.landed: deque[Landed] = deque()
        self.interrupted = False
        self.num_early_stopped = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is assigned, pending or landed."""
        return not (self.landed or len(self.in_flight) or any(self._todo.values()))

    def is_idle(self, worker: RemoteWorker) -> bool:
        """Whether no fragment of this worker is pending or has landed."""
        landed = any(each.worker_index == worker.index for each in self.landed)
        return not landed and self.in_flight.count(worker) == 0

    # ---- launching ------------------------------------------------------------------------------

    def deal(self, num_slots: int, workers: Sequence[RemoteWorker]) -> None:
        """Assigns slots to workers in turn, and launches the first of each."""
        for i in range(num_slots):
            index = workers[i % len(workers)].index
            self._todo[index].append(Slot(index, i // len(workers)))
        for worker in workers:
            self._launch_next(worker)

    def launch(self, worker: RemoteWorker, slot: Slot, weights: Any) -> None:
        """Launches one fragment now, on weights as `weights_for` returns them."""
        request = self._request(worker.index)
        call = self._workers.call(worker, "collect", weights, request)
        self.in_flight.launch(worker, call, self._tag(worker.index, slot, request))

    def _tag(self, index: int, slot: Slot, request: SampleRequest) -> Pending:
        assert request.number is not None
        steps = request.steps or self._workers.config.rollout.rollout_fragment_length
        return Pending(slot, request.number, steps, steps * self._workers.num_envs_of(index))

    def _launch_next(self, worker: RemoteWorker) -> None:
        if self._todo[worker.index]:
            self.launch(worker, self._todo[worker.index].popleft(), self._weights_for(worker))

    def sample_locally(self, slot: Slot) -> None:
        """Makes one fragment with the local worker and its policy."""
        request = self._request(0)
        self._local_number = request.number or 0
        usable = False
        while not usable:
            self._check_interrupted()
            usable = self._keep(slot, 0, self._workers.local.collect(None, request))
        self._check_interrupted()

    # ---- gathering ------------------------------------------------------------------------------

    def receive(self) -> None:
        """Waits until one fragment has arrived or one worker was replaced.

        Raises:
            WorkersFailedError: if workers keep failing.
            CollectionInterrupted: see `interrupt`.
        """
        self._check_interrupted()
        arrival = self.in_flight.wait()
        worker, slot = arrival.worker, arrival.tag.slot
        if arrival.failure is None:
            if not self._keep(slot, worker.index, arrival.value):
                self._todo[worker.index].appendleft(slot)
            if not self.interrupted:
                self._launch_next(worker)
        elif not self.interrupted:
            fresh = self._workers.replace(worker, arrival.failure)
            slots = [slot, *self._todo.pop(worker.index, ())]
            if self._reassign_to is not None:
                self._reassign(slots, self._reassign_to())
            elif fresh is not None:
                self._todo[fresh.index].extend(slots)
                self._launch_next(fresh)
        self._check_interrupted()

    def _keep(self, slot: Slot, index: int, fragment: Fragment) -> bool:
        usable = self._workers.faults.fragment(index, fragment.faults)
        if usable:
            self.landed.append(Landed(slot, index, fragment))
        return usable

    def _reassign(self, slots: Iterable[Slot], workers: Sequence[RemoteWorker]) -> None:
        """Each slot goes to the worker with the fewest fragments left to make."""
        left = {w.index: len(self._todo[w.index]) + self.in_flight.count(w) for w in workers}
        for slot in slots:
            index = min(left, key=lambda i: (left[i], i))
            left[index] += 1
            self._todo[index].append(slot)
        for worker in workers:
            if self.in_flight.count(worker) == 0:
                self._launch_next(worker)

    def wait_for_all(self) -> None:
        """Waits for all assigned fragments; stops stragglers early."""
        sharers = {landed.worker_index for landed in self.landed}
        num_sharers = len(sharers | {worker.index for worker, _ in self.in_flight.pending()})
        while len(self.in_flight):
            if self._stragglers.remain(num_sharers, len(self.in_flight)):
                for worker, _ in self.in_flight.pending():
                    self._todo[worker.index].clear()  # fragments that it has not begun
                self.num_early_stopped += self.stop_early(self.in_flight.pending())
            self.receive()

    def take_all(self) -> list[Landed]:
        """The fragments that have landed, in order of their slots."""
        landed = sorted(self.landed, key=lambda each: each.slot)
        self.landed.clear()
        return landed

    # ---- ending early ---------------------------------------------------------------------------

    def stop_early(self, calls: Iterable[tuple[RemoteWorker, Pending]]) -> int:
        """Ends pending fragments early; does not wait. Returns the number of those that were not
        stopped before."""
        return self._stragglers.stop_early((w, tag.number, tag.steps) for w, tag in calls)

    def stop_all(self, keep_steps: int) -> None:
        """Ends all pending fragments once they have `keep_steps` steps. May be called by any
        thread."""
        for worker, tag in self.in_flight.pending():
            worker.stop_early(tag.number, keep_steps)
        self._workers.local.stop_early(self._local_number, keep_steps)

    def discard(self) -> None:
        """Ends all pending fragments and drops them, and those that have landed."""
        self._todo.clear()
        self.stop_all(1)
        self.in_flight.gather()
        self.landed.clear()

    def interrupt(self) -> None:
        """Makes the thread that gathers raise `CollectionInterrupted`. Pending fragments end after
        their current step; they are kept, and gathering continues with them once `interrupted` is
        reset."""
        self.interrupted = True
        self.stop_all(1)

    def kill_busy(self) -> None:
        """Kills the workers with pending calls, which do not answer. Collection replaces them when
        it continues."""
        for worker, _ in self.in_flight.pending():
            ray.kill(worker.handle, no_restart=True)

    def _check_interrupted(self) -> None:
        if self.interrupted:
            raise CollectionInterrupted("the collector was interrupted")
