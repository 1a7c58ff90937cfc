"""`FragmentPipeline`: the fragments that collectors have on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import ray

from polopt.rollouts.collectors.config import CollectingConfig
from polopt.rollouts.collectors.weight_sync import WeightSync
from polopt.rollouts.sampling.requests import Fragment, SampleRequest, next_number
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.in_flight import InFlight
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class CollectionInterrupted(RuntimeError):
    """`interrupt` was called while a batch was being collected."""


class Asked(NamedTuple):
    """Tag of a call under way."""

    number: int  # of the request
    steps: int  # T
    frames: int  # at most


class FragmentPipeline:
    """Launches fragments as far as frames are wanted, gathers them, replaces who fails.

    Each worker has at most one fragment on its way or landed, so nothing piles up.

    Args:
        workers: who samples; with no remote ones the local one does, in this process.
        config: see there.
        flow: says which weights a fragment is launched with.

    Attributes:
        calls: the calls under way.
        num_frames: environment steps in what was taken out of the pipeline.
        interrupted: whoever waits gets `CollectionInterrupted`.
    """

    def __init__(
        self, workers: WorkerSet, config: CollectingConfig, weight_sync: WeightSync
    ) -> None:
        self._workers = workers
        self._config = config
        self._weight_sync = weight_sync
        self._stragglers = Stragglers(config.fraction_workers, config.fraction_samples)
        self._landed: deque[tuple[int, Fragment]] = deque()  # (worker index, fragment)
        self._round_is_uniform = False
        self._local_number = 0  # of the request that this process is sampling
        self.calls = InFlight(workers)
        self.num_frames = 0
        self.interrupted = False

    def done(self) -> bool:
        """Whether all frames wanted have been taken out."""
        return self._enough(self.num_frames)

    def _enough(self, frames: int) -> bool:
        return 0 <= self._config.total_frames <= frames

    def _asked_for(self) -> int:
        """Frames taken out, landed, and under way; of the last the most it can be."""
        landed = sum(fragment.frames for _, fragment in self._landed)
        return self.num_frames + landed + sum(asked.frames for asked in self.calls.tags())

    # ---- launching ----------------------------------------------------------------------------

    def launch(self, ahead: bool) -> None:
        """Launches a fragment of every worker that has none, as far as frames are wanted.

        Args:
            ahead: the batch at hand has not been handed out yet.
        """
        remote = self._workers.remote
        if self._config.sync:
            if len(self.calls) or self._landed or self._enough(self._asked_for()):
                return  # a round is under way, or none is needed
            self._begin_round()
            for worker in remote:
                self._launch_one(worker, ahead)
            return
        landed = {index for index, _ in self._landed}
        for worker in remote:
            if self._enough(self._asked_for()):
                return
            if worker.index not in landed and self.calls.count(worker) == 0:
                self._launch_one(worker, ahead)

    def _begin_round(self) -> None:
        # One answer for all, also for those that will be replaced within the round.
        self._round_is_uniform = self._asked_for() < self._config.init_random_frames

    def _launch_one(self, worker: RemoteWorker, ahead: bool) -> None:
        request, asked = self._ask(worker.index)
        weights = self._weight_sync.weights_for(worker, ahead)
        self.calls.launch(worker, worker.actor.collect.remote(weights, request), asked)

    def _ask(self, index: int) -> tuple[SampleRequest, Asked]:
        config, envs = self._config, self._workers.num_envs_of(index)
        steps = self._workers.config.rollout.rollout_fragment_length
        if config.frames_per_batch:
            sharers = max(1, len(self._workers.remote)) if config.sync else 1
            steps = -(-config.frames_per_batch // (sharers * envs))
        asked = Asked(next_number(), steps, steps * envs)
        uniform = self._round_is_uniform
        if not config.sync:
            uniform = self._asked_for() < config.init_random_frames
        request = SampleRequest(
            number=asked.number,
            steps=steps,
            exploration=config.exploration_type,
            uniform=uniform,
            reset_first=config.reset_at_each_iter,
        )
        return request, asked

    # ---- gathering ----------------------------------------------------------------------------

    def take_first(self) -> list[Fragment]:
        """The first fragment that is ready."""
        if not self._workers.remote and not self._landed:
            self._sample_here()
        while not self._landed:
            self._wait()
        return self._taken([self._landed.popleft()])

    def take_all(self) -> list[Fragment]:
        """A fragment of every worker, in order of index; the last ones may be cut short."""
        if not self._workers.remote and not self._landed:
            self._begin_round()
            self._sample_here()
        sharers = len(self._landed) + len(self.calls)
        while len(self.calls):
            if self._stragglers.remain(sharers, len(self.calls)):
                self._stop_early(self.calls.pending(), self._stragglers)
            self._wait()
        landed = sorted(self._landed, key=lambda pair: pair[0])
        self._landed.clear()
        return self._taken(landed)

    def _taken(self, landed: list[tuple[int, Fragment]]) -> list[Fragment]:
        self.num_frames += sum(fragment.frames for _, fragment in landed)
        return [fragment for _, fragment in landed]

    def renew_old(self) -> None:
        """Cuts fragments short that would go on with weights that are too old, and waits for them:
        nobody acts on those any more when the batch at hand is handed out."""
        old = self._weight_sync.too_old(worker for worker, _ in self.calls.pending())
        self._stop_early([c for c in self.calls.pending() if c[0] in old], self._stragglers)
        while any(self.calls.count(worker) for worker in old):
            self._wait()

    def settle(self) -> None:
        """Waits for all fragments under way; they are kept."""
        while len(self.calls):
            self._wait()

    def discard(self) -> None:
        """Ends all fragments under way and throws them away, and those that have landed."""
        self._stop_early(self.calls.pending(), Stragglers(1.0, 0.0))
        self.settle()
        self._landed.clear()

    def _sample_here(self) -> None:
        """One fragment of the local worker, by the policy as it is."""
        if self._workers.local.sampler is None:
            raise RuntimeError("there are no collectors left; add some with add_collectors")
        request, asked = self._ask(0)
        self._local_number = asked.number
        self._stop_if_interrupted()
        while not self._land(0, self._workers.local.collect(None, request)):
            self._stop_if_interrupted()
        self._stop_if_interrupted()

    def _wait(self) -> None:
        """Until one fragment has landed or one worker was replaced."""
        self._stop_if_interrupted()
        arrival = self.calls.wait()
        worker: RemoteWorker | None = arrival.worker
        landed = arrival.failure is None and self._land(arrival.worker.index, arrival.value)
        if not landed and not self.interrupted:
            if arrival.failure is not None:
                worker = self._workers.replace(arrival.worker, arrival.failure)
            if worker is not None:
                self._launch_one(worker, ahead=False)
        self._stop_if_interrupted()

    def _land(self, index: int, fragment: Fragment) -> bool:
        """Keeps a fragment, unless it holds numbers that are not finite: another has to be made in
        its place."""
        good = self._workers.faults.fragment(index, fragment.faults)
        if good:
            self._landed.append((index, fragment))
        return good

    def _stop_early(
        self, calls: Iterable[tuple[RemoteWorker, Asked]], stragglers: Stragglers
    ) -> None:
        stragglers.stop_early((worker, asked.number, asked.steps) for worker, asked in calls)

    def stop_early(self, keep_steps: int) -> None:
        """Ends fragments under way once they have `keep_steps` steps. By any thread."""
        for worker, asked in self.calls.pending():
            call = worker.actor.stop_early.options(concurrency_group="control")
            call.remote(asked.number, keep_steps)
        self._workers.local.stop_early(self._local_number, keep_steps)

    # ---- interruption, by another thread ------------------------------------------------------

    def interrupt(self) -> None:
        """Ends the batch that another thread is collecting, which gets `CollectionInterrupted`.

        Fragments under way end after the step they are at; they are kept, for whoever sets
        `interrupted` back and goes on.
        """
        self.interrupted = True
        self._stop_early(self.calls.pending(), Stragglers(1.0, 0.0))
        self._workers.local.stop_early(self._local_number, 1)

    def kill_busy(self) -> None:
        """Ends the workers that are busy, for they do not answer; they are replaced when they are
        next needed."""
        for worker, _ in self.calls.pending():
            ray.kill(worker.handle, no_restart=True)

    def _stop_if_interrupted(self) -> None:
        if self.interrupted:
            raise CollectionInterrupted("the collector was interrupted")
