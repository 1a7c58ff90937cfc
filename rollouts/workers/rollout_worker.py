"""`RolloutWorker`: environments and a copy of the policy, in the driver or as a Ray actor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from ray import cloudpickle

from polopt.common.data_faults import DataFaults
from polopt.common.episodes import Episode
from polopt.common.moments import Moments, merged
from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.common.tracer import TRACER
from polopt.common.weights import Gradients, Weights
from polopt.metrics.lag import LearnedVersions
from polopt.metrics.machine import GpuReader, ProcessMeter
from polopt.policies.learning.reducer import Reducer
from polopt.policies.policy import Policy
from polopt.rollouts.envs.env_sources import env_name
from polopt.rollouts.envs.errors import EnvironmentFailedError
from polopt.rollouts.envs.random_state import seed_global_generators
from polopt.rollouts.sampling.non_finite import non_finite_gradient
from polopt.rollouts.sampling.sample_request import SampleRequest
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeds import Seeds, seeds_from, worker_seeds
from polopt.rollouts.sampling.worker_sampler import check_batch, make_sampler, sample_frames
from polopt.rollouts.transport.endpoint import Endpoint
from polopt.rollouts.transport.rpc_server import RpcServer
from polopt.rollouts.workers.callbacks import CallbackCaller
from polopt.rollouts.workers.counts import CallRecord, Counts
from polopt.rollouts.workers.early_stop import EarlyStop
from polopt.rollouts.workers.failures import CallError, NonFiniteError
from polopt.rollouts.workers.worker_config import WorkerConfig

#: Least interval at which replies carry the running statistics of environments, and the use of
#: processors, memory and GPUs.
STATISTICS_INTERVAL_S = 1.0


class Answer(NamedTuple):
    """What a worker sends back for one call.

    Attributes:
        value: return value of the function; None after an error.
        counts: what the call counted, up to the error if there was one.
        error: what ended the call; None: it returned.
    """

    value: Any
    counts: Counts
    error: CallError | None = None


class RolloutWorker:
    """Samples, holds weights and state, and runs functions of a strategy, `fn(worker, ...)`.

    Args:
        config: see `WorkerConfig`.
        index: 0 is the driver's local worker, which has environments only if it is the only
            worker; remote workers count from 1.

    Attributes:
        policy: this worker's copy.
        sampler: None without environments.
        state: what a strategy keeps in this worker between calls, by a name of its choice. Empty at
            the start, after a replacement, a restore and a reset; never saved. Values with a method
            `close` are closed then.
        record: counts of the current call.
        new_moments: of what this worker has sampled since it last learned together with others.
    """

    def __init__(self, config: WorkerConfig, index: int) -> None:
        # One thread per worker: workers that each use all cores are 30 times slower (RLlib #6102).
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
        if rollout.num_workers_below == 0 and (index > 0 or rollout.num_workers == 0):
            spaces = (config.observation_space, config.action_space)
            # Policies that only act have options of their own.
            fast = getattr(config.policy, "fast_cpu", True)
            made = make_sampler(
                rollout,
                config.env,
                spaces,
                index,
                self.policy,
                seeds,
                fast,
                keep_infos=config.callbacks is not None,
                index_offset=config.env_index_offset,
                in_evaluation=config.in_evaluation,
            )
            self.sampler, self._env_error = made
        self._callbacks = CallbackCaller(config.callbacks, f"{config.who} {index}")
        self.state: dict[str, Any] = {}
        self.record = CallRecord()
        self.new_moments: Moments | None = None
        self._rollouts = LearnedVersions()  # of what this worker learns from
        self._non_finite_in_a_row: dict[str, int] = {}
        self._process = ProcessMeter(GpuReader(torch.cuda))
        self._statistics_sent_s = 0.0
        self._early_stop = EarlyStop(self._stop_fragments)
        self._rpc_server = RpcServer()

    def _seeds(self) -> Seeds:
        config, envs = self.config, self.config.rollout.num_envs_per_worker
        counts = (config.restart_count, envs, config.restore_count)
        return worker_seeds(config.seed, self.index, *counts)

    def _seed_process(self, seeds: Seeds) -> None:
        """Seeds the global generators, which environments may draw from; in the driver's process
        only for environments there and an explicit seed, as in RLlib."""
        rollout = self.config.rollout
        if self.index > 0 or (rollout.num_workers == 0 and rollout.seed is not None):
            seed_global_generators(seeds.process)

    def _make_policy(self, seeds: Seeds) -> Policy:
        """A new policy. Initial weights depend on the run's seed alone, so all workers begin with
        the same."""
        config = self.config
        spaces = (config.observation_space, config.action_space)
        policy: Policy = config.policy_class(
            *spaces, config.policy, seed=config.seed, device=config.device
        )
        policy.shuffle = np.random.default_rng(seeds.shuffle)
        return policy

    def use_policy(self, policy: Policy) -> None:
        """Acts and learns with this policy object from now on."""
        self.policy = policy
        if self.sampler is not None:
            self.sampler.policy = policy

    # ---- calls ----------------------------------------------------------------------------------

    def run(self, call: int, function: Callable[..., Any] | bytes, *args: Any) -> Answer:
        """Runs a function that the driver sent, see `Calls.send`.

        Args:
            call: number of the call, which `stop_early` names.
            function: `fn(worker, *args)`; bytes: encoded by cloudpickle.
            args: its further arguments.
        """
        record = self.record = CallRecord()
        try:
            fn = cloudpickle.loads(function) if isinstance(function, bytes) else function
        except Exception as error:  # an import of the user's module may raise anything
            return self.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        value, failed = None, None
        with self._early_stop.during(call):
            try:
                value = fn(self, *args)
            except Exception as error:  # the user's code may raise anything
                failed = CallError.of(error)
        self._add_statistics(record)
        return Answer(value, record.counts(self.policy.version, value), failed)

    def run_encoded(self, call: bytes) -> Answer:
        """As `run`, with function and arguments encoded by cloudpickle together."""
        try:
            number, function, args = cloudpickle.loads(call)
        except Exception as error:  # as in `run`
            self.record = CallRecord()
            return self.refuse(f"the call cannot be unpickled in the worker: {error!r}")
        return self.run(number, function, *args)

    def run_here(self, call: int, fn: Callable[..., Any], *args: Any) -> tuple[Any, Counts]:
        """As `run`, for a caller in this process: exceptions reach it unchanged."""
        outer, self.record = self.record, CallRecord()
        try:
            with self._early_stop.during(call):
                value = fn(self, *args)
            self._add_statistics(self.record)
            return value, self.record.counts(self.policy.version, value)
        finally:
            self.record = outer

    def refuse(self, why: str) -> Answer:
        """The answer to a call that cannot be run, or whose value cannot be sent."""
        return Answer(
            None, self.record.counts(self.policy.version, None), CallError("function", why)
        )

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times a phase of the current call: `with worker.phase("learn"): ...`. Results report the
        shares of `sample`, `gradient`, `learn`, of the strategy's `worker_phases`, and of the
        `other` time of calls."""
        return self.record.phase(name)

    def stop_early(self, call: int, keep_steps: int) -> None:
        """Ends the fragments of a call once they have `keep_steps` steps. Runs in a concurrency
        group of its own, beside the call."""
        self._early_stop.request(call, keep_steps)

    def _stop_fragments(self, keep_steps: int | None) -> None:
        if self.sampler is not None:
            self.sampler.keep_steps = keep_steps

    def _add_statistics(self, record: CallRecord) -> None:
        """Adds to the record of a call what not every reply carries."""
        now_s = time.monotonic()
        if now_s - self._statistics_sent_s >= STATISTICS_INTERVAL_S:
            self._statistics_sent_s = now_s
            record.env_statistics = self.get_statistics() or None
            record.use = self._process.read()

    # ---- sampling and learning ------------------------------------------------------------------

    @property
    def has_environments(self) -> bool:
        """Whether this worker samples itself, or would if its environments could be made."""
        return self.sampler is not None or self._env_error is not None

    def get_sampler(self) -> VectorSampler:
        """The sampler of this worker's environments.

        Raises:
            EnvironmentFailedError: environments cannot be made.
            RuntimeError: the worker has none.
        """
        if self.sampler is None:
            raise self._env_error or RuntimeError(f"worker {self.index} has no environments")
        return self.sampler

    def next_batch(self) -> SampleBatch:
        """What this worker learns from next: here, a fragment `[T, N]` of its own environments,
        made with its weights and postprocessed. All its values are finite.

        Raises:
            EnvironmentFailedError: environments cannot be made, or keep failing.
            NonFiniteError: too many fragments in a row held values that were not finite.
            CallbackError: a callback raised.
        """
        return self.sample()

    def sample(self, request: SampleRequest | None = None) -> SampleBatch:
        """A fragment `[T, N]` of this worker's environments, as `next_batch`.

        Args:
            request: how to sample; None: as the config says.
        """
        sampler = self.get_sampler()
        request = request or SampleRequest()
        while True:
            sampler.ended = None if self.config.callbacks is None else []
            with self.phase("sample"):
                batch = self._sample(sampler, request)
            moments, batch.moments = batch.moments, None
            if not batch.faults.non_finite:
                steps = request.steps or sampler.fragment_length
                dist, early = self.policy.dist, batch.shape[0] < steps
                self.record.sampled(batch, dist.sizes, moments, dist.bounds, early_stopped=early)
                self.new_moments = merged(self.new_moments, moments)
                self.finite("fragments")
                self.end_episodes(sampler.ended or ())
                return batch
            self.record.env_steps_discarded += batch.env_steps
            self.not_finite("fragments", batch.faults)

    def end_episodes(self, episodes: Iterable[Episode]) -> None:
        """Calls the user's callbacks for episodes that have ended, and counts their metrics.

        Raises:
            CallbackError: a callback raised.
        """
        if self.config.callbacks is not None:
            with self.phase("callbacks"):
                for episode in episodes:
                    self.record.custom_metrics.add(self._callbacks.episode_ended(episode, self))

    def _sample(self, sampler: VectorSampler, request: SampleRequest) -> SampleBatch:
        if request.reset_first:
            sampler.reset()
        batch = sample_frames(sampler, request)
        batch.worker_index = self.index
        batch.compress = self.config.rollout.compress_data
        with np.errstate(all="ignore"):
            batch = self.policy.postprocess(batch)
        return check_batch(batch, sampler, env_name(self.config.env))

    def learn(self, batch: SampleBatch, reducer: Reducer | None = None) -> dict[str, float]:
        """Learns from a batch with this worker's policy, and counts that. Learners that learn
        together first add the moments of what all of them have sampled since the last time; one
        that learns alone gets its moments with weights of the driver, who adds those of replies.

        Args:
            batch: as `next_batch` returns it.
            reducer: sums over all learners; None: this worker learns alone.

        Returns:
            learner statistics; see `Policy.learn_on_batch`.

        Raises:
            NonFiniteError: too many calls in a row made no update, because gradients were not
                finite.
        """
        policy = self.policy
        version, skipped = policy.version, policy.progress.skipped_updates
        rows = policy.progress.rows_applied
        own = policy.progress.non_finite_gradients
        with self.phase("learn"):
            if reducer is not None:
                self.share_moments(reducer)
            stats = policy.learn_on_batch(batch, reducer)
        lag = version - batch.version, self._rollouts.since(batch.version)
        self.record.lags.append(lag)
        self._rollouts.end_rollout(policy.version)
        fault = DataFaults(non_finite="gradient of a minibatch")
        # Of several learners, the one whose gradient was not finite counts it.
        skipped = policy.progress.skipped_updates - skipped
        own = skipped if reducer is None else policy.progress.non_finite_gradients - own
        if policy.version > version:
            updates, rows = policy.version - version, policy.progress.rows_applied - rows
            self.record.learned(batch.env_steps, updates, rows, stats)
            self.record.not_finite(own, fault)
            self.finite("updates")
        elif skipped:
            self.not_finite("updates", fault, own)
        return stats

    def share_moments(self, reducer: Reducer) -> None:
        """Adds what this worker and all other learners have sampled since the last time to the
        moments of the policy; `learn` calls it."""
        moments, self.new_moments = self.new_moments, None
        self.policy.add_moments(moments, reducer)

    def is_finite(self, gradients: Gradients) -> bool:
        """Whether a gradient is finite. One that is not is counted, and must not be used.

        Raises:
            NonFiniteError: too many gradients in a row were not finite.
        """
        problem = non_finite_gradient(gradients)
        if problem:
            self.not_finite("gradients", DataFaults(non_finite=problem))
        else:
            self.finite("gradients")
        return not problem

    def finite(self, what: str) -> None:
        """Notes that data of a kind were finite, which ends a row of those that were not."""
        self._non_finite_in_a_row.pop(what, None)

    def not_finite(self, what: str, faults: DataFaults, count: int = 1) -> None:
        """Counts data that were not finite and are not used.

        Args:
            what: the kind: `fragments`, `gradients` or `updates`.
            faults: of the data.
            count: how many there were; 0: other workers count them.

        Raises:
            NonFiniteError: `max_consecutive_non_finite` of the kind in a row were not finite.
        """
        self.record.not_finite(count, faults)
        limit = self.config.rollout.max_consecutive_non_finite
        in_a_row = self._non_finite_in_a_row[what] = self._non_finite_in_a_row.get(what, 0) + 1
        if in_a_row >= limit:
            raise NonFiniteError(
                f"{self.config.who} {self.index}: {in_a_row} {what} in a row held non-finite "
                f"values (max_consecutive_non_finite={limit}). The last: {faults.non_finite}"
            )

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """A copy of the policy's weights."""
        return self.policy.get_weights()

    def set_weights(self, weights: Weights | None) -> None:
        """Takes over weights; None: the worker has them already."""
        if weights is not None:
            self.policy.set_weights(weights)

    def get_state(self, with_policy: bool = True) -> dict[str, Any]:
        """State of the sampler (None where environments cannot give theirs) and of the policy."""
        return {
            "sampler": None if self.sampler is None else self.sampler.get_state(),
            "statistics": self.get_statistics(),
            "policy": self.policy.get_state() if with_policy else None,
            "shuffle": self.policy.shuffle.bit_generator.state,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, except for parts that are None."""
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
        """Running statistics of the environments' wrappers; empty where there are none."""
        return {} if self.sampler is None else self.sampler.get_statistics()

    def set_statistics(self, statistics: dict[str, Any]) -> None:
        """Restores what `get_statistics` of this worker or another one returned."""
        if self.sampler is not None:
            self.sampler.set_statistics(statistics)

    def begin_restored_run(self, restore_count: int) -> None:
        """Begins new episodes, with random numbers that were not used before the restore. A remote
        worker begins with a new policy, whose weights come with the next call."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        seeds = self._seeds()
        self._seed_process(seeds)
        if self.index > 0:
            self.use_policy(self._make_policy(seeds))
        self._restart(seeds)

    def set_seed(self, env_seeds: list[int]) -> None:
        """Begins new episodes, with one seed per environment; other random numbers follow."""
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
        """Drops what a strategy keeps in this worker."""
        kept, self.state = self.state, {}
        self.new_moments = None
        for value in kept.values():
            if hasattr(value, "close"):
                value.close()

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy, see `Policy.set_option`."""
        self.policy.set_option(name, value)
        self.config = dataclasses.replace(self.config, policy=self.policy.config)

    # ---- configuration and end ------------------------------------------------------------------

    def reconfigure(self, config: WorkerConfig, index: int) -> None:
        """Becomes the worker that `config` describes, in the same process."""
        self.stop()
        self.__init__(config, index)  # type: ignore[misc]

    def connect(self, endpoint: Endpoint) -> str:
        """Connects for calls over ZeroMQ; see `RpcServer.connect`."""
        return self._rpc_server.connect(endpoint)

    def serve(self, endpoint: Endpoint) -> str:
        """Answers calls over ZeroMQ until the client ends serving; see `RpcServer.serve`."""
        return self._rpc_server.serve(self, endpoint)

    def take_large_answer(self, endpoint: Endpoint, number: int) -> list[bytes]:
        """An answer that is too large for ZeroMQ; see `RpcServer.take_large_answer`."""
        return self._rpc_server.take_large_answer(endpoint, number)

    def ping(self) -> int:
        """The version of the policy's weights, once the worker is up and idle."""
        return self.policy.version

    def stop(self) -> None:
        """Drops what a strategy keeps, closes environments and connections, ends a recording."""
        TRACER.take()
        self.clear_state()
        self._rpc_server.close()
        if self.sampler is not None:
            self.sampler.close()
