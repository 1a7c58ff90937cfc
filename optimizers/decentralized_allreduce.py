"""DecentralizedAllReduce: workers sample, and learn together by all-reduce of gradients (DD-PPO).

The strategy follows Wijmans et al., 2020. A rank is a worker of the group that learns together.
Samples and gradients do not pass through the driver. The driver starts rounds, ends the fragments
of slow ranks (stragglers) early, and forms a new group after failures (`rank_group.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import pydantic
import torch

from polopt.common.config import ConfigError
from polopt.common.weights import Weights
from polopt.metrics.number import declare
from polopt.metrics.optimizer_stats import StepResult
from polopt.optimizers.collection_checks import check_collection, check_unused
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.optimizers.rank_group import RankGroup, checksum, numbers_of
from polopt.policies.learning.weight_updater import Updates
from polopt.rollouts.rollout_config import RolloutConfig, sockets_for_zmq
from polopt.rollouts.transport.collective import GroupBroken, TimedReducer
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle

logger = logging.getLogger("polopt")
#: The seconds in which the other ranks must answer after the all-reduce of one rank has timed out.
#: The driver adds the time between the first and the last reply to `sample_and_keep`.
BREAK_GRACE_S = 1.5
#: The driver compares the weights of all ranks after each `CHECKSUM_INTERVAL` rounds. Each rank
#: hashes its own weights, which takes some milliseconds for a million parameters.
CHECKSUM_INTERVAL = 10
#: The largest relative difference of weights between ranks. Small differences can occur because
#: ranks on different processors may round differently. A larger difference is an error.
MAX_DIFFERENCE = 1e-4


class DecentralizedAllReduceConfig(OptimizerConfig):
    """Options of `DecentralizedAllReduce`.

    Attributes:
        backend: how gradients are summed. `socket` uses sockets within one node, and suits small
            neural networks. `gloo` and `nccl` are backends of torch.distributed. `auto` uses `nccl`
            if each worker has its own GPU. Otherwise it uses `gloo` for gradients above 1 MiB, for
            workers on several nodes and with `transport: ray`, and `socket` in all other cases.
        keep_local_weights_in_sync: if True, the driver receives the weights once per step. If
            False, the driver fetches the weights when it saves a checkpoint.
        fraction_workers: once this share of the workers has finished sampling, the fragments of
            the other workers end early. This is the paper's preemption threshold. With 1, the round
            waits for all workers. With smaller values, results can depend on timing. With two
            workers, any share above 0.5 has the same effect as 1.
        fraction_samples: a fragment that ends early has at least this share of its steps.
        allreduce_timeout_s: time limit of each all-reduce. After this time the group is broken, and
            the driver forms a new group.
    """

    backend: Annotated[
        Literal["auto", "socket", "gloo", "nccl"], pydantic.BeforeValidator(sockets_for_zmq)
    ] = "auto"
    keep_local_weights_in_sync: bool = True
    fraction_workers: float = pydantic.Field(default=0.6, gt=0.0, le=1.0)
    fraction_samples: float = pydantic.Field(default=0.25, ge=0.0, le=1.0)
    allreduce_timeout_s: float = pydantic.Field(default=60.0, gt=0.0, le=1e7)

    renamed: ClassVar[Mapping[str, str]] = {
        "preemption_threshold": "fraction_workers",
        "min_fragment_share": "fraction_samples",
    }
    removed: ClassVar[Mapping[str, str]] = {
        "checksum_interval": f"the weights of all ranks are compared every {CHECKSUM_INTERVAL} "
        "rounds, which takes so little time that it needs no option",
    }

    @classmethod
    def of_checkpoint(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Leaves out `checksum_interval`, which did not change what a run learns."""
        return {key: value for key, value in options.items() if key != "checksum_interval"}


class Learned(NamedTuple):
    """The report of a rank about its learning in one round.

    Attributes:
        updates: number of updates that the rank made.
        skipped_updates: number of updates that all ranks skipped because the gradient was not
            finite, or was too large.
        weights: the rank's weights after the round, if the call requested them.
        checksum: SHA-256 of the weights and of the normaliser's moments, if the call requested it.
        broken: the reason why this rank could not finish the round. In this case its last gradient
            is lost, and the ranks may differ by one update. None if the rank finished the round.
    """

    updates: int
    skipped_updates: int
    weights: Weights | None = None
    checksum: str | None = None
    broken: str | None = None


