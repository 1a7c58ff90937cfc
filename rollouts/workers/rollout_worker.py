"""`RolloutWorker`: the object in a worker process, with environments and a copy of the policy."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from polopt.common.episodes import Episode
from polopt.common.faults import Fault
from polopt.common.moments import Moments, merged
from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.common.tracer import TRACER
from polopt.common.weights import Gradients, Weights
from polopt.metrics.lag import LearnedVersions
from polopt.metrics.machine import GpuReader, ProcessMeter
from polopt.metrics.record import Record
from polopt.policies.learning.reducer import Reducer
from polopt.policies.learning.weight_updater import Updates
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_errors import EnvironmentFailedError
from polopt.rollouts.envs.fault_tolerant_env import KeptInfos
from polopt.rollouts.sampling.non_finite import non_finite_gradient
from polopt.rollouts.sampling.running_episodes import EpisodeSteps
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.worker_sampler import (
    SampleRequest,
    clip_rewards,
    make_sampler,
    mark_non_finite,
    sample_frames,
)
from polopt.rollouts.seeds import Seeds, seed_global_generators, seeds_from, worker_seeds
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call_runner import CallRunner
from polopt.rollouts.workers.callbacks import CallbackCaller
from polopt.rollouts.workers.fault_log import InARow
from polopt.rollouts.workers.worker_config import WorkerConfig

#: A reply carries the running statistics of environment wrappers, and the use of processors, memory
#: and GPUs, only if this time has passed since the last reply that carried them. In a run that is
#: recorded, every reply carries the statistics.
STATISTICS_INTERVAL_S = 1.0


class RolloutWorker(CallRunner):
    """Samples with its own environments and its copy of the policy. A strategy, which is the
    optimizer of a run, runs its functions on workers as `fn(worker, ...)`.

        def sample(worker, weights):           # a function of a strategy
            worker.set_weights(weights)
            return worker.next_batch()         # [T, N]

    Args:
        config: see `WorkerConfig`.
        index: index of the worker. Remote workers count from 1. 0 is the local worker in the
            driver, which has environments only if `num_workers=0`.
        control: see `CallRunner`.
        clock: see `CallRunner`.

    Attributes:
        policy: this worker's copy of the policy.
        sampler: steps the environments. None if this worker has no environments, or if they could
            not be made.
        new_moments: mean and variance (`Moments`) of the observations and discounted returns that
            this worker has sampled since the last `share_moments` or `clear_state`. The policy's
            normaliser uses them. None if nothing was sampled, or if the policy does not normalise.
    """

    def __init__(
        self,
        config: WorkerConfig,
        index: int,
        control: ControlPage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(control, clock)
        # Use one thread per worker. In RLlib #6102, four workers that each used all cores needed
        # about 30 times as long for a batch as one worker.
        if index > 0:
            limit_threads(1)
        self.config = config
        self.index = index
        rollout = config.rollout
        seeds = self._seeds()
        self._seed_process(seeds)
        self.policy = self._make_policy(seeds)
        self.sampler: VectorSampler | None = None
        self._env_error: EnvironmentFailedError | None = None
        self._callbacks = CallbackCaller(config.callbacks, self.who)
        if rollout.num_workers_below == 0 and (index > 0 or rollout.num_workers == 0):
            spaces = (config.observation_space, config.action_space)
            # Policies that only act have options of their own, without `fast_cpu`.
            fast = getattr(config.policy, "fast_cpu", True)
            made = make_sampler(
                rollout,
                config.env,
                spaces,
                index,
                self.policy,
                seeds,
                fast,
                keep_infos=self._kept_infos(),
                index_offset=config.env_index_offset,
                in_evaluation=config.in_evaluation,
            )
            self.sampler, self._env_error = made
            if self.sampler is not None:
                self.sampler.stop_after = self.stop_after
                starts, steps, ends = map(
                    self._callbacks.defines,
                    ("on_episode_start", "on_episode_step", "on_episode_end"),
                )
                if starts or steps or ends:
                    self.sampler.steps = EpisodeSteps(
                        self.sampler.env.num_envs,
                        self._episode_started if starts else None,
                        self._step_taken if steps else None,
                        self._episode_ended if ends else None,
                    )
        self.new_moments: Moments | None = None
        self._rollouts = LearnedVersions()  # the version of the policy after each call of `learn`
        self._finite = InARow(self.who, rollout.max_consecutive_non_finite)
        self._process = ProcessMeter(GpuReader(torch.cuda))
        self._statistics_sent_s = -math.inf

    @property
    def who(self) -> str:
        """The name of this worker in error messages."""
        return f"{self.config.who} {self.index}"

    @property
    def version(self) -> int:
        """Version of the policy's weights."""
        return self.policy.version

    def _seeds(self) -> Seeds:
        config, envs = self.config, self.config.rollout.num_envs_per_worker
        counts = (config.restart_count, envs, config.restore_count)
        return worker_seeds(config.seed, self.index, *counts)

    def _seed_process(self, seeds: Seeds) -> None:
        """Seeds the global random generators, because environments may use them. The local worker
        does this only if `num_workers=0` and the run has a seed or must be repeatable."""
        rollout = self.config.rollout
        seeded = rollout.seed is not None or self.config.repeatable
        if self.index > 0 or (rollout.num_workers == 0 and seeded):
            seed_global_generators(seeds.process)

    def _make_policy(self, seeds: Seeds) -> Policy:
        """Returns a new policy. Its initial weights depend on `config.seed`, but not on the index
        of the worker."""
        config = self.config
        spaces = (config.observation_space, config.action_space)
        policy: Policy = config.policy_class(
            *spaces, config.policy, seed=config.seed, device=config.device
        )
        policy.shuffle = np.random.default_rng(seeds.shuffle)
        if not config.in_evaluation:
            policy.worker_index, policy.num_workers = self.index, config.rollout.num_workers
        return policy

    def use_policy(self, policy: Policy) -> None:
        """Replaces the policy object with which this worker acts and learns."""
        self.policy = policy
        if self.sampler is not None:
            self.sampler.policy = policy

    def complete(self, record: Record) -> None:
        """Adds the running statistics of environments and the use of the machine to a record, at
        most once a second. If the run must be repeatable, every record gets the statistics, because
        a replacement of this worker begins with the last statistics that the driver received."""
        now_s = self.clock()
        is_due = now_s - self._statistics_sent_s >= STATISTICS_INTERVAL_S
        if is_due or self.config.repeatable:
            record.env_statistics = self.get_statistics() or None
        if is_due:
            self._statistics_sent_s = now_s
            record.use = self._process.read()

    # ---- sampling and learning ------------------------------------------------------------------

    @property
    def has_environments(self) -> bool:
        """True if this worker has environments, or if it failed to make its environments."""
        return self.sampler is not None or self._env_error is not None

    def get_sampler(self) -> VectorSampler:
        """Returns the sampler of this worker's environments.

        Raises:
            EnvironmentFailedError: the environments could not be made.
            RuntimeError: this worker has no environments.
        """
        if self.sampler is None:
            raise self._env_error or RuntimeError(f"worker {self.index} has no environments")
        return self.sampler

    def next_batch(self) -> SampleBatch:
        """Returns the next batch for learning. A `RolloutWorker` returns a fragment `[T, N]` (T
        steps of N environments) of its own environments, sampled with its weights and
        postprocessed. All values are finite.

        Raises:
            EnvironmentFailedError: environments cannot be made, keep failing, or violate
                Gymnasium's API.
            RuntimeError: this worker has no environments.
            NonFiniteError: too many fragments in a row held values that were not finite.
            CallbackError: a callback raised, or returned a value that is not allowed.
        """
        return self.sample()

    def sample(self, request: SampleRequest | None = None) -> SampleBatch:
        """Samples and postprocesses a fragment `[T, N]`. Drops fragments with non-finite values,
        and samples again. Raises the errors of `next_batch`.

        Args:
            request: says how to sample. None means `SampleRequest()`.
        """
        sampler = self.get_sampler()
        request = request or SampleRequest()
        while True:
            sampler.ended = [] if self._callbacks.defines("on_episode_end") else None
            with self.phase("sample"):
                batch = self._sample(sampler, request)
            moments, batch.moments = batch.moments, None
            early = sampler.num_steps < (request.steps or sampler.fragment_length)
            self.record.fragment_ended(sampler.num_steps, early)
            bad = batch.faults.get("non_finite")
            if bad is None:
                dist = self.policy.dist
                self.record.sampled(batch, dist.sizes, moments, dist.bounds, early_stopped=early)
                self.new_moments = merged(self.new_moments, moments)
                self.note_finite("fragments", "")
                self.end_episodes(sampler.ended or ())
                if self._callbacks.defines("on_sample_end"):
                    samples = self.policy.encode_batch(batch)
                    self._count_metrics("on_sample_end", samples=samples)
                return batch
            self.record.add_faults(batch.faults.values())
            self.note_finite("fragments", bad.message)

    def end_episodes(self, episodes: Iterable[Episode]) -> None:
        """Records the metrics that the user's `on_episode_end` returned for these episodes."""
        for episode in episodes:
            self.record.callback_metrics(episode.metrics)

    def _count_metrics(self, method: str, **arguments: Any) -> None:
        with self.phase("callbacks"):
            metrics = self._callbacks.metrics_of(method, worker=self, **arguments)
            self.record.callback_metrics(metrics)

    def _episode_started(self, episode: Episode) -> None:
        with self.phase("callbacks"):
            self._callbacks.call("on_episode_start", episode=episode, worker=self)

    def _step_taken(self, episode: Episode) -> None:
        with self.phase("callbacks"):
            self._callbacks.call("on_episode_step", episode=episode, worker=self)

    def _episode_ended(self, episode: Episode) -> Mapping[str, Any]:
        with self.phase("callbacks"):
            return self._callbacks.metrics_of("on_episode_end", episode=episode, worker=self)

    def _kept_infos(self) -> KeptInfos:
        """Returns which infos of steps the sampler must keep for the user's callbacks."""
        if self._callbacks.defines("on_episode_step"):
            return "all"
        return "last" if self._callbacks.defines("on_episode_end") else "none"

    def _sample(self, sampler: VectorSampler, request: SampleRequest) -> SampleBatch:
        if request.reset_first:
            sampler.reset()
        batch = sample_frames(sampler, request)
        batch.worker_index = self.index
        batch.compress = self.config.rollout.compress_data
        with np.errstate(all="ignore"):
            clip_rewards(batch, self.config.rollout.clip_raw_rewards)
            batch = self.policy.postprocess(batch)
        return mark_non_finite(batch, sampler)

    def learn(self, batch: SampleBatch, reducer: Reducer | None = None) -> dict[str, float]:
        """Learns from a batch with this worker's policy, and counts the updates.

        The policy's normaliser needs the moments (mean and variance) of all samples of the run.
        Learners that learn together first merge the moments of their new samples (`share_moments`).
        A worker that learns alone does not merge moments here.

        Args:
            batch: a batch from `next_batch`.
            reducer: computes sums over all learners. None means that this worker learns alone.

        Returns:
            learner statistics. See `Policy.learn_on_batch`.

        Raises:
            NonFiniteError: too many consecutive calls made no update, because the gradients were
                not finite.
            GroupBroken: another learner died or hangs, so a sum over all learners failed.
        """
        policy, updates = self.policy, Updates(self.policy)
        with self.phase("learn"):
            if reducer is not None:
                self.share_moments(reducer)
            stats = policy.learn_on_batch(batch, reducer)
        lag = updates.version - batch.version, self._rollouts.since(batch.version)
        self.record.lags += (lag,)
        self._rollouts.end_rollout(policy.version)
        problem = "gradient of a minibatch"
        # All learners skip the same update. Only the learner with the non-finite gradient counts
        # the skipped update.
        own = updates.skipped if reducer is None else updates.non_finite
        if own:
            self.record.add_faults([Fault("non_finite", problem, count=own)])
        if updates.num:
            self.record.learn(batch.agent_steps, updates.num, updates.rows, stats)
            self.note_finite("updates", "")
        elif updates.skipped:
            self.note_finite("updates", problem)
        return stats

    def share_moments(self, reducer: Reducer) -> None:
        """Merges the moments of new data into the moments of the policy's normaliser. New data are
        the data that all learners have sampled since the last call. `learn` calls this method if
        several learners learn together."""
        moments, self.new_moments = self.new_moments, None
        self.policy.add_moments(moments, reducer)

    def is_finite(self, gradients: Gradients) -> bool:
        """Returns True if a gradient is finite. Otherwise counts the gradient and returns False,
        and the caller must discard the gradient.

        Raises:
            NonFiniteError: too many gradients in a row were not finite.
        """
        problem = non_finite_gradient(gradients)
        if problem:
            self.record.add_faults([Fault("non_finite", problem)])
        self.note_finite("gradients", problem)
        return not problem

    def note_finite(self, what: str, problem: str) -> None:
        """Notes whether data were finite, to find data that are not finite several times in a row.

        Args:
            what: the kind of data: `fragments`, `gradients` or `updates`.
            problem: says which values were not finite. Empty if all values were finite.

        Raises:
            NonFiniteError: `max_consecutive_non_finite` consecutive data of this kind were not
                finite.
        """
        self._finite.note(what, problem)

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """Returns a copy of the policy's weights."""
        return self.policy.get_weights()

    def set_weights(self, weights: Weights | None) -> None:
        """Sets the weights of the policy. None means that the worker keeps its weights."""
        if weights is not None:
            self.policy.set_weights(weights)

    def get_state(self, with_policy: bool = True) -> dict[str, Any]:
        """Returns the state of the sampler, of the policy and of the generator for shuffling, and
        the running statistics of the environments. The state of the sampler is None if the worker
        has no environments, or if they cannot return their state. Without `with_policy`, the state
        of the policy is None."""
        return {
            "sampler": None if self.sampler is None else self.sampler.get_state(),
            "statistics": self.get_statistics(),
            "policy": self.policy.get_state() if with_policy else None,
            "shuffle": self.policy.shuffle.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the state that `get_state` returned. If a value in `state` is None or missing,
        the corresponding part of the worker stays unchanged."""
        if state.get("policy") is not None:
            shuffle = self.policy.shuffle.bit_generator.state
            self.policy.set_state(state["policy"])
            self.policy.shuffle.bit_generator.state = shuffle
        if state.get("shuffle") is not None:
            self.policy.shuffle.bit_generator.state = state["shuffle"]
        if state.get("statistics"):
            self.set_statistics(state["statistics"])
        if self.sampler is not None and state.get("sampler") is not None:
            self.sampler.set_state(state["sampler"])

    def get_statistics(self) -> dict[str, Any]:
        """Returns the running statistics of the environments' wrappers. The dict is empty if no
        wrapper has running statistics."""
        return {} if self.sampler is None else self.sampler.get_statistics()

    def set_statistics(self, statistics: dict[str, Any]) -> None:
        """Restores the statistics that `get_statistics` returned in this or in another worker."""
        if self.sampler is not None:
            self.sampler.set_statistics(statistics)

    def begin_restored_run(self, restore_count: int) -> None:
        """Drops the data that a strategy keeps in this worker, and begins new episodes with random
        numbers that were not used before the restore. A remote worker also makes a new policy, so
        the next call has to carry weights."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        seeds = self._seeds()
        self._seed_process(seeds)
        if self.index > 0:
            self.use_policy(self._make_policy(seeds))
        self._restart(seeds)

    def set_seed(self, env_seeds: list[int]) -> None:
        """Drops the data that a strategy keeps in this worker, and begins new episodes with one
        seed per environment. This worker derives its other seeds from these seeds."""
        seeds = seeds_from(env_seeds, self.index)
        if self.sampler is not None:
            seed_global_generators(seeds.process)
        self._restart(seeds)

    def _restart(self, seeds: Seeds) -> None:
        self.clear_state()
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        if self.sampler is not None:
            self.sampler.restart(seeds)

    def clear_state(self) -> None:
        """Drops the data that a strategy keeps in this worker, and `new_moments`."""
        super().clear_state()
        self.new_moments = None

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy. See `Policy.set_option`."""
        self.policy.set_option(name, value)
        self.config = dataclasses.replace(self.config, policy=self.policy.config)

    def stop(self) -> None:
        """Drops the data that a strategy keeps, closes the environments, and ends the recording of
        a trace."""
        TRACER.take()
        super().stop()
        if self.sampler is not None:
            self.sampler.close()
