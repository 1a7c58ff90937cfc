"""`Record`: what a call counts. Written in the worker, carried by the reply, added once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from polopt.common.data_faults import NO_FAULTS, DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.common.moments import Moments, merged
from polopt.common.progress import PROGRESS
from polopt.common.sample_batch import SampleBatch
from polopt.common.tracer import TRACER
from polopt.metrics.actions import ActionSums
from polopt.metrics.custom_metrics import Values, merge_values, values_of
from polopt.metrics.learner import mean_stats
from polopt.metrics.machine import ProcessUse

_NO_ACTIONS = ActionSums()


class Record:
    """Counts and statistics of one call, besides its value. Its size does not depend on the length
    of the run.

        record = Record()
        with record.phase("sample"):
            ...
        record.sampled(batch, sizes)
        record.end(version, value)

    Args:
        clock: seconds of a monotonic clock.

    Attributes:
        seconds: seconds of each phase, disjoint. `other` is the rest of the call.
        version: version of the worker's weights at the end of the call.
        env_steps: valid rows sampled. Rows of fragments that were not finite do not count.
        env_steps_discarded: valid rows of fragments that were not finite.
        episodes: episodes that ended in the rows that count.
        moments: moments of their observations and discounted returns, to be merged into the moments
            of the driver's policy. None if the policy does not normalise, or nothing was sampled.
        actions: actions of these rows, as sampled from the policy's distribution.
        lags: the age of each batch that the worker itself learned from, `(updates, batches)`: how
            many of each it had learned since it had the weights that acted, or the oldest of them.
        faults: exceptions of environments, and non-finite values.
        num_non_finite: fragments and gradients that were discarded because they were not finite.
        num_early_stopped: fragments that ended early.
        restarts_below: workers below this one that were replaced.
        num_bytes: bytes of the arrays in the value.
        env_steps_trained: rows that the worker itself learned from, each counted once.
        updates: updates that the worker itself has made.
        rows_applied: rows of the gradients of these updates, summed over all learners that made the
            updates together.
        learned: statistics of the worker's own learning, means over `env_steps_trained`. None: it
            has not learned.
        env_statistics: running statistics of the wrappers of environments. None: not this time.
        use: use of processors, memory and GPUs by the worker's process since this was last sent.
            None: not this time.
        custom_metrics: what callbacks have returned for episodes, by name.
        timing: what timing has decided in the call, for the record of a run: `steps` of each
            fragment if one of them ended early, `sums` that were completed before a group broke,
            and `below`, the record of the calls that this process has made itself.
        num_fragments: fragments sampled so far, also fragments that were not finite. Only in the
            worker.
    """

    #: What a reply carries.
    FIELDS = (
        "seconds",
        "version",
        "env_steps",
        "env_steps_discarded",
        "episodes",
        "moments",
        "actions",
        "lags",
        "faults",
        "num_non_finite",
        "num_early_stopped",
        "restarts_below",
        "num_bytes",
        "env_steps_trained",
        "updates",
        "rows_applied",
        "learned",
        "env_statistics",
        "use",
        "custom_metrics",
        "timing",
    )
    __slots__ = (
        *FIELDS,
        "_clock",
        "_ended_early",
        "_episodes",
        "_inner_s",
        "_started_s",
        "_steps",
    )

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._inner_s = [0.0]  # seconds of the phases within each open phase
        self.seconds: dict[str, float] = {}
        self.version = 0
        self.env_steps = 0
        self.env_steps_discarded = 0
        self.episodes = EpisodeStats()
        self._episodes: list[EpisodeStats] = []  # of each fragment, until the call ends
        self.moments: Moments | None = None
        self.actions = _NO_ACTIONS
        self.lags: tuple[tuple[int, int], ...] = ()
        self.faults = NO_FAULTS
        self.num_non_finite = 0
        self.num_early_stopped = 0
        self.restarts_below = 0
        self.num_bytes = 0
        self.env_steps_trained = 0
        self.updates = 0
        self.rows_applied = 0
        self.learned: Mapping[str, float] | None = None
        self.env_statistics: dict[str, Any] | None = None
        self.use: ProcessUse | None = None
        self.custom_metrics: Mapping[str, Values] = {}
        self.timing: dict[str, Any] = {}
        self._steps: list[int] = []  # of each fragment
        self._ended_early = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(getattr(self, name) for name in self.FIELDS)

    # ---- in the worker --------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the call. Phases may be nested: the time of the inner one does not count
        for the outer one."""
        PROGRESS.note()
        started_s = self._clock()
        self._inner_s.append(0.0)
        try:
            yield
        finally:
            PROGRESS.note()
            TRACER.span("worker", name, started_s)
            duration_s = self._clock() - started_s
            own_s = duration_s - self._inner_s.pop()
            self._inner_s[-1] += duration_s
            self.seconds[name] = self.seconds.get(name, 0.0) + own_s

    def add_seconds(self, name: str, duration_s: float) -> None:
        """Counts time of a phase that something else has measured within the phase that is open."""
        self._inner_s[-1] += duration_s
        self.seconds[name] = self.seconds.get(name, 0.0) + duration_s

    @property
    def num_fragments(self) -> int:
        """See the class."""
        return len(self._steps)

    def fragment_ended(self, steps: int, early: bool) -> None:
        """Notes the steps of a fragment, finite or not."""
        self._steps.append(steps)
        self._ended_early |= early

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
            sizes: sizes of its actions. See `ActionDistribution`.
            moments: see `SampleBatch.moments`.
            bounds: bounds of its actions. See `ActionDistribution`.
            early_stopped: whether it ended early.
        """
        actions = batch.flat("actions")[batch.flat("valid")]
        self.env_steps += batch.env_steps
        self._episodes.append(batch.episodes)
        self.moments = merged(self.moments, moments)
        self.actions = self.actions.merge(ActionSums.of(actions, sizes, bounds))
        self.num_early_stopped += early_stopped
        self.fault(batch.faults)

    def fault(self, faults: DataFaults) -> None:
        """Counts exceptions of environments, and notes what was not finite."""
        if faults.env_faults or faults.non_finite:
            self.faults = DataFaults.concat([self.faults, faults])

    def not_finite(self, count: int, faults: DataFaults) -> None:
        """Counts fragments or gradients that are not used because they are not finite."""
        self.num_non_finite += count
        if count:
            self.fault(faults)

    def learn(self, env_steps: int, updates: int, rows: int, stats: Mapping[str, float]) -> None:
        """Counts rows that this worker has learned from and the updates that it has made of them,
        with the rows of their gradients and the statistics of its learner."""
        self._add_learned(env_steps, stats)
        self.updates += updates
        self.rows_applied += rows

    def _add_learned(self, env_steps: int, stats: Mapping[str, float]) -> None:
        parts = [(stats, env_steps)]
        if self.learned is not None:
            parts.insert(0, (self.learned, self.env_steps_trained))
        self.learned = mean_stats(parts)
        self.env_steps_trained += env_steps

    def callback_metrics(self, metrics: Mapping[str, float]) -> None:
        """Adds what a callback has returned for an episode."""
        self.custom_metrics = merge_values(self.custom_metrics, values_of(metrics))

    def end(self, version: int, value: Any) -> None:
        """Ends the call.

        Args:
            version: version of the worker's weights.
            value: what the call returns.
        """
        busy_s = self._clock() - self._started_s
        self.seconds["other"] = max(0.0, busy_s - sum(self.seconds.values()))
        self.version = version
        self.episodes = EpisodeStats.concat(self._episodes)
        self.num_bytes = payload_bytes(value)
        if self._ended_early:
            self.timing["steps"] = self._steps

    # ---- where it is added ----------------------------------------------------------------------

    def add_below(self, record: Record) -> None:
        """Adds the record of a worker below this one. Its seconds and bytes are its own."""
        self.env_steps += record.env_steps
        self.env_steps_discarded += record.env_steps_discarded
        self._episodes.append(record.episodes)
        self.moments = merged(self.moments, record.moments)
        self.actions = self.actions.merge(record.actions)
        self.num_non_finite += record.num_non_finite
        self.num_early_stopped += record.num_early_stopped
        self.restarts_below += record.restarts_below
        self.fault(record.faults)
        self.custom_metrics = merge_values(self.custom_metrics, record.custom_metrics)


def _received(*values: Any) -> Record:
    """A record as a reply brings it."""
    record = Record.__new__(Record)
    for name, value in zip(Record.FIELDS, values, strict=True):
        setattr(record, name, value)
    return record


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
