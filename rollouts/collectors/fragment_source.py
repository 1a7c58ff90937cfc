"""`FragmentSource`: which fragments a `Collector` launches, and which make its next batch."""

from __future__ import annotations

from polopt.rollouts.collectors.config import CollectingConfig
from polopt.rollouts.collectors.frame_budget import FrameBudget
from polopt.rollouts.collectors.gatherer import Gatherer, Landed, Slot
from polopt.rollouts.collectors.weight_sync import WeightSync
from polopt.rollouts.sampling.requests import Fragment
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet


class FragmentSource:
    """Applies a collector's rules for frames and weights to a `Gatherer`.

    Args:
        workers: the workers that collect.
        config: options of the collector.
        budget: counts frames.
        weight_sync: decides which weights fragments are made with.
        gatherer: launches and receives.
    """

    def __init__(
        self,
        workers: WorkerSet,
        config: CollectingConfig,
        budget: FrameBudget,
        weight_sync: WeightSync,
        gatherer: Gatherer,
    ) -> None:
        self._workers = workers
        self._config = config
        self._budget = budget
        self._weight_sync = weight_sync
        self._gatherer = gatherer

    def next_batch(self) -> list[Fragment]:
        """The fragments of the next batch; launches those after it, unless they have to wait for
        new weights (`update_after_each_batch`)."""
        self._launch(ahead=False)
        fragments = self._gather() if self._config.sync else [self._take_first().fragment]
        self._budget.num_frames += sum(fragment.frames for fragment in fragments)
        if not self._config.update_after_each_batch:
            self._launch(ahead=True)
        if not self._config.sync:
            self._renew_old()
        return fragments

    def _launch(self, ahead: bool) -> None:
        """Launches a fragment on every idle worker, as far as frames are wanted.

        Args:
            ahead: the current batch has not been returned yet.
        """
        if self._config.sync:
            if not self._gatherer.idle or self._budget.spent():
                return  # a round is pending, or none is needed
            self._budget.begin_fragments(0)
            for worker in self._workers.remote:
                self._launch_on(worker, ahead)
            return
        for worker in self._workers.remote:
            expected = self._expected_frames()
            if self._budget.spent(expected):
                return
            if self._gatherer.is_idle(worker):
                self._budget.begin_fragments(expected)
                self._launch_on(worker, ahead)

    def _launch_on(self, worker: RemoteWorker, ahead: bool) -> None:
        weights = self._weight_sync.weights_for(worker, ahead)
        self._gatherer.launch(worker, Slot(worker.index), weights)

    def _expected_frames(self) -> int:
        """Frames in fragments that have landed or are pending."""
        landed = sum(each.fragment.frames for each in self._gatherer.landed)
        return landed + sum(tag.frames for tag in self._gatherer.in_flight.tags())

    def _gather(self) -> list[Fragment]:
        """A fragment of every worker, in order of index."""
        if not self._workers.remote and not self._gatherer.landed:
            self._sample_locally()
        self._gatherer.wait_for_all()
        return [landed.fragment for landed in self._gatherer.take_all()]

    def _take_first(self) -> Landed:
        """The first fragment that arrives. Fragments from before the last
        `update_policy_weights_` come before newer ones: once a newer one has arrived, they are
        stopped early."""
        gatherer, is_old = self._gatherer, self._weight_sync.is_before_update
        if not self._workers.remote and not gatherer.landed:
            self._sample_locally()
        while True:
            first = next((each for each in gatherer.landed if is_old(each.worker_index)), None)
            if first is None and gatherer.landed:
                pending = gatherer.in_flight.pending()
                overtaken = [call for call in pending if call[0].up and is_old(call[0].index)]
                if not overtaken:
                    first = gatherer.landed[0]
                gatherer.stop_early(overtaken)
            if first is not None:
                gatherer.landed.remove(first)
                if self._weight_sync.may_return(first.worker_index):
                    return first
                self._launch(ahead=False)  # of a worker that was still starting: made again
                continue
            gatherer.receive()

    def _renew_old(self) -> None:
        """Stops fragments early that would continue on weights that are too old
        (`max_weight_update_interval`), and waits for them."""
        calls = self._gatherer.in_flight
        old = self._weight_sync.too_old(worker for worker, _ in calls.pending())
        self._gatherer.stop_early([call for call in calls.pending() if call[0] in old])
        while any(calls.count(worker) for worker in old):
            self._gatherer.receive()

    def _sample_locally(self) -> None:
        if not self._workers.local.has_environments:
            raise RuntimeError("there are no collectors left; add some with add_collectors")
        self._budget.begin_fragments(0)
        self._gatherer.sample_locally(Slot(0))