def sample_and_keep(worker: RolloutWorker) -> None:
    """Runs in a rank: samples a batch, and keeps it for `learn`."""
    worker.state["batch"] = worker.next_batch()


def learn(
    worker: RolloutWorker, env_steps: int, want_weights: bool, want_checksum: bool
) -> Learned:
    """Runs in a rank: learns from the batch together with the other ranks.

    Args:
        worker: the rank.
        env_steps: number of environment steps of all workers before this round. The policy's
            schedules depend on this number.
        want_weights: if True, return the weights.
        want_checksum: if True, return the SHA-256 of the weights and of the normaliser's moments.
    """
    policy, batch = worker.policy, worker.state.pop("batch", None)
    if batch is None or "group" not in worker.state:
        # The call of `sample_and_keep` failed. The reply to it carries this failure to the driver.
        return Learned(0, 0, broken="this rank has no batch")
    updates = Updates(policy)
    reducer = TimedReducer(worker.state["group"], lambda: worker.phase("allreduce"))
    broken = None
    try:
        sampled = torch.tensor([batch.env_steps])
        with worker.phase("skew"):  # this sum waits for the rank that finishes sampling last
            worker.state["group"].sum_(sampled)
        policy.env_steps = env_steps + int(sampled[0])
        worker.learn(batch, reducer)
    except GroupBroken as error:
        broken = str(error)
    return Learned(
        updates.num,
        updates.skipped,
        policy.get_weights() if want_weights and broken is None else None,
        checksum(worker) if want_checksum and broken is None else None,
        broken,
    )


