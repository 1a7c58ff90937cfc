"""`RolloutWorker`: environments and a policy copy, in this process or as a Ray actor."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from polopt.metrics.episodes import EpisodeStats
from polopt.policies.compression import GradientPacker, PackedGradients
from polopt.policies.config import Config
from polopt.policies.lesson import Lesson
from polopt.policies.policy import Policy
from polopt.policies.sample_batch import SampleBatch
from polopt.policies.threads import limit_threads
from polopt.policies.transport import Gradients, Weights
from polopt.rollouts.bad_numbers import bad_gradient
from polopt.rollouts.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.direct_calls import Connection, answer, connect
from polopt.rollouts.env_check import EnvironmentFailedError
from polopt.rollouts.envs import EnvSource, env_name
from polopt.rollouts.guarded_sampling import look_at, make_sampler
from polopt.rollouts.preemption import CutShort
from polopt.rollouts.requests import Fragment, LearnInfo, RoundInfo, SampleRequest
from polopt.rollouts.sampler import VectorSampler
from polopt.rollouts.seeding import Seeds, seeds_from, worker_seeds


@dataclass(frozen=True)
class WorkerConfig:
    """All a worker is made from. Small: weights are sent after construction.

    Attributes:
        rollout: options of sampling.
        env: what `polopt.rollouts.envs.resolve_env` gave.
        policy_class: the policy, or an adapter of `polopt.policies.actors`, which only acts.
        policy: its options.
        observation_space: of one environment.
        action_space: of one environment.
        seed: the run's; workers derive their own from it.
        incarnation: how many workers have stood at this index before; replacements must not
            repeat the episodes of those they replace.
        life: how often the run has been restored from a checkpoint; likewise.
        device: where the policy learns.
        postproc: what a `Collector`'s workers do to each batch, last of all.
    """

    rollout: RolloutConfig
    env: EnvSource
    policy_class: type[Any]
    policy: Config
    observation_space: Space[Any]
    action_space: Space[Any]
    seed: int
    incarnation: int = 0
    life: int = 0
    device: str = "cpu"
    postproc: Callable[[SampleBatch], SampleBatch] | None = None


class RolloutWorker:
    """Samples, and where the strategy wants it computes gradients or learns.

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
        self._group: AllReducer | None = None
        self._sampled: SampleBatch | None = None
        self._lesson: Lesson | None = None
        self._packer = GradientPacker(rollout.compress_gradients, rollout.topk_share)
        self._cut_short = CutShort()
        self._direct: tuple[bytes, Connection] | None = None

    def _seeds(self) -> Seeds:
        config = self.config
        envs = config.rollout.num_envs_per_worker
        return worker_seeds(config.seed, self.index, config.incarnation, envs, config.life)

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
        with self._cut_short.sampling(self.sampler, asked.number):
            if asked.reset_first:
                self.sampler.reset()
            batch = self.sampler.sample(asked.exploration, asked.steps, asked.uniform)
        batch.worker_index = self.index
        batch.compress = self.config.rollout.compress_data
        with np.errstate(over="ignore", invalid="ignore"):
            batch = self.policy.postprocess(batch)
        return look_at(batch, self.sampler, env_name(self.config.env))

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

    def cut_short(self, number: int, keep_steps: int) -> None:
        """Ends the fragment that the request of this number asked for, once it has `keep_steps`
        steps. Runs beside the call that samples, in a concurrency group of its own."""
        self._cut_short.cut(number, keep_steps)

    # ---- gradients for a central update --------------------------------------------------------

    def sample_and_compute_gradients(
        self, weights: Weights | None = None
    ) -> tuple[Gradients | PackedGradients, RoundInfo]:
        """A round of AsyncGradients: takes weights and computes the gradient of the next minibatch.
        Samples first if the last one was gone through; with one epoch of one minibatch, always."""
        told = self._sample_if_needed(weights)
        lesson = self._lesson
        if lesson is None:
            return self.policy.no_gradients(), told
        fresh = lesson.first_epoch
        gradients = lesson.next_gradients()
        told = told._replace(fresh=gradients.rows if fresh else 0, last=lesson.done)
        problem = bad_gradient(gradients)
        if problem:
            told = told._replace(faults=told.faults._replace(bad_numbers=problem))
        return self._packer.pack(gradients), told

    def _sample_if_needed(self, weights: Weights | None) -> RoundInfo:
        if self._lesson is not None and not self._lesson.done:
            if weights is not None:
                self.set_weights(weights)
            empty = EpisodeStats.empty()
            return RoundInfo(0, empty, 0, 0.0, worker_index=self.index, acted=self._lesson.version)
        started_s = time.perf_counter()
        batch = self._data(weights)
        info = self._round_info(batch, time.perf_counter() - started_s)
        self._lesson = None if info.faults.bad_numbers else Lesson(self.policy, batch)
        return info

    # ---- decentralised learning ---------------------------------------------------------------

    def sample_for_learning(self, round_index: int) -> RoundInfo:
        """First half of a round of DecentralizedAllReduce: samples, and keeps the batch."""
        started_s = time.perf_counter()
        self._sampled = self._data(None, SampleRequest(round_index))
        return self._round_info(self._sampled, time.perf_counter() - started_s)

    def _round_info(self, batch: SampleBatch, sample_s: float) -> RoundInfo:
        return RoundInfo(
            batch.env_steps,
            batch.episodes,
            batch.shape[0],
            sample_s,
            batch.faults,
            self.index,
            batch.version,
        )

    def learn(self, env_steps: int, want_weights: bool, want_checksum: bool) -> LearnInfo:
        """Second half: learns from the batch kept, together with all ranks of the group.

        If another rank dies or hangs meanwhile, the gradient under way is thrown away and the
        answer says that the group is broken; this rank may then be an update ahead of others.

        Args:
            env_steps: sampled by all workers before this round; with those of this round it is
                the clock of schedules, the same on all ranks.
            want_weights: return the weights.
            want_checksum: return their SHA-256.
        """
        batch, self._sampled = self._sampled, None
        if batch is None or self._group is None:
            raise RuntimeError(f"worker {self.index} was asked to learn before it sampled")
        started_s = time.perf_counter()
        version = self.policy.version
        stats: dict[str, float] = {}
        broken = None
        vetoed = False
        bad_gradients = self.policy.bad_gradients
        try:
            # Bad numbers of one would be everybody's after the first sum, so all vote.
            votes = torch.tensor([batch.env_steps, int(bool(batch.faults.bad_numbers))])
            self._group.sum_(votes)
            self.policy.env_steps = env_steps + int(votes[0])
            vetoed = bool(votes[1])
            if not vetoed:
                stats = self.policy.learn_on_batch(batch, self._group)
        except GroupBroken as error:
            broken = str(error)
        return LearnInfo(
            stats=stats,
            updates=self.policy.version - version,
            version=version,
            acted=batch.version,
            learn_s=time.perf_counter() - started_s,
            allreduce_s=self._group.take_total_s(),
            weights=self.policy.get_weights() if want_weights and not broken else None,
            checksum=self.checksum() if want_checksum and not broken else None,
            broken=broken,
            vetoed=vetoed,
            bad_gradients=self.policy.bad_gradients - bad_gradients,
        )

    def join_group(self, spec: GroupSpec, rank: int) -> str | None:
        """Becomes `rank` of a group, leaving any it was in.

        Returns:
            None, or why the group did not form. No exception: it is another's fault, and what
            this rank has learned must not be lost with it.
        """
        self.leave_group()
        try:
            self._group = AllReducer(spec, rank, self.config.device)
        except GroupBroken as error:
            return str(error)
        return None

    def leave_group(self) -> None:
        """Leaves its group, if it is in one."""
        if self._group is not None:
            self._group.close()
            self._group = None

    # ---- weights and state --------------------------------------------------------------------

    def checksum(self) -> str:
        """SHA-256 of the weights' bytes."""
        return hashlib.sha256(self.policy.get_weights().flat.tobytes()).hexdigest()

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

    def begin_life(self, life: int) -> None:
        """Begins new episodes with random numbers that no life of the run before has used."""
        self.config = dataclasses.replace(self.config, life=life)
        self._restart(self._seeds())

    def set_seed(self, env_seeds: list[int]) -> None:
        """Begins new episodes, each environment with a seed of its own; action noise and minibatch
        shuffling follow from those."""
        self._restart(seeds_from(env_seeds, self.index))

    def _restart(self, seeds: Seeds) -> None:
        # What was sampled, and what was held back of gradients, is from before.
        self._lesson = self._packer.residual = None
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        if self.sampler is not None:
            self.sampler.restart(seeds)

    def update_algorithm_parameter(self, name: str, value: Any) -> int:
        """Changes an option of the policy, see `Policy.set_option`; returns how many policies have
        it now."""
        self.policy.set_option(name, value)
        return 1

    def serve(self, address: tuple[str, int], token: bytes) -> str:
        """Answers direct calls until the driver hangs up.

        Returns:
            why the driver could not be reached; empty: it could.
        """
        if self._direct is None or self._direct[0] != token:
            try:
                self._direct = token, connect(address, token)
            except OSError as error:
                return str(error)
        answer(self, self._direct[1])
        return ""

    def ping(self) -> int:
        """Answers with its policy version once it is up and idle."""
        return self.policy.version

    def stop(self) -> None:
        """Closes environments and leaves its group."""
        self.leave_group()
        if self.sampler is not None:
            self.sampler.close()
