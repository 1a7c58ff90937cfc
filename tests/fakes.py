"""Stand-ins for Ray and for remote workers. A call ends when the test says so, in the order and the
way it says, and everybody who is called checks what he is given. No process, no waiting."""

from __future__ import annotations

import dataclasses
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from toy_envs import POLICIES, Drift

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.optimizers import rank_group
from polopt.optimizers.base import PolicyOptimizer
from polopt.policies.learning import sgd
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.envs.making import probe_spaces
from polopt.rollouts.envs.resolving import resolve_env
from polopt.rollouts.workers import health, in_flight, weight_snapshots, worker_actors
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

#: See `StallingPPO`; one for each session of tests.
OMEN = os.path.join(tempfile.gettempdir(), f"polopt-test-{os.getpid()}")


class Ref:
    """What a fake call returns, or `FakeRay.put` gives. `done` says whether it has ended."""

    def __init__(self, value: Any = None, error: Exception | None = None, index: int = 0) -> None:
        self.value = value
        self.error = error
        self.index = index  # of the worker
        self.done = False
        self.beside = False  # does not count as a second call at once


#: Which of the calls under way ends next; None: none does, and time passes.
Script = Callable[[list[Ref]], Ref | None]


def oldest_first(pending: list[Ref]) -> Ref | None:
    """The script of workers that are all equally fast."""
    return pending[0]


def nobody(pending: list[Ref]) -> Ref | None:
    """The script of workers that all hang."""
    return None


def in_order(indices: Iterable[int]) -> Script:
    """The script in which calls of these workers end, one after the other."""
    remaining = iter(indices)

    def script(pending: list[Ref]) -> Ref | None:
        wanted = next(remaining)
        return next(ref for ref in pending if ref.index == wanted)

    return script


class FakeRay:
    """`ray` and the clock, as modules of `rollouts.workers` use them.

    Attributes:
        script: see `Script`.
        now_s: the time; passes only while nothing ends.
        num_puts: objects put into the store.
    """

    exceptions = ray.exceptions
    ObjectRef = ray.ObjectRef

    util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def __init__(self) -> None:
        self.script: Script = oldest_first
        self.now_s = 1000.0
        self.num_puts = 0

    def monotonic(self) -> float:
        return self.now_s

    def wait(
        self,
        refs: Sequence[Ref],
        num_returns: int = 1,
        timeout: float | None = None,
        fetch_local: bool = True,
    ) -> tuple[list[Ref], list[Ref]]:
        assert refs, "waits for nothing"
        assert timeout is not None, "waits without a limit"
        assert len(set(refs)) == len(refs)
        if timeout > 0.0 and not any(ref.done for ref in refs):
            chosen = self.script(list(refs))
            if chosen is None:
                self.now_s += timeout
            else:
                chosen.done = True
        ready = [ref for ref in refs if ref.done][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        assert ref.done, "would block"
        assert timeout is not None, "waits without a limit"
        if ref.error is not None:
            raise ref.error
        return ref.value

    def put(self, value: Any) -> Ref:
        self.num_puts += 1
        ref = Ref(value)
        ref.done = True
        return ref

    def kill(self, actor: FakeActor, no_restart: bool = False) -> None:
        assert no_restart, "Ray must not restart what WorkerSet replaces"
        assert actor.alive, "killed twice"
        actor.alive = False


class FakeActor:
    """The handle of a worker that lives in this process. Calls run when made; their results arrive
    when the script says. Refuses calls after its death, and two at once.

    Attributes:
        calls: `(method, arguments)` of all calls so far.
        results: what they returned.
        next_error: what the next call ends with instead.
        errors: likewise the next call of each method.
    """

    def __init__(self, worker: Any, index: int) -> None:
        self.worker = worker
        self.index = index
        self.alive = True
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: list[Any] = []
        self.next_error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        self._refs: list[Ref] = []

    @property
    def under_way(self) -> int:
        return sum(not ref.done and not ref.beside for ref in self._refs)

    def finish(self) -> None:
        """Ends what is under way, whatever the script says."""
        for ref in self._refs:
            ref.done = True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _FakeMethod(self, method)

    def call(self, method: str, *args: Any) -> Ref:
        assert self.alive, f"{method} called on worker {self.index}, which is gone"
        beside = method in ("ping", "stop")
        assert beside or self.under_way == 0, f"two calls at once to worker {self.index}"
        # As in Ray, a call that is given what another failed to make fails with that error.
        inherited = next((arg.error for arg in args if isinstance(arg, Ref) and arg.error), None)
        args = tuple(arg.value if isinstance(arg, Ref) else arg for arg in args)
        self.calls.append((method, args))
        ref = Ref(index=self.index)
        ref.beside = beside
        ref.error = self.next_error or self.errors.pop(method, None) or inherited
        self.next_error = None
        if ref.error is None:
            ref.value = getattr(self.worker, method)(*args)
            self.results.append(ref.value)
        self._refs.append(ref)
        return ref


@dataclasses.dataclass
class _FakeMethod:
    actor: FakeActor
    name: str

    def remote(self, *args: Any) -> Ref:
        return self.actor.call(self.name, *args)

    def options(self, concurrency_group: str) -> _FakeMethod:
        assert concurrency_group == "control"
        return _FakeMethodBeside(self.actor, self.name)


class _FakeMethodBeside(_FakeMethod):
    """Runs at once, whatever else is under way."""

    def remote(self, *args: Any) -> Ref:
        assert self.actor.alive
        return Ref(getattr(self.actor.worker, self.name)(*args))


class CheckedWorker(RolloutWorker):
    """A real worker that refuses weights it has, and to begin without any."""

    version_sent: int | None = None

    def sample(self, weights: Weights | None = None, *args: Any) -> SampleBatch:
        if self.index > 0:
            if weights is None:
                assert self.version_sent is not None, "asked to sample without any weights"
            else:
                assert weights.version != self.version_sent, "was sent weights that it has"
                self.version_sent = weights.version
        return super().sample(weights, *args)


class FakeWorkerSet(WorkerSet):
    """The real one, but for its remote workers, which are `CheckedWorker`s in this process.

    Args:
        config: see `WorkerSet`.
        kind: of its workers.
        up: they need no time to start.

    Attributes:
        actors: all ever started, in that order.
    """

    def __init__(
        self,
        config: WorkerConfig,
        kind: type[RolloutWorker] = CheckedWorker,
        up: bool = True,
    ) -> None:
        self.actors: list[FakeActor] = []
        self._kind = kind
        self._up = up
        super().__init__(config)

    def use_transport(self, message_bytes: int) -> None:
        """There is no process to connect."""

    def _start(self, index: int) -> RemoteWorker:
        restart_count = self._actors.restart_counts.get(index, 0)
        config = dataclasses.replace(self.config, restart_count=restart_count)
        actor = FakeActor(self._kind(config, index), index)
        self.actors.append(actor)
        worker = RemoteWorker(index, actor)
        if self._up:
            worker.last_answer_s = in_flight.time.monotonic()
        return worker


class Puppet:
    """The least a process can be that fails in every way."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def fall_over(self) -> None:
        raise ValueError("over the edge")


def install(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Puts a `FakeRay` in the place of Ray and of the clock that limits are measured by."""
    fake = FakeRay()
    monkeypatch.setattr(in_flight, "ray", fake)
    monkeypatch.setattr(in_flight, "time", fake)
    monkeypatch.setattr(in_flight, "waits_for_resources", lambda actor: False)
    monkeypatch.setattr(health, "waits_for_resources", lambda actor: False)
    monkeypatch.setattr(worker_actors, "ray", fake)
    monkeypatch.setattr(weight_snapshots, "ray", fake)
    monkeypatch.setattr(rank_group, "ray", fake)
    return fake


def worker_config(
    policy: str | type = "a2c",
    env: Any = Drift,
    *,
    seed: int = 0,
    rollout: dict[str, Any] | None = None,
    **policy_options: Any,
) -> WorkerConfig:
    """What workers are made from; two workers of two environments and five steps where `rollout`
    says nothing else."""
    options = {
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 5,
        "num_cpus_per_worker": 0.5,
    }
    config = RolloutConfig.parse({"env": env, **options, **(rollout or {})})
    source = resolve_env(config.env)
    observations, actions = probe_spaces(source, config)
    cls: Any = POLICIES[policy] if isinstance(policy, str) else policy
    policy_config = cls.config_class.parse({"model": {"fcnet_hiddens": (8,)}, **policy_options})
    return WorkerConfig(config, source, cls, policy_config, observations, actions, seed)


def make_optimizer(cls: Any, workers: WorkerSet, **options: Any) -> Any:
    """An optimizer with `options` under the keys users write."""
    optimizer: PolicyOptimizer = cls(workers, cls.config_class.parse(options))
    return optimizer


class RestlessDrift(Drift):
    """Takes a different, random time for each step, so that nobody arrives in order."""

    def step(self, action: int) -> Any:
        time.sleep(ord(os.urandom(1)) * 4e-5)
        return super().step(action)


def pid_of(worker: RemoteWorker) -> int:
    """The process of a worker that is not a fake."""
    pid: int = ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60.0)
    return pid


