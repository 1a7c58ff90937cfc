"""AsyncSamples: the driver learns from the first fragments that arrive (IMPALA, APPO).

This is the data flow of IMPALA (Espeholt et al., 2018) and of RLlib's APPO. With the default
options, workers rarely wait for the driver, and the lag of samples is not bounded. Policies such as
IMPALA and APPO correct for the lag in their losses, with V-trace or with PPO's importance ratio.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, ClassVar

import pydantic

from polopt.common.config import Automatic, ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.number import declare
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.collection_checks import check_central_gradients
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.sync_samples import PEAKS
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.gathering import Fragments, check_batch, num_fragments
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: A margin for the estimated end of a fragment. The driver requests the next fragment this much
#: earlier. So a worker does not wait if its fragment ends a little before the estimated time.
SOON_S = 0.05


class AsyncSamplesConfig(OptimizerConfig):
    """Options of `AsyncSamples`.

    Attributes:
        train_batch_size: number of environment steps of one batch, rounded up to whole fragments.
            None means one fragment.
        max_rollout_lag: maximum lag of a fragment when the driver learns from it. The lag is the
            number of batches that the driver has learned from since it sent the weights for the
            fragment. To keep this bound, workers wait. No fragment is dropped. With 0, and with one
            fragment from each worker in a batch, results equal the results of `sync_samples` bit
            for bit. None means no bound.
        max_requests_in_flight_per_worker: the largest number of fragments that the driver requests
            from a worker at once. With 2, the driver requests the next fragment if the current
            fragment may end while the driver learns. So the worker does not have to wait until the
            driver has finished learning.
    """

    train_batch_size: Automatic = pydantic.Field(default=None, ge=0, le=10**8)
    max_rollout_lag: int | None = pydantic.Field(default=None, ge=0, le=1000)
    max_requests_in_flight_per_worker: int = pydantic.Field(default=2, ge=1, le=1000)


class AsyncSamples(PolicyOptimizer):
    """Learns from the first fragments that arrive. The driver requests a worker's next fragment
    before the current fragment ends, if the options allow this. So the worker samples while the
    driver learns.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="impala",
            optimizer={"name": "async_samples", "train_batch_size": 500, "max_rollout_lag": 4},
            num_workers=4,
        )

    Results usually depend on timing. `max_rollout_lag` describes the exception. If a worker fails,
    its replacement samples the pending fragments of this worker, with the weights that are current
    when the replacement has started.
    """

    name = "async_samples"
    numbers = (
        *PEAKS,
        *declare("""
            num_batches (batches, counter): batches from which the policy learned
            num_fragments_waiting (fragments, total): fragments that had already arrived when the
                driver began to gather a batch, summed over batches
        """),
    )
    config_class = AsyncSamplesConfig
    config: AsyncSamplesConfig
    phases: ClassVar[tuple[str, ...]] = ("broadcast", "sample", "learn")

    def __init__(self, workers: WorkerSet, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.per_worker = self.config.max_requests_in_flight_per_worker
        self.calls.check = check_batch
        self.fragments = Fragments(self.calls, workers)
        self._num_requested = 0
        self._requested: Counter[int] = Counter()  # number of the last request, by worker index
        self._num_batches = self._num_waiting = 0
        self._sample_s: dict[int, float] = {}  # duration of the last fragment, by worker index
        self._learn_s = 0.0  # duration of learning from the last batch
        self._sample_peak = 0.0  # environment steps/s

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        if rollout.collection == "overlapped":
            raise ConfigError(
                "key 'collection': got 'overlapped' with optimizer 'async_samples', which always "
                "collects while it learns. Allowed: 'async', or optimizer 'sync_samples'"
            )
        check_central_gradients(rollout.model_copy(update={"collection": "async"}))

    def step(self) -> StepResult:
        before = self.metrics.counts()
        rows = self.config.train_batch_size
        size = num_fragments(self.workers.config, rows, default=1)
        replies: list[Reply] = []
        with self.timers["sample"]:
            self.calls.receive_ended()
        self._num_batches += 1
        self._num_waiting += len(self.calls.kept)
        while len(replies) < size:
            with self.timers["broadcast"]:
                self._request(len(replies), size)
            with self.timers["sample"]:
                replies.append(self._next(size - len(replies), size))
        sampled_s = 0.0
        for reply in replies:
            seconds = self._sample_s[reply.worker.index] = sum(reply.counts.seconds.values())
            sampled_s += seconds
        with self.timers["broadcast"]:
            self._request(size, size)
        # Sorting makes results with a bound of 0 equal to results of `sync_samples`.
        replies.sort(key=lambda reply: reply.order)
        self.calls.count(replies)
        batch = SampleBatch.concat([reply.value for reply in replies])
        if sampled_s > 0.0:
            # The rate is computed from the workers' seconds, and not from the driver's waiting
            # time, which is 0 if fragments queue.
            rate = batch.agent_steps * len(self.workers.up()) / sampled_s
            self._sample_peak = max(self._sample_peak, rate)
        began_s = self.workers.clock()
        with self.timers["learn"]:
            self.learn(batch)
        self._learn_s = self.workers.clock() - began_s
        self.timers["learn"].push_rows(batch.agent_steps)
        return self.metrics.counts_since(before)

    def _request(self, taken: int, size: int) -> None:
        """Requests as many fragments as the options allow. Workers with the fewest requested
        fragments come first.

        The fragments that the driver has not learned from are numbered k = 0, 1, ... With `size`
        fragments in a batch, the driver learns from fragment k after `k // size` further batches.
        This is the lag of the fragment.

        If a worker still samples a fragment, the driver requests another fragment only if the
        current fragment may end while the driver learns. An earlier request would only increase the
        lag of its fragment, and leave fewer requests for faster workers. With a bound of 0, this
        rule does not apply, because results must not depend on timing.

        Args:
            taken: number of fragments of the current batch that were already taken.
            size: number of fragments in a batch.
        """
        bound, workers = self.config.max_rollout_lag, self.workers.up()
        ahead = taken + self.calls.num_pending + len(self.calls.kept)
        # `num_of` includes fragments that wait in the driver. Otherwise, the number of these
        # fragments would grow with each drain.
        work = {handle: self.fragments.num_of(handle) for handle in workers}
        ends_s = self._ends_s(workers)
        # `_learn_s` counts twice. First, the driver cannot send requests while it learns. Second,
        # if a reply arrives while the driver learns, the driver receives it up to `_learn_s` late.
        # The worker's next fragment may then end up to `_learn_s` earlier than `ends_s` says.
        soon_s = math.inf if bound == 0 else self.workers.clock() + 2 * self._learn_s + SOON_S
        while bound is None or ahead // size <= bound:
            free = [
                handle
                for handle in workers
                if work[handle] < self.calls.per_worker and ends_s[handle] <= soon_s
            ]
            if not free:
                return
            handle = min(free, key=lambda w: (work[w], self._requested[w.index]))
            self.fragments.request(handle)
            ahead += 1
            work[handle] += 1
            ends_s[handle] += self._sample_s.get(handle.index, 0.0)
            self._num_requested += 1
            self._requested[handle.index] = self._num_requested

    def _ends_s(self, handles: list[WorkerHandle]) -> dict[WorkerHandle, float]:
        """Returns the time at which each worker will probably end its last requested fragment, on
        the clock of `self.workers`. Assumes that each fragment takes as long as the last fragment
        of the same worker from which the driver has learned."""
        ends_s: dict[WorkerHandle, float] = {}
        for call in self.calls.pending():
            handle = call.worker
            began_s = ends_s.get(handle, call.began_s)
            ends_s[handle] = began_s + self._sample_s.get(handle.index, 0.0)
        now_s = self.workers.clock()
        return {handle: ends_s.get(handle, now_s) for handle in handles}

    def _next(self, left: int, size: int) -> Reply:
        """Waits for the next fragment of the batch. Does not count its reply yet.

        Takes the first fragment that has arrived. Skips a fragment if taking it would make the lag
        of an older fragment exceed the bound. The older fragment may still be pending.

        Args:
            left: number of fragments that the batch still needs.
            size: number of fragments in a batch.
        """
        bound = self.config.max_rollout_lag

        def may_take(reply: Reply) -> bool:
            return bound is None or _fits(self._ages_without(reply), left - 1, size, bound)

        return self.calls.first(may_take, count=False)

    def _ages_without(self, reply: Reply) -> list[int]:
        """Returns the ages of all other fragments that have arrived or are pending. See `_age`."""
        kept = [self._age(one.value.version) for one in self.calls.kept if one is not reply]
        return [*kept, *(self._age(call.version) for call in self.calls.pending())]

    def _age(self, version: int) -> int:
        """Returns the number of batches that the driver has learned from since its weights had this
        version."""
        return self.metrics.rollouts.since(version)

    def extra_stats(self) -> dict[str, Any]:
        return {
            "sample_peak_throughput": self._sample_peak,
            "learn_peak_throughput": self.timers["learn"].peak_rows_per_s,
            "num_batches": self._num_batches,
            "num_fragments_waiting": self._num_waiting,
        }


def _fits(ages: list[int], left: int, size: int, bound: int) -> bool:
    """Returns True if the driver can learn from all fragments of these ages within the bound, if it
    takes the oldest fragments first.

    Args:
        ages: ages of the fragments.
        left: number of fragments that the current batch can still take.
        size: number of fragments in each later batch.
        bound: maximum lag.
    """
    return all(
        age + (0 if i < left else 1 + (i - left) // size) <= bound
        for i, age in enumerate(sorted(ages, reverse=True))
    )
