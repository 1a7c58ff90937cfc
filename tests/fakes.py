"""Fakes of Ray, of the clock and of remote workers, and policies and environments that fail.

The test sets the order and the outcome of calls; the fakes check their arguments. No processes, no
waiting.
"""

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
from polopt.rollouts.workers import health, in_flight, weight_snapshots, worker_actors, worker_set
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

#: File whose presence makes one process of `StallingPPO` or `NonFiniteGradientPPO` fail.
FAULT_FILE = os.path.join(tempfile.gettempdir(), f"polopt-test-{os.getpid()}")


class Ref:
    """Fake of `ray.ObjectRef`: the result of a fake call or of `FakeRay.put`.

    Attributes:
        done: the call has ended.
        concurrent: the call may run beside another one of the same actor.
    """

    def __init__(self, value: Any = None, error: Exception | None = None, index: int = 0) -> None:
        self.value = value
        self.error = error
        self.index = index  # of the worker
        self.done = False
        self.concurrent = False


#: Chooses the pending call that ends next. None: no call ends, and time passes.
Script = Callable[[list[Ref]], Ref | None]


def oldest_first(pending: list[Ref]) -> Ref | None:
    """Script of equally fast workers."""
    return pending[0]


def none_ready(pending: list[Ref]) -> Ref | None:
    """Script of workers that all hang."""
    return None


def in_order(indices: Iterable[int]) -> Script:
    """Returns the script in which calls of the workers `indices` end in this order."""
    remaining = iter(indices)

    def script(pending: list[Ref]) -> Ref | None:
        wanted = next(remaining)
        return next(ref for ref in pending if ref.index == wanted)

    return script


class FakeRay:
    """Fake of `ray` and of the clock, as modules of `rollouts.workers` use them.

    Attributes:
        script: see `Script`.
        now_s: time of the clock; advances only in a `wait` in which no call ends.
        num_puts: number of objects put into the store.
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
        assert refs, "`wait` without references"
        assert timeout is not None, "no timeout"
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
        assert timeout is not None, "no timeout"
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
    """Fake of the handle of an actor; the worker lives in this process.

    Calls run when they are made; the script decides when their results arrive. A call after the
    death of the actor, or beside another call, is an AssertionError.

    Attributes:
        calls: `(method, arguments)` of all calls so far.
        results: their return values.
        next_error: error of the next call.
        errors: error of the next call of a method, by method.
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
        return sum(not ref.done and not ref.concurrent for ref in self._refs)

    def finish(self) -> None:
        """Ends all pending calls, independent of the script."""
        for ref in self._refs:
            ref.done = True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _FakeMethod(self, method)

    def call(self, method: str, *args: Any) -> Ref:
        assert self.alive, f"{method} called on worker {self.index}, which is dead"
        concurrent = method in ("ping", "stop")
        assert concurrent or self.under_way == 0, f"two calls at once to worker {self.index}"
        # As in Ray, a call whose argument is the result of a failed call fails with its error.
        inherited = next((arg.error for arg in args if isinstance(arg, Ref) and arg.error), None)
        args = tuple(arg.value if isinstance(arg, Ref) else arg for arg in args)
        self.calls.append((method, args))
        ref = Ref(index=self.index)
        ref.concurrent = concurrent
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
        return _ConcurrentFakeMethod(self.actor, self.name)


class _ConcurrentFakeMethod(_FakeMethod):
    """Method of the concurrency group `control`: runs beside other calls."""

    def remote(self, *args: Any) -> Ref:
        assert self.actor.alive
        return Ref(getattr(self.actor.worker, self.name)(*args))


class CheckedWorker(RolloutWorker):
    """Real worker that checks weights: none is received twice, and the first call has some."""

    version_sent: int | None = None

    def sample(self, weights: Weights | None = None, *args: Any) -> SampleBatch:
        if self.index > 0:
            if weights is None:
                assert self.version_sent is not None, "`sample` without any weights"
            else:
                assert weights.version != self.version_sent, "received the same weights twice"
                self.version_sent = weights.version
        return super().sample(weights, *args)


