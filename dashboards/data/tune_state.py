"""Reads Tune's files about an experiment: its trials, their states, and the scheduler.

Tune saves `experiment_state-<time>.json` regularly, and `tuner.pkl` at the start of a run. This
module scans pickles, including the pickles inside the JSON file. It never loads a pickle, because
loading a pickle can run arbitrary code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickletools
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polopt.common.files import open_regular, read_regular

STATE_FILES = "experiment_state-*.json"
_TUNER_FILE = "tuner.pkl"
_MOST_STATE_BYTES = 1 << 30
_MOST_PICKLE_BYTES = 1 << 20  # only the beginning of a pickle is scanned
_PICKLED = "CLOUDPICKLE_FALLBACK"
_OF_SCHEDULER = ("scheduler", "_max_t", "_time_attr")
#: Schedulers of Tune that can end a trial before its stop condition. Maps the class name to a short
#: name.
_PRUNING = {
    "AsyncHyperBandScheduler": "ASHA",
    "HyperBandScheduler": "HyperBand",
    "HyperBandForBOHB": "BOHB",
    "MedianStoppingRule": "median stopping",
}


@dataclass(frozen=True)
class TuneTrial:
    """A trial in Tune's state.

    Attributes:
        folder: name of the trial's directory. Before the directory exists, the id of the trial.
        status: `PENDING`, `RUNNING`, `PAUSED`, `TERMINATED` or `ERROR`.
        config: the config. `object #<hash>` stands for a value that is not JSON.
        stop: the stop conditions: result keys with the limits that end the trial.
    """

    folder: str
    status: str
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneState:
    """The last saved state of one run of an experiment.

    Attributes:
        path: path of the state file.
        saved_s: modification time of the file, in seconds since the epoch.
        directory: the directory into which Tune copies the results. None if the file does not
            contain this directory.
        trials: the trials by name of their directory.
        scheduler: short name of a scheduler that can end trials early, such as `ASHA`. Empty for
            other schedulers.
        longest: the result key and the value at which this scheduler considers a trial complete.
            None if these are not known.
        other_stop: whether Tune also uses a stop condition that is not a limit of a result key,
            such as a function. This module cannot evaluate such a condition.
    """

    path: Path
    saved_s: float
    directory: Path | None
    trials: Mapping[str, TuneTrial]
    scheduler: str = ""
    longest: tuple[str, float] | None = None
    other_stop: bool = False

    def is_pruned(self, trial: TuneTrial, last: Mapping[str, float]) -> bool:
        """Returns whether the scheduler ended a trial before the trial was complete.

        Args:
            trial: a trial with the status `TERMINATED`.
            last: the last result of the trial, by key.
        """
        limits = [*trial.stop.items(), *([self.longest] if self.longest else [])]
        complete = any(last.get(key, float("-inf")) >= limit for key, limit in limits)
        return bool(self.scheduler) and not self.other_stop and not complete


def ray_root() -> Path:
    """Returns the directory in which Ray keeps its sessions."""
    # Like Ray, this uses `TMPDIR` only on Linux.
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None
    return Path(os.environ.get("RAY_TMPDIR") or on_linux or "/tmp", "ray")


def is_own(path: Path) -> bool:
    """Returns whether this user owns a path. Ray's directory contains files of all users."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # the path no longer exists
        return False


