"""`StopWhen`: the stop conditions of a run of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import tune

from polopt.common.config import ConfigError
from polopt.trainers.results import look_up


class StopWhen(tune.Stopper):
    """Stops the trial at the first limit that it reaches, or after the iteration in which `request`
    was called. Tune then saves a checkpoint, which it does neither for `stop_all` nor on a signal.

    Args:
        limits: result key to the value that ends the run.
        stop_file: created by `request`; the trainer ends its iteration early once it exists.

    Attributes:
        error: why the limits could not be compared; None if they could.
    """

    def __init__(self, limits: Mapping[str, float], stop_file: Path) -> None:
        self._limits = dict(limits)
        self._stop_file = stop_file
        self._requested = False
        self.error: ConfigError | None = None

    def request(self) -> None:
        """Stops the trial after the current iteration; may be called in a signal handler."""
        self._requested = True
        try:
            self._stop_file.touch()
        except OSError:  # disk full: the iteration is not shortened
            return

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Called by Tune with each result."""
        if self._requested:
            return True
        try:
            return any(look_up(result, key) >= limit for key, limit in self._limits.items())
        except ConfigError as error:
            self.error = error
            return True

    def stop_all(self) -> bool:
        """Never: Tune saves no checkpoint then."""
        return False
