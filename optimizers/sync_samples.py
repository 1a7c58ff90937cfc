"""SyncSamples: synchronous samples of all workers, learned from centrally (A2C, PPO).

RLlib 0.8's SyncSamplesOptimizer; nothing collected is thrown away, and results do not depend on
the order in which samples arrive.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import pydantic

from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer, StepResult
from polopt.policies.sample_batch import SampleBatch
from polopt.rollouts.preemption import Stragglers
from polopt.rollouts.remote_worker import RemoteWorker
from polopt.rollouts.requests import SampleRequest, next_number
from polopt.rollouts.worker_set import WorkerSet


class SyncSamplesConfig(OptimizerConfig):
    """Options of `SyncSamples`.

    Attributes:
        train_batch_size: environment steps of one batch, rounded up to whole fragments; rows lost
            to next-step resets are not made up for. 0: one fragment of each worker.
        fraction_workers: once this share of the workers has sampled all its part, the others are
            cut short; what they have is used. 1: waits for all, and only then do results not
            depend on timing.
        fraction_samples: but a fragment that is cut short keeps at least this share of its steps.
    """

    train_batch_size: int = pydantic.Field(0, ge=0, le=10**8)
    fraction_workers: float = pydantic.Field(1.0, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(0.25, ge=0.0, le=1.0)


class _Slot(NamedTuple):
    """A place in the train batch. Sorting slots gives the order of concatenation."""

    worker_index: int
    round: int


#: What each worker has still to sample, by index.
_ToDo = defaultdict[int, deque[_Slot]]


class SyncSamples(PolicyOptimizer):
    """Broadcast, gather samples from all workers, learn on the driver; then again.

    Workers that have just been started take part from the step on that follows. What a failed
    worker owed the others make up for, so that one that hangs holds up one step. As long as none
    fails, which worker gives which part of a batch is fixed beforehand, so a run is reproducible
    bit for bit for one seed, config and number of workers. With `num_workers=0` the local worker
    samples.
    """

    name = "sync_samples"
    config_class = SyncSamplesConfig
    config: SyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.stragglers = Stragglers(self.config.fraction_workers, self.config.fraction_samples)
        self.num_cut_short = 0

    def step(self) -> StepResult:
        before = self._counts()
        with self.timers["broadcast"]:
            todo = self._deal_out()
        with self.timers["sample"]:
            batch = self._gather(todo)
        env_steps = batch.env_steps
        self.timers["sample"].push_rows(env_steps)
        self.count_samples(env_steps, batch.episodes)
        self.lag.add(self.policy.version - batch.version)
        with self.timers["learn"]:
            version = self.policy.version
            stats = self.policy.learn_on_batch(batch)
        self.timers["learn"].push_rows(env_steps)
        updates = self.policy.version - version
        if env_steps:
            self.workers.faults.fragments.update(updates > 0, why="gradient of the whole batch")
        self.count_training(env_steps if updates else 0, updates, stats)
        return self._since(before)

    def _deal_out(self) -> _ToDo:
        """Sends weights and starts the first fragment of each worker; returns what is left."""
        alone = self.workers.config.rollout.num_workers == 0 and not self.workers.remote
        workers = [] if alone else self.muster.up()
        indices = [worker.index for worker in workers] or [0]
        todo: _ToDo = defaultdict(deque)
        for i in range(self._num_fragments(len(indices))):
            index = indices[i % len(indices)]
            todo[index].append(_Slot(index, i // len(indices)))
        for worker in workers:
            self._launch_next(worker, todo)
        return todo

    def _num_fragments(self, num_workers: int) -> int:
        rollout = self.workers.config.rollout
        rows = rollout.num_envs_per_worker * rollout.rollout_fragment_length
        wanted = self.config.train_batch_size or rows * num_workers
        return -(-wanted // rows)

    def _launch_next(self, worker: RemoteWorker, todo: _ToDo) -> None:
        if todo[worker.index]:
            slot = todo[worker.index].popleft()
            request = SampleRequest(next_number())
            call = worker.actor.sample.remote(self.workers.weights_for(worker), request)
            self.in_flight.launch(worker, call, (slot, request.number))

    def _gather(self, todo: _ToDo) -> SampleBatch:
        collected: dict[_Slot, SampleBatch] = {}
        for slot in todo.pop(0, ()):
            while slot not in collected:
                self._keep(collected, slot, self.workers.local.sample())
        sharers = len(self.in_flight)
        while len(self.in_flight):
            arrival = self.in_flight.wait()
            worker, slot = arrival.worker, arrival.tag[0]
            if arrival.failure is not None:
                self.workers.replace(worker, arrival.failure)
                self._hand_over([slot, *todo.pop(worker.index)], todo)
            else:
                if not self._keep(collected, slot, arrival.value):
                    todo[worker.index].appendleft(slot)
                self._launch_next(worker, todo)
            if self.stragglers.remain(sharers, len(self.in_flight)):
                self._cut_stragglers_short(todo)
        return SampleBatch.concat([collected[slot] for slot in sorted(collected)])

    def _keep(self, collected: dict[_Slot, SampleBatch], slot: _Slot, batch: SampleBatch) -> bool:
        """False for a batch with bad numbers: its worker has to make up for it."""
        good = self.usable(batch.worker_index, batch.faults)
        if good:
            collected[slot] = batch
        return good

    def _hand_over(self, slots: Iterable[_Slot], todo: _ToDo) -> None:
        """What a failed worker owed goes to those that are up and have least to do."""
        up = self.muster.up()
        owing = {w.index: len(todo[w.index]) + self.in_flight.count(w) for w in up}
        for slot in slots:
            index = min(owing, key=lambda i: (owing[i], i))
            owing[index] += 1
            todo[index].append(slot)
        for worker in up:
            if self.in_flight.count(worker) == 0:
                self._launch_next(worker, todo)

    def _cut_stragglers_short(self, todo: _ToDo) -> None:
        """Each worker has at most one fragment under way, so those under way are of as many
        stragglers. They give up what they have not begun."""
        length = self.workers.config.rollout.rollout_fragment_length
        late = [(w, number) for w, (_, number) in self.in_flight.under_way()]
        for worker, _ in late:
            todo[worker.index].clear()
        self.num_cut_short += self.stragglers.cut_short((w, n, length) for w, n in late)

    def drain(self) -> None:
        """Nothing to do: `step` leaves nothing in flight."""

    def get_state(self) -> dict[str, Any]:
        """Besides what every optimizer saves, where the workers' environments and random numbers
        stand. A run restored with the same config goes on bit for bit if the environments have
        `get_state` and `set_state` (see `polopt.rollouts.env_state`); if not, weights, torch
        optimizer, schedules and counters go on and episodes start anew."""
        for worker in self.workers.remote:
            if worker.up:
                call = worker.actor.get_state.remote(False)
                self.in_flight.launch(worker, call, str(worker.index))
        states = {"0": self.workers.local.get_state(with_policy=False), **self._settle()}
        return {**super().get_state(), "workers": states}

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        states = state.get("workers", {})
        if "0" in states:
            self.workers.local.set_state(states["0"])
        for worker in self.workers.remote:
            if worker.up and str(worker.index) in states:
                call = worker.actor.set_state.remote(states[str(worker.index)])
                self.in_flight.launch(worker, call)
        self._settle()

    def extra_stats(self) -> dict[str, Any]:
        return {
            "num_cut_short": self.num_cut_short,
            "sample_peak_throughput": self.timers["sample"].peak_rows_per_s,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
        }
