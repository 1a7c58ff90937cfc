"""`Collector`: iterates over the SampleBatches of a WorkerSet, like TorchRL's `RayCollector`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import ray
import torch

from polopt.collectors.collector_arguments import CollectorArguments
from polopt.collectors.collector_config import CollectingConfig, CollectorConfig
from polopt.collectors.frame_budget import FrameBudget
from polopt.collectors.trajectories import pad_trajectories, split_trajectories
from polopt.collectors.weight_sync import WeightSync
from polopt.common.sample_batch import SampleBatch
from polopt.common.tested_versions import warn_of_untested_versions
from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.rollouts.workers.call import Call, Reply
from polopt.rollouts.workers.call_workers import call_each, set_up_each
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.gathering import Fragments
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: TorchRL reduces its seeds modulo this number.
_LARGEST_SEED = 2**32 - 1


class Collector:
    """Collects experience with one or more workers. Each worker is a Ray actor with its own
    environments. With `num_collectors=0`, this process collects instead.

        with Collector(
            lambda: gymnasium.make("CartPole-v1"),
            policy=("ppo", {"lr": 3e-4}),
            num_collectors=4, num_envs=8, frames_per_batch=4096, total_frames=100_000, sync=True,
        ) as collector:
            for batch in collector:
                collector.policy.learn_on_batch(batch)
                collector.update_policy_weights_()

    As in TorchRL, the workers are also called collectors, and environment steps are called frames.
    On each request, a worker samples one fragment, which is T steps of its N environments. If a
    worker fails, its replacement samples the lost fragment again. Each worker has at most one
    fragment that is pending or not yet returned. The workers therefore wait for a slow consumer.

    Args:
        create_env_fn: a callable that makes an environment, or a Gymnasium id (see `resolve_env`).
            A list has one item for each worker.
        policy: the policy that chooses actions, in one of these forms. From all forms except the
            first, polopt makes a policy object, which is then `collector.policy`.

            - a polopt Policy, which is used directly
            - the name or class of a polopt Policy, or `(name or class, options)`
            - a `torch.nn.Module` that maps observations `[N, ...]` to action parameters `[N, P]`
            - `(module, {"outputs": "actions"})`, where the `torch.nn.Module` maps observations to
              actions
            - a `TensorDictModule` that writes the key `action`
            - a callable that maps observations to actions `[N, ...]`
            - None, for random actions
        options: see `CollectorConfig`.

    Raises:
        ConfigError: if an argument is invalid, if Ray does not answer, or if this machine has too
            little memory. This is raised before any actor starts, except if the file `record_to`
            cannot be written.
        RerunDifference: with `rerun_of`, if the start differs from the record.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        warn_of_untested_versions()
        config = CollectorConfig.parse(options, "Collector")
        self._arguments: CollectorArguments | None
        self._arguments = CollectorArguments(create_env_fn, policy, config)
        self._started_ray = self._arguments.connect()
        with self._recorded():
            self._set_up(self._arguments.make_workers(), config)

    @classmethod
    def over(
        cls, workers: WorkerSet, count: Callable[[Reply], None] | None = None, **options: Any
    ) -> Collector:
        """Makes a Collector that uses existing workers. The Collector does not stop these workers.
        Its batches hold observations as rows (see `ObservationEncoder`), for a policy of polopt.

        Args:
            workers: the workers. Without remote workers, the local worker samples in this process.
            count: a function that is called with each reply that becomes part of a batch. See
                `Calls`.
            options: see `CollectingConfig`.

        Raises:
            ConfigError: if an option is invalid.
        """
        self = cls.__new__(cls)
        self._arguments, self._started_ray = None, False
        self._set_up(workers, CollectingConfig.parse(options, "Collector"), count)
        return self

    def _set_up(
        self,
        workers: WorkerSet,
        config: CollectingConfig,
        count: Callable[[Reply], None] | None = None,
    ) -> None:
        self.config = config
        self.workers = workers
        workers.weights = self.weight_sync = WeightSync(workers, config)
        self._budget = FrameBudget(config, workers)
        self._keep_steps: int | None = None
        self._waits = False  # whether `_next` waits for the fragments of a batch
        count = count or self._count
        self.calls = Calls(workers, "Collector", count=count)
        stragglers = Stragglers(config.fraction_workers, config.fraction_samples)
        self.fragments = Fragments(self.calls, workers, stragglers)
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        """Shows the workers and the number of frames in the batches so far."""
        total = f" of {self.config.total_frames:,}" if self.config.total_frames >= 0 else ""
        return f"Collector({self.workers!r}, {self.num_frames:,}{total} frames)"

    def _recorded(self) -> AbstractContextManager[None]:
        """Records or compares what happens inside this context, with `record_to` or `rerun_of`."""
        record = None if self._arguments is None else self._arguments.record
        return contextlib.nullcontext() if record is None else record

    def _count(self, reply: Reply) -> None:
        # Replies contain moments (mean and variance of observations and returns) only if the policy
        # normalises. A policy that does not learn does not normalise, and has no `add_moments`.
        if reply.counts.moments is not None:
            self.policy.add_moments(reply.counts.moments)

    # ---- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Collector:
        return self

    def __next__(self) -> Any:
        """Returns the next batch. The batch is a SampleBatch, or a list of SampleBatches if
        `split_trajs` is `list`.

        Raises:
            StopIteration: after `total_frames` frames, or with `rerun_of` at the end of the record.
            WorkersFailedError: if workers keep failing, or if no worker can be made.
            EnvironmentFailedError: if this process collects, and an environment cannot be made or
                fails repeatedly.
            EnvironmentAPIError: if an environment breaks Gymnasium's API.
            NonFiniteError: if too many consecutive fragments contain non-finite values.
            FunctionError: if sampling would probably fail in every worker. For example, the policy
                or `postproc` raises in a worker before any worker has sampled a fragment.
            Exception: if this process collects, any exception of the policy or `postproc`.
            RuntimeError: if another thread is collecting, if no workers remain, or after
                `shutdown`.
            RerunDifference: with `rerun_of`, at the first difference from the record.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("another thread is collecting with this Collector")
        try:
            if self._budget.spent():
                raise StopIteration
            with self._recorded():
                return self._next()
        finally:
            self._turn.release()

    def _next(self) -> SampleBatch | list[SampleBatch]:
        config = self.config
        self._request(ahead=False)
        self._waits = True
        self._stop_early()
        replies = self.fragments.all() if config.sync else [self.calls.first(self._may_return)]
        self._waits, self._keep_steps = False, None
        self._budget.num_frames += sum(reply.counts.env_steps for reply in replies)
        if not config.update_after_each_batch:
            self._request(ahead=True)
        if not config.sync:
            self._renew_old()
        batch = SampleBatch.concat([reply.value for reply in replies])
        if self._arguments is not None:  # the batch is for code of the user
            batch = self.policy.encode_batch(batch)
        self.weight_sync.num_batches += 1
        batch.device = config.storing_device
        if not config.split_trajs:
            return batch
        as_list = config.split_trajs == "list"
        return split_trajectories(batch) if as_list else pad_trajectories(batch)

    # ---- fragments ------------------------------------------------------------------------------

    def _request(self, ahead: bool) -> None:
        """Requests a fragment from every idle worker, unless the requested frames already suffice
        for `total_frames`.

        Args:
            ahead: whether the current batch has not been returned yet.
        """
        self.weight_sync.ahead = ahead
        if self.config.sync:
            if not self.calls.idle or self._budget.spent():
                return  # a batch is pending, or no more batches are needed
            self._budget.begin_fragments(0)
            workers = self.workers.remote or self._here(ahead)
            self.fragments.request_in_turn(workers, len(workers), self._budget.request)
            return
        for handle in self.workers.remote or self._here(ahead):
            expected = self.fragments.num_frames
            if self._budget.spent(expected):
                return
            if not self.fragments.num_of(handle):
                self._budget.begin_fragments(expected)
                self.fragments.request(handle, self._budget.request(handle))

    def _here(self, ahead: bool) -> list[WorkerHandle]:
        """Returns a list with the local worker, for a Collector without remote workers. The local
        worker does not sample ahead, so the list is empty if `ahead` is True."""
        if ahead:
            return []
        if not self.workers.local.has_environments:
            raise RuntimeError("there are no collectors left; add some with add_collectors")
        return [self.workers.here]

    def _may_return(self, reply: Reply) -> bool:
        """Returns whether the fragment in `reply` may be returned now.

        Another fragment is earlier if it was requested before a call of `update_policy_weights_` by
        the user, and this fragment was requested after that call. This fragment must wait while an
        earlier fragment is pending, or has arrived and was not returned. This method also stops
        pending earlier fragments early.
        """

        def earlier(one: Call) -> bool:
            return update_of(one.worker) < update_of(reply.worker)

        update_of = self.weight_sync.update_of
        overtaken = list(filter(earlier, self.calls.pending()))
        self.calls.stop_early(overtaken, 1)
        return not overtaken and not any(map(earlier, self.calls.kept))

    def _renew_old(self) -> None:
        """Stops the pending fragments whose weights are becoming too old, and waits for these
        fragments. `max_weight_update_interval` sets the maximum lag."""
        calls = self.calls
        old = self.weight_sync.too_old(call.worker for call in calls.pending())
        calls.stop_early([call for call in calls.pending() if call.worker in old], 1)
        while any(calls.num_calls_of(handle) for handle in old):
            calls.receive()

    def stop_batch_early(self, keep_steps: int | None) -> None:
        """Ends the fragments of a batch early. This is the batch for which the Collector waits now,
        or else the next batch. Later batches are not affected. Any thread may call this method.

        Args:
            keep_steps: the minimum number of steps in each fragment. `None` cancels a request for
                the next batch.
        """
        self._keep_steps = keep_steps
        if self._waits:
            self._stop_early()

    def _stop_early(self) -> None:
        """Ends the fragments that are missing from the current batch, if `stop_batch_early`
        requested this. In asynchronous collection, this is the oldest pending fragment, unless
        another fragment has already arrived."""
        keep_steps = self._keep_steps  # read once, because another thread may change it
        if keep_steps is None or (self.calls.kept and not self.config.sync):
            return
        pending = self.calls.pending()
        self.calls.stop_early(pending if self.config.sync else pending[:1], keep_steps)

    @property
    def num_frames(self) -> int:
        """The number of environment steps in the batches returned so far. Rows that are not `valid`
        do not count (see `SampleBatch`)."""
        return self._budget.num_frames

    @property
    def num_batches(self) -> int:
        """The number of batches returned so far."""
        return self.weight_sync.num_batches

    # ---- weights and collectors -----------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy whose weights the workers receive. If the user passed a module or a callable,
        this is a polopt policy that wraps it."""
        return self.workers.local.policy

    def update_policy_weights_(
        self, weights: Weights | np.ndarray | Mapping[str, Any] | None = None
    ) -> int:
        """Sends weights to every worker with the request for the worker's next fragment. Once the
        Collector has returned a fragment that was requested after this call, it returns no fragment
        that was requested before this call.

        Args:
            weights: the new weights of the policy: Weights, a flat vector `[P]`, or a `state_dict`
                of its network. `None` means the current weights of `policy`.

        Returns:
            the version of the weights. Batches that are sampled with these weights carry this
            version.

        Raises:
            ValueError: if the weights belong to a different network.
        """
        if weights is not None:
            take_weights(self.policy, weights)
        version = self.weight_sync.take().weights.version
        self.weight_sync.num_updates += 1
        return version

    def add_collectors(
        self,
        create_env_fn: Any = None,
        num_collectors: int | None = None,
        num_envs: int | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Starts more workers. The new workers contribute to the next batch that is requested.

        Args:
            create_env_fn: as for the constructor. `None` means the environment of the first worker.
            num_collectors: the number of new workers. `None` means one for each item of
                `create_env_fn`.
            num_envs: as for the constructor. `None` means the number that was passed to the
                constructor.
            remote_configs: as for the constructor. `None` means the actor options of the first
                worker.

        Returns:
            the indices of the new workers. Batches carry these indices, and `remove_collectors`
            accepts them.

        Raises:
            ConfigError: if an argument is invalid, or if the spaces of the environments differ from
                the policy's spaces.
            RuntimeError: if this Collector did not make its workers.
        """
        if self._arguments is None:
            raise RuntimeError("this Collector did not make its workers; use WorkerSet.add_workers")
        specs = self._arguments.more(create_env_fn, num_collectors, num_envs, remote_configs)
        return [handle.index for handle in self.workers.add_workers(specs)]

    def remove_collectors(self, indices: Iterable[int]) -> None:
        """Stops the workers with these indices. Their pending fragments are lost and not counted.

        Raises:
            KeyError: if an index does not exist.
        """
        self.workers.remove_workers(indices)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the environments and the action noise of all workers. All environments begin new
        episodes, and pending fragments are dropped.

        Args:
            seed: the seed of the first environment. The other environments receive the next seeds
                of TorchRL's sequence (`torchrl._utils.seed_generator`).
            static_seed: whether all environments receive the same seed.

        Returns:
            the next seed of the sequence, or `seed` itself if `static_seed` is True.
        """
        self.calls.discard()
        return seed_workers(self.workers, seed, static_seed)

    def drain(self) -> None:
        """Waits for the pending fragments of all workers that have started, and keeps the fragments
        for the next batches."""
        self.calls.drain()

    # ---- state and end --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the Collector, as tensors, arrays, numbers, bools, strings, None,
        and lists and dicts of these values.

        The state contains the numbers of frames and batches, and the state of the policy. For each
        worker that has started, it contains the state of the random generators and the running
        statistics of the environments' wrappers. It also contains the states of the environments,
        if they support this (see `polopt.rollouts.envs.env_state`).

        This method waits for pending fragments. The Collector keeps these fragments for the next
        batches, and the state does not include them. This method also waits for workers to start,
        as `WorkerSet.up` does.

        Raises:
            WorkersFailedError: if workers keep failing, or if too few workers remain.
        """
        self.drain()
        indices = [handle.index for handle in self.workers.up()] if self.workers.remote else []
        states = call_each(self.workers, "get_state", dict.fromkeys(indices, (False,)))
        states[0] = self.workers.local.get_state(with_policy=False)
        return {
            "num_frames": self.num_frames,
            "num_batches": self.num_batches,
            "policy": self.policy.get_state(),
            "collectors": {str(index): states[index] for index in sorted(states)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `state_dict` returned. Pending fragments are dropped.

        Raises:
            ValueError: if the state belongs to a different network.
        """
        self.calls.discard()
        self._budget.num_frames = int(state["num_frames"])
        self.weight_sync.num_batches = int(state["num_batches"])
        load_collector_state(self.workers, state)
        self.weight_sync.take(force=True)

    def shutdown(self) -> None:
        """Stops the workers that this Collector made. If this Collector connected to Ray, also
        disconnects, which stops Ray if this Collector started it. Workers that this Collector did
        not make end their pending fragment after the current step, and keep running."""
        if self._arguments is not None and self._arguments.record is not None:
            self._arguments.record.end()
        self.calls.interrupt()
        self.calls.clear()
        if self._arguments is None:
            return
        self.workers.stop()
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def next_seed(seed: int) -> int:
    """Returns the seed after `seed` in TorchRL's sequence (`torchrl._utils.seed_generator`)."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED


def seed_workers(workers: WorkerSet, seed: int, static: bool) -> int:
    """Seeds every environment of every worker, and returns the next seed of the sequence. With
    `static`, all environments receive `seed`, and the result is also `seed`."""
    seeds: dict[int, list[int]] = {}
    for index in [handle.index for handle in workers.remote] or [0]:
        seeds[index] = []
        for _ in range(workers.num_envs_of(index)):
            seeds[index].append(seed)
            seed = seed if static else next_seed(seed)
    if 0 in seeds:
        workers.local.set_seed(seeds[0])
    set_up_each(workers, "set_seed", {index: (mine,) for index, mine in seeds.items()})
    return seed


def take_weights(policy: Any, weights: Weights | np.ndarray | Mapping[str, Any]) -> None:
    """Sets the weights of a policy.

    A `Weights` object keeps its version. A flat vector `[P]` or a `state_dict` of the network
    receives the next version. The policy keeps its own moments, which are the mean and variance of
    the observations and returns that its workers have sampled.

    Raises:
        ValueError: if the weights belong to a different network.
    """
    if isinstance(weights, Weights):
        policy.set_weights(weights._replace(moments=None))
        return
    own = policy.get_weights()
    if isinstance(weights, Mapping):
        network = getattr(policy, "module", None) or policy.model
        try:
            network.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"the weights belong to another network: {error}") from None
    else:
        if torch.is_tensor(weights):
            weights = weights.detach().cpu().numpy()
        flat = np.asarray(weights, dtype=np.float32)
        policy.set_weights(own._replace(flat=flat, moments=None))
    policy.version = own.version + 1


def load_collector_state(workers: WorkerSet, state: Mapping[str, Any]) -> None:
    """Restores the policy and the workers from a state that `Collector.state_dict` returned.
    Workers that are not in `state` keep their own state."""
    saved = {int(index): parts for index, parts in state["collectors"].items()}
    workers.local.policy.set_state(state["policy"])
    workers.local.set_state(saved[0])
    set_up_each(workers, "set_state", {index: (parts,) for index, parts in saved.items()})
