"""`Collector`: an iterable of SampleBatches over a WorkerSet (TorchRL: RayCollector)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import ray

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.rollouts.collectors.config import CollectingConfig, CollectorConfig
from polopt.rollouts.collectors.fragment_source import FragmentSource
from polopt.rollouts.collectors.frame_budget import FrameBudget
from polopt.rollouts.collectors.gatherer import Gatherer
from polopt.rollouts.collectors.state import load_collector_state, seed_workers, take_weights
from polopt.rollouts.collectors.trajectories import pad_trajectories, split_trajectories
from polopt.rollouts.collectors.weight_sync import WeightSync
from polopt.rollouts.collectors.worker_factory import WorkerFactory
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.worker_set import WorkerSet


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
        create_env_fn: makes an environment (or is a Gymnasium id, see `resolve_env`); a list has
            one for each collector.
        policy: a polopt Policy, which is used directly; the name or class of one, or
            `(name or class, options)`; a `torch.nn.Module` from observations `[N, ...]` to action
            parameters `[N, P]`; a callable from observations to actions `[N, ...]`; or None, for
            random actions. Where polopt makes the policy, it is `collector.policy`.
        options: see `CollectorConfig`.

    Raises:
        ConfigError: before any actor starts.
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        config = CollectorConfig.parse(options, "Collector")
        self._factory: WorkerFactory | None = WorkerFactory(create_env_fn, policy, config)
        self._started_ray = self._factory.connect()
        self._set_up(self._factory.make_workers(), config)

    @classmethod
    def over(cls, workers: WorkerSet, **options: Any) -> Collector:
        """A collector over existing workers, which it does not stop.

        Args:
            workers: the workers; without remote ones the local one samples, in this process.
            options: see `CollectingConfig`.
        """
        self = cls.__new__(cls)
        self._factory, self._started_ray = None, False
        self._set_up(workers, CollectingConfig.parse(options, "Collector"))
        return self

    def _set_up(self, workers: WorkerSet, config: CollectingConfig) -> None:
        self.config = config
        self.workers = workers
        self.weight_sync = WeightSync(workers, config)
        self._budget = FrameBudget(config, workers)
        self.gatherer = Gatherer(
            workers,
            self._budget.request,
            self.weight_sync.weights_for,
            stragglers=Stragglers(config.fraction_workers, config.fraction_samples),
        )
        self._fragments = FragmentSource(
            workers, config, self._budget, self.weight_sync, self.gatherer
        )
        self._turn = threading.Lock()

    # ---- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Collector:
        return self

    def __next__(self) -> Any:
        """The next batch: a SampleBatch, or a list of them if `split_trajs` is `list`.

        Raises:
            StopIteration: `total_frames` have been returned.
            WorkersFailedError: workers keep failing.
            EnvironmentFailedError: the environments of a collector without workers cannot be made.
            RuntimeError: another thread is collecting, or there are no collectors left.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("another thread is collecting with this Collector")
        try:
            if self._budget.spent():
                raise StopIteration
            return self._next()
        finally:
            self._turn.release()

    def _next(self) -> SampleBatch | list[SampleBatch]:
        config = self.config
        fragments = self._fragments.next_batch()
        batch = SampleBatch.concat([fragment.batch for fragment in fragments])
        self.weight_sync.handed += 1
        batch.device = config.storing_device
        if not config.split_trajs:
            return batch
        parts = split_trajectories(batch)
        return parts if config.split_trajs == "list" else pad_trajectories(parts)

    @property
    def num_frames(self) -> int:
        """Environment steps in the batches returned so far; reset rows and padding do not count."""
        return self._budget.num_frames

    @property
    def num_batches(self) -> int:
        """Number of batches returned so far."""
        return self.weight_sync.handed

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
            weights: of the policy, as Weights, flat vector `[P]`, or `state_dict` of its network;
                None: the current weights of `policy`.

        Returns:
            their version, which batches made with them carry.

        Raises:
            ValueError: weights of another network.
        """
        if weights is not None:
            take_weights(self.policy, weights)
        version = self.weight_sync.take_snapshot()
        self.weight_sync.num_updates += 1
        return version

    def add_collectors(
        self,
        create_env_fn: Any = None,
        num_collectors: int | None = None,
        num_envs: int | None = None,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Starts more collectors, which take part from the next batch on.

        Args:
            create_env_fn: as for the constructor; None: the environment of the first collector.
            num_collectors: number of collectors; None: one for each given environment.
            num_envs: number of environments of each; None: as the others.
            remote_configs: as for the constructor; None: as given there.

        Returns:
            their indices, which batches carry and `remove_collectors` takes.

        Raises:
            ConfigError: if their spaces differ from those of the policy.
            RuntimeError: if this Collector did not make its workers.
        """
        if self._factory is None:
            raise RuntimeError("this Collector did not make its workers; use WorkerSet.add_workers")
        specs = self._factory.more(create_env_fn, num_collectors, num_envs, remote_configs)
        return [worker.index for worker in self.workers.add_workers(specs)]

    def remove_collectors(self, indices: Iterable[int]) -> None:
        """Stops collectors; their pending fragments are lost, and not counted.

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
        self.gatherer.discard()
        return seed_workers(self.workers, seed, static_seed)

    def settle(self) -> None:
        """Waits for pending fragments, and keeps them for the next batches."""
        while len(self.gatherer.in_flight):
            self.gatherer.receive()

    # ---- state and end --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts, the policy, and for each collector its random numbers, running statistics of its
        environments' wrappers, and states of its environments, if they have `get_state`.

        Holds tensors, arrays, numbers, strings, and lists and dicts of those. Waits for pending
        fragments; they are kept for the next batches, and are not in the state.
        """
        self.settle()
        states = self.workers.call_all("get_state", False)
        states[0] = self.workers.local.get_state(with_policy=False)
        return {
            "num_frames": self.num_frames,
            "num_batches": self.num_batches,
            "policy": self.policy.get_state(),
            "collectors": {str(index): states[index] for index in sorted(states)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned; pending fragments are dropped."""
        self.gatherer.discard()
        self._budget.num_frames = int(state["num_frames"])
        self.weight_sync.handed = int(state["num_batches"])
        load_collector_state(self.workers, state)
        self.weight_sync.take_snapshot()

    def shutdown(self) -> None:
        """Stops the collectors, and Ray if this Collector started it. Workers that this Collector
        did not make finish their fragment and continue to run."""
        self.gatherer.interrupt()
        self.gatherer.in_flight.clear()
        if self._factory is None:
            return
        self.workers.stop()
        if self._started_ray:
            self._started_ray = False
            ray.shutdown()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
