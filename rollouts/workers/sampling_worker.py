"""`SamplingWorker`: one process that samples."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from polopt.common.sample_batch import SampleBatch
from polopt.common.threads import limit_threads
from polopt.common.weights import Weights
from polopt.policies.policy import Policy
from polopt.rollouts.envs.errors import EnvironmentFailedError
from polopt.rollouts.envs.random_state import seed_global_generators
from polopt.rollouts.envs.resolving import env_name
from polopt.rollouts.sampling.requests import Fragment, SampleRequest
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.seeding import Seeds, seeds_from, worker_seeds
from polopt.rollouts.transport.messages import Endpoint
from polopt.rollouts.transport.rpc_server import RpcServer
from polopt.rollouts.workers.early_stop import EarlyStop
from polopt.rollouts.workers.guarded_sampling import check_batch, make_sampler
from polopt.rollouts.workers.worker_config import WorkerConfig


class SamplingWorker:
    """Has environments and a policy, and samples.

    Args:
        config: see `WorkerConfig`.
        index: 0 is the driver's own worker, which has environments only if it is the only one;
            remote workers count from 1.
    """

    def __init__(self, config: WorkerConfig, index: int) -> None:
        # One thread for each worker: several that each use all cores are 30 times slower (#6102).
        if index > 0:
            limit_threads(1)
        self.config = config
        self.index = index
        rollout = config.rollout
        seeds = self._seeds()
        self._seed_process(seeds)
        # Initial weights are from the run's seed alone, so that every worker starts alike.
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
            self.sampler, self._env_error = make_sampler(config, index, self.policy, seeds)
        self._stop_early = EarlyStop()
        self._rpc_server = RpcServer()

    def _seeds(self) -> Seeds:
        config = self.config
        envs = config.rollout.num_envs_per_worker
        return worker_seeds(
            config.seed, self.index, config.restart_count, envs, config.restore_count
        )

    def _seed_process(self, seeds: Seeds) -> None:
        """Seeds the global generators, which environments may draw from. Those of the driver's
        process are the user's: they are seeded only for environments there, with an explicit seed,
        as in RLlib."""
        rollout = self.config.rollout
        if self.index > 0 or (rollout.num_workers == 0 and rollout.seed is not None):
            seed_global_generators(seeds.process)

    def adopt(self, policy: Policy) -> None:
        """Acts and learns by this very policy from now on."""
        self.policy = policy
        if self.sampler is not None:
            self.sampler.policy = policy

    # ---- sampling -----------------------------------------------------------------------------

    def sample(
        self, weights: Weights | None = None, request: SampleRequest | None = None
    ) -> SampleBatch:
        """A postprocessed fragment `[T, N]`, by `weights` if given, else by those it has."""
        if weights is not None:
            self.set_weights(weights)
        if self.sampler is None:
            if self._env_error is not None:
                raise self._env_error
            raise RuntimeError(f"worker {self.index} has no environments to sample from")
        asked = request or SampleRequest()
        with self._stop_early.sampling(self.sampler, asked.number):
            if asked.reset_first:
                self.sampler.reset()
            batch = self.sampler.sample(asked.exploration, asked.steps, asked.uniform)
        batch.worker_index = self.index
        batch.compress = self.config.rollout.compress_data
        with np.errstate(over="ignore", invalid="ignore"):
            batch = self.policy.postprocess(batch)
        return check_batch(batch, self.sampler, env_name(self.config.env))

    def _data(
        self, weights: Weights | None = None, request: SampleRequest | None = None
    ) -> SampleBatch:
        """What it computes gradients from: here, its own sample."""
        return self.sample(weights, request)

    def collect(self, weights: Weights | None, request: SampleRequest) -> Fragment:
        """What a `Collector` asks for: a sample that `postproc` has seen, too."""
        started_s = time.perf_counter()
        batch = self.sample(weights, request)
        sample_s = time.perf_counter() - started_s
        frames, steps, faults = batch.env_steps, batch.shape[0], batch.faults
        if self.config.postproc is not None:
            batch = self.config.postproc(batch)
            if not isinstance(batch, SampleBatch):
                raise TypeError(f"postproc must return a SampleBatch; got {type(batch).__name__}")
        return Fragment(batch, frames, steps, sample_s, faults)

    def stop_early(self, number: int, keep_steps: int) -> None:
        """Ends the fragment that the request of this number asked for, once it has `keep_steps`
        steps. Runs beside the call that samples, in a concurrency group of its own."""
        self._stop_early.cut(number, keep_steps)

    # ---- weights and state --------------------------------------------------------------------

    def get_weights(self) -> Weights:
        """A copy of the policy's weights."""
        return self.policy.get_weights()

    def set_weights(self, weights: Weights) -> int:
        """Takes over weights; returns their version."""
        self.policy.set_weights(weights)
        return self.policy.version

    def get_state(self, with_policy: bool = True) -> dict[str, Any]:
        """State of the sampler (None where environments can not tell) and of the policy."""
        return {
            "sampler": None if self.sampler is None else self.sampler.get_state(),
            "statistics": [] if self.sampler is None else self.sampler.get_statistics(),
            "policy": self.policy.get_state() if with_policy else None,
            "shuffle": self.policy.shuffle.bit_generator.state,
        }

    def get_learner_state(self) -> dict[str, Any]:
        """State of the policy alone, for a rank that has to catch up: random numbers stay its
        own."""
        return {"policy": self.policy.get_state()}

    def set_state(self, state: dict[str, Any]) -> int:
        """Takes back what `get_state` gave, parts that are None excepted; returns the version."""
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
        return self.policy.version

    def reconfigure(self, config: WorkerConfig, index: int) -> None:
        """Becomes the worker that `config` makes, in the same process."""
        self.stop()
        self.__init__(config, index)  # type: ignore[misc]

    def begin_restored_run(self, restore_count: int) -> None:
        """Begins new episodes with random numbers that no life of the run before has used."""
        self.config = dataclasses.replace(self.config, restore_count=restore_count)
        seeds = self._seeds()
        self._seed_process(seeds)
        self._restart(seeds)

    def set_seed(self, env_seeds: list[int]) -> None:
        """Begins new episodes, each environment with a seed of its own; action noise and minibatch
        shuffling follow from those."""
        seeds = seeds_from(env_seeds, self.index)
        if self.sampler is not None:
            seed_global_generators(seeds.process)
        self._restart(seeds)

    def _restart(self, seeds: Seeds) -> None:
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        if self.sampler is not None:
            self.sampler.restart(seeds)

    def update_algorithm_parameter(self, name: str, value: Any) -> None:
        """Changes an option of the policy, see `Policy.set_option`."""
        self.policy.set_option(name, value)

    def apply(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Returns `fn(self, *args)`; see `WorkerSet.apply`."""
        return fn(self, *args)

    def connect(self, endpoint: Endpoint) -> str:
        """Connects for calls over ZeroMQ; see `RpcServer.connect`."""
        return self._rpc_server.connect(endpoint)

    def serve(self, endpoint: Endpoint) -> str:
        """Answers calls over ZeroMQ until the client ends serving; see `RpcServer.serve`."""
        return self._rpc_server.serve(self, endpoint)

    def ping(self) -> int:
        """Answers with its policy version once it is up and idle."""
        return self.policy.version

    def stop(self) -> None:
        """Closes environments and its connection."""
        self._rpc_server.close()
        if self.sampler is not None:
            self.sampler.close()
