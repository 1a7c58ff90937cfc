"""Trials in a directory of Tune results: configs, states and rows."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from polopt.dashboards.data.cache import cache_dir, remove_unused
from polopt.dashboards.data.trial_rows import TrialRows

RESULT_FILE, PARAMS_FILE, ERROR_FILE = "result.json", "params.json", "error.txt"
RETURN = "env_runners/episode_return_mean"
STEPS = "num_env_steps_sampled_lifetime"
SECONDS = "time_total_s"
#: A run that has written nothing for so long is not shown as running.
_SILENT_S = 120.0
_MAX_DEPTH = 6  # of directories below the results directory
_TUNE_NAME = re.compile(r"^(?P<trainable>.+?)_[0-9a-f]{5,8}_\d{5}")

Progress = Callable[[int, int, str], None]


@dataclass
class Trial:
    """One trial of an experiment.

    Attributes:
        folder: its directory.
        experiment: name of the experiment: the directory above, relative to the results directory.
        rows: its rows.
        config: from `params.json`, from the rows where that file is missing.
        state: `running`, `finished`, `failed`, `stopped` (no result for two minutes and no end),
            or `no results`.
        problems: sentences about files that could not be read.
    """

    folder: Path
    experiment: str
    rows: TrialRows
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "no results"
    problems: list[str] = field(default_factory=list)
    _optimizer: tuple[int, str] = (-1, "")

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def trainable(self) -> str:
        """Name of the preset, such as `A3C`; of the optimizer where the directory names none."""
        match = _TUNE_NAME.match(self.name)
        return match["trainable"].split("_")[0] if match else self.optimizer or self.name

    @property
    def optimizer(self) -> str:
        """Name of the optimizer, such as `async_gradients`; empty before the first result."""
        if self._optimizer[0] != self.rows.version:
            names = self.rows.column("optimizer/name")
            name = str(names[-1]) if names is not None and len(names) else ""
            self._optimizer = (self.rows.version, name)
        return self._optimizer[1]

    def values(self, name: str) -> np.ndarray[Any, Any] | None:
        """A column of numbers of shape `[R]`; None if no row has it."""
        column = self.rows.column(name)
        return None if column is None or column.dtype == object else column

    def last(self, name: str) -> float:
        """The last finite value of a column; NaN if there is none."""
        column = self.values(name)
        finite = column[np.isfinite(column)] if column is not None else np.empty(0)
        return float(finite[-1]) if len(finite) else float("nan")


class ResultsDirectory:
    """All trials below a directory.

    Args:
        folder: the directory; one experiment, one trial, or a directory of experiments.
        cache_folder: where the columnar cache is; `cache_dir()` by default.

    Attributes:
        trials: by directory, in the order of their names.
    """

    def __init__(self, folder: Path, cache_folder: Path | None = None) -> None:
        self.folder = folder.expanduser().absolute()
        self._cache_folder = cache_folder or cache_dir()
        self._by_folder: dict[Path, Trial] = {}
        self.trials: list[Trial] = []
        remove_unused(self._cache_folder)

    def refresh(self, progress: Progress | None = None) -> bool:
        """Finds new trials and reads new rows; whether anything changed.

        Args:
            progress: receives bytes read, bytes to read in all, and the name of the trial.
        """
        staged = _staged_files()
        found = dict(self._find())
        changed = found.keys() != self._by_folder.keys()
        for folder, experiment in found.items():
            if folder not in self._by_folder:
                rows = TrialRows(folder, self._cache_folder)
                self._by_folder[folder] = Trial(folder, experiment, rows)
        self._by_folder = {folder: self._by_folder[folder] for folder in sorted(found)}
        files = {
            folder: _newest(folder / RESULT_FILE, staged.get((folder.parent.name, folder.name)))
            for folder in self._by_folder
        }
        total = sum(_size(file) for file in files.values())
        done = 0
        for folder, trial in self._by_folder.items():
            file, begun_at = files[folder], done

            def read(count: int, trial: Trial = trial) -> None:
                nonlocal done
                done += count
                if progress is not None:
                    progress(min(done, total), total, trial.name)

            if file.exists():
                changed |= trial.rows.refresh(file, read)
            done = begun_at + _size(file)
            changed |= _update(trial, file)
        self.trials = list(self._by_folder.values())
        return changed

    def _find(self) -> Iterator[tuple[Path, str]]:
        """Directories of trials with the name of their experiment."""
        for parent, folders, files in os.walk(self.folder):
            path = Path(parent)
            if RESULT_FILE in files or PARAMS_FILE in files:
                above = path.parent
                is_below = above != self.folder and self.folder in above.parents
                yield path, str(above.relative_to(self.folder)) if is_below else above.name
                folders.clear()
            depth = len(path.relative_to(self.folder).parts)
            folders[:] = [] if depth >= _MAX_DEPTH else sorted(folders)


def _update(trial: Trial, file: Path) -> bool:
    """Brings config, state and problems up to date; whether the state changed."""
    problems = []
    if not trial.config:
        try:
            config = json.loads((trial.folder / PARAMS_FILE).read_bytes())
            trial.config = config if isinstance(config, dict) else {}
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{PARAMS_FILE} cannot be read: {error.strerror}")
        except (ValueError, RecursionError):
            problems.append(f"{PARAMS_FILE} is not JSON: its config is taken from the rows")
        trial.config = trial.config or trial.rows.config or {}
    before, trial.state = trial.state, _state(trial, file)
    problems += trial.rows.problems
    if trial.rows.half_line and trial.state != "running":
        problems.append(f"{RESULT_FILE}: the last line is half-written and left out")
    trial.problems = problems
    return before != trial.state


def _state(trial: Trial, file: Path) -> str:
    if (trial.folder / ERROR_FILE).exists() or file.with_name(ERROR_FILE).exists():
        return "failed"
    done = trial.values("done")
    if done is None or not len(done):
        return "no results"
    if done[-1]:
        return "finished"
    try:
        silent_s = time.time() - file.stat().st_mtime
    except OSError:
        return "stopped"
    period_s = trial.last("time_this_iter_s")
    return "running" if silent_s < max(_SILENT_S, 3.0 * period_s) else "stopped"


def _staged_files() -> dict[tuple[str, str], Path]:
    """Result files that Tune has not copied to the results directory yet, by experiment and trial.

    While a run goes on, Tune's loggers write below Ray's temporary directory, and Tune copies to
    the results directory once in a few minutes.
    """
    root = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    found: dict[tuple[str, str], Path] = {}
    for file in root.glob(f"session_[0-9]*/artifacts/*/*/driver_artifacts/*/{RESULT_FILE}"):
        key = (file.parents[2].name, file.parent.name)
        try:
            own = file.stat().st_uid == os.getuid()
        except OSError:
            continue
        if own and (key not in found or _size(found[key]) < _size(file)):
            found[key] = file
    return found


def _newest(file: Path, staged: Path | None) -> Path:
    return staged if staged is not None and _size(staged) > _size(file) else file


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
