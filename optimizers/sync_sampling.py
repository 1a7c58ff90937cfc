"""`SyncSampling`: base class of strategies whose driver waits for the fragments of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polopt.common.config import ConfigError
from polopt.optimizers.collection_checks import check_central_gradients
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.call_workers import restore_samplers, sampler_states
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.gathering import Fragments, check_batch, num_fragments
from polopt.rollouts.workers.worker_set import WorkerSet


class SyncSampling(PolicyOptimizer):
    """Base class of `SyncSamples` and `SyncReplay`. The driver requests fragments from all workers
    in turn, and waits for all of them. So results do not depend on the order of arrival.

    Attributes:
        fragments: requests the fragments, and gathers them.
        overlaps: whether workers sample while the driver learns (`collection: overlapped`).
    """

    runs_in_process = True
    after_failure = "reassign"
    #: Name of the optimizer that the error for `collection: async` suggests.
    async_instead: ClassVar[str]

    def __init__(
        self, workers: WorkerSet, config: OptimizerConfig, stragglers: Stragglers | None = None
    ) -> None:
        super().__init__(workers, config)
        self.calls.check = check_batch
        self.fragments = Fragments(self.calls, workers, stragglers)
        self.overlaps = workers.config.rollout.collection == "overlapped"

    @classmethod
    def check(cls, rollout: RolloutConfig, config: Any) -> None:
        if rollout.collection == "async" and rollout.num_workers > 0:
            raise ConfigError(
                f"key 'collection': got 'async' with optimizer {cls.name!r}. Allowed: 'sync', "
                f"'overlapped', or optimizer {cls.async_instead!r}"
            )
        check_central_gradients(rollout)

    def request(self, rows: int | None = None) -> None:
        """Requests fragments from the workers that are up, in turn. Does nothing if fragments are
        pending, or have arrived and were not taken yet.

        Args:
            rows: number of rows that the fragments together have at least. None means one fragment
                from each worker.
        """
        if self.calls.idle:
            workers = self.workers.up()
            count = num_fragments(self.workers.config, rows, default=len(workers))
            self.fragments.request_in_turn(workers, count)

    def drain(self) -> None:
        """Waits for pending fragments, and keeps them for the next step."""
        self.calls.wait()

    def worker_states(self) -> dict[str, Any]:
        """Returns the state of each worker, by worker index: the state of its environments and
        random numbers, and the running statistics of its environments' wrappers.

        With `collection: sync`, a run that is restored from this state continues bit for bit if its
        environments can save their state. See `sampler_states`.
        """
        return sampler_states(self.workers)

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        restore_samplers(self.workers, state.get("workers", {}))
