"""`ReplayShards`: the processes that hold the rows of AsyncReplay.

The functions of this file run in a shard. A shard runs calls like a worker does: one at a time, in
the order in which they were sent.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.rollouts.workers.call_runner import CallRunner
from polopt.rollouts.workers.calls import Reply
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: Kinds of failures, as they are named in the keys of results.
_FAILURES = ("deaths", "hangs", "exceptions", "lost_arguments")


class Fragment(NamedTuple):
    """A fragment that a sampler makes for its shard.

    Attributes:
        batch: the fragment `[T, N]`.
        priorities: priorities `[K + T, N]` of the rows whose windows this fragment completes. All
            other rows have NaN. The first K steps are the last steps of the previous fragment.
            None: drawing is uniform.
    """

    batch: SampleBatch
    priorities: np.ndarray | None


class Report(NamedTuple):
    """What a shard reports about itself in each answer.

    Attributes:
        num_rows: number of rows that the shard holds.
        fill: share of the shard's buffer that is in use.
        buffer_bytes: memory of the full buffer.
        weight: the sum of the priorities of the shard's rows, or the number of rows where drawing
            is uniform. Shards are drawn from in proportion to it.
        num_gaps: streams of fragments that were interrupted.
    """

    num_rows: int = 0
    fill: float = 0.0
    buffer_bytes: int = 0
    weight: float = 0.0
    num_gaps: int = 0


class Stored(NamedTuple):
    """Answer of `add`: the number of rows that were stored, and the report."""

    num_rows: int
    report: Report


class Batch(NamedTuple):
    """Answer of `draw`.

    Attributes:
        rows: B rows.
        ages: for each row, how many rows the shard has stored after it.
        priority_versions: for each row, the version of the weights that computed its priority.
        report: report of the shard.
    """

    rows: Transitions
    ages: np.ndarray  # [B] int64
    priority_versions: np.ndarray  # [B] int64
    report: Report


class ReplayShard(CallRunner):
    """Holds a part of the rows of a run, in a process of its own.

    Args:
        make: makes the buffer of a shard from a seed.
        seed: seed of the draws.
        control: see `CallRunner`.
        clock: see `CallRunner`.

    Attributes:
        buffer: the rows.
        priority_versions: for each place in the buffer `[capacity]`, the version of the weights
            that computed the row's priority.
    """

    def __init__(
        self,
        make: Callable[[Any], ReplayBuffer],
        seed: list[int],
        control: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(control, clock)
        self.make = make
        self.restart(seed)

    def restart(self, seed: list[int]) -> None:
        """Forgets all rows."""
        self.buffer = self.make(np.random.SeedSequence(seed))
        self.priority_versions = np.zeros(self.buffer.capacity, dtype=np.int64)

    def report(self) -> Report:
        """The current report of this shard."""
        buffer = self.buffer
        return Report(
            buffer.num_rows,
            min(buffer.end, buffer.capacity) / buffer.capacity,
            buffer.nbytes,
            buffer.total_weight,
            buffer.num_gaps,
        )


def add(shard: ReplayShard, fragment: Fragment) -> Stored:
    """Runs in a shard: stores a fragment, with the priorities that the sampler has computed. A row
    whose window is cut off by a gap in the stream gets the largest priority so far."""
    buffer, batch = shard.buffer, fragment.batch
    begin = buffer.end
    with shard.phase("insert"):
        num_rows = buffer.add(batch, fragment.priorities)
        places = np.arange(begin, buffer.end) % buffer.capacity
        shard.priority_versions[places] = batch.version
    return Stored(num_rows, shard.report())


def draw(shard: ReplayShard, num_rows: int, beta: float) -> Batch:
    """Runs in a shard: draws a batch. `beta` is the exponent of the importance weights."""
    buffer = shard.buffer
    with shard.phase("draw"):
        buffer.beta = buffer.final_beta = beta
        rows = buffer.sample(num_rows)
        versions = shard.priority_versions[rows.indices % buffer.capacity]
    return Batch(rows, buffer.end - 1 - rows.indices, versions, shard.report())


def set_priorities(
    shard: ReplayShard, indices: np.ndarray, priorities: np.ndarray, version: int
) -> Report:
    """Runs in a shard: sets the new priorities `[B]` of a batch's rows. Skips rows that were
    overwritten since the batch was drawn."""
    buffer = shard.buffer
    with shard.phase("prioritize"):
        buffer.update_priorities(indices, priorities)
        kept = indices[indices >= buffer.end - buffer.capacity]
        shard.priority_versions[kept % buffer.capacity] = version
    return shard.report()


def forget(shard: ReplayShard, seed: list[int]) -> Report:
    """Runs in a shard: drops all rows, after a restore."""
    shard.restart(seed)
    return shard.report()


class ReplayShards(ProcessGroup):
    """The shards of a run. Chooses the shard that draws the next batch.

    They share the transport of the workers. A shard that fails is replaced by an empty one.

    Args:
        workers: the samplers.
        config: an `AsyncReplayConfig`.

    Attributes:
        reports: the last report of each shard that is up and has answered.
        num_rows_lost: rows of shards that have failed.
        busy_s: seconds that each shard has worked, by index and phase.
    """

    def __init__(self, workers: WorkerSet, config: Any) -> None:
        resources: dict[str, Any] = {
            "num_cpus_per_worker": config.num_cpus_per_replay_shard,
            "num_gpus_per_worker": 0.0,
            "custom_resources_per_worker": {},
            "memory_per_worker": 0,
            "min_workers": None,
        }
        options = workers.config.rollout.model_copy(update=resources)
        super().__init__(workers.transport, options, "replay shard")
        policy: Any = workers.config.policy
        self._make = functools.partial(
            config.new_buffer, policy, num_shards=config.num_replay_shards
        )
        self._workers = workers
        self.reports: dict[WorkerHandle, Report] = {}
        self.num_rows_lost = 0
        self.busy_s: dict[int, Counter[str]] = {}
        self._turn: Counter[int] = Counter()  # by index. See `next_to_draw`
        for _ in range(config.num_replay_shards):
            self._add_process()

    def _start_process(self, index: int) -> WorkerHandle:
        arguments = self._make, self.seed_of(index)
        options = {"num_cpus": self.options.num_cpus_per_worker}
        name = f"{self.who} {index}"
        channel = self.transport.start(ReplayShard, arguments, options, name)
        return WorkerHandle(index, channel, self.clock())

    def seed_of(self, index: int) -> list[int]:
        """Seed of a shard's draws. It is new for each replacement and in each restored run."""
        restarts = self.restart_counts.get(index, 0)
        config = self._workers.config
        return [config.seed, index, restarts, config.restore_count]

    def of_sampler(self, index: int) -> WorkerHandle:
        """The shard that stores all fragments of a sampler. It must always be the same one, because
        windows go on from one fragment to the next. The shard may still be starting."""
        return self.remote[(index - 1) % len(self.remote)]

    def note(self, shard: WorkerHandle, report: Report) -> None:
        """Keeps the report of a shard's answer."""
        if not shard.removed:
            self.reports[shard] = report

    def count(self, reply: Reply) -> None:
        """Counts the seconds of a call."""
        self.busy_s.setdefault(reply.worker.index, Counter()).update(reply.counts.seconds)

    def drop_lost(self) -> bool:
        """Forgets the reports of shards that were replaced. Returns whether there were any."""
        lost = [shard for shard in self.reports if shard.removed]
        for shard in lost:
            self.num_rows_lost += self.reports.pop(shard).num_rows
        return bool(lost)

    def forget_all(self) -> dict[WorkerHandle, list[int]]:
        """Forgets all reports.

        Returns:
            the shards that are up, with their next seed. The caller tells them to forget their
            rows. All other shards start without rows.
        """
        self.reports.clear()
        self._turn.clear()
        return {shard: self.seed_of(shard.index) for shard in self.remote if shard.up}

    @property
    def num_rows(self) -> int:
        """Rows in all shards, by their last reports."""
        return sum(report.num_rows for report in self.reports.values())

    def next_to_draw(self) -> WorkerHandle | None:
        """The shard that draws the next batch. None if no shard has a row.

        Shards take turns in proportion to their `weight`, so each row is drawn as often as from one
        buffer that holds all rows.
        """
        weights = {shard: r.weight for shard, r in self.reports.items() if r.weight > 0.0}
        total = sum(weights.values())
        if not weights:
            return None
        for shard, weight in weights.items():
            self._turn[shard.index] += weight / total  # type: ignore[assignment]
        chosen = max(weights, key=lambda shard: (self._turn[shard.index], -shard.index))
        self._turn[chosen.index] -= 1
        return chosen

    def extra_stats(self) -> dict[str, Any]:
        """Numbers for all shards together, and for each shard."""
        faults = self.stats()
        return {
            "num_replay_shards_up": faults["num_healthy_workers"],
            "num_replay_shard_restarts": self.faults.num_restarts,
            **{f"num_replay_shard_{kind}": faults[f"num_worker_{kind}"] for kind in _FAILURES},
            "last_replay_shard_failure": faults["last_failure"],
            "num_rows_lost": self.num_rows_lost,
            "replay_shards": {str(shard.index): self._stats_of(shard) for shard in self.remote},
        }

    def _stats_of(self, shard: WorkerHandle) -> dict[str, float]:
        report = self.reports.get(shard, Report())
        busy_s = self.busy_s.get(shard.index, Counter())
        return {
            "num_rows": report.num_rows,
            "fill": report.fill,
            "weight": report.weight,
            "num_gaps": report.num_gaps,
            **{f"{phase}_s": busy_s[phase] for phase in ("insert", "draw", "prioritize", "other")},
        }
