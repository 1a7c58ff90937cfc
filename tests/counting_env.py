"""An environment that counts its steps and faults in files, which remain if its process dies."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from faulty_envs import num_faults
from toy_envs import Drift

from polopt.optimizers.policy_optimizer import PolicyOptimizer


class Totals(NamedTuple):
    """The totals that environments counted, or that an optimizer counted.

    Attributes:
        steps: the number of steps that returned, including steps in discarded fragments.
        faults: the number of steps that raised.
        nans: the number of rewards that were NaN. Each of them is in a different fragment.
    """

    steps: int
    faults: int
    nans: int

    def since(self, before: Totals) -> Totals:
        return Totals(*(b - a for a, b in zip(before, self, strict=True)))


class CountingDrift(Drift):
    """A `Drift` that counts its steps. It raises in some steps, and returns NaN as the reward of
    others.

    Args:
        config: `folder` is the folder of the files. `raise_every` is the number of steps from one
            exception to the next. `nan_at` is the step in which the first environment of each
            process returns NaN. `slow` is the index of the worker whose steps take time.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.options = dict(config)
        name = f"{config.worker_index}-{config.vector_index}-{os.getpid()}"
        path = Path(self.options["folder"], name)
        # After an exception, a new environment is made, which continues the counts in the file.
        mode: Any = "r+" if path.exists() else "w+"
        self.totals = np.memmap(path, np.int64, mode, shape=len(Totals._fields))

    def step(self, action: int) -> Any:
        if self.options.get("slow") == self.context.worker_index:
            time.sleep(0.002)
        number = int(self.totals[0] + self.totals[1]) + 1
        if number % self.options.get("raise_every", 10**9) == 0:
            self.totals[1] += 1
            raise RuntimeError("simulated fault")
        obs, reward, *rest = super().step(action)
        self.totals[0] += 1
        if number == self.options.get("nan_at") and self.context.vector_index == 0:
            self.totals[2] += 1
            reward = float("nan")
        return (obs, reward, *rest)


def made_in(folder: Path) -> Totals:
    """Returns the totals that all environments of workers have counted so far."""
    files = [path for path in folder.iterdir() if not path.name.startswith("0-")]
    rows = [np.fromfile(path, np.int64) for path in files]
    return Totals(*map(int, np.sum(rows, axis=0)))


def counted_by(optimizer: PolicyOptimizer) -> Totals:
    """Returns the totals that an optimizer has counted, plus the counts of the replies that the
    optimizer keeps and will count later."""
    kept = [reply.counts for reply in optimizer.calls.kept]
    metrics, faults = optimizer.metrics, optimizer.workers.faults
    return Totals(
        metrics.num_env_steps_sampled
        + metrics.num_env_steps_discarded
        + sum(counts.env_steps + counts.env_steps_discarded for counts in kept),
        faults.counts["raised"] + sum(num_faults(counts.faults, "raised") for counts in kept),
        faults.counts["non_finite"]
        + sum(num_faults(counts.faults, "non_finite", "bad_rows") for counts in kept),
    )
