"""`StopWhen`: decides when a run ends. A run ends when a result reaches a limit, or on request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.trainers.results import check_stop_keys, look_up


class StopWhen:
    """Ends a run when a result reaches one of the limits, or after the iteration in which `request`
    was called. Also ends the run if a result cannot be compared with the limits. With
    `checkpoint_at_end=True`, Tune then saves a checkpoint. If a signal ended the run instead, Tune
    would not save a checkpoint.

    Args:
        limits: maps each result key to the smallest value at which the run ends.
        stop_file: path of a file that `request` creates. The trainer ends its iteration early when
            this file exists. `None` means that iterations do not end early.

    Attributes:
        error: the reason why a result could not be compared with the limits. It is None without
            such an error.
        reason: the limit that was reached, with the value in the result. It is empty if no limit
            was reached.
        is_requested: whether `request` was called.
    """

    def __init__(self, limits: Mapping[str, float], stop_file: Path | None = None) -> None:
        self._limits = dict(limits)
        self._stop_file = stop_file
        self._checked: set[str] = set()  # trials whose first result has all keys of the limits
        self.is_requested = False
        self.error: ConfigError | None = None
        self.reason = ""

    def request(self) -> None:
        """Ends each running trial after its current iteration. Signal handlers may call this
        method."""
        self.is_requested = True
        if self._stop_file is not None:
            with suppress(OSError):  # on a full disk, the iteration does not end early
                self._stop_file.touch()

    def __call__(self, trial_id: str, result: Mapping[Any, Any]) -> bool:
        """Returns whether the trial ends after this result. Tune or, without Tune, the trainer
        calls this method with each result."""
        if self.is_requested:
            return True
        try:
            if trial_id not in self._checked:
                check_stop_keys(self._limits, result)
                self._checked.add(trial_id)
            for key, limit in self._limits.items():
                if (value := look_up(result, key)) >= limit:
                    self.reason = f"{key} reached {_number(value)} (stop: {_number(limit)})"
                    return True
        except ConfigError as error:
            self.error = error
            return True
        return False


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.5g}"
