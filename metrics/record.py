"""`Record`: the counts and statistics of one call.

The worker fills the record during the call, and the reply carries the record to the driver. The
driver adds each record to its counters once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.common.faults import Fault, Faults, one_per_kind
from polopt.common.moments import Moments, merged
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.progress import PROGRESS
from polopt.common.sample_batch import SampleBatch
from polopt.common.tracer import TRACER
from polopt.metrics.actions import ActionSums
from polopt.metrics.custom_metrics import Values, merge_values, values_of
from polopt.metrics.learner import mean_stats
from polopt.metrics.machine import ProcessUse

_NO_ACTIONS = ActionSums()


class Record:
    """The counts and statistics of one call, besides the value that the call returns.

    The size of a record does not depend on the length of the run.

        record = Record()
        with record.phase("sample"):
            ...
        record.sampled(batch, sizes)
        record.end(version, value)

    Args:
        clock: returns the seconds of a monotonic clock.

    Attributes:
        seconds: seconds of each phase. The time of a nested phase counts only for the inner phase.
            `other` is the time of the call outside all phases.
        version: version of the worker's weights at the end of the call.
        env_steps: number of environment steps sampled, without the steps of fragments that were not
            finite. Steps that only reset an environment do not count.
        agent_steps: number of valid rows sampled in these steps. A row is one step of one agent.
        episodes: episodes that ended in the rows of `env_steps`.
        moments: number, mean and squared deviations of the observations and discounted returns in
            the rows of `env_steps`. The driver merges these numbers into the running mean and
            variance of its policy's normaliser. None if the policy does not normalise, or if
            nothing was sampled.
        actions: sums of the actions in the rows of `env_steps`, before the actions are clipped.
        lags: the lag of each batch that this worker learned from, as `(updates, batches)`: how many
            updates the worker has made, and from how many batches it has learned, since its weights
            had the version that chose the actions. If several versions chose the actions, the lag
            is measured from the oldest version.
        faults: exceptions of environments, and data that were not used because they were not
            finite, by kind. See `Fault`.
        num_early_stopped: finite fragments that ended early because enough workers had finished.
        restarts_below: number of times that a worker below this worker was replaced. The workers
            below a gradient worker sample for this gradient worker.
        num_bytes: bytes of the arrays in the value.
        env_steps_trained: rows that this worker used for learning. Each row counts once.
        updates: updates that this worker made.
        rows_applied: rows of the gradients of these updates, summed over all learners that made the
            updates together.
        learned: statistics of this worker's learning, as means over `env_steps_trained` rows. None
            if the worker has not learned.
        env_statistics: running statistics of the wrappers of environments. None if this reply does
            not carry them.
        use: use of processors, memory and GPUs by the worker's process since the last reply that
            carried this field. None if this reply does not carry it.
        custom_metrics: summaries of the values that callbacks have returned for episodes, by name.
        timing: decisions in the call that depended on timing. The recording of a run contains them.
            `steps` is the length of each fragment, and is present if a fragment ended early. `sums`
            is the number of all-reduce sums that were completed before the group broke. `below` is
            the recording of the calls that this process made to workers below it. `leaves` is True
            if the process has got SIGTERM, and expects to be replaced.
        num_fragments: number of fragments sampled in this call so far, including fragments that
            were not finite. Exists only in the worker.
    """

    #: The attributes that a reply carries.
    FIELDS = (
        "seconds",
        "version",
        "env_steps",
        "agent_steps",
        "episodes",
        "moments",
        "actions",
        "lags",
        "faults",
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
        self._inner_s = [0.0]  # for each open phase, the seconds of the phases within it
        self.seconds: dict[str, float] = {}
        self.version = 0
        self.env_steps = 0
        self.agent_steps = 0
        self.episodes = EpisodeStats()
        # One entry per fragment, or per record of a worker below. `end` joins the entries.
        self._episodes: list[EpisodeStats] = []
        self.moments: Moments | None = None
        self.actions = _NO_ACTIONS
        self.lags: tuple[tuple[int, int], ...] = ()
        self.faults: Faults = {}
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
        self._steps: list[int] = []  # the length of each fragment
        self._ended_early = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(getattr(self, name) for name in self.FIELDS)

    # ---- in the worker --------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase of the call.

        Phases may be nested. The time of an inner phase does not count for the outer phase.
        """
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

    @property
    def num_fragments(self) -> int:
        return len(self._steps)

    def fragment_ended(self, steps: int, early: bool) -> None:
        """Records the length of a fragment, finite or not."""
        self._steps.append(steps)
        self._ended_early |= early

    def sampled(
        self,
        batch: SampleBatch | MultiAgentBatch,
        sizes: Sequence[int],
        moments: Moments | None = None,
        bounds: tuple[np.ndarray, np.ndarray] | None = None,
        early_stopped: bool = False,
    ) -> None:
        """Counts a fragment whose values are finite.

        Args:
            batch: the fragment. Of a batch of several policies, only the actions of the first
                policy are counted in `actions`.
            sizes: number of categories of each categorical action. See `ActionDistribution`.
            moments: see `SampleBatch.moments`.
            bounds: bounds that clip the actions of a Box. See `ActionDistribution`.
            early_stopped: whether the fragment ended early.
        """
        part = batch.first if isinstance(batch, MultiAgentBatch) else batch
        actions = part.flat("actions")
        if part.agent_steps < len(actions):
            actions = actions[part.flat("valid")]
        self.env_steps += batch.env_steps
        self.agent_steps += batch.agent_steps
        self._episodes.append(batch.episodes)
        self.moments = merged(self.moments, moments)
        self.actions = self.actions.merge(ActionSums.of(actions, sizes, bounds))
        self.num_early_stopped += early_stopped
        self.add_faults(batch.faults.values())

    def add_faults(self, faults: Iterable[Fault]) -> None:
        """Adds exceptions of environments, and data that are not used because they are not
        finite."""
        self.faults = one_per_kind([*self.faults.values(), *faults])

    @property
    def env_steps_discarded(self) -> int:
        """The number of valid rows that were not used because their values, or other values of
        their fragment, were not finite."""
        return sum(fault.rows for fault in self.faults.values())

    def learn(self, env_steps: int, updates: int, rows: int, stats: Mapping[str, float]) -> None:
        """Counts the learning of this worker.

        Args:
            env_steps: number of rows that the worker used.
            updates: number of updates with these rows.
            rows: number of rows in the gradients of the updates. See `rows_applied`.
            stats: statistics of the learner.
        """
        self._add_learned(env_steps, stats)
        self.updates += updates
        self.rows_applied += rows

    def _add_learned(self, env_steps: int, stats: Mapping[str, float]) -> None:
        parts = [(stats, env_steps)]
        if self.learned is not None:
            parts.insert(0, (self.learned, self.env_steps_trained))
        self.learned = mean_stats(parts)
        self.env_steps_trained += env_steps

    def callback_metrics(self, metrics: Mapping[str, float | Sequence[float]]) -> None:
        """Adds the values that a callback has returned for an episode."""
        self.custom_metrics = merge_values(self.custom_metrics, values_of(metrics))

    def end(self, version: int, value: Any) -> None:
        """Completes the record at the end of the call.

        Args:
            version: version of the worker's weights.
            value: the value that the call returns.
        """
        busy_s = self._clock() - self._started_s
        self.seconds["other"] = max(0.0, busy_s - sum(self.seconds.values()))
        self.version = version
        self.episodes = EpisodeStats.concat(self._episodes)
        self.num_bytes = payload_bytes(value)
        if self._ended_early:
            self.timing["steps"] = self._steps

    # ---- in a gradient worker, which has workers below it ----------------------------------------

    def add_below(self, record: Record) -> None:
        """Adds the samples, episodes, faults and custom metrics of the record of a worker below
        this worker."""
        self.env_steps += record.env_steps
        self.agent_steps += record.agent_steps
        self._episodes.append(record.episodes)
        self.moments = merged(self.moments, record.moments)
        self.actions = self.actions.merge(record.actions)
        self.num_early_stopped += record.num_early_stopped
        self.restarts_below += record.restarts_below
        self.add_faults(record.faults.values())
        self.custom_metrics = merge_values(self.custom_metrics, record.custom_metrics)


def _received(*values: Any) -> Record:
    """Rebuilds a record that a reply has carried."""
    record = Record.__new__(Record)
    for name, value in zip(Record.FIELDS, values, strict=True):
        setattr(record, name, value)
    return record


def payload_bytes(value: Any) -> int:
    """Returns the sum of `nbytes` of all arrays in a value, also within tuples, lists and dicts."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    if isinstance(value, tuple | list):
        return sum(payload_bytes(item) for item in value)
    if isinstance(value, Mapping):
        return sum(payload_bytes(item) for item in value.values())
    return 0
