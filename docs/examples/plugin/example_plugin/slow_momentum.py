"""SlowMo (Wang et al., 2020): local SGD with momentum for the averaged weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pydantic

import polopt


class SlowMomentumConfig(polopt.OptimizerConfig):
    """Options of `SlowMomentum`.

    Attributes:
        local_rounds: batches that each worker learns from between two averages (tau in the paper).
        slow_momentum: share of the last move that is added to the next move (beta in the paper).
    """

    local_rounds: int = pydantic.Field(default=2, ge=1)
    slow_momentum: float = pydantic.Field(default=0.5, ge=0.0, lt=1.0)


def learn_alone(
    worker: polopt.RolloutWorker, weights: polopt.Weights | None, rounds: int
) -> polopt.Weights:
    """Runs in a worker. Learns from the worker's own batches, and returns its weights."""
    worker.set_weights(weights)
    for _ in range(rounds):
        worker.learn(worker.next_batch())
    return worker.get_weights()


class SlowMomentum(polopt.PolicyOptimizer):
    """Workers learn alone. Then the driver moves its weights to the mean of the workers' weights,
    and further in the direction of earlier moves."""

    name = "slow_momentum"
    config_class = SlowMomentumConfig
    config: SlowMomentumConfig
    phases = ("learn", "average")
    runs_in_process = True
    after_failure = "drop"

    _move: np.ndarray | float = 0.0  # [P]

    def step(self) -> polopt.StepResult:
        before = self.metrics.counts()
        start = self.policy.get_weights().flat  # without workers, this policy learns
        with self.timers["learn"]:
            self.calls.fill(learn_alone, self.workers.up(), self.config.local_rounds)
            weights = [reply.value for reply in self.calls.all()]
        with self.timers["average"]:
            if weights:  # empty if every worker has failed
                self._average(start, weights)
        return self.metrics.counts_since(before)

    def _average(self, start: np.ndarray, weights: list[polopt.Weights]) -> None:
        towards = np.mean([each.flat for each in weights], axis=0) - start
        self._move = self.config.slow_momentum * self._move + towards
        newest = max(each.version for each in weights)
        self.set_weights(weights[0]._replace(flat=start + self._move, version=newest))

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "slow_move": self._move}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self._move = state.get("slow_move", 0.0)
