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
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from toy_envs import POLICIES, Drift

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.optimizers.base import PolicyOptimizer
from polopt.policies import actor_critic
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import probe_spaces
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.rollout_worker import Answer, RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet, call_method

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


def of_worker(*indices: int) -> Script:
    """Returns the script in which only calls of the workers `indices` end, oldest first."""
    return lambda pending: next((ref for ref in pending if ref.index in indices), None)


def in_order(indices: Iterable[int]) -> Script:
    """Returns the script in which calls of the workers `indices` end in this order."""
    remaining = iter(indices)

    def script(pending: list[Ref]) -> Ref | None:
        wanted = next(remaining)
        return next(ref for ref in pending if ref.index == wanted)

    return script


class FakeRay:
    """Fake of the module `ray` and of the clock, for `WorkerSet(config, ray=..., clock=...)`.

    Attributes:
        script: see `Script`.
        now_s: time of the clock; advances only in a `wait` in which no call ends.
        num_puts: number of objects put into the store.
        resources: of the cluster; all are free.
    """

    ObjectRef = Ref

    def __init__(self) -> None:
        self.resources = {"CPU": 4.0}
        self.script: Script = oldest_first
        self.now_s = 1000.0
        self.num_puts = 0

    def clock(self) -> float:
        return self.now_s

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def available_resources(self) -> dict[str, float]:
        return self.resources

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
    death of the actor is an AssertionError.

    Attributes:
        calls: `(name, arguments)` of all calls so far; of `run`, those of the function.
        answers: their return values; of `run`, the value of the function.
        next_error: error of the next call.
        errors: error of the next call of a method or function, by name.
    """

    def __init__(self, worker: Any, index: int) -> None:
        self.worker = worker
        self.index = index
        self.alive = True
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: list[Any] = []
        self.next_error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        self._refs: list[Ref] = []

    @property
    def under_way(self) -> int:
        return sum(not ref.done for ref in self._refs)

    def finish(self) -> None:
        """Ends all pending calls, independent of the script."""
        for ref in self._refs:
            ref.done = True

    def fail(self, error: Exception) -> None:
        """Ends all pending calls with an error, independent of the script."""
        for ref in self._refs:
            if not ref.done:
                ref.error, ref.done = error, True

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)
        return _FakeMethod(self, method)

    def call(self, method: str, *args: Any) -> Ref:
        assert self.alive, f"{method} called on worker {self.index}, which is dead"
        # As in Ray, a call whose argument is the result of a failed call fails with its error.
        inherited = next((arg.error for arg in args if isinstance(arg, Ref) and arg.error), None)
        args = tuple(arg.value if isinstance(arg, Ref) else arg for arg in args)
        name, shown = method, args
        if method == "run_encoded":
            number, function, given = cloudpickle.loads(args[0])
            method, args = "run", (number, function, *given)
        if method == "run":
            fn = cloudpickle.loads(args[1]) if isinstance(args[1], bytes) else args[1]
            name, shown = getattr(fn, "__name__", type(fn).__name__), args[2:]
            if fn is call_method:
                name, shown = args[2], args[3:]
        self.calls.append((name, shown))
        ref = Ref(index=self.index)
        ref.error = self.next_error or self.errors.pop(name, None) or inherited
        self.next_error = None
        if ref.error is None:
            ref.value = getattr(self.worker, method)(*args)
            self.answers.append(ref.value.value if isinstance(ref.value, Answer) else ref.value)
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
    """Real worker that checks weights: none is received twice, and the first fragment has some."""

    version_received: int | None = None

    def set_weights(self, weights: Weights | None) -> None:
        if self.index > 0 and weights is not None:
            assert weights.version != self.version_received, "received the same weights twice"
            self.version_received = weights.version
        super().set_weights(weights)

    def sample(self, *args: Any) -> SampleBatch:
        assert self.index == 0 or self.version_received is not None, "sampled without any weights"
        return super().sample(*args)


class FakeWorkerSet(WorkerSet):
    """WorkerSet whose remote workers are `CheckedWorker`s in this process.

    Args:
        config: see `WorkerSet`.
        fake: of Ray and of the clock.
        kind: class of the workers.
        up: workers count as started from the beginning; replacements, too.

    Attributes:
        actors: all actors that were started, in this order.
        unplaced: indices of workers for which Ray has no resources.
    """

    def __init__(
        self,
        config: WorkerConfig,
        fake: FakeRay | None = None,
        kind: type[RolloutWorker] = CheckedWorker,
        up: bool = True,
    ) -> None:
        self.actors: list[FakeActor] = []
        #: Workers without a process, and how many of them Ray has no resources for.
        self.unplaced: set[int] = set()
        self.lacking: int | None = None  # all
        self._kind = kind
        self._up = up
        fake = fake or FakeRay()
        super().__init__(config, ray=fake, clock=fake.clock)

    def use_transport(self, message_bytes: int) -> None:
        """Does nothing: there is no process to connect."""

    def waiting_for_resources(
        self, starting: Sequence[WorkerHandle]
    ) -> tuple[list[WorkerHandle], int]:
        waiting = [worker for worker in starting if worker.index in self.unplaced]
        return waiting, len(waiting) if self.lacking is None else self.lacking

    def _start(self, index: int) -> WorkerHandle:
        restart_count = self._processes.restart_counts.get(index, 0)
        config = dataclasses.replace(self.config, restart_count=restart_count)
        actor = FakeActor(self._kind(config, index), index)
        self.actors.append(actor)
        worker = WorkerHandle(index, actor, self.clock())
        if self._up:
            worker.last_answer_s = self.clock()
            self.changes += 1
        else:
            self.starting[actor.ping.remote()] = worker
        return worker


class FakeWorkerProcess:
    """Smallest actor class that can raise, hang and be killed."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)

    def fail(self) -> None:
        raise ValueError("expected failure")


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


def through_ray(worker: WorkerHandle) -> Any:
    """The actor of a worker that is not a fake. Calls that are made of it now are answered after
    those that were made over ZeroMQ."""
    if worker.channel is not None:
        worker.channel.pause()
    return worker.actor


def inside(worker: WorkerHandle, function: Callable[[RolloutWorker], Any]) -> Any:
    """Returns what `function` of a worker that is not a fake gives in its process, also while the
    worker answers calls over ZeroMQ, on another thread."""
    call = worker.actor.__ray_call__.options(concurrency_group="control")
    return ray.get(call.remote(function), timeout=120.0)


def pid_of(worker: WorkerHandle) -> int:
    """Returns the process id of a worker that is not a fake."""
    return int(inside(worker, lambda _: os.getpid()))


def connect_workers(workers: WorkerSet) -> None:
    """All workers are up and, unless calls go through Ray, connected."""
    until_s = time.monotonic() + 60.0
    for worker in workers.remote:
        calls = Calls(workers, "test")
        calls.send(worker, call_method, "ping")
        assert calls.next().failure is None
        while workers.rpc is not None and not (worker.channel and worker.channel.connected):
            assert time.monotonic() < until_s
            workers.rpc.poll(1.0)


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

    def training_rows(self, batch: SampleBatch, reducer: Any = None) -> dict[str, np.ndarray]:
        return super().training_rows(batch)


class UnweightedPPO(PPOPolicy):
    """Wrong variant: unweighted mean over learners, although their row counts differ."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        right = actor_critic.reduce_gradient
        actor_critic.reduce_gradient = lambda policy, _, stats, group: right(
            policy, 1, stats, group
        )
        try:
            return super().learn_on_batch(batch, reducer)
        finally:
            actor_critic.reduce_gradient = right


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
