"""`Collector`: an iterable of SampleBatches over a WorkerSet (TorchRL: RayCollector)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch

from polopt.common.sample_batch import SampleBatch
from polopt.common.tested_versions import warn_of_untested_versions
from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.rollouts.collectors.collector_arguments import CollectorArguments
from polopt.rollouts.collectors.collector_config import CollectingConfig, CollectorConfig
from polopt.rollouts.collectors.frame_budget import FrameBudget
from polopt.rollouts.collectors.trajectories import pad_trajectories, split_trajectories
from polopt.rollouts.collectors.weight_sync import WeightSync
from polopt.rollouts.workers.arrival_log import ArrivalLog, Departure, RecordEnded, Rerun
from polopt.rollouts.workers.call_workers import call_each, set_up_each
from polopt.rollouts.workers.calls import Calls, Reply
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.errors import RerunDifference
from polopt.rollouts.workers.gathering import Fragments
from polopt.rollouts.workers.recorded_transport import RecordedTransport
from polopt.rollouts.workers.supervisor import Pending
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: End of TorchRL's range of seeds.
_LARGEST_SEED = 2**32 - 1


class Collector:
    """Collects experience with several workers, each a Ray actor with environments of its own.

        with Collector(
            lambda: gymnasium.make("CartPole-v1"),
            policy=("ppo", {"lr": 3e-4}),
            num_collectors=4, num_envs=8, frames_per_batch=4096, total_frames=100_000, sync=True,
        ) as collector:
            for batch in collector:
                collector.policy.learn_on_batch(batch)
                collector.update_policy_weights_()

    A collector that fails is replaced, and its fragment is collected again. Each has at most one
    fragment pending or waiting, so a slow consumer slows them down.

    Args:
        create_env_fn: makes an environment (or is a Gymnasium id, see `resolve_env`). A list has
            one for each collector.
        policy: one of these. Where polopt makes the policy, it is `collector.policy`.

            - a polopt Policy, which is used directly
            - the name or class of one, or `(name or class, options)`
            - a `torch.nn.Module` from observations `[N, ...]` to action parameters `[N, P]`, or
              `(module, {"outputs": "actions"})` from observations to actions
            - a `TensorDictModule` that writes the key `action`
            - a callable from observations to actions `[N, ...]`
            - None, for random actions
        options: see `CollectorConfig`.

    Raises:
        ConfigError: before any actor starts.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        warn_of_untested_versions()
        config = CollectorConfig.parse(options, "Collector")
        self._arguments: CollectorArguments | None
        self._arguments = CollectorArguments(create_env_fn, policy, config)
        self._started_ray = self._arguments.connect()
        with _differences_raised():
            self._set_up(self._arguments.make_workers(), config)

    @classmethod
    def over(
        cls, workers: WorkerSet, count: Callable[[Reply], None] | None = None, **options: Any
    ) -> Collector:
        """A collector over existing workers, which it does not stop.

        Args:
            workers: the workers. Without remote ones the local one samples, in this process.
            count: gets each reply that becomes part of a batch. See `Calls`.
            options: see `CollectingConfig`.
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
        self._waits = False  # for the fragments of a batch
        count = count or self._count
        self.calls = Calls(workers, "Collector", count=count)
        stragglers = Stragglers(config.fraction_workers, config.fraction_samples)
        self.fragments = Fragments(self.calls, workers, stragglers)
        self._turn = threading.Lock()

    def __repr__(self) -> str:
        """Its workers, and the frames of the batches so far."""
        total = f" of {self.config.total_frames:,}" if self.config.total_frames >= 0 else ""
        return f"Collector({self.workers!r}, {self.num_frames:,}{total} frames)"

    @property
    def _log(self) -> ArrivalLog | Rerun | None:
        """The record of this collector's own workers."""
        transport = self.workers.transport
        if self._arguments is None or not isinstance(transport, RecordedTransport):
            return None
        return transport.log

    def _count(self, reply: Reply) -> None:
        if reply.counts.moments is not None:  # only policies that learn normalise
            self.policy.add_moments(reply.counts.moments)

    # ---- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Collector:
        return self

    def __next__(self) -> Any:
        """The next batch: a SampleBatch, or a list of them if `split_trajs` is `list`.

        Raises:
            StopIteration: `total_frames` have been returned.
            WorkersFailedError: workers keep failing.
            EnvironmentFailedError: the environments of a collector without workers cannot be made.
            RuntimeError: another thread is collecting, or all collectors were removed.
            RerunDifference: with `rerun_of`, at the first difference. At the end of the record, the
                iteration stops.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("another thread is collecting with this Collector")
        try:
            if self._budget.spent():
                raise StopIteration
            try:
                with _differences_raised():
                    batch = self._next()
            except RecordEnded:
                raise StopIteration from None
            if self._log is not None:
                self._log.flush()
            return batch
        finally:
            self._turn.release()

    def _next(self) -> SampleBatch | list[SampleBatch]:
        config = self.config
        self._request(ahead=False)
        self._waits = True
        self._stop_early()
        replies = self.fragments.all() if config.sync else [self.calls.first(self._may_return)]
        self._waits = False
        self._budget.num_frames += sum(reply.counts.env_steps for reply in replies)
        if not config.update_after_each_batch:
            self._request(ahead=True)
        if not config.sync:
            self._renew_old()
        batch = SampleBatch.concat([reply.value for reply in replies])
        self.weight_sync.num_batches += 1
        batch.device = config.storing_device
        if not config.split_trajs:
            return batch
        parts = split_trajectories(batch)
        return parts if config.split_trajs == "list" else pad_trajectories(parts)

    # ---- fragments ------------------------------------------------------------------------------

    def _request(self, ahead: bool) -> None:
        """Requests a fragment of every idle worker, as far as frames are wanted.

        Args:
            ahead: the current batch has not been returned yet.
        """
        self.weight_sync.ahead = ahead
        if self.config.sync:
            if not self.calls.idle or self._budget.spent():
                return  # a batch is pending, or none is needed
            self._budget.begin_fragments(0)
            workers = self.workers.remote or self._here(ahead)
            self.fragments.request_in_turn(workers, len(workers), self._budget.request)
            return
        for worker in self.workers.remote or self._here(ahead):
            expected = self.fragments.num_frames
            if self._budget.spent(expected):
                return
            if not self.fragments.num_of(worker):
                self._budget.begin_fragments(expected)
                self.fragments.request(worker, self._budget.request(worker))

    def _here(self, ahead: bool) -> list[WorkerHandle]:
        """The local worker, if it is the only one. It does not sample ahead."""
        if ahead:
            return []
        if not self.workers.local.has_environments:
            raise RuntimeError("there are no collectors left; add some with add_collectors")
        return [self.workers.here]

    def _may_return(self, reply: Reply) -> bool:
        """Whether no fragment is pending or kept that was requested before an
        `update_policy_weights_` which came before this one's request. Stops such fragments
        early."""

        def earlier(one: Reply | Pending) -> bool:
            return update_of(one.worker) < update_of(reply.worker)

        update_of = self.weight_sync.update_of
        overtaken = list(filter(earlier, self.calls.pending()))
        self.calls.stop_early(overtaken, 1)
        return not overtaken and not any(map(earlier, self.calls.kept))

    def _renew_old(self) -> None:
        """Stops fragments early that would continue on weights that are too old
        (`max_weight_update_interval`), and waits for them."""
        calls = self.calls
        old = self.weight_sync.too_old(call.worker for call in calls.pending())
        calls.stop_early([call for call in calls.pending() if call.worker in old], 1)
        while any(calls.num_calls_of(worker) for worker in old):
            calls.receive()

    def stop_batch_early(self, keep_steps: int | None) -> None:
        """Ends the fragments of the batch that is being collected early, or of the next one. Those
        that are pending for later batches are not ended. Any thread may call this.

        Args:
            keep_steps: least number of steps of each fragment. None: ends no more.
        """
        self._keep_steps = keep_steps
        if self._waits:
            self._stop_early()

    def _stop_early(self) -> None:
        """Ends the fragments that are missing for the current batch. In asynchronous collection,
        this is the oldest fragment."""
        if self._keep_steps is None or (self.calls.kept and not self.config.sync):
            return
        pending = self.calls.pending()
        self.calls.stop_early(pending if self.config.sync else pending[:1], self._keep_steps)

    @property
    def num_frames(self) -> int:
        """Environment steps in the batches returned so far. Reset rows and padding do not count."""
        return self._budget.num_frames

    @property
    def num_batches(self) -> int:
        """Number of batches returned so far."""
        return self.weight_sync.num_batches

    # ---- weights and collectors -----------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy whose weights the collectors receive, or its adapter."""
        return self.workers.local.policy

    def update_policy_weights_(
        self, weights: Weights | np.ndarray | Mapping[str, Any] | None = None
    ) -> int:
        """Sends weights to every collector, before its next fragment. Fragments made with older
        weights are not returned after newer ones.

        Args:
            weights: of the policy, as Weights, flat vector `[P]`, or `state_dict` of its network.
                None: the current weights of `policy`.

        Returns:
            their version, which batches made with them carry.

        Raises:
            ValueError: weights of another network.
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
        """Starts more collectors. They take part in the next batch.

        Args:
            create_env_fn: as for the constructor. None: the environment of the first collector.
            num_collectors: number of collectors. None: one for each given environment.
            num_envs: number of environments of each. None: as the others.
            remote_configs: as for the constructor. None: as given there.

        Returns:
            their indices, which batches carry and `remove_collectors` takes.

        Raises:
            ConfigError: if their spaces differ from the policy's spaces.
            RuntimeError: if this Collector did not make its workers.
        """
        if self._arguments is None:
            raise RuntimeError("this Collector did not make its workers; use WorkerSet.add_workers")
        specs = self._arguments.more(create_env_fn, num_collectors, num_envs, remote_configs)
        return [worker.index for worker in self.workers.add_workers(specs)]

    def remove_collectors(self, indices: Iterable[int]) -> None:
        """Stops collectors. Their pending fragments are lost, and not counted.

        Raises:
            KeyError: for an index that does not exist.
        """
        self.workers.remove_workers(indices)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds environments and action noise of all collectors, which begin new episodes. Pending
        fragments are dropped.

        Args:
            seed: seed of the first environment. The others have the seeds that follow in TorchRL's
                sequence (`torchrl._utils.seed_generator`).
            static_seed: all environments have the same seed.

        Returns:
            the next seed of the sequence.
        """
        self.calls.discard()
        return seed_workers(self.workers, seed, static_seed)

    def drain(self) -> None:
        """Waits for pending fragments, and keeps them for the next batches."""
        self.calls.drain()

    # ---- state and end --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts, the policy, and for each collector its random numbers, running statistics of its
        environments' wrappers, and states of its environments, if they can give it (see
        `polopt.rollouts.envs.env_state`).

        Holds tensors, arrays, numbers, strings, and lists and dicts of those. Waits for collectors
        that have never started, and for pending fragments. These are kept for the next batches, and
        are not in the state.
        """
        self.drain()
        indices = [worker.index for worker in self.workers.up()] if self.workers.remote else []
        states = call_each(self.workers, "get_state", dict.fromkeys(indices, (False,)))
        states[0] = self.workers.local.get_state(with_policy=False)
        return {
            "num_frames": self.num_frames,
            "num_batches": self.num_batches,
            "policy": self.policy.get_state(),
            "collectors": {str(index): states[index] for index in sorted(states)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned. Pending fragments are dropped."""
        self.calls.discard()
        self._budget.num_frames = int(state["num_frames"])
        self.weight_sync.num_batches = int(state["num_batches"])
        load_collector_state(self.workers, state)
        self.weight_sync.take(force=True)

    def shutdown(self) -> None:
        """Stops the collectors, and Ray if this Collector started it. Workers that this Collector
        did not make finish their fragment and continue to run."""
        if isinstance(self._log, Rerun):
            self._log.finish()
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


