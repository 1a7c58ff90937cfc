"""`RolloutWorker`: environments and a policy copy, in this process or as a Ray actor."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import Space

from polopt.metrics.episodes import EpisodeStats
from polopt.metrics.fragment_faults import NO_FAULTS, FragmentFaults
from polopt.policies.config import Config
from polopt.policies.policy import Policy
from polopt.policies.sample_batch import SampleBatch
from polopt.policies.transport import Gradients, Weights
from polopt.rollouts.bad_numbers import bad_gradient
from polopt.rollouts.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.env_check import EnvironmentFailedError
from polopt.rollouts.envs import EnvSource, env_name
from polopt.rollouts.guarded_sampling import look_at, make_sampler
from polopt.rollouts.preemption import CutShort
from polopt.rollouts.requests import Fragment, SampleRequest
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


class RoundInfo(NamedTuple):
    """What a round of sampling tells besides its batch or gradient.

    Attributes:
        env_steps: valid rows sampled.
        episodes: that ended in it.
        steps: T, fewer than the fragment length if it was cut short.
        sample_s: seconds spent sampling.
        faults: of environments, and numbers that are not finite.
        worker_index: whose round it was.
    """

    env_steps: int
    episodes: EpisodeStats
    steps: int
    sample_s: float
    faults: FragmentFaults = NO_FAULTS
    worker_index: int = 0


class LearnInfo(NamedTuple):
    """What a round of decentralised learning tells.

    Attributes:
        stats: learner statistics over all ranks' rows.
        updates: made in this round.
        lag: updates between the weights that sampled and those that learning began with.
        learn_s: seconds, sums over the group included.
        allreduce_s: seconds in sums over the group, waiting for other ranks included.
        weights: of the rank that was asked for them.
        checksum: SHA-256 of the weights, from ranks that were asked for it.
        broken: why the group broke, if it did; then the last gradient was thrown away.
        vetoed: some rank's fragment held bad numbers, so no rank learned.
        bad_gradients: this rank's own that were not finite; no rank has applied their sums.
    """

    stats: dict[str, float]
    updates: int
    lag: int
    learn_s: float
    allreduce_s: float
    weights: Weights | None = None
    checksum: str | None = None
    broken: str | None = None
    vetoed: bool = False
    bad_gradients: int = 0


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
            torch.set_num_threads(1)
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
        if index > 0 or rollout.num_workers == 0:
            self.sampler, self._env_error = make_sampler(config, index, self.policy, seeds)
        self._group: AllReducer | None = None
        self._sampled: SampleBatch | None = None
        self._cut_short = CutShort()

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
            self.policy.set_weights(weights)
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
        with np.errstate(over="ignore", invalid="ignore"):
            batch = self.policy.postprocess(batch)
        return look_at(batch, self.sampler, env_name(self.config.env))

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

    def sample_and_compute_gradients(
        self, weights: Weights | None = None
    ) -> tuple[Gradients, RoundInfo]:
        """A round of AsyncGradients: takes weights, samples, and computes one gradient."""
        started_s = time.perf_counter()
        batch = self.sample(weights)
        info = _round_info(batch, time.perf_counter() - started_s)
        if info.faults.bad_numbers:
            return self.policy.no_gradients(), info
        gradients = self.policy.compute_gradients(batch)
        problem = bad_gradient(gradients)
        if problem:
            info = info._replace(faults=info.faults._replace(bad_numbers=problem))
        return gradients, info

    # ---- decentralised learning ---------------------------------------------------------------

    def sample_for_learning(self, round_index: int) -> RoundInfo:
        """First half of a round of DecentralizedAllReduce: samples, and keeps the batch."""
        started_s = time.perf_counter()
        self._sampled = self.sample(None, SampleRequest(round_index))
        return _round_info(self._sampled, time.perf_counter() - started_s)

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
            lag=version - batch.version,
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
        self.policy.shuffle = np.random.default_rng(seeds.shuffle)
        if self.sampler is not None:
            self.sampler.restart(seeds)

    def ping(self) -> int:
        """Answers with its policy version once it is up and idle."""
        return self.policy.version

    def stop(self) -> None:
        """Closes environments and leaves its group."""
        self.leave_group()
        if self.sampler is not None:
            self.sampler.close()


def _round_info(batch: SampleBatch, sample_s: float) -> RoundInfo:
    return RoundInfo(
        batch.env_steps,
        batch.episodes,
        batch.shape[0],
        sample_s,
        batch.faults,
        batch.worker_index,
    )
