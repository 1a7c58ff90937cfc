"""Gathering: fragments of several workers, for strategies and for the Collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.minibatch_gradients import MinibatchGradients
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.sample_request import SampleRequest
from polopt.rollouts.workers.calls import WEIGHTS, Calls, Reply
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

# ---- in a worker --------------------------------------------------------------------------------


def sample(
    worker: RolloutWorker, weights: Weights | None, request: SampleRequest | None = None
) -> SampleBatch:
    """Runs in a worker: takes over weights, samples with them, and applies the user's `postproc`.

    Args:
        worker: the worker.
        weights: None: the worker has them already.
        request: how to sample a fragment of the worker's own environments. None: the worker's next
            batch, which a gradient worker has from the workers below it.

    Returns:
        a batch `[T, N]`.

    Raises:
        TypeError: `postproc` returned something else than a SampleBatch.
    """
    worker.set_weights(weights)
    batch = worker.next_batch() if request is None else worker.sample(request)
    if worker.config.postproc is not None:
        batch = worker.config.postproc(batch)
        if not isinstance(batch, SampleBatch):
            raise TypeError(f"postproc must return a SampleBatch; got {type(batch).__name__}")
    return batch


def current_rollout(worker: RolloutWorker) -> MinibatchGradients:
    """Returns the rollout with which the worker computes gradients. Samples a new rollout if no
    minibatch of the last one is left. The rest of the rollout stays in `worker.state`."""
    rollout: MinibatchGradients | None = worker.state.get("rollout")
    if rollout is None or rollout.done:
        rollout = worker.state["rollout"] = MinibatchGradients(worker.policy, worker.next_batch())
    return rollout


# ---- where fragments are gathered ---------------------------------------------------------------


def check_batch(value: Any) -> None:
    """Raises TypeError unless the value of a reply is a SampleBatch."""
    if not isinstance(value, SampleBatch):
        raise TypeError(f"a SampleBatch was expected; got {type(value).__name__}")


def num_fragments(rollout: RolloutConfig, rows: int | None, default: int) -> int:
    """Number of fragments in a batch of at least `rows` rows. `default` where `rows` is None or
    0."""
    fragment = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    return -(-rows // fragment) if rows else default


class Fragments:
    """The fragments that workers sample for one strategy or Collector.

        fragments.request_in_turn(workers.up(), 8)
        batch = SampleBatch.concat([reply.value for reply in fragments.all()])

    `all` waits for the fragments of a batch, in the order of the workers. `Calls.first` takes one
    at a time.

    Args:
        calls: carries the requests.
        workers: the workers that `calls` calls.
        stragglers: which fragments `all` ends early. None: it waits for all.
    """

    def __init__(
        self, calls: Calls, workers: WorkerSet, stragglers: Stragglers | None = None
    ) -> None:
        self._calls = calls
        self._workers = workers
        self._stragglers = stragglers

    def request(self, worker: WorkerHandle, how: SampleRequest | None = None) -> None:
        """Requests a fragment of a worker, which gets weights with the request.

        Args:
            worker: the worker.
            how: see `sample`.
        """
        if how is None:
            self._calls.send(worker, sample, WEIGHTS, tag=self._steps)
        else:
            self._calls.send(worker, sample, WEIGHTS, how, tag=how.steps or self._steps)

    @property
    def _steps(self) -> int:
        return self._workers.config.rollout.rollout_fragment_length

    def request_in_turn(
        self,
        workers: list[WorkerHandle],
        count: int,
        how: Callable[[WorkerHandle], SampleRequest | None] = lambda _: None,
    ) -> None:
        """Requests `count` fragments of the workers in turn.

        Args:
            workers: the first one gets the first request.
            count: number of fragments.
            how: see `sample`, by worker.
        """
        for i in range(count):
            worker = workers[i % len(workers)]
            self.request(worker, how(worker))

    def all(self) -> list[Reply]:
        """The fragments that are pending or have arrived, counted, once all of them have. Their
        order does not depend on the order of arrival. Errors as `Calls.first`."""
        return self._calls.all(self._stragglers, steps=lambda work: work.tag)

    def num_of(self, worker: WorkerHandle) -> int:
        """Number of fragments of a worker that are pending, or have arrived and wait here."""
        kept = sum(reply.worker.index == worker.index for reply in self._calls.kept)
        return kept + self._calls.num_work_of(worker)

    @property
    def num_frames(self) -> int:
        """Environment steps in the fragments that have arrived and wait here, and in pending
        fragments. Pending fragments are taken to be whole, without rows that only reset."""
        kept = sum(reply.counts.env_steps for reply in self._calls.kept)
        pending = self._calls.pending_work()
        return kept + sum(w.tag * self._workers.num_envs_of(w.order[0]) for w in pending)
