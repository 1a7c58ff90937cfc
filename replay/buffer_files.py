"""`BufferFiles`: writes and reads the rows of a replay buffer as files of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.replay.policy_buffers import PolicyBuffers, PolicyLimiters
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer

logger = logging.getLogger("polopt")


class BufferFiles:
    """Saves and restores the rows of a replay buffer, which are too large for the `get_state` of
    the replay optimizer.

    Args:
        buffer: the replay buffer, or the `PolicyBuffers` of several policies.
        limiter: its rate limiter. Its counts are saved together with the rows.
        saves: whether `write` saves the rows. `read` also reads saved rows if `saves` is False,
            unless the options of the buffer have changed.
    """

    def __init__(
        self,
        buffer: ReplayBuffer | PolicyBuffers,
        limiter: RateLimiter | PolicyLimiters,
        saves: bool,
    ) -> None:
        self._buffer = buffer
        self._limiter = limiter
        self._saves = saves

    def write(self, directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
        """Writes the rows. If the rows of a file have not changed since the last `write` or `read`,
        this method only creates a hard link to the old file.

        Args:
            directory: directory for the files. Use a new directory for each checkpoint.

        Returns:
            the state that `read` needs in addition to the files, and the SHA-256 of each file by
            its name. The state consists of numbers, strings, None, NumPy arrays, lists and dicts.
            If `saves` is False, both results are empty.

        Raises:
            OSError: a file cannot be written.
        """
        if not self._saves:
            return {}, {}
        rows = self._buffer.save(directory)
        state = {"rows": rows, "limiter": self._limiter.get_state()}
        return state, self._buffer.checksums(rows)

    def read(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Restores the rows. Call `set_state` of the replay optimizer first, because `set_state`
        empties the buffer.

        If the saved buffer and this buffer have different options and `saves` is False, the buffer
        stays empty, and a warning says why.

        Args:
            directory: directory of the files. It need not exist if `state` is empty.
            state: the state that `write` returned. If it is empty, this method does nothing.

        Raises:
            RowFilesError: a file is missing or damaged, or does not fit the state.
            ConfigError: the saved buffer and this buffer have different options and `saves` is
                True, or the full buffer does not fit into the free memory or onto the disk.
        """
        if not state:
            return
        if problem := self._buffer.misfit(state["rows"]):
            if self._saves:
                raise ConfigError(
                    f"{problem}. With save_replay_buffer=False, the run continues with an empty "
                    "buffer"
                )
            logger.warning("the saved rows are dropped: %s", problem)
            return
        self._buffer.load(directory, state["rows"])
        self._limiter.set_state(state["limiter"])
