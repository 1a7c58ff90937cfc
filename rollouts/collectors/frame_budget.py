"""`FrameBudget`: how many frames a collector still collects, and its requests for them."""

from __future__ import annotations

from polopt.rollouts.collectors.collector_config import CollectingConfig
from polopt.rollouts.sampling.sample_request import SampleRequest
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


class FrameBudget:
    """Counts frames and makes the requests of a `Collector`.

    Args:
        config: `frames_per_batch`, `total_frames`, `init_random_frames` and how to sample.
        workers: the workers that collect.

    Attributes:
        num_frames: environment steps in the batches returned so far.
    """

    def __init__(self, config: CollectingConfig, workers: WorkerSet) -> None:
        self._config = config
        self._workers = workers
        self._uniform = False
        self.num_frames = 0

    def spent(self, expected: int = 0) -> bool:
        """Whether `total_frames` are reached, once `expected` more frames have been returned."""
        return 0 <= self._config.total_frames <= self.num_frames + expected

    def begin_fragments(self, expected: int) -> None:
        """Decides how the next fragments are sampled: uniform actions, or the policy's. All
        fragments of a synchronous batch are sampled alike, also by workers that replace others.

        Args:
            expected: frames in fragments that are pending or kept.
        """
        self._uniform = self.num_frames + expected < self._config.init_random_frames

    def request(self, worker: WorkerHandle) -> SampleRequest:
        """The request for one fragment of a worker."""
        config = self._config
        frames, steps = None, None
        if config.frames_per_batch:
            num_collectors = max(1, len(self._workers.remote)) if config.sync else 1
            frames = -(-config.frames_per_batch // num_collectors)
            steps = -(-frames // self._workers.num_envs_of(worker.index))
        return SampleRequest(
            steps=steps,
            frames=frames,
            exploration=config.exploration_type,
            uniform=self._uniform,
            reset_first=config.reset_at_each_iter,
        )
