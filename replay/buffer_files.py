"""`BufferFiles`: the rows of a replay buffer as files of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer


class BufferFiles:
    """Writes and reads what of the state of a strategy is too large for its `get_state`.

    Args:
        buffer: the rows.
        limiter: its counts belong to the rows.
        saves: whether a checkpoint holds the rows. Files of a checkpoint that has them are read in
            any case.
    """

    def __init__(self, buffer: ReplayBuffer, limiter: RateLimiter, saves: bool) -> None:
        self._buffer = buffer
        self._limiter = limiter
        self._saves = saves

    def write(self, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Writes the rows. Files whose rows have not changed since the last time are linked.

        Args:
            directory: does not exist yet.

        Returns:
            what `read` needs besides the files: numbers, strings, lists and dicts. And the SHA-256
            of each file in the directory, by name. Both are empty if nothing is saved.
        """
        if not self._saves:
            return {}, {}
        rows = self._buffer.save(directory)
        state = {"rows": rows, "limiter": self._limiter.get_state()}
        return state, self._buffer.checksums(rows)

    def read(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restores the rows, after `set_state` of the strategy.

        Args:
            directory: does not exist if nothing was written.
            state: what `write` returned. Empty if nothing was written.

        Raises:
            ValueError: the files do not fit.
        """
        if state:
            self._buffer.load(directory, state["rows"])
            self._limiter.set_state(state["limiter"])
