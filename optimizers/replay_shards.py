"""`ReplayShards`: the processes that hold the rows of AsyncReplay.

`ReplayShards` runs in the driver. The functions of this file run in a shard. Like a worker, a shard
runs one call at a time, in the order in which the driver sent the calls.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.metrics.number import Number, declare
from polopt.policies.policy_group import DEFAULT_POLICY, learning
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.call_runner import CallRunner
from polopt.rollouts.workers.process_group import ProcessGroup
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: The names of kinds of failures in result keys.
_FAILURES = ("deaths", "hangs", "exceptions", "lost_arguments", "preemptions")
_PHASES = ("insert", "draw", "prioritize", "other")
#: The numbers of `ReplayShards.extra_stats`.
NUMBERS = (
    *declare("""
        num_replay_shards_up (shards, metric=replay_shards): shards that are up now
        num_replay_shard_restarts (shards, total): shards that were replaced
        num_replay_shard_deaths (failures, total): failures of shards of the kind `death`
        num_replay_shard_hangs (failures, total): failures of shards of the kind `hang`
        num_replay_shard_exceptions (failures, total): failures of shards of the kind `exception`
        num_replay_shard_preemptions (shards, total): shards that left because their node or their
            process had announced its end. Their rows are lost
        num_replay_shard_lost_arguments (fragments, total): fragments that were lost with their
            sampler
        last_replay_shard_failure (text): message of the last failure of a shard
        num_rows_lost (rows, total): rows that were lost with failed shards
        replay_shards/<shard>/num_rows (rows, metric=): rows in the shard
        replay_shards/<shard>/fill (share, metric=): share of the shard in use
        replay_shards/<shard>/weight (metric=): sum of the priorities of the rows of the shard, each
            to the power of alpha
        replay_shards/<shard>/num_gaps (fragments, metric=): fragments of the shard as in `num_gaps`
    """),
    *(
        Number(f"replay_shards/<shard>/{phase}_s", "s", f"time in the phase `{phase}`", metric="")
        for phase in _PHASES
    ),
)


class Fragment(NamedTuple):
    """A fragment that a sampler makes for its shard. With several policies, the sampler makes a
    dict with the fragment of each policy that learns.

    Attributes:
        batch: the fragment `[T, N]`.
        priorities: priorities `[K + T, N]` of rows. The first K steps are the last steps of the
            previous fragment. The priority is NaN if a row is not valid, or if the window of the
            row (the steps of its n-step return) needs later steps. None if all rows are drawn with
            the same probability.
    """

    batch: SampleBatch
    priorities: np.ndarray | None


class Report(NamedTuple):
    """The report of a shard about the buffer of a policy. Each answer of a shard contains a report
    for each policy.

    Attributes:
        num_rows: number of rows that the shard holds.
        fill: share of the shard's buffer that is in use.
        buffer_bytes: memory of the full buffer.
        weight: sum of the priorities of the rows that can be drawn, each to the power of alpha. If
            all rows are drawn with the same probability, the number of these rows. The number of
            draws from a shard is proportional to its weight.
        num_gaps: number of times that a worker's stream of fragments was interrupted.
    """

    num_rows: int = 0
    fill: float = 0.0
    buffer_bytes: int = 0
    weight: float = 0.0
    num_gaps: int = 0

    @classmethod
    def sum(cls, reports: Collection[Report]) -> Report:
        """Returns the sums over the buffers of several policies, and the mean of `fill`."""
        total = cls(*map(sum, zip(*reports, strict=True)))
        return total._replace(fill=total.fill / len(reports))


class Stored(NamedTuple):
    """The return value of `add`: the number of transitions that were stored and the report, for
    each policy."""

    num_rows: dict[str, int]
    reports: dict[str, Report]


class Batch(NamedTuple):
    """The return value of `draw`.

    Attributes:
        rows: the B rows that were drawn.
        ages: for each row, the number of rows that the shard has stored after this row.
        priority_versions: for each row, the version of the weights that computed its priority.
        reports: the report for each policy.
    """

    rows: Transitions
    ages: np.ndarray  # [B] int64
    priority_versions: np.ndarray  # [B] int64
    reports: dict[str, Report]


class ReplayShard(CallRunner):
    """Holds a part of the rows of a run, in its own process. Each policy has its own buffer.

    Args:
        make: for each policy, a function that returns an empty buffer for a seed.
        seed: seed of the draws.
        control: see `CallRunner`.
        clock: see `CallRunner`.

    Attributes:
        buffers: the buffer with the rows of each policy, by name.
        priority_versions: for each place in the buffer of a policy `[capacity]`, the version of the
            weights that computed the priority of the row in this place.
    """

    def __init__(
        self,
        make: Mapping[str, Callable[[Any], ReplayBuffer]],
        seed: list[int],
        control: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(control, clock)
        self.make = make
        self.restart(seed)

    def restart(self, seed: list[int]) -> None:
        """Drops all rows, and seeds the draws anew."""
        draws = np.random.SeedSequence(seed)
        self.buffers = {
            name: make(draws if place == 0 else draws.spawn(1)[0])
            for place, (name, make) in enumerate(self.make.items())
        }
        self.priority_versions = {
            name: np.zeros(buffer.capacity, dtype=np.int64) for name, buffer in self.buffers.items()
        }

    def reports(self) -> dict[str, Report]:
        """Returns the current report for each policy."""
        return {
            name: Report(
                buffer.num_rows,
                min(buffer.end, buffer.capacity) / buffer.capacity,
                buffer.nbytes,
                buffer.total_weight,
                buffer.num_gaps,
            )
            for name, buffer in self.buffers.items()
        }


def add(shard: ReplayShard, made: Fragment | dict[str, Fragment]) -> Stored:
    """Runs in a shard: stores a fragment with the priorities that the sampler has computed. If a
    gap in the sampler's stream of fragments cuts off the window of a row, this row gets the largest
    priority so far."""
    fragments = made if isinstance(made, dict) else {DEFAULT_POLICY: made}
    counts = {}
    with shard.phase("insert"):
        for name, fragment in fragments.items():
            buffer = shard.buffers[name]
            begin = buffer.end
            counts[name] = buffer.add(fragment.batch, fragment.priorities)
            places = np.arange(begin, buffer.end) % buffer.capacity
            shard.priority_versions[name][places] = fragment.batch.version
    return Stored(counts, shard.reports())


def draw(shard: ReplayShard, name: str, num_rows: int, beta: float) -> Batch:
    """Runs in a shard: draws a batch of `num_rows` rows of the policy `name`. `beta` is the
    exponent of the importance weights."""
    buffer = shard.buffers[name]
    with shard.phase("draw"):
        buffer.beta = buffer.final_beta = beta
        rows = buffer.sample(num_rows)
        versions = shard.priority_versions[name][rows.indices % buffer.capacity]
    return Batch(rows, buffer.end - 1 - rows.indices, versions, shard.reports())


def set_priorities(
    shard: ReplayShard, name: str, indices: np.ndarray, priorities: np.ndarray, version: int
) -> dict[str, Report]:
    """Runs in a shard: sets the new priorities `[B]` of the rows of a batch of the policy `name`.
    Skips rows that were overwritten after the batch was drawn."""
    buffer = shard.buffers[name]
    with shard.phase("prioritize"):
        buffer.update_priorities(indices, priorities)
        kept = indices[indices >= buffer.end - buffer.capacity]
        shard.priority_versions[name][kept % buffer.capacity] = version
    return shard.reports()


def forget(shard: ReplayShard, seed: list[int]) -> dict[str, Report]:
    """Runs in a shard: drops all rows. The driver calls this function after a restore."""
    shard.restart(seed)
    return shard.reports()


class ReplayShards(ProcessGroup):
    """Holds the driver's handles of the shards of a run. Also chooses the shard that draws the next
    batch.

    The shards share the transport of the workers. The replacement of a shard that fails is empty.

    Args:
        workers: the samplers.
        config: an `AsyncReplayConfig`.

    Attributes:
        reports: for each shard that is up and has answered a call, its last report for each policy.
        num_rows_lost: number of rows that were lost because shards have failed.
        busy_s: the seconds that each shard has worked, by index of the shard and by phase.
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
        self._make = {
            name: functools.partial(config.new_buffer, one, num_shards=config.num_replay_shards)
            for name, one in learning(workers.config.policy).items()
        }
        self._workers = workers
        self.reports: dict[WorkerHandle, dict[str, Report]] = {}
        self.num_rows_lost = 0
        self.busy_s: dict[int, Counter[str]] = {}
        # The number of draws that each shard is behind its share, by policy and index. See
        # `next_to_draw`.
        self._turn: Counter[tuple[str, int]] = Counter()
        for _ in range(config.num_replay_shards):
            self._add_process()

    def _start_process(self, index: int) -> WorkerHandle:
        arguments = self._make, self.seed_of(index)
        options = {"num_cpus": self.options.num_cpus_per_worker}
        name = f"{self.who} {index}"
        channel = self.transport.start(ReplayShard, arguments, options, name)
        return WorkerHandle(index, channel, self.clock())

    def seed_of(self, index: int) -> list[int]:
        """Returns the seed of a shard's draws. Each replacement and each restored run has a new
        seed."""
        restarts = self.restart_counts.get(index, 0)
        config = self._workers.config
        return [config.seed, index, restarts, config.restore_count]

    def of_sampler(self, index: int) -> WorkerHandle:
        """Returns the shard that stores all fragments of a sampler. Each sampler always has the
        same shard, because n-step returns can continue from one fragment to the next. The shard may
        still be starting."""
        return self.remote[(index - 1) % len(self.remote)]

    def note(self, shard: WorkerHandle, reports: dict[str, Report]) -> None:
        """Keeps the reports from a shard's answer."""
        if not shard.removed:
            self.reports[shard] = reports

    def count(self, reply: Reply) -> None:
        """Counts the seconds of a call to a shard."""
        self.busy_s.setdefault(reply.worker.index, Counter()).update(reply.counts.seconds)

    def drop_lost(self) -> bool:
        """Drops the reports of shards that have failed, and counts the rows of these shards as
        lost. Returns True if there were such reports."""
        lost = [shard for shard in self.reports if shard.removed]
        for shard in lost:
            self.num_rows_lost += Report.sum(self.reports.pop(shard).values()).num_rows
        return bool(lost)

    def forget_all(self) -> dict[WorkerHandle, list[int]]:
        """Drops all reports, after a restore.

        Returns:
            the shards that are up, each with its new seed. The caller must call `forget` in these
            shards. All other shards start without rows.
        """
        self.reports.clear()
        self._turn.clear()
        return {shard: self.seed_of(shard.index) for shard in self.remote if shard.up}

    def num_rows(self, name: str) -> int:
        """Returns the number of rows of a policy in all shards, from their last reports."""
        return sum(of_policies[name].num_rows for of_policies in self.reports.values())

    def totals(self) -> list[Report]:
        """Returns the report of each shard about the buffers of all policies."""
        return [Report.sum(of_policies.values()) for of_policies in self.reports.values()]

    def next_to_draw(self, name: str) -> WorkerHandle | None:
        """Returns the shard that draws the next batch of the policy `name`. None if no shard has
        rows to draw.

        Shards take turns in proportion to their `weight`. So, on average, each row is drawn as
        often as from a single buffer with all rows.
        """
        found = {s: reports[name].weight for s, reports in self.reports.items() if s.up}
        weights = {shard: weight for shard, weight in found.items() if weight > 0.0}
        total = sum(weights.values())
        if not weights:
            return None
        for shard, weight in weights.items():
            self._turn[name, shard.index] += weight / total  # type: ignore[assignment]
        chosen = max(weights, key=lambda shard: (self._turn[name, shard.index], -shard.index))
        self._turn[name, chosen.index] -= 1
        return chosen

    def extra_stats(self) -> dict[str, Any]:
        """Returns the numbers for results: for all shards together, and for each shard."""
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
        report = Report.sum(self.reports.get(shard, {DEFAULT_POLICY: Report()}).values())
        busy_s = self.busy_s.get(shard.index, Counter())
        return {
            "num_rows": report.num_rows,
            "fill": report.fill,
            "weight": report.weight,
            "num_gaps": report.num_gaps,
            **{f"{phase}_s": busy_s[phase] for phase in _PHASES},
        }
