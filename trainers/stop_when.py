"""`StopWhen`: ends a run at the first limit that it reaches, or on request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.trainers.results import look_up


class StopWhen:
    """Stops a run at the first limit that it reaches, or after the iteration in which `request` was
    called. Tune then saves a checkpoint, which it does not on a signal.

    Args:
        limits: result key to the value that ends the run.
        stop_file: created by `request`. The trainer ends its iteration early once it exists. None:
            iterations do not end early.

    Attributes:
        error: why the limits could not be compared. None if they could.
        reason: the limit that was reached, and the result's number. Empty before.
        is_requested: whether `request` was called.
    """

    def __init__(self, limits: Mapping[str, float], stop_file: Path | None = None) -> None:
        self._limits = dict(limits)
        self._stop_file = stop_file
        self.is_requested = False
        self.error: ConfigError | None = None
        self.reason = ""

    def request(self) -> None:
        """Stops the trial after the current iteration. May be called in a signal handler."""
        self.is_requested = True
        if self._stop_file is not None:
            with suppress(OSError):  # disk full: the iteration is not shortened
                self._stop_file.touch()

    def __call__(self, trial_id: str, result: Mapping[Any, Any]) -> bool:
        """Called by Tune with each result."""
        if self.is_requested:
            return True
        try:
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