def shuffled_by(seed: int) -> Script:
    """The script in which a random one ends next."""
    return random.Random(seed).choice


class CrawlingDrift(Drift):
    """So slow in worker 4 that the others wait for it, if they wait."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 4:
            time.sleep(0.03)
        return super().step(action)


class SecondCrawls(Drift):
    """Slow in worker 2."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 2:
            time.sleep(0.05)
        return super().step(action)


class OwnAdvantagesPPO(PPOPolicy):
    """Wrong on purpose: each learner standardises its advantages by its own rows."""

    def training_rows(self, batch: SampleBatch, reducer: Any = None) -> dict[str, torch.Tensor]:
        return super().training_rows(batch)


class UnweightedPPO(PPOPolicy):
    """Wrong on purpose: the mean over learners of their mean gradients, whoever has more rows."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        right = sgd.reduce_gradient
        sgd.reduce_gradient = lambda policy, _, stats, group: right(policy, 1, stats, group)
        try:
            return super().learn_on_batch(batch, reducer)
        finally:
            sgd.reduce_gradient = right


class StallingPPO(PPOPolicy):
    """Whoever first finds the file that `OMEN` names takes it away, and stalls within learning."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        try:
            os.remove(OMEN)
        except FileNotFoundError:
            return super().learn_on_batch(batch, reducer)
        time.sleep(3600.0)
        raise AssertionError("nobody waits that long")


class PoisonedPPO(PPOPolicy):
    """Whoever first finds the file that `OMEN` names takes it away, and computes a gradient that is
    not finite."""

    def backward(self, rows: Any) -> dict[str, float]:
        stats = super().backward(rows)
        try:
            os.remove(OMEN)
        except FileNotFoundError:
            return stats
        self.flat.grads[3] = float("nan")
        return stats


class GulliblePPO(PoisonedPPO):
    """Wrong on purpose: applies whatever gradient there is."""

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        with torch.no_grad():
            self.flat.params.sub_(self.flat.grads, alpha=1e-3)
        self.version += 1
        return {}
