"""SyncReplay: samples go into a replay buffer, and the driver learns from what it draws (DQN, SAC).

RLlib 0.8's SyncReplayOptimizer, with a training intensity that is exact, and with a buffer that can
be saved. Results do not depend on the order in which samples arrive.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from polopt.common.config import ConfigError
from polopt.metrics import plots
from polopt.metrics.optimizer_stats import StepResult
from polopt.metrics.tab import Tab
from polopt.optimizers.base import OptimizerConfig
from polopt.optimizers.checks import check_central_gradients
from polopt.optimizers.replay_optimizer import ReplayOptimizer, ReplayOptions
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.gathering import Fragments, check_batch
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncReplay(ReplayOptimizer):
    """Gathers fragments of all workers, inserts them, and learns as often as the intensity says.

    A step samples one fragment of each worker that is up. As long as none fails, a run is
    reproducible bit for bit for one seed, config and number of workers, also if `collection` is
    `overlapped`: then the next fragments are sampled while the driver learns, with weights that are
    one step older. Fragments of a failed worker are reassigned to the others. With
    `num_workers=0` the local worker samples.
    """

    name = "sync_replay"
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "insert", "draw", "learn")
    runs_in_process = True
    after_failure = "reassign"

    def step(self) -> StepResult:
        before = self.metrics.counts()
        with self.timers["broadcast"]:
            self._request()
        with self.timers["sample"]:
            fragments = [reply.value for reply in self.fragments.all()]
        with self.timers["insert"]:
            for fragment in fragments:
                self.limiter.insert(self.buffer.add(fragment))
        if self.overlaps:
            with self.timers["broadcast"]:
                self._request()
        while self.limiter.sample(self.config.train_batch_size):
            with self.timers["draw"]:
                rows = self.buffer.sample(self.config.train_batch_size, self.beta)
            with self.timers["learn"]:
                errors = self.learn_transitions(rows)
            with self.timers["draw"]:
                self.buffer.update_priorities(rows.indices, errors)
        self.metrics.rollouts.end_rollout(self.policy.version)
        return self.metrics.counts_since(before)
