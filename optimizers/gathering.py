"""Where `SyncSamples` has its fragments from: dealt out beforehand, or first ready first served."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.sampling.requests import SampleRequest, next_number
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

Usable = Callable[[SampleBatch], bool]


class Gathering(ABC):
    """Fragments of one batch after the other.

    Args:
        workers: who samples.
        health: says who of them can.
        in_flight: with nothing in it.
        train_batch_size: rows of a batch; 0: as the subclass says.
        usable: says of a fragment whether it may be learned from; if not, another is made.

    Attributes:
        num_early_stopped: fragments that were, so far.
    """

    num_early_stopped = 0

    def __init__(
        self,
        workers: WorkerSet,
        health: WorkerHealth,
        in_flight: InFlight,
        train_batch_size: int,
        usable: Usable,
    ) -> None:
        self.workers = workers
        self.health = health
        self.in_flight = in_flight
        self.train_batch_size = train_batch_size
        self.usable = usable

    @abstractmethod
    def launch(self) -> None:
        """Sends weights and starts what is idle."""

    @abstractmethod
    def gather(self) -> list[SampleBatch]:
        """The fragments of one batch."""

    @abstractmethod
    def drain(self) -> None:
        """Waits for what is in flight, and keeps it for `gather`."""

    @abstractmethod
    def forget(self) -> None:
        """Throws away what `drain` kept."""


def fragments_of(train_batch_size: int, workers: WorkerSet, default: int) -> int:
    """Fragments that make a batch of so many rows; `default` where it is 0."""
    rollout = workers.config.rollout
    rows = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    return -(-train_batch_size // rows) if train_batch_size else default


class _Slot(NamedTuple):
    """A place in the train batch. Sorting slots gives the order of concatenation."""

    worker_index: int
    round: int


class DealtOut(Gathering):
    """Which worker gives which part of a batch is fixed beforehand, and all are waited for; only
    stragglers may be cut short. Without remote workers the local one samples. A batch of no given
    size has one fragment of each worker; one that can not be used is made again by its worker.

    Args:
        stragglers: who is one.
        given: see `Gathering`.
    """

    def __init__(self, stragglers: Stragglers, **given: Any) -> None:
        super().__init__(**given)
        self.stragglers = stragglers
        self._todo: defaultdict[int, deque[_Slot]] = defaultdict(deque)
        self._collected: dict[_Slot, SampleBatch] = {}
        self._sharers = 0

    def launch(self) -> None:
        """Sends weights and starts the first fragment of each worker, unless that was done."""
        if self._todo or self._collected:
            return
        alone = self.workers.config.rollout.num_workers == 0 and not self.workers.remote
        workers = [] if alone else self.health.up()
        indices = [worker.index for worker in workers] or [0]
        for i in range(fragments_of(self.train_batch_size, self.workers, len(indices))):
            index = indices[i % len(indices)]
            self._todo[index].append(_Slot(index, i // len(indices)))
        for worker in workers:
            self._launch_next(worker)
        self._sharers = len(self.in_flight)

    def _launch_next(self, worker: RemoteWorker) -> None:
        if self._todo[worker.index]:
            slot = self._todo[worker.index].popleft()
            request = SampleRequest(next_number())
            call = worker.actor.sample.remote(self.workers.weights_for(worker), request)
            self.in_flight.launch(worker, call, (slot, request.number))

    def gather(self) -> list[SampleBatch]:
        """In order of worker, then of round."""
        self.drain()
        fragments = [self._collected[slot] for slot in sorted(self._collected)]
        self.forget()
        return fragments

    def drain(self) -> None:
        for slot in self._todo.pop(0, ()):
            while not self._keep(slot, self.workers.local.sample()):
                pass
        while len(self.in_flight):
            arrival = self.in_flight.wait()
            worker, slot = arrival.worker, arrival.tag[0]
            if arrival.failure is not None:
                self.workers.replace(worker, arrival.failure)
                self._hand_over([slot, *self._todo.pop(worker.index)])
            else:
                if not self._keep(slot, arrival.value):
                    self._todo[worker.index].appendleft(slot)
                self._launch_next(worker)
            if self.stragglers.remain(self._sharers, len(self.in_flight)):
                self._stop_stragglers_early()

    def _keep(self, slot: _Slot, batch: SampleBatch) -> bool:
        good = self.usable(batch)
        if good:
            self._collected[slot] = batch
        return good

    def _hand_over(self, slots: Iterable[_Slot]) -> None:
        """What a failed worker owed goes to those that are up and have least to do."""
        up = self.health.up()
        owing = {w.index: len(self._todo[w.index]) + self.in_flight.count(w) for w in up}
        for slot in slots:
            index = min(owing, key=lambda i: (owing[i], i))
            owing[index] += 1
            self._todo[index].append(slot)
        for worker in up:
            if self.in_flight.count(worker) == 0:
                self._launch_next(worker)

    def forget(self) -> None:
        self._todo.clear()
        self._collected.clear()

    def _stop_stragglers_early(self) -> None:
        """Each worker has at most one fragment under way, so those under way are of as many
        stragglers. They give up what they have not begun."""
        length = self.workers.config.rollout.rollout_fragment_length
        late = [(w, number) for w, (_, number) in self.in_flight.pending()]
        for worker, _ in late:
            self._todo[worker.index].clear()
        self.num_early_stopped += self.stragglers.stop_early((w, n, length) for w, n in late)


class FirstReady(Gathering):
    """Fragments as they come. A worker that gave one gets new weights and starts the next at once,
    so it samples while the driver learns. At least one worker is remote; a batch of no given size
    is one fragment.

    Args:
        given: see `Gathering`.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._landed: deque[SampleBatch] = deque()

    def launch(self) -> None:
        """Sends weights and starts a fragment of each worker that has none."""
        for worker in self.health.up():
            if self.in_flight.count(worker) == 0:
                call = worker.actor.sample.remote(self.workers.weights_for(worker))
                self.in_flight.launch(worker, call)

    def gather(self) -> list[SampleBatch]:
        """The first that are ready."""
        wanted = fragments_of(self.train_batch_size, self.workers, 1)
        while len(self._landed) < wanted:
            self._receive()
            self.launch()
        return [self._landed.popleft() for _ in range(wanted)]

    def _receive(self) -> None:
        """Takes what comes next."""
        arrival = self.in_flight.wait()
        if arrival.failure is not None:
            self.workers.replace(arrival.worker, arrival.failure)
        elif self.usable(arrival.value):
            self._landed.append(arrival.value)

    def drain(self) -> None:
        while len(self.in_flight):
            self._receive()

    def forget(self) -> None:
        self._landed.clear()
