"""`RunResults`: the parts of a run's results that the rules of the diagnosis read.

There are three sources: results as they arrive (`History`), a result file (`read_results`), and the
columns that the dashboards keep.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: The columns that rules read. Maps the name of a column in the rules to its path in the results.
COLUMNS = {
    "steps": "num_env_steps_sampled_lifetime",
    "return": "env_runners/episode_return_mean",
    "return_min": "env_runners/episode_return_min",
    "return_max": "env_runners/episode_return_max",
    "num_episodes": "env_runners/num_episodes_lifetime",
    "episode_len": "env_runners/episode_len_mean",
    "actions_clipped": "optimizer/actions/clipped",
    "entropy": "learners/default_policy/entropy",
    "vf_loss": "learners/default_policy/vf_loss",
    "mean_kl_loss": "learners/default_policy/mean_kl_loss",
    "clip_fraction": "learners/default_policy/clip_fraction",
    "num_env_faults": "fault_tolerance/num_env_faults",
    "last_env_fault": "fault_tolerance/last_env_fault",
    "num_restarts": "fault_tolerance/num_remote_worker_restarts",
    "num_given_up": "fault_tolerance/num_workers_given_up",
    "last_failure": "fault_tolerance/last_failure",
    "num_non_finite": "fault_tolerance/num_non_finite",
    "last_non_finite": "fault_tolerance/last_non_finite",
    "optimizer": "optimizer/name",
    "interval_s": "optimizer/interval_s",
    "rows_per_update": "optimizer/rows_per_update",
    "num_updates": "optimizer/num_updates",
    "num_skipped_updates": "optimizer/num_skipped_updates",
    "num_bytes_sent": "optimizer/num_bytes_sent",
    "num_events_recorded": "optimizer/num_events_recorded",
    "num_ranks": "optimizer/num_ranks",
    "num_gradients": "optimizer/num_gradients",
    "num_gradients_stale": "optimizer/num_gradients_stale",
    "buffer_rows": "optimizer/buffer_rows",
    "buffer_fill": "optimizer/buffer_fill",
    "learner_blocked_s": "optimizer/learner_blocked_s",
    "samplers_blocked_s": "optimizer/samplers_blocked_s",
    "learner_blocked_by_shards_s": "optimizer/learner_blocked_by_shards_s",
    "driver_startup": "optimizer/driver/share/startup",
    "driver_wait": "optimizer/driver/share/wait",
    "driver_sample": "optimizer/driver/share/sample",
    "driver_dispatch": "optimizer/driver/share/dispatch",
    "driver_broadcast": "optimizer/driver/share/broadcast",
    "driver_report": "optimizer/driver/share/report",
    "workers_idle": "optimizer/workers/share/idle",
    "workers_skew": "optimizer/workers/share/skew",
    "workers_allreduce": "optimizer/workers/share/allreduce",
    "cpu_share": "optimizer/machine/cpu_share",
    "num_cpus": "optimizer/machine/num_cpus",
    "load_1m": "optimizer/machine/load_1m",
}
PER_WORKER = "optimizer/workers/per_worker"
_INDEX, _RATE = "index", "env_steps_per_sampling_s"  # keys of each worker
#: Rules about time need at least this many seconds of training, with several results and with one.
_LEAST_S, _LEAST_S_OF_ONE = 2.0, 10.0
_MOST_ROWS = 2000  # `History` keeps at most this many rows


def paths(num_workers: int) -> list[str]:
    """Returns the paths of all columns that rules read, including the columns of each worker."""
    each = (f"{PER_WORKER}/{n}/{key}" for n in range(num_workers) for key in (_INDEX, _RATE))
    return [*COLUMNS.values(), *each]


class RunResults:
    """The results of one run as columns, with the means and sums that rules need.

    Args:
        columns: an array for each path of `paths` that occurs in the results. Columns of numbers
            have the shape `[R]` for R results, with NaN for a result without this number. Columns
            of texts are arrays of objects.
        other_processes: the mean number of processes that other trials of the experiment had during
            this run. 0 if the caller does not know the other trials.
    """

    def __init__(self, columns: Mapping[str, Array], other_processes: float = 0.0) -> None:
        self._columns = columns
        self.other_processes = other_processes
        seconds, startup = self._numbers("interval_s"), self._numbers("driver_startup")
        if seconds is None or startup is None:
            self._seconds = np.zeros(0)
        else:
            self._seconds = np.nan_to_num(seconds) * (1.0 - np.nan_to_num(startup))
        # Means over time skip the first third of the training time, because workers start one after
        # another and the first updates take longer than later updates.
        late = np.cumsum(self._seconds) > self._seconds.sum() / 3.0
        self._weights = np.where(late, self._seconds, 0.0)

    @property
    def lasts(self) -> bool:
        """Whether the run has trained long enough for rules about time."""
        least_s = _LEAST_S if len(self._seconds) > 1 else _LEAST_S_OF_ONE
        return float(self._seconds.sum()) >= least_s

    def _numbers(self, name: str) -> Array | None:
        values = self._columns.get(COLUMNS[name])
        return None if values is None or values.dtype == object else values

    def has(self, name: str) -> bool:
        """Returns whether the results have a column."""
        return COLUMNS[name] in self._columns

    def column(self, name: str) -> Array:
        """Returns the finite values of a column, of shape `[<= R]`."""
        values = self._numbers(name)
        return values[np.isfinite(values)] if values is not None else np.zeros(0)

    def together(self, *names: str) -> list[Array]:
        """Returns the values of several columns in the results in which all of them are finite."""
        columns = [self._numbers(name) for name in names]
        known = [values for values in columns if values is not None]
        if len(known) < len(columns) or len({len(values) for values in known}) > 1:
            return [np.zeros(0) for _ in names]
        finite = np.logical_and.reduce([np.isfinite(values) for values in known])
        return [values[finite] for values in known]

    def mean(self, name: str) -> float:
        """Returns the time-weighted mean over the last two thirds of the training time, or NaN
        without values."""
        values = self._numbers(name)
        if values is None or len(values) != len(self._weights):
            return math.nan
        known = np.isfinite(values) & (self._weights > 0.0)
        if not known.any():
            return math.nan
        return float(np.average(values[known], weights=self._weights[known]))

    def share(self, name: str) -> float:
        """Returns the `mean` of a share of time, or 0 if the run does not have the phase."""
        value = self.mean(name)
        return 0.0 if math.isnan(value) else value

    def last(self, name: str) -> float:
        """Returns the last finite value of a column, or NaN without values."""
        values = self.column(name)
        return float(values[-1]) if len(values) else math.nan

    def rise(self, name: str) -> float:
        """Returns the total increase of a counter over all results, or 0 without the column.

        A counter that starts again at 0 in a resumed run does not reduce this number.
        """
        values = self.column(name)
        return float(np.diff(values, prepend=0.0).clip(0.0).sum()) if len(values) else 0.0

    def rise_per_s(self, name: str) -> float:
        """Returns the `rise` of a counter per second of training."""
        return self.rise(name) / max(float(self._seconds.sum()), 1e-9)

    def text(self, name: str) -> str:
        """Returns the last non-empty text of a column, or "" without such a text."""
        values = self._columns.get(COLUMNS[name])
        if values is None or values.dtype != object:
            return ""
        return next((str(text) for text in reversed(values) if text), "")

    def sampling_rates(self) -> dict[int, Array]:
        """Returns each remote worker's environment steps per second of sampling, by worker index.

        The arrays contain the finite values of all results.
        """
        rates: dict[int, Array] = {}
        number = 0
        while (indices := self._columns.get(f"{PER_WORKER}/{number}/{_INDEX}")) is not None:
            known = indices[np.isfinite(indices)]
            rate = self._columns.get(f"{PER_WORKER}/{number}/{_RATE}", np.zeros(0))
            if len(known) and known[-1] > 0.0:  # the local worker has index 0
                rates[int(known[-1])] = rate[np.isfinite(rate)]
            number += 1
        return rates


class History:
    """Collects the columns that the rules read, from results as they arrive.

    Memory is bounded: when the history is full, it merges each pair of neighboring rows into one
    row. From then on, each new row contains twice as many results as before.

    Attributes:
        num_results: number of results added so far.
    """

    def __init__(self) -> None:
        self.num_results = 0
        self._every = 1
        self._rows: list[dict[str, float]] = []
        self._texts: dict[str, str] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        """Adds a result in the nested form that Tune passes to callbacks."""
        self.num_results += 1
        workers = _value(result, PER_WORKER)
        row: dict[str, float] = {}
        for path in paths(len(workers) if isinstance(workers, list | tuple) else 0):
            value = _value(result, path)
            if isinstance(value, int | float):
                row[path] = float(value)
            elif isinstance(value, str) and value:
                self._texts[path] = value
        if (self.num_results - 1) % self._every == 0:
            self._rows.append(row)
        else:
            _merge(self._rows[-1], row)
        if len(self._rows) > _MOST_ROWS:
            for earlier, later in zip(self._rows[::2], self._rows[1::2], strict=False):
                _merge(earlier, later)
            self._rows = self._rows[::2]
            self._every *= 2

    def results(self) -> RunResults:
        """Returns the results so far as columns."""
        columns = {
            path: np.array([row.get(path, math.nan) for row in self._rows])
            for path in {path for row in self._rows for path in row}
        }
        texts = {path: np.array([text], dtype=object) for path, text in self._texts.items()}
        return RunResults({**columns, **texts})


def _merge(row: dict[str, float], later: Mapping[str, float]) -> None:
    """Merges a row with the next row. The intervals are added, shares of time become their mean
    over both intervals, and all other values are those of the later row."""
    path = COLUMNS["interval_s"]
    seconds, added = row.get(path, 0.0), later.get(path, 0.0)
    shares = {path: row.get(path, 0.0) for path in later if "/share/" in path}
    row |= later
    if total := seconds + added:
        row[path] = total
        for share, value in shares.items():
            row[share] = (value * seconds + later[share] * added) / total


def _value(result: Any, path: str) -> Any:
    """Returns the value at a path in nested mappings and lists, or None."""
    for key in path.split("/"):
        if isinstance(result, Mapping):
            result = result.get(key)
        elif isinstance(result, list | tuple) and key.isdigit():
            result = result[int(key)] if int(key) < len(result) else None
        else:
            return None
    return result


def read_results(file: Path) -> RunResults:
    """Reads the columns for the rules from a result file of Tune. Skips lines that are not JSON.

    Raises:
        OSError: if the file cannot be read.
    """
    history = History()
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                history.add(row)
    return history.results()