class TuneStates:
    """Reads the state files of experiments. Reads a file again only if the file has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int], TuneState | None]] = {}

    def all(self, folder: Path) -> list[TuneState]:
        """Returns the readable states of all runs in a directory, the last run first."""
        # The name of a state file ends with the time at which the run began.
        paths = sorted(folder.glob(STATE_FILES), reverse=True)
        return [state for path in paths if (state := self._state(path)) is not None]

    def staged(self, names: Collection[str]) -> dict[Path, TuneState]:
        """Returns the newest state of each experiment in Ray's temporary directory.

        During a run, Tune's loggers write to the temporary directory. From time to time, Tune
        copies their files to the results directory. The keys of the returned dict are these results
        directories.

        Args:
            names: names of the directories that may be an experiment. Ray keeps the directories of
                all sessions, and this method reads only states of experiments with these names.
        """
        found: dict[Path, TuneState] = {}
        for folder in ray_root().glob("session_[0-9]*/artifacts/*/*/driver_artifacts"):
            if folder.parent.name not in names or not is_own(folder):
                continue
            for state in self.all(folder)[:1]:
                other = found.get(state.directory) if state.directory else None
                if state.directory and (other is None or other.path.name < state.path.name):
                    found[state.directory] = state
        return found

    def _state(self, path: Path) -> TuneState | None:
        try:
            status = path.stat()
            seen = (status.st_size, status.st_mtime_ns)
            if path not in self._read or self._read[path][0] != seen:
                self._read[path] = (seen, _parsed(path, status.st_mtime))
        except OSError:
            return None
        return self._read[path][1]


def _parsed(path: Path, saved_s: float) -> TuneState | None:
    """Parses a state file and the scheduler in `tuner.pkl`. Returns None if the state file is
    damaged or incomplete, or is not a file of Tune."""
    try:
        content = json.loads(read_regular(path, _MOST_STATE_BYTES))
        saved = [json.loads(static) for static, _ in content["trial_data"]]
        stopper = _scan_hex(content["runner_data"].get("_stopper"), ()).get("")
        trials = [_trial(one) for one in saved]
        directory = next(filter(None, (_directory(one.get("storage")) for one in saved)), None)
        found = scan_pickle(_read_tuner(path.parent, directory), _OF_SCHEDULER)
        name = _PRUNING.get(str(found.get("scheduler")), "")
        most = found.get("_max_t")
        is_limit = bool(name) and isinstance(most, int | float)
        longest = (str(found.get("_time_attr")), float(most)) if is_limit else None  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError):
        return None
    return TuneState(
        path=path,
        saved_s=saved_s,
        directory=directory,
        trials={trial.folder: trial for trial in trials},
        scheduler=name,
        longest=longest,
        other_stop=stopper not in (None, "NoopStopper"),
    )


def _read_tuner(*folders: Path | None) -> bytes:
    """Returns the beginning of `tuner.pkl` in the first folder that contains this file.

    The results directory contains `tuner.pkl`, but Ray's temporary directory does not.
    """
    for folder in folders:
        try:
            if folder is not None:
                with open_regular(folder / _TUNER_FILE, _MOST_STATE_BYTES) as file:
                    return file.read(_MOST_PICKLE_BYTES)
        except OSError:
            continue
    return b""


def _directory(storage: Any) -> Path | None:
    """Returns the experiment's directory, which the pickled storage of a trial contains."""
    found = _scan_hex(storage, ("storage_fs_path", "experiment_dir_name"))
    parts = (found.get("storage_fs_path"), found.get("experiment_dir_name"))
    return Path(*map(str, parts)).resolve() if all(parts) else None


def _trial(saved: Mapping[str, Any]) -> TuneTrial:
    stop = saved.get("stopping_criterion")
    limits = stop if isinstance(stop, dict) else {}
    return TuneTrial(
        folder=str(saved.get("relative_logdir") or saved["trial_id"]),
        status=str(saved["status"]),
        config=_as_text(saved.get("config") or {}),
        stop={key: float(v) for key, v in limits.items() if isinstance(v, int | float)},
    )


def _as_text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replaces each value that is not JSON, such as a class or function, by `object #<hash>`.

    Equal objects have equal hashes.
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value.get("_type") == _PICKLED:
            found[key] = f"object #{hashlib.sha256(value['value'].encode()).hexdigest()[:8]}"
        else:
            found[key] = _as_text(value) if isinstance(value, dict) else value
    return found


def _scan_hex(value: Any, keys: Collection[str]) -> dict[str, Any]:
    """Runs `scan_pickle` on a pickle inside Tune's JSON."""
    if not isinstance(value, dict) or value.get("_type") != _PICKLED:
        return {}
    return scan_pickle(bytes.fromhex(value["value"]), keys)


def scan_pickle(data: bytes, keys: Collection[str]) -> dict[str, Any]:
    """Reads single values from a pickle without loading the pickle.

    Args:
        data: a pickle, or the beginning of a pickle.
        keys: names of attributes, or keys of dicts.

    Returns:
        For each key that occurs, the value after the key: a number, a text, or the class name of an
        object. The empty key maps to the name of the first class or function in the pickle.
    """
    found: dict[str, Any] = {}
    memo: list[Any] = []
    pushed: list[Any] = []  # pushed numbers and texts in order, and None for other values
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "MEMOIZE":
                memo.append(pushed[-1] if pushed else None)
                continue
            if name == "STACK_GLOBAL":
                found.setdefault("", pushed[-1])
                if len(pushed) > 2 and pushed[-3] in keys:
                    found[pushed[-3]] = pushed[-1]
                pushed[-2:] = [None]
                continue
            if name in ("FRAME", "PROTO", "STOP"):
                continue
            value = argument if isinstance(argument, int | float | str) else None
            if name in ("BINGET", "LONG_BINGET") and isinstance(argument, int):
                value = memo[argument]
            if pushed and isinstance(pushed[-1], str) and pushed[-1] in keys:
                found.setdefault(pushed[-1], value)
            pushed.append(value)
    except (ValueError, IndexError, UnicodeDecodeError):  # incomplete, or not a pickle
        pass
    return {key: value for key, value in found.items() if value is not None}
