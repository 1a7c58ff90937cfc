"""`FrameBudget`: decides how many frames a Collector still requests, and makes the requests."""

from __future__ import annotations

from polopt.collectors.collector_config import CollectingConfig
from polopt.rollouts.sampling.worker_sampler import SampleRequest
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet


class FrameBudget:
    """Counts the frames (environment steps) of a `Collector`, and makes its requests for fragments.

    Args:
        config: the options of the Collector.
        workers: the workers that collect.

    Attributes:
        num_frames: the number of environment steps in the batches returned so far.
    """

    def __init__(self, config: CollectingConfig, workers: WorkerSet) -> None:
        self._config = config
        self._workers = workers
        self._uniform = False
        self.num_frames = 0

    def spent(self, expected: int = 0) -> bool:
        """Returns whether the number of frames will reach `total_frames` after `expected` more
        frames."""
        return 0 <= self._config.total_frames <= self.num_frames + expected

    def begin_fragments(self, expected: int) -> None:
        """Decides whether the next fragments are sampled with uniform actions or with the policy.
        All fragments of a synchronous batch are sampled in the same way. This includes fragments
        from replacements of failed workers.

        Args:
            expected: the number of frames in fragments that were requested and not yet returned.
        """
        self._uniform = self.num_frames + expected < self._config.init_random_frames

    def request(self, handle: WorkerHandle) -> SampleRequest:
        """Makes the request for one fragment of a worker."""
        config = self._config
        frames, steps = None, None
        if config.frames_per_batch:
            num_collectors = max(1, len(self._workers.remote)) if config.sync else 1
            frames = -(-config.frames_per_batch // num_collectors)
            steps = -(-frames // self._workers.num_envs_of(handle.index))
        return SampleRequest(
            steps=steps,
            frames=frames,
            exploration=config.exploration_type,
            uniform=self._uniform,
            reset_first=config.reset_at_each_iter,
        )
