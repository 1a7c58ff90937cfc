"""Simulated remote workers on a virtual clock, and policies and environments that fail.

A test determines the order and the results of calls. The fakes check their arguments. They start no
processes and do not wait.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from simulated_channel import (
    Script,
    SimulatedChannel,
    SimulatedTicket,
    SimulatedTransport,
    of_process,
)
from simulated_channel import in_order as processes_in_order
from toy_envs import POLICIES, Drift

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Channel, Message
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import ProcessState, WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: If this file exists, one process with a `StallingPPO` or `NonFiniteGradientPPO` removes the file
#: and fails.
FAULT_FILE = os.path.join(tempfile.gettempdir(), f"polopt-test-{os.getpid()}")


def of_worker(*indices: int) -> Script:
    """Returns a script in which only calls to the workers `indices` end, oldest first."""
    return of_process(*(f"worker {index}" for index in indices))


def in_order(indices: Iterable[int]) -> Script:
    """Returns a script in which one call ends for each index, in the order of `indices`."""
    return processes_in_order(f"worker {index}" for index in indices)


class FakeTransport(SimulatedTransport):
    """A `SimulatedTransport` with `FakeChannel`s, and with a cluster that the test describes.

    Attributes:
        cluster: resources of the cluster. All of them are free.
        unplaced: names of the processes that may be waiting for resources.
        lacking: number of processes that really wait for resources. None means all of `unplaced`.
        ending: the channels to processes whose nodes have announced their end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = {"CPU": 4.0}
        self.unplaced: set[str] = set()
        self.lacking: int | None = None
        self.ending: set[Channel] = set()

    def make_channel(
        self, make: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> FakeChannel:
        return FakeChannel(make, args, name)

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        waiting = [channel for channel in channels if channel.name in self.unplaced]
        return waiting, len(waiting) if self.lacking is None else self.lacking

    def leaving(self, channels: Iterable[Channel]) -> list[Channel]:
        return [channel for channel in channels if channel in self.ending]

    def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        return self.cluster, self.cluster


class FakeChannel(SimulatedChannel):
    """A `SimulatedChannel` that records its calls, and fails calls as the test demands.

    Attributes:
        calls: `(name, arguments)` of all calls so far.
        values: the return values of these calls.
        next_error: the error with which the next call fails. None if it does not fail.
        errors: errors by the name of a function or method. The next call of this function or method
            fails with its error.
    """

    def __init__(self, make: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.values: list[Any] = []
        self.next_error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        super().__init__(make, args, name)

    @property
    def index(self) -> int:
        """The index of the worker."""
        return int(self.name.rpartition(" ")[2])

    @property
    def under_way(self) -> int:
        return sum(not ticket.done for ticket in self.tickets)

    def run(self, ticket: SimulatedTicket, message: Message) -> None:
        name = getattr(message.function, "__name__", type(message.function).__name__)
        shown = message.args
        if name == "call_method":
            name, shown = message.args[0], message.args[1:]
        self.calls.append((name, shown))
        ticket.error = self.next_error or self.errors.pop(name, None)
        self.next_error = None
        if ticket.error is None:
            super().run(ticket, message)
            self.values.append(getattr(ticket.answer, "value", None))


class CheckedWorker(RolloutWorker):
    """A real worker that raises AssertionError if it receives the same weights twice in a row, or
    samples before it has received weights."""

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
    """A `WorkerSet` whose remote workers are objects in this process, by default `CheckedWorker`s.

    Args:
        config: see `WorkerSet`.
        transport: starts the workers.
        kind: class of the workers.
        up: if True, workers and replacements are up as soon as they are started.
        meanwhile: see `WorkerSet`.

    Attributes:
        channels: the channels of all workers so far, in the order of their starts.
    """

    def __init__(
        self,
        config: WorkerConfig,
        transport: FakeTransport | None = None,
        kind: type[RolloutWorker] = CheckedWorker,
        up: bool = True,
        meanwhile: str = "",
    ) -> None:
        self._up = up
        self.worker_class = kind  # type: ignore[misc]
        super().__init__(config, transport=transport or FakeTransport(), meanwhile=meanwhile)

    @property
    def channels(self) -> list[FakeChannel]:
        return self.transport.channels  # type: ignore[attr-defined,no-any-return]

    def _start(self, index: int) -> WorkerHandle:
        worker = super()._start(index)
        if self._up:
            del self.starting[worker.channel.start]
            worker.channel.finish()  # type: ignore[attr-defined]
            worker.set_up.clear()
            worker.last_answer_s = self.clock()
            self._to(worker, ProcessState.UP)
        return worker


class FakeWorkerProcess:
    """A small actor class whose actors can raise, hang and be killed."""

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
    """Returns a config of workers. By default, two workers each have two environments and
    fragments of five steps."""
    options = {
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 5,
        "num_cpus_per_worker": 0.5,
    }
    config = RolloutConfig.parse({"env": env, **options, **(rollout or {})})
    source = resolve_env(config.env)
    observations, actions = probe_env(source, config)[:2]
    cls: Any = POLICIES[policy] if isinstance(policy, str) else policy
    policy_config = cls.config_class.parse({"model": {"fcnet_hiddens": (8,)}, **policy_options})
    return WorkerConfig(config, source, cls, policy_config, observations, actions, seed)


def make_optimizer(cls: Any, workers: WorkerSet, **options: Any) -> Any:
    """Returns an optimizer of class `cls`. `options` has the keys of its config."""
    optimizer: PolicyOptimizer = cls(workers, cls.config_class.parse(options))
    return optimizer


class RandomDelayDrift(Drift):
    """A `Drift` whose steps take random times, so that results arrive in random order."""

    def step(self, action: int) -> Any:
        time.sleep(ord(os.urandom(1)) * 4e-5)
        return super().step(action)


_INSIDE_NUMBERS = itertools.count(1 << 61)  # no other call has these numbers


def inside(worker: WorkerHandle, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Runs `function(worker, *args)` in the process of a worker that is not a fake, after the calls
    that were sent before. Returns a function that waits for the return value."""
    channel: Any = worker.channel
    if (
        getattr(channel, "state", "") == "connecting"
    ):  # a process gets no call before it has started
        started_until_s = time.monotonic() + 120.0
        while not channel.start.ended():
            channel._transport.wait([channel.start], 1.0)
            assert time.monotonic() < started_until_s
        channel.note_started(channel.start.result(60.0))
    ticket = channel.send(Message(next(_INSIDE_NUMBERS), "inside", function, args))

    def value() -> Any:
        until_s = time.monotonic() + 120.0
        while not ticket.ended():
            channel._transport.wait([ticket], 1.0)
            assert time.monotonic() < until_s
        answer = ticket.result(60.0)
        assert answer.error is None, answer.error
        return answer.value

    return value


def pid_of(worker: WorkerHandle) -> int:
    """Returns the process id of a worker that is up and not a fake."""
    pid = worker.channel.started.pid
    assert pid > 0, "the worker is not up, and a signal to process 0 would reach the test itself"
    return pid


class SlowFourthWorkerDrift(Drift):
    """A `Drift` that is slow in worker 4."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 4:
            time.sleep(0.03)
        return super().step(action)


class SlowSecondWorkerDrift(Drift):
    """A `Drift` that is slow in worker 2."""

    def step(self, action: int) -> Any:
        if self.context.worker_index == 2:
            time.sleep(0.05)
        return super().step(action)


class StallingPPO(PPOPolicy):
    """A policy with which the first process that finds `FAULT_FILE` removes the file, and hangs in
    `learn_on_batch`."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        try:
            os.remove(FAULT_FILE)
        except FileNotFoundError:
            return super().learn_on_batch(batch, reducer)
        time.sleep(3600.0)
        raise AssertionError("the sleep ended before the process was killed")


class NonFiniteGradientPPO(PPOPolicy):
    """A policy with which the first process that finds `FAULT_FILE` removes the file, and computes
    a non-finite gradient."""

    def backward(self, rows: Any) -> dict[str, float]:
        stats = super().backward(rows)
        try:
            os.remove(FAULT_FILE)
        except FileNotFoundError:
            return stats
        self.flat.grads[3] = float("nan")
        return stats


class UncheckedGradientPPO(NonFiniteGradientPPO):
    """A wrong variant, which applies non-finite gradients."""

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        with torch.no_grad():
            self.flat.params.sub_(self.flat.grads, alpha=1e-3)
        self.version += 1
        return {}
