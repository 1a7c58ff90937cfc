"""The files that Tune writes of a trial, written without it: whoever reads one reads the other."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import ray

#: Of Tune's logger for TensorBoard: what is no curve to look at.
_NO_CURVES = ("config", "pid", "timestamp", "time_total_s", "training_iteration")


class Tally:
    """Adds to each result what a Tune trainable adds: iterations, steps, times, and where it ran.

    Args:
        trial_id: of the run.
        config: as it was given.
    """

    def __init__(self, trial_id: str, config: Mapping[str, Any]) -> None:
        self._fixed = {
            "trial_id": trial_id,
            "pid": os.getpid(),
            "hostname": platform.node(),
            "node_ip": ray.util.get_node_ip_address(),
            "config": config,
        }
        self._iterations = 0
        self._steps = 0
        self._seconds = 0.0

    def complete(self, result: Mapping[str, Any], iteration_s: float) -> dict[str, Any]:
        """The result of an iteration that took `iteration_s`, with all that is reported of it;
        counts from where the process began, as Tune's do after a restore from a path."""
        self._iterations += 1
        self._steps += result["timesteps_this_iter"]
        self._seconds += iteration_s
        now_s = time.time()
        return {
            **result,
            "done": False,
            "timesteps_total": self._steps,
            "timesteps_since_restore": self._steps,
            "training_iteration": self._iterations,
            "iterations_since_restore": self._iterations,
            "time_this_iter_s": iteration_s,
            "time_total_s": self._seconds,
            "time_since_restore": self._seconds,
            "date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now_s)),
            "timestamp": int(now_s),
            **self._fixed,
        }


class ResultFiles:
    """`params.json`, `result.json`, `progress.csv` and the event file of TensorBoard. A context
    manager.

    Args:
        folder: where they go; it exists.
        config: as it was given, for `params.json`.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder
        text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
        (folder / "params.json").write_text(text)
        self._open = contextlib.ExitStack()
        self._json = self._open.enter_context((folder / "result.json").open("a"))
        self._csv = self._open.enter_context((folder / "progress.csv").open("a", newline=""))
        self._rows: csv.DictWriter[str] | None = None
        self._curves: Any = None

    def __enter__(self) -> ResultFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def write(self, result: Mapping[str, Any]) -> None:
        """Adds a result to each; whoever looks sees it at once."""
        self._json.write(json.dumps(result, default=_plain) + "\n")
        self._json.flush()
        flat = dict(flatten({k: v for k, v in result.items() if k != "config"}))
        if self._rows is None:
            self._rows = csv.DictWriter(self._csv, list(flat), extrasaction="ignore")
            self._rows.writeheader()
        self._rows.writerow(flat)
        self._csv.flush()
        self._draw(result)

    def _draw(self, result: Mapping[str, Any]) -> None:
        if self._curves is None:
            from tensorboardX import SummaryWriter  # not while a start waits for it

            self._curves = SummaryWriter(str(self._folder), flush_secs=30)
            self._open.callback(self._curves.close)
        at = result["timesteps_total"] or result["training_iteration"]
        shown = {k: v for k, v in result.items() if k not in _NO_CURVES}
        for path, value in flatten(shown, "ray/tune/"):
            if isinstance(value, int | float | np.integer | np.floating):
                if not math.isnan(value):
                    self._curves.add_scalar(path, value, at)
            elif isinstance(value, list | np.ndarray) and np.size(value):
                # As Tune does: a list of anything else is no reason to end a run.
                with contextlib.suppress(ValueError, TypeError):
                    self._curves.add_histogram(path, np.asarray(value), at)
        self._curves.flush()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of nested dicts with its path, the keys with `/` between them."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def _plain(value: Any) -> Any:
    """What JSON has no form for: NumPy's values as Python's, all else as text."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else str(value)
