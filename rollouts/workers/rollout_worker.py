"""`RolloutWorker`: one process that samples, computes gradients, or learns."""

from __future__ import annotations

import hashlib
import time

import torch

from polopt.common.compression import GradientPacker, PackedGradients
from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.policies.minibatch_gradients import MinibatchGradients
from polopt.rollouts.sampling.non_finite import non_finite_gradient
from polopt.rollouts.sampling.requests import LearnInfo, RoundInfo, SampleRequest
from polopt.rollouts.sampling.seeding import Seeds
from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.workers.sampling_worker import SamplingWorker
from polopt.rollouts.workers.worker_config import WorkerConfig


class RolloutWorker(SamplingWorker):
    """Samples, and where the strategy wants it computes gradients or learns.

    Args:
        config: see `WorkerConfig`.
        index: see `SamplingWorker`.
    """

    def __init__(self, config: WorkerConfig, index: int) -> None:
        super().__init__(config, index)
        rollout = config.rollout
        self._group: AllReducer | None = None
        self._sampled: SampleBatch | None = None
        self._lesson: MinibatchGradients | None = None
        self._packer = GradientPacker(rollout.compress_gradients, rollout.topk_share)

    # ---- gradients for a central update --------------------------------------------------------

    def sample_and_compute_gradients(
        self, weights: Weights | None = None
    ) -> tuple[Gradients | PackedGradients, RoundInfo]:
        """A round of AsyncGradients: takes weights and computes the gradient of the next minibatch.
        Samples first if the last one was gone through; with one epoch of one minibatch, always."""
        told = self._sample_if_needed(weights)
        lesson = self._lesson
        if lesson is None:
            return self.policy.no_gradients(), told
        fresh = lesson.first_epoch
        gradients = lesson.next_gradients()
        told = told._replace(fresh=gradients.rows if fresh else 0, last=lesson.done)
        problem = non_finite_gradient(gradients)
        if problem:
            told = told._replace(faults=told.faults._replace(non_finite=problem))
        return self._packer.pack(gradients), told

    def _sample_if_needed(self, weights: Weights | None) -> RoundInfo:
        if self._lesson is not None and not self._lesson.done:
            if weights is not None:
                self.set_weights(weights)
            empty = EpisodeStats.empty()
            return RoundInfo(0, empty, 0, 0.0, worker_index=self.index, acted=self._lesson.version)
        started_s = time.perf_counter()
        batch = self._data(weights)
        info = self._round_info(batch, time.perf_counter() - started_s)
        self._lesson = None if info.faults.non_finite else MinibatchGradients(self.policy, batch)
        return info

    # ---- decentralised learning ---------------------------------------------------------------

    def sample_for_learning(self, round_index: int) -> RoundInfo:
        """First half of a round of DecentralizedAllReduce: samples, and keeps the batch."""
        started_s = time.perf_counter()
        self._sampled = self._data(None, SampleRequest(round_index))
        return self._round_info(self._sampled, time.perf_counter() - started_s)

    def _round_info(self, batch: SampleBatch, sample_s: float) -> RoundInfo:
        return RoundInfo(
            batch.env_steps,
            batch.episodes,
            batch.shape[0],
            sample_s,
            batch.faults,
            self.index,
            batch.version,
        )

    def learn(self, env_steps: int, want_weights: bool, want_checksum: bool) -> LearnInfo:
        """Second half: learns from the batch kept, together with all ranks of the group.

        If another rank dies or hangs meanwhile, the gradient under way is thrown away and the
        answer says that the group is broken; this rank may then be an update ahead of others.

        Args:
            env_steps: sampled by all workers before this round; with those of this round it is
                the clock of schedules, the same on all ranks.
            want_weights: return the weights.
            want_checksum: return their SHA-256.
        """
        batch, self._sampled = self._sampled, None
        if batch is None or self._group is None:
            raise RuntimeError(f"worker {self.index} was asked to learn before it sampled")
        started_s = time.perf_counter()
        version = self.policy.version
        stats: dict[str, float] = {}
        broken = None
        vetoed = False
        non_finite_gradients = self.policy.non_finite_gradients
        try:
            # Bad numbers of one would be everybody's after the first sum, so all vote.
            votes = torch.tensor([batch.env_steps, int(bool(batch.faults.non_finite))])
            self._group.sum_(votes)
            self.policy.env_steps = env_steps + int(votes[0])
            vetoed = bool(votes[1])
            if not vetoed:
                stats = self.policy.learn_on_batch(batch, self._group)
        except GroupBroken as error:
            broken = str(error)
        return LearnInfo(
            stats=stats,
            updates=self.policy.version - version,
            version=version,
            acted=batch.version,
            learn_s=time.perf_counter() - started_s,
            allreduce_s=self._group.take_total_s(),
            weights=self.policy.get_weights() if want_weights and not broken else None,
            checksum=self.checksum() if want_checksum and not broken else None,
            broken=broken,
            vetoed=vetoed,
            non_finite_gradients=self.policy.non_finite_gradients - non_finite_gradients,
        )

    def join_group(self, spec: GroupSpec, rank: int) -> str | None:
        """Becomes `rank` of a group, leaving any it was in.

        Returns:
            None, or why the group did not form. No exception: it is another's fault, and what
            this rank has learned must not be lost with it.
        """
        self.leave_group()
        try:
            self._group = AllReducer(spec, rank, self.config.device)
        except GroupBroken as error:
            return str(error)
        return None

    def leave_group(self) -> None:
        """Leaves its group, if it is in one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def checksum(self) -> str:
        """SHA-256 of the weights' bytes."""
        return hashlib.sha256(self.policy.get_weights().flat.tobytes()).hexdigest()

    def _restart(self, seeds: Seeds) -> None:
        # What was sampled, and what was held back of gradients, is from before.
        self._lesson = self._packer.residual = None
        super()._restart(seeds)

    def stop(self) -> None:
        """Leaves its group, and closes environments and its connection."""
        self.leave_group()
        super().stop()
