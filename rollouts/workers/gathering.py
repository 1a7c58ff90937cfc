"""Functions that sample fragments in workers and gather them, for strategies (the optimizers of
runs) and the Collector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.rollouts.sampling.worker_sampler import SampleRequest
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import WEIGHTS
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

# ---- functions that run in a worker --------------------------------------------------------------


def sample(
    worker: RolloutWorker, weights: Weights | None, request: SampleRequest | None = None
) -> SampleBatch:
    """Sets weights, samples a batch with them, and applies the user's `postproc`.

    Args:
        worker: the worker.
        weights: the weights. None means that the worker keeps its weights.
        request: says how the worker samples a fragment in its own environments. None means that
            `sample` returns `worker.next_batch()`. For a gradient worker, this is a batch from its
            own Collector.

    Returns:
        a batch `[T, N]`: T steps of N environments.

    Raises:
        EnvironmentFailedError, RuntimeError, NonFiniteError, CallbackError: see
            `RolloutWorker.next_batch`.
        TypeError: `postproc` did not return a SampleBatch.
    """
    worker.set_weights(weights)
    batch = worker.next_batch() if request is None else worker.sample(request)
    if worker.config.postproc is not None:
        batch = worker.config.postproc(worker.policy.encode_batch(batch))
        if not isinstance(batch, SampleBatch):
            raise TypeError(f"postproc must return a SampleBatch; got {type(batch).__name__}")
    return batch


def current_rollout(worker: RolloutWorker) -> MinibatchGradients:
    """Returns the rollout from which the worker computes gradients. The first call samples a
    rollout, and so does each call after all minibatches of the last rollout were used.
    `worker.state` keeps the rollout between calls."""
    rollout: MinibatchGradients | None = worker.state.get("rollout")
    if rollout is None or rollout.done:
        rollout = worker.state["rollout"] = MinibatchGradients(worker.policy, worker.next_batch())
    return rollout


# ---- the process that gathers --------------------------------------------------------------------


def check_batch(value: Any) -> None:
    """Raises TypeError unless the value of a reply is a SampleBatch."""
    if not isinstance(value, SampleBatch | MultiAgentBatch):
        raise TypeError(f"a SampleBatch was expected; got {type(value).__name__}")


def num_fragments(config: WorkerConfig, steps: int | None, default: int) -> int:
    """Returns the least number of full fragments that together have at least `steps` steps. With
    `count_steps_by="agent_steps"`, the steps of all agents count, as if all agents acted in each
    step. Returns `default` if `steps` is None or 0."""
    rollout = config.rollout
    fragment = rollout.num_envs_per_worker * rollout.rollout_fragment_length
    if rollout.count_steps_by == "agent_steps":
        fragment *= config.num_agents
    return -(-steps // fragment) if steps else default


class Fragments:
    """Requests fragments from workers, and gathers them for one strategy or Collector.

        fragments.request_in_turn(workers.up(), 8)
        batch = SampleBatch.concat([reply.value for reply in fragments.all()])

    `all` waits for all requested fragments. `Calls.first` waits for a single fragment.

    Args:
        calls: sends the requests.
        workers: the workers that `calls` calls.
        stragglers: the rule by which `all` ends fragments early. None means that no fragment ends
            early.
    """

    def __init__(
        self, calls: Calls, workers: WorkerSet, stragglers: Stragglers | None = None
    ) -> None:
        self._calls = calls
        self._workers = workers
        self._stragglers = stragglers

    def request(self, handle: WorkerHandle, how: SampleRequest | None = None) -> None:
        """Requests a fragment from a worker. The request carries the weights that `Calls`
        puts in place of `WEIGHTS`.

        Args:
            handle: the worker.
            how: the argument `request` of `sample`.
        """
        if how is None:
            self._calls.send(handle, sample, WEIGHTS, tag=self._steps)
        else:
            self._calls.send(handle, sample, WEIGHTS, how, tag=how.steps or self._steps)

    @property
    def _steps(self) -> int:
        return self._workers.config.rollout.rollout_fragment_length

    def request_in_turn(
        self,
        handles: list[WorkerHandle],
        count: int,
        how: Callable[[WorkerHandle], SampleRequest | None] = lambda _: None,
    ) -> None:
        """Requests `count` fragments from the workers in turn.

        Args:
            handles: the workers. The first worker gets the first request.
            count: number of fragments.
            how: a function that returns the argument `request` of `sample` for a worker.
        """
        for i in range(count):
            handle = handles[i % len(handles)]
            self.request(handle, how(handle))

    def all(self) -> list[Reply]:
        """Waits until all requested fragments have arrived, counts their replies, and returns them.
        The order of the replies does not depend on the order of arrival. Raises the errors of
        `Calls.all`."""
        return self._calls.all(self._stragglers, steps=lambda work: work.tag)

    def num_of(self, handle: WorkerHandle) -> int:
        """Returns the number of fragments of a worker that are pending, or have arrived and were
        not taken."""
        kept = sum(reply.worker.index == handle.index for reply in self._calls.kept)
        return kept + self._calls.num_work_of(handle)

    @property
    def num_frames(self) -> int:
        """Number of environment steps in pending fragments, and in fragments that have arrived and
        were not taken. A pending fragment counts with its full length, as if none of its rows were
        the reset of an environment."""
        kept = sum(reply.counts.env_steps for reply in self._calls.kept)
        pending = self._calls.pending_work()
        return kept + sum(w.tag * self._workers.num_envs_of(w.order[0]) for w in pending)