class DecentralizedAllReduce(PolicyOptimizer):
    """All workers sample, and then all workers learn. For each minibatch, the workers sum their
    flat gradients by all-reduce, and each worker applies the same update.

        polopt.PolicyOptimizerTrainer(
            env="CartPole-v1",
            policy="ppo",
            optimizer={"name": "decentralized_allreduce", "fraction_workers": 0.6},
            num_workers=4,
        )

    A step requests the next round before it returns, so workers do not wait for the driver. If a
    worker fails, the rest of the round is lost. The other workers keep the updates that they have
    made, and form a new group. A replacement joins in a later group, once it has started.
    """

    name = "decentralized_allreduce"
    numbers = declare("""
        allreduce_backend (text): the backend that sums the gradients: `socket`, `gloo` or `nccl`
        num_rounds (rounds, counter): rounds of sampling and learning
        num_broken_rounds (rounds, total): rounds that broke because a rank was lost
        num_checksums (comparisons, total): comparisons of the ranks' weights
        num_resynchronized (comparisons, total): comparisons that found a difference caused by
            rounding. After such a comparison, all ranks get the weights of one rank
        num_ranks (ranks): ranks in the group now
    """)
    config_class = DecentralizedAllReduceConfig
    config: DecentralizedAllReduceConfig
    phases: ClassVar[tuple[str, ...]] = ("group", "sample", "learn")
    worker_phases: ClassVar[tuple[str, ...]] = ("allreduce", "skew")
    after_failure = "drop"  # the group is then broken, so no other rank can do the work

    def __init__(self, workers: Any, config: OptimizerConfig) -> None:
        super().__init__(workers, config)
        self.calls.per_worker = 2
        timeout_s = self.config.allreduce_timeout_s
        self.group = RankGroup(workers, self.config.backend, timeout_s)
        self.stragglers = Stragglers(self.config.fraction_workers, self.config.fraction_samples)
        # The time between the first and the last reply to `sample_and_keep` in a round.
        self._skew_s = 0.0
        self.num_rounds = 0
        self.num_broken_rounds = 0
        self._num_skipped_updates = 0
        self.num_checksums = 0
        self.num_resynchronized = 0

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        if config.backend == "nccl" and rollout.num_gpus_per_worker < 1.0:
            raise ConfigError(
                f"key 'backend': got 'nccl' with num_gpus_per_worker={rollout.num_gpus_per_worker}"
                ". Allowed: 'socket', 'gloo' or 'auto', or a GPU for each worker"
            )
        check_collection("each worker", "num_workers_below", rollout)
        why = "all-reduce sums gradients in place and cannot compress them"
        check_unused(rollout, why, "compress_gradients", "topk_share")

    @classmethod
    def check_evaluation(cls, config: Any) -> None:
        if not config.keep_local_weights_in_sync:
            raise ConfigError(
                "key 'keep_local_weights_in_sync': got False with evaluation_interval, but "
                "evaluation needs the current weights in the driver. Allowed: True"
            )

    def step(self) -> StepResult:
        before = self.metrics.counts()
        self._request_round()
        with self.timers["sample"]:
            sampled = self._await_samples()
        with self.timers["learn"]:
            self._finish_round(sampled, self._await_learning())
        self._request_round()
        return self.metrics.counts_since(before)

    def _request_round(self) -> None:
        """Sends the calls `sample_and_keep` and `learn` to each rank. A rank can then begin to
        learn after sampling without waiting for the driver. Does nothing while a round is
        pending."""
        if not self.calls.idle:
            return
        with self.timers["group"]:
            self.group.ensure()
            self.num_rounds += 1
            want_checksum = self.num_rounds % CHECKSUM_INTERVAL == 0
            env_steps = self.metrics.num_env_steps_sampled
            limit_s = self.workers.config.rollout.worker_timeout_s
            for rank, handle in enumerate(self.group.ranks):
                want_weights = rank == 0 and self.config.keep_local_weights_in_sync
                self.calls.send(handle, sample_and_keep, tag="sample")
                self.calls.send(
                    handle,
                    learn,
                    env_steps,
                    want_weights,
                    want_checksum,
                    tag="learn",
                    # Learning also includes the time that an all-reduce waits for other ranks.
                    timeout_s=limit_s + self.config.allreduce_timeout_s,
                )
        self._learned: list[Reply] = []

    def _await_samples(self) -> list[Reply]:
        """Waits until every rank has sampled or failed. Ends the fragments of stragglers early.
        Returns the replies of the ranks that have sampled."""
        sampled: list[Reply] = []
        first_s = last_s = 0.0
        late, hurried = self._sampling(), False
        while late:
            if not hurried and self.stragglers.remain(len(self.group.ranks), len(late)):
                length = self.workers.config.rollout.rollout_fragment_length
                self.calls.stop_early(list(late.values()), self.stragglers.keep_steps(length))
                hurried = True
            reply = self.calls.next(count=False)
            if reply.failure is None and reply.tag == "sample":
                last_s = self.workers.clock()
                first_s = first_s or last_s
                sampled.append(reply)
                del late[reply.worker]
            else:
                self._keep(reply)
                late = self._sampling()
        self._skew_s = last_s - first_s
        self.timers["skew"].push(self._skew_s)
        return sampled

    def _sampling(self) -> dict[WorkerHandle, Reply]:
        """Returns the pending call of `sample_and_keep` of each rank that has one."""
        return {call.worker: call for call in self.calls.pending() if call.tag == "sample"}

    def _await_learning(self) -> list[Reply]:
        """Waits until every rank has learned or failed. Returns the replies of the ranks that have
        learned, in the order of `Reply.order`."""
        while self.calls.num_pending:
            self._keep(self.calls.next(count=False))
        return sorted(self._learned, key=lambda reply: reply.order)

    def _keep(self, reply: Reply) -> None:
        """Keeps the reply of a rank that has learned. If the reply is a failure, marks the group as
        broken. After a failure, the all-reduces of the other ranks fail, too, and their replies
        report this."""
        if reply.failure is not None:
            self.group.broken = True
            return
        self._learned.append(reply)
        waited_s = reply.counts.seconds.get("allreduce", 0.0) + reply.counts.seconds.get(
            "skew", 0.0
        )
        if reply.value.broken and waited_s >= self.config.allreduce_timeout_s:
            # The all-reduce of this rank timed out, so another rank hangs. The all-reduces of the
            # remaining ranks time out at most `_skew_s` later. A rank that has not answered by then
            # is the rank that hangs.
            #
            # If a rank dies, the all-reduces of the other ranks usually fail long before the
            # timeout, so this code does not run. The other ranks may then still be computing a
            # gradient, and keep their deadlines.
            for handle in self.group.ranks:
                if self.calls.num_calls_of(handle) == 1:  # the worker has sampled
                    self.calls.tighten_deadline(handle, BREAK_GRACE_S + self._skew_s)

    def _finish_round(self, sampled: list[Reply], learned: list[Reply]) -> None:
        """Counts the samples of a round, in order of worker index. If all ranks have finished the
        round, also counts the learning, and sets the weights of the driver's policy if a rank sent
        its weights."""
        self.calls.count(sorted(sampled, key=lambda reply: reply.order))
        lost = len(learned) < len(self.group.ranks)
        if lost or self.group.broken or any(reply.value.broken for reply in learned):
            # The rest of this round is lost, and learning in this round is not counted. The updates
            # that ranks have made are not lost, because the new group starts from the latest
            # version.
            self.group.broken = True
            self.num_broken_rounds += 1
            self.calls.drop(learned)
            return
        self.calls.count(learned)
        seconds = [reply.counts.seconds.get("allreduce", 0.0) for reply in learned]
        self.timers["allreduce"].push(sum(seconds) / len(seconds))
        first: Learned = learned[0].value
        self.group.version = learned[0].counts.version
        self._num_skipped_updates += first.skipped_updates
        self.add_updates_of_workers(first.updates, self.group.version)
        self._compare({reply.worker.index: reply.value.checksum for reply in learned})
        if first.weights is not None:
            self.policy.set_weights(first.weights)

    def _compare(self, checksums: Mapping[int, str | None]) -> None:
        """Compares the weights of the ranks by their checksums. If the weights differ only by
        rounding, all ranks will get the weights of one rank.

        Raises:
            RuntimeError: the weights differ by more than `MAX_DIFFERENCE`.
        """
        sums = {index: value for index, value in checksums.items() if value is not None}
        if not sums:
            return
        self.num_checksums += 1
        if len(set(sums.values())) == 1:
            return
        weights = list(self.group.call_ranks(RolloutWorker.get_weights).values())
        if not weights:  # all ranks have failed, so the next `ensure` forms a new group or raises
            self.group.broken = True
            return
        difference = max(
            _relative_difference([numbers[i] for numbers in map(numbers_of, weights)])
            for i in range(len(numbers_of(weights[0])))
        )
        if not difference <= MAX_DIFFERENCE:
            raise RuntimeError(
                f"the ranks have different weights after round {self.num_rounds}. The relative "
                f"difference is {difference:.2g}. SHA-256 of the weights by worker: "
                f"{ ({index: value[:12] for index, value in sums.items()}) }"
            )
        if self.num_resynchronized == 0:
            logger.warning(
                "the weights of the ranks have a relative difference of %.2g, probably because "
                "their processors round differently. All ranks get the weights of one rank. This "
                "warning appears once. Results count each case as num_resynchronized",
                difference,
            )
        self.num_resynchronized += 1
        self.group.broken = True  # the next `ensure` sends the state of one rank to all ranks

    def drain(self) -> None:
        """Waits for the pending round, and finishes it."""
        if not self.calls.idle:
            self._finish_round(self._await_samples(), self._await_learning())

    def get_state(self) -> dict[str, Any]:
        """See `PolicyOptimizer.get_state`. If there is a group, first fetches the state of the
        policy, including its torch optimizer, from a rank."""
        self.drain()
        if self.group.ranks:
            self.policy.set_state(self.group.fetch_policy_state())
        return super().get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self.group.version = self.policy.version
        self.group.restart_from_local()

    @property
    def num_skipped_updates(self) -> int:
        """The number of updates that all ranks skipped because the gradient was not finite, or was
        too large. This number comes from replies, because the driver's policy applies no
        gradients."""
        return self._num_skipped_updates

    def extra_stats(self) -> dict[str, Any]:
        return {
            "allreduce_backend": self.group.backend,
            "num_rounds": self.num_rounds,
            "num_broken_rounds": self.num_broken_rounds,
            "num_checksums": self.num_checksums,
            "num_resynchronized": self.num_resynchronized,
            "num_ranks": len(self.group.ranks),
        }


def _relative_difference(arrays: list[np.ndarray]) -> float:
    """Returns the largest difference between the first array and any other array, divided by the
    largest absolute value in all arrays."""
    largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)
    difference = max(float(np.abs(array - arrays[0]).max(initial=0.0)) for array in arrays)
    return difference / max(largest, 1e-12)
