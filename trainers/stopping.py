"""When a run of the command line ends: at a limit of the config's, or when the user says so."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from polopt.common.config import ConfigError, nearest_of
from polopt.trainers.results import is_result_key, result_keys


class StopWhen:
    """Ends a run at the first limit it reaches, as a dict given to Tune would, or after the
    iteration in which `interrupt` was called.

    Args:
        limits: result key, such as `env_runners/episode_return_mean`, to the value that ends it.

    Raises:
        ConfigError: for a key that no result has, with the nearest that one has.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        for key in limits:
            if not is_result_key(key):
                raise ConfigError(
                    f"stop: unknown result key {key!r}{nearest_of(key, result_keys())}, "
                    "and optimizer/..."
                )
        self._limits = dict(limits)
        self.interrupted = False

    def interrupt(self) -> None:
        """Ends the run after its iteration."""
        self.interrupted = True

    def __call__(self, result: Mapping[str, Any]) -> bool:
        """Whether this result is the last."""
        if self.interrupted:
            return True
        return any(_look_up(result, key) >= limit for key, limit in self._limits.items())


class OnInterrupt:
    """Calls `first` on the first Ctrl-C; the second interrupts as ever. A context manager.

    Args:
        first: what to do; it runs inside a signal handler.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first
        self._previous: Any = None

    def __enter__(self) -> None:
        self._previous = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._first()


def _look_up(result: Mapping[str, Any], key: str) -> float:
    value: Any = result
    for part in key.split("/"):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(f"stop: results have no key {key!r}")
        value = value[part]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"stop: result key {key!r} is {value!r}, which is no number")
    return float(value)
