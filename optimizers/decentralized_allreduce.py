"""DecentralizedAllReduce: workers sample and learn together; gradients are all-reduced (DD-PPO).

Wijmans et al., 2020. Neither data nor gradients pass through the driver, which only starts rounds,
stops stragglers early and forms the group again after failures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from polopt.common.config import ConfigError
from polopt.common.data_faults import DataFaults
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.base import OptimizerConfig, PolicyOptimizer
from polopt.optimizers.rank_group import RankGroup
from polopt.optimizers.scheme import (
    Scheme,
    check_collection,
    check_remote_workers,
    check_unused,
    collection_of,
)
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import LearnInfo, RoundInfo, next_number
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.in_flight import Arrival

#: After the all-reduce of one rank has timed out, time for the other ranks to answer.
BREAK_GRACE_S = 1.5


class DecentralizedAllReduceConfig(OptimizerConfig):
    """Options of `DecentralizedAllReduce`.

    Attributes:
        backend: what sums gradients. `zmq`: ZeroMQ, authenticated, and encrypted between nodes; for
            small networks. `gloo` and `nccl`: those of torch.distributed. `auto`: `nccl` where
            workers have GPUs, `gloo` for gradients above 1 MiB and with `transport: ray`, else
            `zmq`.
        keep_local_weights_in_sync: fetch weights to the local worker once a step; else only when
            they are saved.
        preemption_threshold: once this share of workers has finished sampling, the others stop
            early. With 1 the round waits for all; then, and with two workers, results do not depend
            on timing.
        min_fragment_share: a fragment that stops early keeps at least this share of its steps.
        checksum_interval: rounds after which all workers' weights are compared; 0: never.
        allreduce_timeout_s: time limit of each all-reduce; after it, the group is broken.
    """

    backend: Literal["auto", "zmq", "gloo", "nccl"] = "auto"
    keep_local_weights_in_sync: bool = True
    preemption_threshold: float = pydantic.Field(0.6, gt=0.0, le=1.0)
    min_fragment_share: float = pydantic.Field(0.25, ge=0.0, le=1.0)
    checksum_interval: int = pydantic.Field(10, ge=0)
    allreduce_timeout_s: float = pydantic.Field(60.0, gt=0.0, le=1e7)


class DecentralizedAllReduce(PolicyOptimizer):
    """All workers sample, then all learn: the flat gradient of each minibatch is summed over them,
    and each applies the same update. The next round is launched before a step returns."""

    name = "decentralized_allreduce"
    config_class = DecentralizedAllReduceConfig
    config: DecentralizedAllReduceConfig
    phases: ClassVar[tuple[str, ...]] = ("group", "sample", "learn")
    worker_phases: ClassVar[tuple[str, ...]] = ("allreduce", "skew")

    def __init__(self, workers: Any, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        timeout_s = self.config.allreduce_timeout_s
        self.group = RankGroup(workers, self.health, self.config.backend, timeout_s)
        self.stragglers = Stragglers(
            self.config.preemption_threshold, self.config.min_fragment_share
        )
        self._skew_s = 0.0  # between the first and the last sample of this round
        self.num_rounds = 0
        self.num_broken_rounds = 0
        self.num_early_stopped = 0
        self._num_skipped_updates = 0
        self.num_checksums = 0
        fetched = self.config.keep_local_weights_in_sync
        workers.use_transport(self.policy.flat.grads.nbytes if fetched else 0)

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> Scheme:
        below, how = rollout.num_workers_below, rollout.collection
        check_remote_workers(cls.name, rollout)
        if config.backend == "nccl" and rollout.num_gpus_per_worker < 1.0:
            raise ConfigError(
                f"key 'backend': got 'nccl' with num_gpus_per_worker={rollout.num_gpus_per_worker}"
                ". Allowed: 'zmq', 'gloo' or 'auto', or a GPU for each worker"
            )
        check_collection("each worker", "num_workers_below", rollout)
        check_unused(
            "all-reduce sums gradients in place, without compression",
            compress_gradients=(rollout.compress_gradients, "none"),
        )
        return Scheme(collection_of(below, how), "parallel sync", "decentralized")

    def step(self) -> StepResult:
        before = self.metrics.counts()
        self._launch_round()
        with self.timers["sample"]:
            sampled = self._await_samples()
        with self.timers["learn"]:
            learned = self._await_learning()
            self._finish_round(sampled, learned)
        self._launch_round()
        return self.metrics.counts_since(before)

    def _launch_round(self) -> None:
        """Queues two calls to each rank, so that a rank goes from sampling to learning without a
        message from the driver. Has no effect while a round is pending."""
        if len(self.in_flight):
            return
        with self.timers["group"]:
            self.group.ensure()
            self._launch_on_ranks()

    def _launch_on_ranks(self) -> None:
        self.num_rounds += 1
        self._request = next_number()
        every = self.config.checksum_interval
        want_checksum = every > 0 and self.num_rounds % every == 0
        for rank, worker in enumerate(self.group.ranks):
            want_weights = rank == 0 and self.config.keep_local_weights_in_sync
            env_steps = self.metrics.num_env_steps_sampled
            sample = self.workers.call(worker, "sample_for_learning", self._request)
            learn = self.workers.call(worker, "learn", env_steps, want_weights, want_checksum)
            self.in_flight.launch(worker, sample, "sample")
            # An all-reduce also waits for other ranks.
            self.in_flight.launch(worker, learn, "learn", self.config.allreduce_timeout_s)
        self._learned: list[tuple[int, LearnInfo]] = []

    def _await_samples(self) -> list[RoundInfo]:
        """Waits until every rank has sampled or failed; stops the last ones early. The result is in
        order of worker index, so that it does not depend on the order of arrival."""
        sampled: dict[int, RoundInfo] = {}
        first_s = last_s = 0.0
        while "sample" in self.in_flight.tags():
            arrival = self.in_flight.wait()
            if arrival.failure is not None:
                self._replace(arrival)
            elif arrival.tag == "learn":
                self._keep(arrival)
            else:
                last_s = time.perf_counter()
                first_s = first_s or last_s
                sampled[arrival.worker.index] = arrival.value
                self._count_seconds(arrival)
                waited_for = len(self.group.ranks) - len(sampled)
                if self.stragglers.remain(len(self.group.ranks), waited_for):
                    self._stop_stragglers_early()
        self._skew_s = last_s - first_s
        self.timers["skew"].push(self._skew_s)
        return [sampled[index] for index in sorted(sampled)]

    def _stop_stragglers_early(self) -> None:
        length = self.workers.config.rollout.rollout_fragment_length
        # Ranks with two pending calls have not finished sampling.
        late = [worker for worker in self.group.ranks if self.in_flight.count(worker) == 2]
        self.stragglers.stop_early((worker, self._request, length) for worker in late)

    def _await_learning(self) -> list[tuple[int, LearnInfo]]:
        """Waits until every rank has learned or failed; `(worker index, result)` of each."""
        while len(self.in_flight):
            arrival = self.in_flight.wait()
            if arrival.failure is not None:
                self._replace(arrival)
            else:
                self._keep(arrival)
        return sorted(self._learned, key=lambda pair: pair[0])

    def _keep(self, arrival: Arrival) -> None:
        self._learned.append((arrival.worker.index, arrival.value))
        self._count_seconds(arrival)
        if arrival.value.broken and arrival.value.allreduce_s >= self.config.allreduce_timeout_s:
            # Its all-reduce timed out, so a rank hangs. The all-reduces of the others time out too,
            # later by the time that they sampled later. (The death of a rank is reported by Ray;
            # the other ranks may still be computing a gradient then.)
            for worker in self.group.ranks:
                if self.in_flight.count(worker) == 1:  # it has sampled
                    self.in_flight.tighten_deadline(worker, BREAK_GRACE_S + self._skew_s)

    def _count_seconds(self, arrival: Arrival) -> None:
        """Counts what a rank did with its time; sums over the group begin with a wait for the rank
        that samples last, the skew."""
        info, times = arrival.value, self.metrics.worker_times
        if isinstance(info, RoundInfo):
            times.add(arrival.worker.index, {"sample": info.sample_s}, info.env_steps)
            return
        parts = {
            "learn": info.learn_s - info.allreduce_s,
            "allreduce": info.allreduce_s - info.skew_s,
            "skew": info.skew_s,
        }
        times.add(arrival.worker.index, parts)
        if info.weights is not None:
            self.metrics.num_bytes_received += info.weights.flat.nbytes

    def _replace(self, arrival: Arrival) -> None:
        """Replaces a failed rank. The all-reduce of the other ranks fails, and they report it."""
        assert arrival.failure is not None
        self.workers.replace(arrival.worker, arrival.failure)
        self.group.broken = True

    def _finish_round(self, sampled: list[RoundInfo], learned: list[tuple[int, LearnInfo]]) -> None:
        length = self.workers.config.rollout.rollout_fragment_length
        self.num_early_stopped += sum(info.steps < length for info in sampled)
        for info in sampled:
            self.workers.faults.num_restarts_below += info.restarts_below
            if self.workers.faults.fragment(info.worker_index, info.faults):
                self.count_samples(info.env_steps, info.episodes)
        infos = [info for _, info in learned]
        if self.group.broken or any(info.broken for info in infos):
            # Updates that the other ranks made before are kept: the group is formed again from the
            # latest version. The rest of this round is lost.
            self.group.broken = True
            self.num_broken_rounds += 1
            return
        self._check_equal(learned)
        first = infos[0]
        self.timers["allreduce"].push(sum(info.allreduce_s for info in infos) / len(infos))
        for learning in infos:
            self.metrics.add_lag(learning.acted, learning.version)
        self.metrics.rollouts.tick(first.version + first.updates)
        self._count_skipped(learned)
        self._num_skipped_updates += first.skipped_updates
        env_steps = sum(info.env_steps for info in sampled) if first.updates else 0
        self.metrics.add_training(env_steps, first.updates, first.stats)
        if first.weights is not None:
            self.policy.set_weights(first.weights)

    def _count_skipped(self, learned: list[tuple[int, LearnInfo]]) -> None:
        """Counts updates that were skipped, by the rank whose gradient was not finite. All ranks
        skip the same updates."""
        log = self.workers.faults.fragments
        for index, info in learned:
            if info.non_finite_gradients:
                log.note(index, DataFaults(non_finite="gradient of a minibatch"))
        first = learned[0][1]
        rank_known = first.vetoed or any(info.non_finite_gradients for _, info in learned)
        if first.updates or rank_known or first.stats:
            why = "" if rank_known else "sum of the gradients"
            log.update(first.updates > 0, why=why)

    def _check_equal(self, learned: list[tuple[int, LearnInfo]]) -> None:
        sums = {index: info.checksum for index, info in learned if info.checksum is not None}
        if not sums:
            return
        self.num_checksums += 1
        if len(set(sums.values())) > 1:
            raise RuntimeError(
                f"the ranks have different weights in round {self.num_rounds}: SHA-256 by "
                f"worker { ({index: value[:12] for index, value in sums.items()}) }"
            )

    def drain(self) -> None:
        if len(self.in_flight):
            self._finish_round(self._await_samples(), self._await_learning())

    def get_state(self) -> dict[str, Any]:
        """As every optimizer's; the policy, torch optimizer included, is fetched from a rank."""
        self.drain()
        if self.group.ranks:
            self.policy.set_state(self.group.fetch_policy_state())
        return super().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.group.restart_from_local()

    @property
    def num_skipped_updates(self) -> int:
        """As all ranks have counted them; the driver's policy applies no gradient."""
        return self._num_skipped_updates

    def extra_stats(self) -> dict[str, Any]:
        return {
            "allreduce_backend": self.group.backend,
            "num_rounds": self.num_rounds,
            "num_broken_rounds": self.num_broken_rounds,
            "num_early_stopped": self.num_early_stopped,
            "num_checksums": self.num_checksums,
            "num_ranks": len(self.group.ranks),
        }
