"""Finds the trials in a directory of Tune results, and reads their configs, states and rows."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from polopt.common.files import open_regular, read_regular
from polopt.dashboards.data.cache import cache_dir, remove_unused
from polopt.dashboards.data.diagnosis import Finding, diagnose
from polopt.dashboards.data.rows import NOT_SET, flat_config
from polopt.dashboards.data.run_results import PER_WORKER, RunResults, paths
from polopt.dashboards.data.tab import TAB_FILE, OptimizerTab
from polopt.dashboards.data.trial_rows import MOST_FILE_BYTES, TrialRows
from polopt.dashboards.data.tune_state import STATE_FILES, TuneState, TuneStates, TuneTrial
from polopt.metrics.timers import EVALUATION, REPORT, STARTUP

RESULT_FILE, PARAMS_FILE, ERROR_FILE = "result.json", "params.json", "error.txt"
RETURN = "env_runners/episode_return_mean"
#: Mean return of an evaluation. NaN in results without an evaluation.
EVALUATED_RETURN = "evaluation/env_runners/episode_return_mean"
#: The number of environment steps that training had sampled when the evaluated weights were taken.
EVALUATED_STEPS = "evaluation/policy_env_steps"
STEPS = "num_env_steps_sampled_lifetime"
#: `TRAINING_S` is the seconds since the end of start-up, without the seconds of evaluations.
#: `STARTUP_S` is the seconds of start-up.
TRAINING_S, STARTUP_S = "optimizer/training_s", "optimizer/startup_s"
EVENTS = "optimizer/num_events_recorded"
#: A trial counts as ended if its result file has not changed for this time, and Tune has ended. If
#: three iterations take longer than this time, the limit is the duration of three iterations.
_SILENT_S = 120.0
#: Tune counts as ended if it has not saved its state for this time. Tune saves its
#: state every 10 s, or less often if saving would take more than 5 percent of its time.
_STATE_SILENT_S = 300.0
_LATEST_S = 1e11  # a time after the year 5000 is not used
_MAX_DEPTH = 6  # maximum depth of directories below the results directory
_MOST_PARAMS_BYTES = 16 << 20
_TUNE_NAME = re.compile(r"^(?P<trainable>.+?)_[0-9a-f]{5,8}_\d{5}")
_MOST_LINE_BYTES = 1 << 20  # the comparison of two files reads at most this much of the first line
_MOST_TAB_BYTES = 1 << 20
_MOST_ERROR_BYTES = 1 << 30
_ERROR_BYTES = 4000  # only the last bytes of an error file are read

Progress = Callable[[int, int, str], None]
_T = TypeVar("_T")


@dataclass
class Trial:
    """One trial of an experiment.

    Attributes:
        folder: directory of the trial. It does not exist before the trial starts.
        experiment: name of the experiment. This is the path of the parent directory, relative to
            the results directory. If the parent is not below the results directory, it is the name
            of the parent.
        rows: the rows of the trial.
        config: the config at the start of the trial.
        config_is_of_tune: whether `config` comes from Tune's state, which contains hashes instead
            of the names of classes and functions.
        state: `pending`, `starting`, `running`, `paused`, `finished`, `pruned by <scheduler>`,
            `failed`, `stopped`, `not started` or `no results`. `docs/dashboard-reference.md`
            explains the states.
        error: the end of the trial's error file, which contains a traceback, or the reason why the
            file cannot be read. Empty without the file.
        declared: the optimizer's declaration of its plots and metrics, from `TAB_FILE`. None if
            this file does not exist or cannot be read.
        problems: sentences about files and lines that could not be read.
        other_processes: the mean number of processes that other trials of the experiment had during
            this trial.
    """

    folder: Path
    experiment: str
    rows: TrialRows
    config: dict[str, Any] = field(default_factory=dict)
    config_is_of_tune: bool = False
    state: str = "no results"
    error: str = ""
    declared: OptimizerTab | None = None
    problems: list[str] = field(default_factory=list)
    other_processes: int = 0
    _derived: dict[Hashable, tuple[int, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def trainable(self) -> str:
        """The name of the preset, such as `A3C`.

        If the config contains no preset, this is the first of these names that is known: the name
        of the trainable in the trial's name, the name of the optimizer, the trial's name.
        """
        chosen = self.config.get("preset")
        name = chosen.get("name") if isinstance(chosen, Mapping) else chosen
        if isinstance(name, str) and name:
            return name.rpartition(":")[2]
        match = _TUNE_NAME.match(self.name)
        return match["trainable"].split("_")[0] if match else self.optimizer or self.name

    @property
    def optimizer(self) -> str:
        """The name of the optimizer, such as `async_gradients`. Empty before the first result."""

        def name() -> str:
            names = self.rows.column("optimizer/name")
            return str(names[-1]) if names is not None and len(names) else ""

        return self.derived("optimizer", name)

    @property
    def begun_s(self) -> float:
        """The time of the first result in seconds since the epoch, or infinity without results."""
        times = self.values("timestamp")
        return float(times[0]) if times is not None and len(times) else np.inf

    @property
    def optimizer_tab(self) -> OptimizerTab:
        """The declaration of the trial's optimizer.

        Without a declaration of this optimizer, this is an `OptimizerTab` that contains only the
        names of the optimizer and of the phases in the results.
        """
        if self.declared is not None and self.declared.name == self.optimizer:
            return self.declared
        prefix = "optimizer/driver/share/"
        names = (n.removeprefix(prefix) for n in self.rows.names() if n.startswith(prefix))
        phases = tuple(sorted(set(names) - {STARTUP, REPORT, EVALUATION, "other"}))
        return OptimizerTab(self.optimizer, self.optimizer, phases)

    @property
    def settings(self) -> dict[str, str]:
        """The values of the config as text, by dotted key.

        Population-based training changes values during a run. The text of such a value is
        `0.1, then 0.2`, or `0.1, then 0.2 after 3 changes`.
        """
        settings = flat_config(self.config)
        counts: dict[str, int] = {}
        for changes in self.rows.config_changes:
            for key, (_, new) in changes.items():
                counts[key] = counts.get(key, 0) + 1
                begun = settings.get(key, NOT_SET).split(", then ")[0]
                after = f" after {counts[key]} changes" if counts[key] > 1 else ""
                settings[key] = f"{begun}, then {new}{after}"
        return settings

    @property
    def findings(self) -> list[Finding]:
        """The findings of the diagnosis."""
        columns, others = paths(self.num_workers), self.other_processes
        return self.derived(
            ("findings", others), lambda: diagnose(RunResults(self.rows.columns(columns), others))
        )

    @property
    def num_processes(self) -> int:
        """The number of processes of the driver and the workers."""
        # With `num_workers=0`, the only worker is in the driver's process and has the index 0.
        return self.num_workers + (self.last(f"{PER_WORKER}/0/index") != 0.0)

    @property
    def span_s(self) -> tuple[float, float]:
        """The times at which the trial began and of its last result, in seconds since the epoch.
        Both are infinity without results."""

        def span_s() -> tuple[float, float]:
            times, took_s = self.values("timestamp"), self.values("time_this_iter_s")
            if times is None or took_s is None or not len(times):
                return math.inf, math.inf
            return float(times[0] - took_s[0]), float(times[-1])

        return self.derived("span_s", span_s)

    @property
    def num_workers(self) -> int:
        """The number of workers in the results: 1 for `num_workers=0`, and 0 without results."""
        names = self.rows.names()
        return sum(n.startswith(f"{PER_WORKER}/") and n.endswith("/index") for n in names)

    def derived(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """Returns the result of `compute`, and caches it until the rows change.

        Args:
            key: identifies the result. The key contains everything that the result depends on,
                except the rows.
            compute: computes the result from the rows.
        """
        version = self.rows.version  # read before `compute`, because rows may arrive meanwhile
        if self._derived.get(key, (-1, None))[0] != version:
            self._derived[key] = (version, compute())
        value: _T = self._derived[key][1]
        return value

    def values(self, name: str) -> np.ndarray[Any, Any] | None:
        """Returns a column of numbers of shape `[R]`. Returns None if no row has this column, or if
        its values are strings."""
        column = self.rows.column(name)
        return None if column is None or column.dtype == object else column

    def last(self, name: str) -> float:
        """Returns the last finite value of a column, or NaN without finite values."""
        column = self.values(name)
        finite = column[np.isfinite(column)] if column is not None else np.empty(0)
        return float(finite[-1]) if len(finite) else float("nan")


class ResultsDirectory:
    """Finds and reads all trials below a directory.

    Args:
        folder: directory of a trial, of an experiment, or of several experiments.
        cache_folder: directory of the cache files. The default is `cache_dir()`.

    Attributes:
        trials: the trials, sorted by directory.
    """

    def __init__(self, folder: Path, cache_folder: Path | None = None) -> None:
        self.folder = folder.expanduser().resolve()  # Tune's states contain resolved paths
        self._cache_folder = cache_folder or cache_dir()
        self._by_folder: dict[Path, Trial] = {}
        self._states = TuneStates()
        self.trials: list[Trial] = []
        remove_unused(self._cache_folder)

    def refresh(self, progress: Progress | None = None) -> None:
        """Finds new trials and reads new rows.

        Args:
            progress: called with the bytes read so far, the bytes of all files, and the name of the
                trial. Bytes that were read in earlier calls or are in the cache count as read.
        """
        known = self._find()
        for folder in known.keys() - self._by_folder.keys():
            rows = TrialRows(folder, self._cache_folder)
            self._by_folder[folder] = Trial(folder, self._experiment_of(folder), rows)
        self._by_folder = {folder: self._by_folder[folder] for folder in sorted(known)}
        files = {folder: where.file for folder, where in known.items()}
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
                trial.rows.refresh(file, read)
            done = begun_at + _size(file)
            _update(trial, known[folder])
        _name_objects(self._by_folder, known)
        self.trials = list(self._by_folder.values())
        _count_processes(self.trials)

    def _find(self) -> dict[Path, _Place]:
        """Returns the directories of all trials, and where to find the files of each trial.

        The directory of a trial that Tune has not started does not exist yet.
        """
        walked = list(self._walk())
        # The results directory may itself be a trial. Then its parent is the experiment.
        names = {folder.name for folder, _, _ in walked} | {self.folder.parent.name}
        staged = self._states.staged(names)
        folders = [folder for folder, is_trial, _ in walked if is_trial]
        experiments = {folder.parent for folder in folders}
        experiments |= {folder for folder, _, has_state in walked if has_state}
        experiments |= {path for path in staged if self._holds(path)}
        found = {folder: _Place(folder / RESULT_FILE) for folder in folders}
        for experiment in experiments:
            states = self._states.all(experiment)
            now = staged.get(experiment.resolve())
            # A state in Ray's temporary directory that is older than the newest state in the
            # results directory belongs to an earlier run with the same name.
            if now is not None and states and now.path.name < states[0].path.name:
                now = None
            if now is not None:
                states = [now, *states]
            for state in reversed(states):  # the newest state comes last and overwrites older ones
                for name, tune in state.trials.items():
                    folder = experiment / name
                    if self._holds(folder):
                        found[folder] = _Place(folder / RESULT_FILE, state, tune)
            if now is None:
                continue
            for name, tune in now.trials.items():
                folder, staging = experiment / name, now.path.parent / name
                if folder in found:
                    file = _newest(folder / RESULT_FILE, staging / RESULT_FILE)
                    found[folder] = _Place(file, now, tune)
        return found

    def _holds(self, folder: Path) -> bool:
        return folder == self.folder or self.folder in folder.parents

    def _experiment_of(self, folder: Path) -> str:
        above = folder.parent
        is_below = above != self.folder and self.folder in above.parents
        return str(above.relative_to(self.folder)) if is_below else above.name

    def _walk(self) -> Iterator[tuple[Path, bool, bool]]:
        """Yields the directories down to `_MAX_DEPTH` that are not below a trial.

        For each directory, it yields the path, whether the directory is a trial, and whether it is
        an experiment with a saved state of Tune.
        """
        for parent, folders, files in os.walk(self.folder):
            path = Path(parent)
            is_trial = bool({RESULT_FILE, PARAMS_FILE, ERROR_FILE} & set(files))
            has_state = any(fnmatch.fnmatch(file, STATE_FILES) for file in files)
            yield path, is_trial, has_state and not is_trial
            if is_trial:
                folders.clear()
            depth = len(path.relative_to(self.folder).parts)
            folders[:] = [] if depth >= _MAX_DEPTH else sorted(folders)


@dataclass(frozen=True)
class _Place:
    """The location of a trial's rows, and Tune's information on the trial.

    Attributes:
        file: result file of the trial, which may not exist.
        state: Tune's state of the experiment. None if Tune has not saved a state.
        tune: the trial in this state.
    """

    file: Path
    state: TuneState | None = None
    tune: TuneTrial | None = None


def _update(trial: Trial, place: _Place) -> None:
    """Updates the config, the declaration, the error, the state and the problems of a trial."""
    problems = []
    file = place.file
    if not trial.config or trial.config_is_of_tune:
        config: Any = {}
        try:
            config = json.loads(read_regular(file.with_name(PARAMS_FILE), _MOST_PARAMS_BYTES))
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(f"{PARAMS_FILE} cannot be read: {error.strerror}")
        except (ValueError, RecursionError):
            problems.append(f"{PARAMS_FILE} is not JSON and is ignored")
        known = config if isinstance(config, dict) and config else trial.rows.config
        trial.config_is_of_tune = not known and place.tune is not None
        if known or not trial.config:
            trial.config = known or (dict(place.tune.config) if place.tune is not None else {})
    if trial.rows.config_changes and trial.rows.config is not None:
        # Each change of the config overwrites `params.json`, so only the rows contain the first
        # config.
        trial.config = trial.rows.config
    if trial.declared is None or trial.declared.name != trial.optimizer:
        try:
            trial.declared = _read_tab(trial.folder / TAB_FILE)
        except (OSError, ValueError) as error:
            problems.append(f"{TAB_FILE}: {error}")
    trial.error = _read_error(trial, file)
    trial.state = _state(trial, place)
    problems += trial.rows.problems
    if trial.rows.half_line and trial.state != "running":
        problems.append(f"{RESULT_FILE}: the last line is incomplete and is ignored")
    trial.problems = problems


def _read_tab(path: Path) -> OptimizerTab | None:
    """Reads a `TAB_FILE`. Returns None if the file does not exist.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if the content is not a valid declaration.
    """
    try:
        return OptimizerTab.from_json(read_regular(path, _MOST_TAB_BYTES))
    except FileNotFoundError:
        return None


def _read_error(trial: Trial, file: Path) -> str:
    """Reads the value of `Trial.error` from the error file."""
    for path in (trial.folder / ERROR_FILE, file.with_name(ERROR_FILE)):
        try:
            with open_regular(path, _MOST_ERROR_BYTES) as stream:
                size = stream.seek(0, os.SEEK_END)
                stream.seek(max(0, size - _ERROR_BYTES))
                return stream.read(_ERROR_BYTES).decode(errors="replace").strip() or ERROR_FILE
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{ERROR_FILE} cannot be read: {error.strerror}"
    return ""


def _state(trial: Trial, place: _Place) -> str:
    state, tune = place.state, place.tune
    status = tune.status if tune is not None else ""
    if status == "ERROR" or (trial.error and status != "TERMINATED"):
        return "failed"
    done = trial.values("done")
    has_rows = done is not None and len(done) > 0
    if state is not None and tune is not None and status == "TERMINATED":
        if not has_rows:
            return "no results"
        keys = {*tune.stop, *([state.longest[0]] if state.longest else [])}
        last = {key: trial.last(key) for key in keys}
        return f"pruned by {state.scheduler}" if state.is_pruned(tune, last) else "finished"
    if has_rows and done is not None and done[-1]:
        return "finished"
    if _is_silent(trial, place):
        return "stopped" if has_rows else "not started" if status == "PENDING" else "no results"
    if not has_rows:
        return {"PENDING": "pending", "RUNNING": "starting"}.get(status, "no results")
    return "paused" if status == "PAUSED" else "running"


def _is_silent(trial: Trial, place: _Place) -> bool:
    """Returns whether the trial and Tune count as ended, because they have written nothing for a
    long time."""
    now_s = time.time()
    if place.state is not None and now_s - place.state.saved_s < _STATE_SILENT_S:
        return False
    try:
        silent_s = now_s - place.file.stat().st_mtime
    except OSError:
        return True
    period_s = trial.last("time_this_iter_s")
    return silent_s >= max(_SILENT_S, 3.0 * period_s)


def _name_objects(trials: Mapping[Path, Trial], places: Mapping[Path, _Place]) -> None:
    """Replaces hashes of classes and functions in configs by names.

    A config from Tune's state contains `object #<hash>` for a class or function. The name of this
    class or function comes from the config of another trial that contains the same object.
    """
    unnamed = [trial for trial in trials.values() if trial.config_is_of_tune]
    names: dict[str, str] = {}
    for folder, place in places.items() if unnamed else ():
        if place.tune is not None and not trials[folder].config_is_of_tune:
            known = flat_config(trials[folder].config)
            of_tune = flat_config(place.tune.config).items()
            names |= {text: known[key] for key, text in of_tune if key in known and "#" in text}
    for trial in unnamed:
        trial.config = _named(trial.config, names)


def _count_processes(trials: Sequence[Trial]) -> None:
    """Sets `other_processes` of each trial."""
    together: dict[str, list[Trial]] = {}
    for trial in trials:
        begun_s, ended_s = trial.span_s
        if -_LATEST_S < begun_s < ended_s < _LATEST_S:
            together.setdefault(trial.experiment, []).append(trial)
    for members in together.values():
        spans_s = np.array([trial.span_s for trial in members])
        own = np.array([trial.num_processes for trial in members])
        times_s, place = np.unique(spans_s, return_inverse=True)
        begun, ended = place.reshape(-1, 2).T
        changes = np.bincount(begun, own, len(times_s)) - np.bincount(ended, own, len(times_s))
        # The seconds of all processes until each time
        total_s = np.cumsum(np.diff(times_s, prepend=times_s[0]) * (np.cumsum(changes) - changes))
        means = (total_s[ended] - total_s[begun]) / (spans_s[:, 1] - spans_s[:, 0])
        for trial, count in zip(members, np.round(means - own), strict=True):
            trial.other_processes = int(count)


def _named(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {
        key: _named(value, names)
        if isinstance(value, dict)
        else names.get(value, value)
        if isinstance(value, str)
        else value
        for key, value in config.items()
    }


def _newest(file: Path, staged: Path) -> Path:
    """Returns the longer of two copies of a result file.

    If the first lines of the copies differ, `file` belongs to an earlier run, and Tune will replace
    it. Then the result is `staged`.

    Args:
        file: the copy in the results directory.
        staged: the copy in Ray's temporary directory.
    """
    if not staged.exists():
        return file
    is_same = _first_line(file) == _first_line(staged)
    return file if is_same and _size(file) >= _size(staged) else staged


def _first_line(file: Path) -> bytes:
    try:
        with open_regular(file, MOST_FILE_BYTES) as stream:
            return stream.readline(_MOST_LINE_BYTES)
    except OSError:
        return b""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