class FakeWorkerSet(WorkerSet):
    """WorkerSet whose remote workers are `CheckedWorker`s in this process.

    Args:
        config: see `WorkerSet`.
        kind: class of the workers.
        up: workers count as started from the beginning.

    Attributes:
        actors: all actors that were started, in this order.
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
        """Does nothing: there is no process to connect."""

    def _start(self, index: int) -> RemoteWorker:
        restart_count = self._actors.restart_counts.get(index, 0)
        config = dataclasses.replace(self.config, restart_count=restart_count)
        actor = FakeActor(self._kind(config, index), index)
        self.actors.append(actor)
        worker = RemoteWorker(index, actor)
        if self._up:
            worker.last_answer_s = in_flight.time.monotonic()
        return worker


class FakeWorkerProcess:
    """Smallest actor class that can raise, hang and be killed."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def fail(self) -> None:
        raise ValueError("expected failure")


def install(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Replaces Ray and the clock of deadlines by a `FakeRay`."""
    fake = FakeRay()
    monkeypatch.setattr(in_flight, "ray", fake)
    monkeypatch.setattr(in_flight, "time", fake)
    monkeypatch.setattr(in_flight, "waits_for_resources", lambda actor: False)
    monkeypatch.setattr(worker_set, "waits_for_resources", lambda actor: False)
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
    """Returns the config of workers; default: two workers, two environments each, five steps."""
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
    """Returns an optimizer of class `cls`; `options` has the keys of its config."""
    optimizer: PolicyOptimizer = cls(workers, cls.config_class.parse(options))
    return optimizer


class RandomDelayDrift(Drift):
    """Drift whose steps take random times, so that results arrive in random order."""

    def step(self, action: int) -> Any:
        time.sleep(ord(os.urandom(1)) * 4e-5)
        return super().step(action)


def pid_of(worker: RemoteWorker) -> int:
    """Returns the process id of a worker that is not a fake."""
    pid: int = ray.get(worker.actor.__ray_call__.remote(lambda _: os.getpid()), timeout=120.0)
    return pid


def shuffled_by(seed: int) -> Script:
    """Returns the script in which a random pending call ends next."""
    return random.Random(seed).choice


class SlowFourthWorkerDrift(Drift):
    """Drift that is slow in worker 4."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 4:
            time.sleep(0.03)
        return super().step(action)


class SlowSecondWorkerDrift(Drift):
    """Drift that is slow in worker 2."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 2:
            time.sleep(0.05)
        return super().step(action)


class OwnAdvantagesPPO(PPOPolicy):
    """Wrong variant: each learner standardises its advantages by its own rows."""

    def training_rows(self, batch: SampleBatch, reducer: Any = None) -> dict[str, torch.Tensor]:
        return super().training_rows(batch)


class UnweightedPPO(PPOPolicy):
    """Wrong variant: unweighted mean over learners, although their row counts differ."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        right = sgd.reduce_gradient
        sgd.reduce_gradient = lambda policy, _, stats, group: right(policy, 1, stats, group)
        try:
            return super().learn_on_batch(batch, reducer)
        finally:
            sgd.reduce_gradient = right


class StallingPPO(PPOPolicy):
    """The first process that finds `FAULT_FILE` removes it and hangs in `learn_on_batch`."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        try:
            os.remove(FAULT_FILE)
        except FileNotFoundError:
            return super().learn_on_batch(batch, reducer)
        time.sleep(3600.0)
        raise AssertionError("the sleep ended before the process was killed")


class NonFiniteGradientPPO(PPOPolicy):
    """The first process that finds `FAULT_FILE` removes it and computes a non-finite gradient."""

    def backward(self, rows: Any) -> dict[str, float]:
        stats = super().backward(rows)
        try:
            os.remove(FAULT_FILE)
        except FileNotFoundError:
            return stats
        self.flat.grads[3] = float("nan")
        return stats


class UncheckedGradientPPO(NonFiniteGradientPPO):
    """Wrong variant: applies non-finite gradients."""

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        with torch.no_grad():
            self.flat.params.sub_(self.flat.grads, alpha=1e-3)
        self.version += 1
        return {}
