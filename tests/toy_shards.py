"""Processes that are not rollout workers: shards that hold rows, as replay shards do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Transport
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call_runner import CallRunner
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.worker_handle import WorkerHandle


class Shard(CallRunner):
    """A shard that holds rows.

    Attributes:
        index: index of the shard in its group.
        rows: the rows, `[B, D]` float32.
    """

    def __init__(
        self,
        index: int,
        num_columns: int,
        control: ControlPage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(control, clock)
        self.index = index
        self.rows = np.zeros((0, num_columns), np.float32)


class Shards(ProcessGroup):
    """A group of shards whose rows have `num_columns` numbers."""

    def __init__(
        self,
        transport: Transport,
        num_shards: int,
        num_columns: int = 4,
        who: str = "shard",
        **options: Any,
    ) -> None:
        super().__init__(transport, RolloutConfig.parse(options), who)
        self.num_columns = num_columns
        for _ in range(num_shards):
            self._add_process()

    def _start_process(self, index: int) -> WorkerHandle:
        arguments, options = (index, self.num_columns), {"num_cpus": 0.1}
        channel = self.transport.start(Shard, arguments, options, f"{self.who} {index}")
        return WorkerHandle(index, channel, self.clock())


# ---- functions that run in shards --------------------------------------------------------------


def make_rows(shard: Shard, num_rows: int) -> np.ndarray:
    """Returns rows `[B, D]` that are filled with the index of the shard."""
    return np.full((num_rows, shard.rows.shape[1]), shard.index, np.float32)


def add_rows(shard: Shard, *parts: np.ndarray) -> tuple[int, float]:
    """Adds rows. Returns the number of rows of the shard, and the sum of their first column."""
    shard.rows = np.concatenate([shard.rows, *parts])
    return len(shard.rows), float(shard.rows[:, 0].sum())


def count(shard: Shard, tag: Any = None) -> tuple[Any, int, int]:
    """Returns the tag, the index of the shard, and the number of rows in the shard."""
    return tag, shard.index, len(shard.rows)


def fail_with_rows(shard: Shard, rows: np.ndarray) -> None:
    """Raises ValueError."""
    raise ValueError(f"expected failure with {len(rows)} rows")
