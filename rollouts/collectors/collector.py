"""`Collector`: an iterable of SampleBatches over a WorkerSet; what TorchRL calls RayCollector."""

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
from polopt.rollouts.collectors.fragment_pipeline import FragmentPipeline
from polopt.rollouts.collectors.state import (
    load_collector_state,
    seed_workers,
    take_weights,
)
from polopt.rollouts.collectors.trajectories import pad_trajectories, split_trajectories
from polopt.rollouts.collectors.weight_sync import WeightSync
from polopt.rollouts.collectors.worker_factory import WorkerFactory
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

    A collector that fails is replaced, and what it owed is collected again. Each has at most one
    fragment on its way or waiting, so a slow consumer slows them down and nothing piles up.

    Args:
        create_env_fn: makes an environment (or is a Gymnasium id, see `resolve_env`); a list has
            one for each collector.
        policy: a polopt Policy, which is used as it is; the name or class of one, or
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
        """A collector over workers that somebody else made, and will stop.

        Args:
            workers: to collect with; with no remote ones the local one samples, in this process.
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
        self.pipeline = FragmentPipeline(workers, config, self.weight_sync)
        self._turn = threading.Lock()

    # ---- iteration ------------------------------------------------------------------------------

    def __iter__(self) -> Collector:
        return self

    def __next__(self) -> Any:
        """The next batch: a SampleBatch, or a list of them if `split_trajs` is `list`.

        Raises:
            StopIteration: `total_frames` have been handed out.
            WorkersFailedError: workers keep failing.
            RuntimeError: another thread is in the middle of this, or there are no collectors left.
        """
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("another thread is collecting with this Collector")
        try:
            if self.pipeline.done():
                raise StopIteration
            return self._next()
        finally:
            self._turn.release()

    def _next(self) -> SampleBatch | list[SampleBatch]:
        config, pipeline = self.config, self.pipeline
        pipeline.launch(ahead=False)
        fragments = pipeline.take_all() if config.sync else pipeline.take_first()
        batch = SampleBatch.concat([fragment.batch for fragment in fragments])
        if not config.update_after_each_batch:
            pipeline.launch(ahead=True)
        if not config.sync:
            pipeline.renew_old()
        self.weight_sync.handed += 1
        batch.device = config.storing_device
        if not config.split_trajs:
            return batch
        parts = split_trajectories(batch)
        return parts if config.split_trajs == "list" else pad_trajectories(parts)

    @property
    def num_frames(self) -> int:
        """Environment steps in the batches handed out so far, exactly; rows that only reset, and
        padding, are none."""
        return self.pipeline.num_frames

    @property
    def num_batches(self) -> int:
        """Batches handed out."""
        return self.weight_sync.handed

    # ---- weights and collectors -----------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """The policy whose weights the collectors get (or its adapter)."""
        return self.workers.local.policy

    def update_policy_weights_(
        self, weights: Weights | np.ndarray | Mapping[str, Any] | None = None
    ) -> int:
        """Sends weights to every collector, before its next fragment.

        Args:
            weights: of the policy, as Weights, flat vector `[P]`, or `state_dict` of its network;
                None: the policy's own, as they are at this moment.

        Returns:
            their version, which batches made with them carry.
        """
        if weights is not None:
            take_weights(self.policy, weights)
        return self.weight_sync.take_snapshot()

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
            num_collectors: how many; None: as many as environments are given.
            num_envs: environments of each; None: as the others have.
            remote_configs: as for the constructor; None: as it was there.

        Returns:
            their indices, which batches carry and `remove_collectors` takes.

        Raises:
            ConfigError: if their spaces are others than those of the policy.
        """
        if self._factory is None:
            raise RuntimeError("this Collector did not make its workers: use WorkerSet.add_workers")
        specs = self._factory.more(create_env_fn, num_collectors, num_envs, remote_configs)
        return [worker.index for worker in self.workers.add_workers(specs)]

    def remove_collectors(self, indices: Iterable[int]) -> None:
        """Ends collectors, whatever they are doing; what they had on its way is lost, and is not
        counted.

        Raises:
            KeyError: if there is none of such an index.
        """
        self.workers.remove_workers(indices)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds environments and action noise of all collectors, which begin new episodes; what
        they had on its way is thrown away.

        Args:
            seed: of the first environment. The next ones get those that follow in TorchRL's
                sequence (`torchrl._utils.seed_generator`).
            static_seed: all environments get the same.

        Returns:
            the seed that the next environment would get.
        """
        self.pipeline.discard()
        return seed_workers(self.workers, seed, static_seed)

    # ---- state and end --------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Counts, the policy, and of each collector random numbers, the running statistics of its
        environments' wrappers, and where its environments stand, if they can say so.

        Tensors, arrays, numbers, strings, and lists and dicts of those. Waits for the fragments
        under way; they are kept here, and not in the state.
        """
        self.pipeline.settle()
        states = self.workers.call_all("get_state", False)
        states[0] = self.workers.local.get_state(with_policy=False)
        return {
            "num_frames": self.num_frames,
            "num_batches": self.num_batches,
            "policy": self.policy.get_state(),
            "collectors": {str(index): states[index] for index in sorted(states)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; what is on its way is thrown away."""
        self.pipeline.discard()
        self.pipeline.num_frames = int(state["num_frames"])
        self.weight_sync.handed = int(state["num_batches"])
        load_collector_state(self.workers, state)
        self.weight_sync.take_snapshot()

    def shutdown(self) -> None:
        """Ends the collectors, and Ray if this Collector started it. Workers that somebody else
        made end the fragment they are at, and are left alone."""
        self.pipeline.interrupt()
        self.pipeline.calls.clear()
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
