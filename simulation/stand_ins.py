"""Stand-ins for a worker, its policy and its group of ranks.

A function of a strategy uses a stand-in as it uses the real object, through the same methods. The
methods that take long, such as sampling and gradients, return a measured example and add their
measured time to the program of the call. All other methods are the real ones.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients, Weights
from polopt.metrics.lag import LearnedVersions
from polopt.optimizers.rank_group import join, leave, listen
from polopt.policies.learning.weight_updater import LearningProgress
from polopt.rollouts.sampling.worker_sampler import SampleRequest
from polopt.rollouts.transport.control_page import ControlPage
from polopt.rollouts.workers.call_runner import Answer, CallRunner
from polopt.rollouts.workers.callbacks import CallbackCaller
from polopt.rollouts.workers.fault_log import InARow
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.simulation.costs import Learning
from polopt.simulation.processes import DriverProgram, Meeting, Program, Scene


class Examples(NamedTuple):
    """The values that stand-ins return.

    Attributes:
        policy: a real policy.
        fragments: fragments `[T, N]` that a real worker has sampled.
        gradients: the gradients of one fragment. Empty if the policy gives no gradients.
        stats: learner statistics.
    """

    policy: Any
    fragments: list[SampleBatch]
    gradients: list[Gradients]
    stats: Mapping[str, float]


def partners(rank: int, size: int) -> list[int]:
    """Returns the ranks with which a rank exchanges values in one sum, one after the other, as in
    `SocketAllReduce`."""
    doubling = 1 << (size.bit_length() - 1)  # the largest power of two
    if rank >= doubling:
        return [rank - doubling, rank - doubling]
    found = [rank ^ 1 << power for power in range(doubling.bit_length() - 1)]
    beyond = [rank + doubling] if rank + doubling < size else []
    return [*beyond, *found, *beyond]


class Ranks:
    """The meetings of ranks in all-reduce sums. The n-th sums of all ranks belong together."""

    def __init__(self, scene: Scene, size: int) -> None:
        self.scene = scene
        self.size = size
        self._meetings: dict[tuple[int, ...], Meeting] = {}
        self._agreed: dict[int, Learning] = {}

    def meeting(self, number: int, place: int, rank: int, partner: int) -> Meeting:
        """Returns the meeting of a rank and its partner.

        Args:
            number: number of the sum.
            place: how many times the two have already met in this sum.
            rank: one rank.
            partner: the other rank.
        """
        key = number, place, *sorted((rank, partner))
        known = self._meetings.pop(key, None)
        if known is not None:
            return known
        made = self._meetings[key] = Meeting(self.scene.engine, self.scene.costs.exchange_wait_s)
        return made

    def agreed(self, number: int, own: Learning) -> Learning:
        """Returns the learning in which all ranks make the same number of sums and updates,
        although their batches can differ in size: the first rank decides for all.

        Args:
            number: number of the round of learning.
            own: the learning of the rank's own batch.
        """
        self._agreed.pop(number - 10, None)
        first = self._agreed.setdefault(number, own)
        return own._replace(updates=first.updates, sums=first.sums)

    def exchange_s(self, num_bytes: int) -> tuple[float, float]:
        """Returns the processor time and the time on the link of one exchange in one rank."""
        costs, scene = self.scene.costs, self.scene
        cpu_s = costs.exchange_s + costs.exchange_byte_s * num_bytes
        if len(scene.engine.nodes) == 1:
            return cpu_s, 0.0
        return cpu_s, scene.link.latency_s + num_bytes / scene.link.bandwidth


class StandInGroup:
    """The stand-in for `AllReducer` in one rank."""

    address = "simulated"

    def __init__(self, ranks: Ranks, rank: int, worker: StandInWorker) -> None:
        self._ranks = ranks
        self._rank = rank
        self._worker = worker
        self._number = self._round = 0
        self.world_size = ranks.size
        own = partners(rank, ranks.size)
        self._meets = [(partner, int(partner in own[:place])) for place, partner in enumerate(own)]

    def agreed(self, own: Learning) -> Learning:
        """Begins a round of learning. See `Ranks.agreed`."""
        self._round += 1
        return self._ranks.agreed(self._round, own)

    def sum_(self, tensor: Any) -> None:
        """Exchanges values with all partners. Each rank is assumed to give the same values."""
        program: Any = self._worker.program
        self._number += 1
        cpu_s, wait_s = self._ranks.exchange_s(tensor.numel() * tensor.element_size())
        for partner, again in self._meets:
            program.spend(cpu_s, wait_s)
            program.meet(self._ranks.meeting(self._number, again, self._rank, partner))
        tensor *= self.world_size

    def close(self) -> None:
        """Does nothing, because there are no connections."""


class StandInWorker(RolloutWorker):
    """The stand-in for a `RolloutWorker`. It has no environments.

    Args:
        stage: the simulation, the examples and the groups of ranks.
        config: see `RolloutWorker`.
        index: see `RolloutWorker`.
        program: the program that the worker's work is added to. The driver's worker has a
            `DriverProgram`.
    """

    def __init__(self, stage: Stage, config: WorkerConfig, index: int, program: Any = None) -> None:
        CallRunner.__init__(self, _Page(), stage.scene.engine)
        self.stage = stage
        self.config = config
        self.index = index
        self.program: Any = program or Program()
        self.policy = stand_in_policy(self)
        self.sampler = None
        self._env_error = None
        self._callbacks = CallbackCaller(None, self.who)
        self.new_moments = None
        self._rollouts = LearnedVersions()
        self._finite = InARow(self.who, config.rollout.max_consecutive_non_finite)
        self._rng = np.random.default_rng([stage.seed, index])
        self._num_fragments = index
        self._place = 0

    @property
    def has_environments(self) -> bool:
        return True

    def complete(self, record: Any) -> None:
        """Adds nothing, because there are no wrappers and no process."""

    def phase(self, name: str) -> Any:
        return self.program.phase(name) if self.index else super().phase(name)

    def save(self) -> Any:
        """Returns what a call may change, for `restore`."""
        state = self._rng.bit_generator.state, self._num_fragments, self._place
        return dict(self.state), copy.copy(self.policy.__dict__), state

    def restore(self, saved: Any) -> None:
        """Undoes the changes since `save`."""
        self.state, self.policy.__dict__, state = dict(saved[0]), dict(saved[1]), saved[2]
        self._rng.bit_generator.state, self._num_fragments, self._place = state

    def run(self, number: int, function: Any, *args: Any) -> Answer:
        return super().run(number, _STAND_INS.get(function, function), *args)

    def sample(self, request: SampleRequest | None = None) -> SampleBatch:
        """Returns an example, and adds the time of a fragment that is drawn from the trace."""
        stage, program = self.stage, self.program
        fragments = stage.examples.fragments
        example = fragments[self._num_fragments % len(fragments)]
        self._num_fragments += 1
        whole = (request and request.steps) or self.config.rollout.rollout_fragment_length
        costs, steps = stage.scene.costs, 0
        with self.phase("sample"):
            for cpu_s, wait_s, steps in costs.pieces(self._rng, whole, stage.parts):
                program.spend(cpu_s, wait_s, steps)
                if program.limit is not None and steps >= program.limit:
                    break
            program.spend(costs.fragment_s)
        batch = example if steps >= example.shape[0] else example.steps(0, steps)
        batch = dataclasses.replace(
            batch,
            version=self.policy.version,
            worker_index=self.index,
            place=(self.index, self._place),
            column_versions=None,
        )
        self._place += batch.shape[0]
        dist = self.policy.dist
        self.record.fragment_ended(steps, steps < whole)
        self.record.sampled(batch, dist.sizes, early_stopped=steps < whole)
        return batch


class _Page(ControlPage):
    """A page that nobody else writes."""


class Stage:
    """What all stand-ins of one simulation share.

    Args:
        scene: the simulation.
        examples: the values that stand-ins return.
        seed: seed of all draws.
        parts: the largest number of parts of a fragment. With several parts, fragments can end
            early, and compute and wait in turns.
    """

    def __init__(self, scene: Scene, examples: Examples, seed: int, parts: int) -> None:
        self.scene = scene
        self.examples = examples
        self.seed = seed
        self.parts = parts
        self._ranks: dict[int, Ranks] = {}

    def ranks_of(self, generation: int, size: int) -> Ranks:
        """Returns the ranks of a group."""
        return self._ranks.setdefault(generation, Ranks(self.scene, size))


class StandInWorkerSet(WorkerSet):
    """A `WorkerSet` whose local worker is a stand-in. Its transport makes the remote stand-ins.

    Args:
        stage: the simulation.
        config: the config of the workers.
        transport: a `VirtualTransport`.
    """

    def __init__(self, stage: Stage, config: WorkerConfig, transport: Any) -> None:
        self.stage = stage
        super().__init__(config, transport=transport)

    def _make_local(self, device: str) -> RolloutWorker:
        return StandInWorker(self.stage, self.config_of(1), 0, DriverProgram(self.stage.scene))


# ---- policies ------------------------------------------------------------------------------------


class _StandInPolicy:
    """The methods of a policy that take long. See the module. `stand_in_policy` puts this class in
    front of the class of the real policy."""

    _worker: StandInWorker
    version: int
    progress: LearningProgress

    @property
    def _costs(self) -> Any:
        return self._worker.stage.scene.costs

    def _spend(self, seconds: float) -> None:
        self._worker.program.spend(seconds)

    def set_weights(self, weights: Weights) -> None:
        """Takes only the version: all stand-ins share one vector of weights."""
        self.version, self.env_steps = weights.version, weights.env_steps

    def add_moments(self, moments: Any, reducer: Any = None) -> None:
        """Does nothing, because no observations are normalised."""

    def get_state(self) -> dict[str, Any]:
        return {"version": self.version}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.version = state["version"]

    def _updated(self, updates: int, rows: int) -> None:
        self.version += updates
        self.progress.rows_applied += rows

    def compute_gradients(self, batch: Any) -> Gradients:
        costs, examples = self._costs, self._worker.stage.examples
        self._spend(sum(costs.gradient_s))
        return examples.gradients[0]._replace(version=self.version, ends_rollout=True)

    def minibatch_gradients(self, batch: Any) -> Iterator[Gradients]:
        for seconds, one in zip(
            self._costs.gradient_s, self._worker.stage.examples.gradients, strict=True
        ):
            self._spend(seconds)
            yield one._replace(version=self.version)

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        self._spend(self._costs.apply_s)
        self._updated(1, gradients.rows)
        return {}

    def learn_on_batch(self, batch: Any, reducer: Any = None) -> dict[str, float]:
        rows = batch.agent_steps
        if not rows:
            return {}
        cost = self._costs.learning_of(rows)
        alone = reducer is None or reducer.world_size == 1
        if not alone:
            cost = self._worker.state["group"].agreed(cost)
        sums = 0 if alone else cost.sums
        for _ in range(sums):
            self._spend(cost.seconds / sums)
            reducer.sum_(torch.zeros(max(1, round(cost.sum_bytes / 4))))
        if alone:
            self._spend(cost.seconds)
        self._updated(cost.updates, rows)
        return dict(self._worker.stage.examples.stats)

    def learn_on_transitions(self, rows: Any) -> tuple[dict[str, float], np.ndarray]:
        self._spend(self._costs.learn_transitions_s(rows.num_rows))
        self._updated(1, rows.num_rows)
        return dict(self._worker.stage.examples.stats), np.ones(rows.num_rows)

    def td_errors(self, rows: Any) -> np.ndarray:
        self._spend(self._costs.td_errors_s(rows.num_rows))
        return np.ones(rows.num_rows)


@functools.cache
def _class_of(real: Any) -> Any:
    return type(real.__name__, (_StandInPolicy, real), {"__module__": __name__})


def stand_in_policy(worker: StandInWorker) -> Any:
    """Returns the stand-in for the policy of a worker. It shares everything with the real policy
    but the version and the counts."""
    real = worker.stage.examples.policy
    kind: Any = _class_of(real.__class__)
    policy: Any = object.__new__(kind)
    policy.__dict__.update(real.__dict__)
    policy.progress = LearningProgress()
    policy.shuffle = np.random.default_rng(0)
    policy.version = 0
    policy._worker = worker
    return policy


# ---- ranks ---------------------------------------------------------------------------------------


def _listen(worker: Any, spec: Any, rank: int) -> str:
    ranks = worker.stage.ranks_of(spec.generation, spec.world_size)
    worker.state["group"] = StandInGroup(ranks, rank, worker)
    return StandInGroup.address


def _join(worker: Any, addresses: Any) -> None:
    return None


def _leave(worker: Any) -> None:
    worker.state.pop("group", None)


#: Functions that open connections, and what runs in their place.
_STAND_INS: dict[Any, Any] = {listen: _listen, join: _join, leave: _leave}