@contextlib.contextmanager
def _differences_raised() -> Iterator[None]:
    """Turns the first difference of a rerun into an error that users handle.

    Raises:
        RerunDifference: the rerun differs from the record.
    """
    try:
        yield
    except Departure as departure:
        raise RerunDifference(
            departure.event,
            f"at event {departure.event}, the rerun differs: {departure}; likely because the "
            "program, a library, the processor or an environment is not the same",
        ) from None


def next_seed(seed: int) -> int:
    """The seed after `seed` in TorchRL's sequence (`torchrl._utils.seed_generator`)."""
    return int.from_bytes(np.random.default_rng(seed).bytes(8), "big") % _LARGEST_SEED


def seed_workers(workers: WorkerSet, seed: int, static: bool) -> int:
    """Seeds every environment of every worker. Returns the next seed of the sequence."""
    seeds: dict[int, list[int]] = {}
    for index in [worker.index for worker in workers.remote] or [0]:
        seeds[index] = []
        for _ in range(workers.num_envs_of(index)):
            seeds[index].append(seed)
            seed = seed if static else next_seed(seed)
    if 0 in seeds:
        workers.local.set_seed(seeds[0])
    set_up_each(workers, "set_seed", {index: (mine,) for index, mine in seeds.items()})
    return seed


def take_weights(policy: Any, weights: Weights | np.ndarray | Mapping[str, Any]) -> None:
    """Sets weights of a policy: Weights with their version. A flat vector `[P]` or a `state_dict`
    of the network as the next version. The policy keeps its moments, which hold what its workers
    have sampled.

    Raises:
        ValueError: they are of another network.
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
            raise ValueError(f"weights are of another network: {error}") from None
    else:
        if torch.is_tensor(weights):
            weights = weights.detach().cpu().numpy()
        flat = np.asarray(weights, dtype=np.float32)
        policy.set_weights(own._replace(flat=flat, moments=None))
    policy.version = own.version + 1


def load_collector_state(workers: WorkerSet, state: Mapping[str, Any]) -> None:
    """Restores policy and workers from what `Collector.state_dict` returned. Workers that are not
    in `state` keep theirs."""
    saved = {int(index): parts for index, parts in state["collectors"].items()}
    workers.local.policy.set_state(state["policy"])
    workers.local.set_state(saved[0])
    set_up_each(workers, "set_state", {index: (parts,) for index, parts in saved.items()})
