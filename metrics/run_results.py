"""`RunResults`: the numbers and texts of one run's results that the rules of the diagnosis read.

They come from results as they arrive (`History`), from a result file (`read_results`), or from the
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
#: Each column that rules read: its name in the rules, and its path in the results.
COLUMNS = {
    "steps": "num_env_steps_sampled_lifetime",
    "return": "env_runners/episode_return_mean",
    "return_min": "env_runners/episode_return_min",
    "return_max": "env_runners/episode_return_max",
    "num_episodes": "env_runners/num_episodes_lifetime",
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
_INDEX, _RATE = "index", "env_steps_per_sampling_s"  # of each worker
#: Rules about time need so many results, and so many seconds of training.
_LEAST_RESULTS, _LEAST_S = 3, 2.0
_MOST_ROWS = 2000  # that `History` keeps


def paths(num_workers: int) -> list[str]:
    """Paths in the results of all columns that rules read, with the columns of each worker."""
    each = (f"{PER_WORKER}/{n}/{key}" for n in range(num_workers) for key in (_INDEX, _RATE))
    return [*COLUMNS.values(), *each]


class RunResults:
    """The results of one run as columns.

    Args:
        columns: arrays by path, of the paths in `paths` that the results have. Numbers have the
            shape `[R]`, with NaN where a result lacks them. Texts are arrays of objects.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        self._columns = columns
        seconds, startup = self._numbers("interval_s"), self._numbers("driver_startup")
        if seconds is None or startup is None:
            self._seconds = np.zeros(0)
        else:
            self._seconds = np.nan_to_num(seconds) * (1.0 - np.nan_to_num(startup))
        # Workers start one after another, and the first updates are not like later ones.
        late = np.cumsum(self._seconds) > self._seconds.sum() / 3.0
        self._weights = np.where(late, self._seconds, 0.0)

    @property
    def lasts(self) -> bool:
        """Whether there is enough training for statements about time."""
        return len(self._seconds) >= _LEAST_RESULTS and float(self._seconds.sum()) >= _LEAST_S

    def _numbers(self, name: str) -> Array | None:
        values = self._columns.get(COLUMNS[name])
        return None if values is None or values.dtype == object else values

    def has(self, name: str) -> bool:
        """Whether results have a column."""
        return COLUMNS[name] in self._columns

    def column(self, name: str) -> Array:
        """The finite values of a column, of shape `[<= R]`."""
        values = self._numbers(name)
        return values[np.isfinite(values)] if values is not None else np.zeros(0)

    def mean(self, name: str) -> float:
        """Mean over the last two thirds of the training time, weighted by time, or NaN."""
        values = self._numbers(name)
        if values is None or len(values) != len(self._weights):
            return math.nan
        known = np.isfinite(values) & (self._weights > 0.0)
        if not known.any():
            return math.nan
        return float(np.average(values[known], weights=self._weights[known]))

    def share(self, name: str) -> float:
        """The `mean` of a share of time, or 0 for a phase that the run lacks."""
        value = self.mean(name)
        return 0.0 if math.isnan(value) else value

    def last(self, name: str) -> float:
        """The last finite value, or NaN."""
        values = self.column(name)
        return float(values[-1]) if len(values) else math.nan

    def rise(self, name: str) -> float:
        """How much a counter has risen over all results, or 0."""
        values = self.column(name)
        return float(np.diff(values, prepend=0.0).clip(0.0).sum()) if len(values) else 0.0

    def rise_per_s(self, name: str) -> float:
        """How much a counter has risen in a second of training, over all results, or 0."""
        return self.rise(name) / max(float(self._seconds.sum()), 1e-9)

    def text(self, name: str) -> str:
        """The last text, or an empty one."""
        values = self._columns.get(COLUMNS[name])
        if values is None or values.dtype != object:
            return ""
        return next((str(text) for text in reversed(values) if text), "")

    def sampling_rates(self) -> dict[int, Array]:
        """Steps per second of each remote worker while it samples, by the worker's index."""
        rates: dict[int, Array] = {}
        number = 0
        while (indices := self._columns.get(f"{PER_WORKER}/{number}/{_INDEX}")) is not None:
            known = indices[np.isfinite(indices)]
            rate = self._columns.get(f"{PER_WORKER}/{number}/{_RATE}", np.zeros(0))
            if len(known) and known[-1] > 0.0:  # the driver has index 0
                rates[int(known[-1])] = rate[np.isfinite(rate)]
            number += 1
        return rates


class History:
    """Collects the numbers that the rules read, from results as they arrive. As a run gets longer,
    it keeps only every second result, later every fourth, eighth and so forth.

    Attributes:
        num_results: results added so far.
    """

    def __init__(self) -> None:
        self.num_results = 0
        self._every = 1
        self._rows: list[dict[str, float]] = []
        self._texts: dict[str, str] = {}

    def add(self, result: Mapping[str, Any]) -> None:
        """Adds a result as Tune has it."""
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
        else:  # counters hold, and most results have the shares of time
            self._rows[-1] |= {path: value for path, value in row.items() if _is_total(path)}
        if len(self._rows) > _MOST_ROWS:
            self._rows = self._rows[::2]
            self._every *= 2

    def results(self) -> RunResults:
        """The results so far as columns."""
        columns = {
            path: np.array([row.get(path, math.nan) for row in self._rows])
            for path in {path for row in self._rows for path in row}
        }
        texts = {path: np.array([text], dtype=object) for path, text in self._texts.items()}
        return RunResults({**columns, **texts})


def _is_total(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith("num_")


def _value(result: Any, path: str) -> Any:
    """The value at a path of nested mappings and lists, or None."""
    for key in path.split("/"):
        if isinstance(result, Mapping):
            result = result.get(key)
        elif isinstance(result, list | tuple) and key.isdigit():
            result = result[int(key)] if int(key) < len(result) else None
        else:
            return None
    return result


def read_results(file: Path) -> RunResults:
    """Reads what the rules need from a result file of Tune. It skips lines that are not JSON.

    Raises:
        OSError: it cannot be read.
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
