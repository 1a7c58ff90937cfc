"""`RolloutWorker`: environments and a copy of the policy, in the driver or as a Ray actor."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polopt.common.compression import PackedGradients
from polopt.common.episodes import EpisodeStats
from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.common.tracing import TRACER
from polopt.common.weights import Gradients, Weights
from polopt.policies.policy import Policy
from polopt.rollouts.envs.errors import EnvironmentFailedError
from polopt.rollouts.envs.random_state import seed_global_generators
from polopt.rollouts.envs.resolving import env_name
from polopt.rollouts.sampling.joining import sample_frames
from polopt.rollouts.sampling.making import check_batch, make_sampler
from polopt.rollouts.sampling.requests import Fragment, LearnInfo, RoundInfo, SampleRequest
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeding import Seeds, seeds_from, worker_seeds
from polopt.rollouts.transport.collective import GroupSpec
from polopt.rollouts.transport.endpoint import Address, Endpoint
from polopt.rollouts.transport.rpc_server import RpcServer
from polopt.rollouts.workers.early_stop import EarlyStop
from polopt.rollouts.workers.first_call import first_call
from polopt.rollouts.workers.gradient_rounds import GradientRounds
from polopt.rollouts.workers.group_learner import GroupLearner, checksum_of
from polopt.rollouts.workers.worker_config import WorkerConfig


class RolloutWorker:
    """Samples, and computes gradients or learns, as the optimizer requests.

    Args:
        config: see `WorkerConfig`.
        index: 0 is the driver's local worker, which has environments only if it is the only
            worker; remote workers count from 1.

    Attributes:
        policy: this worker's copy.
        sampler: None without environments.
        gradients: gradients for a central update.
        group: decentralized learning.
        has_worked: a call that runs environments and policy has succeeded.
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
        # Initial weights depend on the run's seed alone, so all workers begin with the same.
        self.policy: Policy = config.policy_class(
            config.observation_space,
            config.action_space,
            config.policy,
            seed=config.seed,
            device=config.device,
        )
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        self.sampler: VectorSampler | None = None
        self._env_error: EnvironmentFailedError | None = None
        if rollout.num_workers_below == 0 and (index > 0 or rollout.num_workers == 0):
            spaces = (config.observation_space, config.action_space)
            made = make_sampler(rollout, config.env, spaces, index, self.policy, seeds)
            self.sampler, self._env_error = made
        self.gradients = GradientRounds(rollout.compress_gradients, rollout.topk_share)
        self.group = GroupLearner()
        self.has_worked = False
        self._early_stop = EarlyStop()
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

    def adopt(self, policy: Policy) -> None:
        """Acts and learns with this policy object from now on."""
        self.policy = policy
        if self.sampler is not None:
            self.sampler.policy = policy

    # ---- sampling -------------------------------------------------------------------------------

    @property
    def has_environments(self) -> bool:
        """Whether this worker samples itself, or would if its environments could be made."""
        return self.sampler is not None or self._env_error is not None

    def sample(
        self, weights: Weights | None = None, request: SampleRequest | None = None
    ) -> SampleBatch:
        """A postprocessed fragment `[T, N]`.

        Args:
            weights: taken over first; None: the worker's own.
            request: how to sample; None: as the config says.

        Raises:
            EnvironmentFailedError: environments cannot be made, or keep failing.
        """
        if weights is not None:
            self.set_weights(weights)
        if self.sampler is None:
            raise self._env_error or RuntimeError(f"worker {self.index} has no environments")
        request = request or SampleRequest()
        with self._early_stop.sampling(self.sampler, request.number):
            if request.reset_first:
                self.sampler.reset()
            batch = sample_frames(self.sampler, request)
        batch.worker_index = self.index
        batch.compress = self.config.rollout.compress_data
        with np.errstate(over="ignore", invalid="ignore"):
            batch = self.policy.postprocess(batch)
        return check_batch(batch, self.sampler, env_name(self.config.env))

    @first_call
    def collect(self, weights: Weights | None, request: SampleRequest) -> Fragment:
        """As `sample`, with `postproc` applied, and counts from before it."""
        started_s = time.perf_counter()
        batch = self.sample(weights, request)
        sample_s = TRACER.span("worker", "sample", started_s)
        frames, steps, faults = batch.env_steps, batch.shape[0], batch.faults
        if self.config.postproc is not None:
            batch = self.config.postproc(batch)
            if not isinstance(batch, SampleBatch):
                raise TypeError(f"postproc must return a SampleBatch; got {type(batch).__name__}")
        return Fragment(batch, frames, steps, sample_s, faults)

    def stop_early(self, number: int, keep_steps: int) -> None:
        """Ends the fragment of this request once it has `keep_steps` steps, beside the call."""
        self._early_stop.stop(number, keep_steps)

    # ---- gradients and learning -----------------------------------------------------------------

    def _next_batch(
        self, weights: Weights | None = None, request: SampleRequest | None = None
    ) -> SampleBatch:
        """The batch that gradients are computed from: here, the worker's own sample."""
        return self.sample(weights, request)

    @first_call
    def sample_and_compute_gradients(
        self, weights: Weights | None = None
    ) -> tuple[Gradients | PackedGradients, RoundInfo]:
        """One round of AsyncGradients or SyncGradients: takes over weights, samples if the last
        rollout has no minibatch left, and computes the gradient of the next minibatch."""
        return self.gradients.next_gradients(self.policy, self._sample_if_needed(weights))

    def _sample_if_needed(self, weights: Weights | None) -> RoundInfo:
        minibatches = self.gradients.minibatches
        if minibatches is not None and not minibatches.done:
            if weights is not None:
                self.set_weights(weights)
            counts = (0, EpisodeStats.empty(), 0, 0.0)
            return RoundInfo(*counts, worker_index=self.index, acted=minibatches.version)
        started_s = time.perf_counter()
        batch = self._next_batch(weights)
        info = self._round_info(batch, started_s)
        self.gradients.begin(self.policy, batch)
        return info

    @first_call
    def sample_for_learning(self, round_index: int) -> RoundInfo:
        """First half of a round of DecentralizedAllReduce: samples, and keeps the batch."""
        started_s = time.perf_counter()
        batch = self.group.batch = self._next_batch(None, SampleRequest(round_index))
        return self._round_info(batch, started_s)

    def _round_info(self, batch: SampleBatch, started_s: float) -> RoundInfo:
        sample_s = TRACER.span("worker", "sample", started_s)
        counts = (batch.env_steps, batch.episodes, batch.shape[0], sample_s)
        return RoundInfo(*counts, batch.faults, self.index, batch.version)

    def learn(self, env_steps: int, want_weights: bool, want_checksum: bool) -> LearnInfo:
        """Second half of a round of DecentralizedAllReduce; see `GroupLearner.learn`."""
        return self.group.learn(self.policy, env_steps, want_weights, want_checksum)

    def listen_for_group(self, spec: GroupSpec, rank: int) -> Address | None:
        """Becomes `rank` of a group; see `GroupLearner.listen`."""
        return self.group.listen(spec, rank, self.config.device)

    def join_group(self, addresses: Sequence[Any]) -> str | None:
        """Connects to the other ranks of the group; see `GroupLearner.join`."""
        return self.group.join(addresses)

    def checksum(self) -> str:
        """SHA-256 of the weights' bytes."""
        return checksum_of(self.policy)

    @first_call
    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns `fn(self, *args)`; see `WorkerSet.apply`."""
        return fn(self, *args)

    # ---- weights and state ----------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """A copy of the policy's weights."""
        return self.policy.get_weights()

    def set_weights(self, weights: Weights) -> None:
        """Takes over weights."""
        self.policy.set_weights(weights)

    def get_state(self, with_policy: bool = True) -> dict[str, Any]:
        """State of the sampler (None where environments have no `get_state`) and of the policy."""
        return {
            "sampler": None if self.sampler is None else self.sampler.get_state(),
            "statistics": [] if self.sampler is None else self.sampler.get_statistics(),
            "policy": self.policy.get_state() if with_policy else None,
            "shuffle": self.policy.shuffle.bit_generator.state,
        }

    def get_learner_state(self) -> dict[str, Any]:
        """State of the policy alone: a rank that gets it keeps its own random numbers."""
        return {"policy": self.policy.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned, except for parts that are None."""
        if state.get("policy") is not None:
            shuffle = self.policy.shuffle.bit_generator.state
            self.policy.set_state(state["policy"])
            self.policy.shuffle.bit_generator.state = shuffle
        if state.get("shuffle") is not None:
            self.policy.shuffle.bit_generator.state = state["shuffle"]
        if self.sampler is not None:
            if state.get("statistics"):
                self.sampler.set_statistics(state["statistics"])
            if state.get("sampler") is not None:
                self.sampler.set_state(state["sampler"])

    def begin_restored_run(self, restore_count: int) -> None:
        """Begins new episodes, with random numbers that were not used before the restore."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        seeds = self._seeds()
        self._seed_process(seeds)
        self._restart(seeds)

    def set_seed(self, env_seeds: list[int]) -> None:
        """Begins new episodes, with one seed per environment; other random numbers follow."""
        seeds = seeds_from(env_seeds, self.index)
        if self.sampler is not None:
            seed_global_generators(seeds.process)
        self._restart(seeds)

    def _restart(self, seeds: Seeds) -> None:
        self.gradients.clear()
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        if self.sampler is not None:
            self.sampler.restart(seeds)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy, see `Policy.set_option`."""
        self.policy.set_option(name, value)

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

    def ping(self) -> int:
        """The version of the policy's weights, once the worker is up and idle."""
        return self.policy.version

    def stop(self) -> None:
        """Leaves its group, closes environments and connections, and ends a recording."""
        TRACER.take()
        self.group.leave()
        self._rpc_server.close()
        if self.sampler is not None:
            self.sampler.close()
