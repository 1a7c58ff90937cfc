"""What Tune says of an experiment: its trials, their states, and the scheduler that may stop them.

Tune saves `experiment_state-<time>.json` every few seconds, and `tuner.pkl` at the start. Pickles,
also those inside the JSON file, are scanned and never loaded: loading one runs what it names.
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
_MOST_PICKLE_BYTES = 1 << 20  # of a pickle that is scanned
_PICKLED = "CLOUDPICKLE_FALLBACK"
_OF_SCHEDULER = ("scheduler", "_max_t", "_time_attr")
#: Schedulers of Tune that end trials before their stop condition, by the names of their classes.
_PRUNING = {
    "AsyncHyperBandScheduler": "ASHA",
    "HyperBandScheduler": "HyperBand",
    "HyperBandForBOHB": "BOHB",
    "MedianStoppingRule": "median stopping",
}


@dataclass(frozen=True)
class TuneTrial:
    """One trial as Tune knows it.

    Attributes:
        folder: name of its directory, or its id before it has a directory.
        status: `PENDING`, `RUNNING`, `PAUSED`, `TERMINATED` or `ERROR`.
        config: its config. `object #<hash>` stands for what is not JSON.
        stop: result keys and limits that end it.
    """

    folder: str
    status: str
    config: dict[str, Any] = field(default_factory=dict)
    stop: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TuneState:
    """The last saved state of one run of an experiment.

    Attributes:
        path: the file.
        saved_s: time of the file, seconds since the epoch.
        directory: where Tune copies the results. None if the file does not say so.
        trials: by name of their directory.
        scheduler: short name of a scheduler that may end trials early, such as `ASHA`. Else empty.
        longest: of that scheduler: the result key and the value at which trials are complete.
        other_stop: whether a stop condition is a function, which this file does not tell.
    """

    path: Path
    saved_s: float
    directory: Path | None
    trials: Mapping[str, TuneTrial]
    scheduler: str = ""
    longest: tuple[str, float] | None = None
    other_stop: bool = False

    def is_pruned(self, trial: TuneTrial, last: Mapping[str, float]) -> bool:
        """Whether the scheduler has ended a terminated trial before its end.

        Args:
            trial: its status is `TERMINATED`.
            last: its last result, by key.
        """
        limits = [*trial.stop.items(), *([self.longest] if self.longest else [])]
        complete = any(last.get(key, float("-inf")) >= limit for key, limit in limits)
        return bool(self.scheduler) and not self.other_stop and not complete


def ray_root() -> Path:
    """The directory in which Ray keeps its sessions."""
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None  # as Ray does it
    return Path(os.environ.get("RAY_TMPDIR") or on_linux or "/tmp", "ray")


def is_own(path: Path) -> bool:
    """Whether a file or directory is the user's. Ray's directory holds files of all users."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:  # removed meanwhile
        return False


class TuneStates:
    """Reads the state files of experiments, and reads a file again only if it has changed."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int], TuneState | None]] = {}

    def all(self, folder: Path) -> list[TuneState]:
        """The readable states of all runs in a directory, the last run first."""
        # Names end with the time at which the run began.
        paths = sorted(folder.glob(STATE_FILES), reverse=True)
        return [state for path in paths if (state := self._state(path)) is not None]

    def staged(self, names: Collection[str]) -> dict[Path, TuneState]:
        """The newest state of each experiment in Ray's temporary directory. The key is the
        directory into which Tune copies the experiment's results.

        While a run goes on, Tune's loggers write there, and Tune copies now and then.

        Args:
            names: of directories that may be an experiment's, which Tune makes before it writes
                anything. Ray keeps every session, and most of them are of other experiments.
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
    """The content of a state file. None while it is half-written or if it is something else."""
    try:
        content = json.loads(read_regular(path, _MOST_STATE_BYTES))
        saved = [json.loads(static) for static, _ in content["trial_data"]]
        stopper = _scan_hex(content["runner_data"].get("_stopper"), ()).get("")
        trials = [_trial(one) for one in saved]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    directory = next(filter(None, (_directory(one.get("storage")) for one in saved)), None)
    found = scan_pickle(_read_tuner(path.parent, directory), _OF_SCHEDULER)
    name = _PRUNING.get(str(found.get("scheduler")), "")
    most = found.get("_max_t")
    is_limit = bool(name) and isinstance(most, int | float)
    return TuneState(
        path=path,
        saved_s=saved_s,
        directory=directory,
        trials={trial.folder: trial for trial in trials},
        scheduler=name,
        longest=(str(found.get("_time_attr")), float(most)) if is_limit else None,  # type: ignore[arg-type]
        other_stop=stopper not in (None, "NoopStopper"),
    )


def _read_tuner(*folders: Path | None) -> bytes:
    """The beginning of `tuner.pkl`, which is in the results directory only."""
    for folder in folders:
        try:
            if folder is not None:
                with open_regular(folder / _TUNER_FILE, _MOST_STATE_BYTES) as file:
                    return file.read(_MOST_PICKLE_BYTES)
        except OSError:
            continue
    return b""


def _directory(storage: Any) -> Path | None:
    """The experiment's directory that a trial's pickled storage names."""
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
    """A config in which `object #<hash>` stands for each class, function or other object that JSON
    cannot hold. Equal objects have equal hashes."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value.get("_type") == _PICKLED:
            found[key] = f"object #{hashlib.sha256(value['value'].encode()).hexdigest()[:8]}"
        else:
            found[key] = _as_text(value) if isinstance(value, dict) else value
    return found


def _scan_hex(value: Any, keys: Collection[str]) -> dict[str, Any]:
    """`scan_pickle` of a pickle inside Tune's JSON."""
    if not isinstance(value, dict) or value.get("_type") != _PICKLED:
        return {}
    return scan_pickle(bytes.fromhex(value["value"]), keys)


def scan_pickle(data: bytes, keys: Collection[str]) -> dict[str, Any]:
    """Reads single values of a pickle without loading it.

    Args:
        data: a pickle, or its beginning.
        keys: names of attributes or keys of dicts.

    Returns:
        for each key that occurs, the number, the text, or the class of the object that follows it.
        The empty key has the name of the first class or function.
    """
    found: dict[str, Any] = {}
    memo: list[Any] = []
    pushed: list[Any] = []  # in order, with None for what is neither a number nor text
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
    except (ValueError, IndexError, UnicodeDecodeError):  # cut off, or no pickle
        pass
    return {key: value for key, value in found.items() if value is not None}
