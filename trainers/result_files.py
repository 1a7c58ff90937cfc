"""The files of a trial, for a trainer that runs without Tune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback

from polopt.common.config import ConfigError, shown

_RESULTS = "result.json"


class ResultFiles:
    """Writes `result.json`, `progress.csv`, `params.json` and TensorBoard events, with the loggers
    that Tune has for a trial.

    Args:
        folder: directory of the files. It is made if it does not exist.
        continues: True if the folder holds the results of the earlier run that was restored. New
            results are then appended.

    Attributes:
        folder: absolute path of the folder.

    Raises:
        ConfigError: `folder` cannot be made, or holds the results of another run.
    """

    def __init__(self, folder: Any, continues: bool = False) -> None:
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise ConfigError(f"log_dir: got {shown(folder)}: {error}. Allowed: a path") from None
        if not continues and (self.folder / _RESULTS).exists():
            raise ConfigError(
                f"log_dir: got {str(folder)!r}, which holds the results of another run. Allowed: "
                f"another directory. To continue that run: from_checkpoint({str(folder)!r}, "
                f"log_dir={str(folder)!r})"
            )
        self._loggers = [JsonLoggerCallback(), CSVLoggerCallback(), TBXLoggerCallback()]
        self._trial: Any = None  # a _Trial, which Tune's types do not know

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the config, from which dashboards know the run before its first result."""
        self._trial = _Trial(self.folder, config)
        for logger in self._loggers:
            logger.on_trial_start(0, [self._trial], self._trial)

    def add(self, result: dict[str, Any]) -> None:
        """Writes one result."""
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
    """What Tune's loggers read of a trial.

    Attributes:
        local_path: directory of the files.
        config: written to `params.json`, and to `params.pkl` by cloudpickle. A value that cannot be
            pickled is written as its text: without Tune, a run may have one.
        evaluated_params: options that a search has chosen.
        checkpoint: None. From the checkpoint of a trial, loggers conclude that there are files to
            fetch from its storage.
    """

    checkpoint = None

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.local_path = str(folder)
        self.config = {key: _picklable(value) for key, value in config.items()}
        self.evaluated_params: dict[str, Any] = {}

    def init_local_path(self) -> None:
        """Called by loggers. The directory exists."""


def _picklable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:  # a user's `__reduce__` may raise anything
        return shown(value)
    return value
