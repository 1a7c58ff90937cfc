"""`GroupLearner`: a worker's part in decentralized learning by all-reduce (DD-PPO)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from polopt.common.sample_batch import SampleBatch
from polopt.common.tracing import TRACER
from polopt.policies.policy import Policy
from polopt.rollouts.sampling.requests import LearnInfo
from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.transport.endpoint import Address


class GroupLearner:
    """Membership in a group of ranks, and the batch to learn from next.

    Attributes:
        reducer: sums over the group; None outside of a group.
        batch: sampled, and not learned from yet.
    """

    def __init__(self) -> None:
        self.reducer: AllReducer | None = None
        self.batch: SampleBatch | None = None

    def listen(self, spec: GroupSpec, rank: int, device: str) -> Address | None:
        """Leaves the group before, and listens for the other ranks of the next one.

        Returns:
            the address at which they reach this rank; None for torch's groups.
        """
        self.leave()
        self.reducer = AllReducer(spec, rank, device, ray.util.get_node_ip_address())
        return self.reducer.address

    def join(self, addresses: Sequence[Any]) -> str | None:
        """Connects to the other ranks of the group that `listen` named.

        Args:
            addresses: of all ranks, by rank.

        Returns:
            None, or why the group was not formed. Not an exception: the cause is another rank, and
            an exception would cost this one its process, and what it has learned.
        """
        if self.reducer is None:
            return "join_group was called before listen_for_group"
        try:
            self.reducer.join(addresses)
        except GroupBroken as error:
            self.reducer = None
            return str(error)
        return None

    def leave(self) -> None:
        """Leaves the group, if there is one."""
        if self.reducer is not None:
            self.reducer.close()
            self.reducer = None

    def learn(
        self, policy: Policy, env_steps: int, want_weights: bool, want_checksum: bool
    ) -> LearnInfo:
        """Learns from `batch` together with the other ranks.

        If another rank dies or hangs meanwhile, the current gradient is dropped, and the result
        says that the group is broken; this rank may then be one update ahead of others.

        Args:
            policy: learns.
            env_steps: sampled by all workers before this round, for the clock of schedules.
            want_weights: return the weights.
            want_checksum: return their SHA-256.
        """
        batch, self.batch = self.batch, None
        if batch is None or self.reducer is None:
            # After a failure to sample, which the driver receives from that call.
            return LearnInfo({}, 0, policy.version, policy.version, 0.0, 0.0, broken="no batch")
        started_s = time.perf_counter()
        version, skipped = policy.version, policy.skipped_updates
        non_finite = policy.non_finite_gradients
        stats: dict[str, float] = {}
        broken: str | None = None
        vetoed, skew_s = False, 0.0
        try:
            # After the first sum, numbers of one rank that are not finite would be in all ranks'
            # gradients. Each rank reports its own, and all skip the round.
            votes = torch.tensor([batch.env_steps, int(bool(batch.faults.non_finite))])
            self.reducer.sum_(votes)
            skew_s = TRACER.span("worker", "skew", started_s)
            policy.env_steps = env_steps + int(votes[0])
            if not (vetoed := bool(votes[1])):
                stats = policy.learn_on_batch(batch, self.reducer)
        except GroupBroken as error:
            broken = str(error)
        return LearnInfo(
            stats=stats,
            updates=policy.version - version,
            version=version,
            acted=batch.version,
            learn_s=TRACER.span("worker", "learn", started_s),
            allreduce_s=self.reducer.take_total_s(),
            weights=policy.get_weights() if want_weights and not broken else None,
            checksum=checksum_of(policy) if want_checksum and not broken else None,
            broken=broken,
            vetoed=vetoed,
            non_finite_gradients=policy.non_finite_gradients - non_finite,
            skew_s=skew_s,
            skipped_updates=policy.skipped_updates - skipped,
        )


def checksum_of(policy: Policy) -> str:
    """SHA-256 of the weights' bytes."""
    return hashlib.sha256(policy.get_weights().flat.tobytes()).hexdigest()
