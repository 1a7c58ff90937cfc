"""What a call of a worker counts: recorded in the worker, carried by the reply, added once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import Moments, merged
from polopt.common.sample_batch import SampleBatch
from polopt.common.tracer import TRACER
from polopt.metrics.actions import ActionSums
from polopt.metrics.custom_metrics import CustomMetrics, Values
from polopt.metrics.learner import mean_stats
from polopt.metrics.machine import ProcessUse

_NO_ACTIONS = ActionSums()


class Counts(NamedTuple):
    """Counts and statistics of one call, besides its value. Its size does not depend on the length
    of the run.

    Attributes:
        seconds: of each phase, disjoint; `other` is the rest of the call.
        version: version of the worker's weights at the end of the call.
        env_steps: valid rows sampled, without those of fragments that were not finite.
        env_steps_discarded: valid rows of fragments that were not finite.
        episodes: episodes that ended in them.
        moments: of their observations and discounted returns, to be merged into those of the
            driver's policy; None if it does not normalise, or nothing was sampled.
        actions: of these steps, as sampled from the policy's distribution.
        lags: of each batch that the worker itself learned from, `(updates, batches)`: how many it
            had learned since it had the weights that acted; the oldest, if there were several.
        faults: exceptions of environments, and non-finite values.
        num_non_finite: fragments and gradients that were discarded because they were not finite.
        num_early_stopped: fragments that ended early.
        restarts_below: workers below this one that were replaced.
        num_bytes: bytes of the arrays in the value.
        env_steps_trained: of the rows that the worker itself learned from, each counted once.
        updates: that the worker itself has made.
        rows_applied: rows of the gradients of these updates, summed; of all learners that made them
            together.
        learned: statistics of the worker's own learning, means over `env_steps_trained`.
        env_statistics: running statistics of the wrappers of environments; None: not this time.
        use: of processors, memory and GPUs by the worker's process since this was last sent; None:
            not this time.
        custom_metrics: what callbacks have returned for episodes, by name.
    """

    seconds: Mapping[str, float] = {}
    version: int = 0
    env_steps: int = 0
    env_steps_discarded: int = 0
    episodes: EpisodeStats = EpisodeStats()
    moments: Moments | None = None
    actions: ActionSums = _NO_ACTIONS
    lags: tuple[tuple[int, int], ...] = ()
    faults: DataFaults = NO_FAULTS
    num_non_finite: int = 0
    num_early_stopped: int = 0
    restarts_below: int = 0
    num_bytes: int = 0
    env_steps_trained: int = 0
    updates: int = 0
    rows_applied: int = 0
    learned: Mapping[str, float] | None = None
    env_statistics: dict[str, Any] | None = None
    use: ProcessUse | None = None
    custom_metrics: Mapping[str, Values] = {}


class CallRecord:
    """Counts of the call that a worker runs; attributes as in `Counts`."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.env_steps = 0
        self.env_steps_discarded = 0
        self.updates = 0
        self.rows_applied = 0
        self.lags: list[tuple[int, int]] = []
        self.num_non_finite = 0
        self.num_early_stopped = 0
        self.restarts_below = 0
        self.env_statistics: dict[str, Any] | None = None
        self.use: ProcessUse | None = None
        self.custom_metrics = CustomMetrics()
        self._seconds: dict[str, float] = {}
        self._inner_s = [0.0]  # of the phases within each open phase
        self._episodes: list[EpisodeStats] = []
        self.moments: Moments | None = None
        self._actions = _NO_ACTIONS
        self._faults: list[DataFaults] = []
        self._trained: list[tuple[Mapping[str, float], int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the call. Phases may be nested: the time of the inner one does not count
        for the outer one."""
        started_s = time.perf_counter()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            duration_s = TRACER.span("worker", name, started_s)
            own_s = duration_s - self._inner_s.pop()
            self._inner_s[-1] += duration_s
            self._seconds[name] = self._seconds.get(name, 0.0) + own_s

    def add_seconds(self, name: str, duration_s: float) -> None:
        """Counts time of a phase that something else has measured within the phase that is open."""
        self._inner_s[-1] += duration_s
        self._seconds[name] = self._seconds.get(name, 0.0) + duration_s

    def sampled(
        self,
        batch: SampleBatch,
        sizes: Sequence[int],
        moments: Moments | None = None,
        bounds: tuple[np.ndarray, np.ndarray] | None = None,
        early_stopped: bool = False,
    ) -> None:
        """Counts a fragment whose values are finite.

        Args:
            batch: the fragment.
            sizes: of its actions; see `ActionDistribution`.
            moments: see `SampleBatch.moments`.
            bounds: of its actions; see `ActionDistribution`.
            early_stopped: whether it ended early.
        """
        actions = batch.flat("actions")[batch.flat("valid")]
        self.env_steps += batch.env_steps
        self._episodes.append(batch.episodes)
        self.moments = merged(self.moments, moments)
        self._actions = self._actions.merge(ActionSums.of(actions, sizes, bounds))
        self.num_early_stopped += early_stopped
        self.fault(batch.faults)

    def fault(self, faults: DataFaults) -> None:
        """Counts exceptions of environments, and notes what was not finite."""
        if faults.env_faults or faults.non_finite:
            self._faults.append(faults)

    def not_finite(self, count: int, faults: DataFaults) -> None:
        """Counts fragments or gradients that are not used because they are not finite."""
        self.num_non_finite += count
        if count:
            self.fault(faults)

    def learned(self, env_steps: int, updates: int, rows: int, stats: Mapping[str, float]) -> None:
        """Counts rows that this worker has learned from and the updates that it has made of them,
        with the rows of their gradients and the statistics of its learner."""
        self.updates += updates
        self.rows_applied += rows
        self._trained.append((stats, env_steps))

    def add(self, counts: Counts) -> None:
        """Adds the counts of a worker below this one. Its seconds and bytes are not this
        worker's."""
        self.env_steps += counts.env_steps
        self.env_steps_discarded += counts.env_steps_discarded
        self._episodes.append(counts.episodes)
        self.moments = merged(self.moments, counts.moments)
        self._actions = self._actions.merge(counts.actions)
        self.num_non_finite += counts.num_non_finite
        self.num_early_stopped += counts.num_early_stopped
        self.restarts_below += counts.restarts_below
        self.fault(counts.faults)
        self.custom_metrics.merge(counts.custom_metrics)

    def counts(self, version: int, value: Any) -> Counts:
        """The counts at the end of the call.

        Args:
            version: of the worker's weights.
            value: that the call returns.
        """
        busy_s = time.perf_counter() - self.started_s
        other_s = max(0.0, busy_s - sum(self._seconds.values()))
        trained = sum(env_steps for _, env_steps in self._trained)
        return Counts(
            seconds={**self._seconds, "other": other_s},
            version=version,
            env_steps=self.env_steps,
            env_steps_discarded=self.env_steps_discarded,
            episodes=EpisodeStats.concat(self._episodes),
            moments=self.moments,
            actions=self._actions,
            lags=tuple(self.lags),
            faults=DataFaults.concat(self._faults) if self._faults else NO_FAULTS,
            num_non_finite=self.num_non_finite,
            num_early_stopped=self.num_early_stopped,
            restarts_below=self.restarts_below,
            num_bytes=payload_bytes(value),
            env_steps_trained=trained,
            updates=self.updates,
            rows_applied=self.rows_applied,
            learned=mean_stats(self._trained) if self._trained else None,
            env_statistics=self.env_statistics,
            use=self.use,
            custom_metrics=self.custom_metrics.values(),
        )


def payload_bytes(value: Any) -> int:
    """Bytes of the arrays in a value: in tuples, lists and dicts, and in objects with `nbytes`."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, tuple | list):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, Mapping):
        return sum(payload_bytes(item) for item in value.values())
    return 0
