"""`ResultFiles`: writes the files of a Tune trial for a trainer that runs without Tune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

from polopt.common.config import ConfigError, shown

_RESULTS = "result.json"


class ResultFiles:
    """Writes `result.json`, `progress.csv`, `params.json`, `params.pkl` and TensorBoard events with
    Tune's own loggers.

    Args:
        folder: directory of the files. It is created if it does not exist.
        continues: whether the trainer was restored from a run whose results are in `folder`. New
            results are then appended to the files. If False, `folder` must not contain
            `result.json`.

    Attributes:
        folder: absolute path of the directory.

    Raises:
        ConfigError: `folder` is not a path or cannot be created, or contains the results of another
            run.
    """

    def __init__(self, folder: Any, continues: bool = False) -> None:
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise ConfigError(f"log_dir: got {shown(folder)}: {error}. Allowed: a path") from None
        if not continues and (self.folder / _RESULTS).exists():
            raise ConfigError(
                f"log_dir: got {str(folder)!r}, which contains the results of another run. Give "
                f"another directory. To continue that run, call from_checkpoint({str(folder)!r}, "
                f"log_dir={str(folder)!r})"
            )
        self._loggers = [JsonLoggerCallback(), CSVLoggerCallback(), TBXLoggerCallback()]
        self._trial: Any = None  # a `_Trial`. The annotations of Tune's loggers do not allow it

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the config. Dashboards can then show the run before its first result."""
        self._trial = _Trial(self.folder, config)
        for logger in self._loggers:
            logger.on_trial_start(0, [self._trial], self._trial)

    def add(self, result: dict[str, Any]) -> None:
        """Writes one result. Call `begin` first."""
        assert self._trial is not None
        result = {**result, "config": self._trial.config}
        for logger in self._loggers:
            logger.on_trial_result(0, [self._trial], self._trial, result)

    def close(self) -> None:
        """Closes the files. A second call does nothing."""
        trial, self._trial = self._trial, None
        if trial is not None:
            for logger in self._loggers:
                logger.on_trial_complete(0, [trial], trial)


class _Trial:
    """Replaces Tune's `Trial`. It has only the attributes that Tune's loggers read.

    Attributes:
        local_path: directory of the files.
        config: the config, which the loggers write to `params.json`, and with cloudpickle to
            `params.pkl`. Values that cannot be pickled are replaced by text.
        evaluated_params: options that a search algorithm has chosen. This dict is always empty.
        checkpoint: always None. With a checkpoint, the loggers would try to fetch files from the
            trial's storage.
    """

    checkpoint = None

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.local_path = str(folder)
        self.config = {key: _picklable(value) for key, value in config.items()}
        self.evaluated_params: dict[str, Any] = {}

    def init_local_path(self) -> None:
        """Does nothing, because the directory exists. Tune's loggers call this method."""


def _picklable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:  # a user's `__reduce__` may raise any exception
        return shown(value)
    return value
