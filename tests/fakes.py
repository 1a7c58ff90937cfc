"""Simulated remote workers on a virtual clock, and policies and environments that fail.

The test sets the order and the outcome of calls. The fakes check their arguments. No processes, no
waiting.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from toy_envs import POLICIES, Drift

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Weights
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies import fragment_policy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import probe_spaces
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import Channel, Message
from polopt.rollouts.transport.simulated_channel import (
    Script,
    SimulatedChannel,
    SimulatedTicket,
    SimulatedTransport,
    of_process,
)
from polopt.rollouts.transport.simulated_channel import in_order as processes_in_order
from polopt.rollouts.transport.socket_channel import SocketChannel
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: File whose presence makes one process of `StallingPPO` or `NonFiniteGradientPPO` fail.
FAULT_FILE = os.path.join(tempfile.gettempdir(), f"polopt-test-{os.getpid()}")


def of_worker(*indices: int) -> Script:
    """Returns the script in which only calls of the workers `indices` end, oldest first."""
    return of_process(*(f"worker {index}" for index in indices))


def in_order(indices: Iterable[int]) -> Script:
    """Returns the script in which calls of the workers `indices` end in this order."""
    return processes_in_order(f"worker {index}" for index in indices)


class FakeTransport(SimulatedTransport):
    """`SimulatedTransport` whose channels are `FakeChannel`s, and whose cluster the test describes.

    Attributes:
        cluster: resources of the cluster. All are free.
        unplaced: names of the processes that find no resources.
        lacking: how many processes the cluster has no resources for. None: all of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cluster = {"CPU": 4.0}
        self.unplaced: set[str] = set()
        self.lacking: int | None = None

    def make_channel(
        self, make: Callable[..., Any], args: tuple[Any, ...], name: str
    ) -> FakeChannel:
        return FakeChannel(make, args, name)

    def waiting(self, channels: Sequence[Channel]) -> tuple[list[Channel], int]:
        waiting = [channel for channel in channels if channel.name in self.unplaced]
        return waiting, len(waiting) if self.lacking is None else self.lacking

    def resources(self) -> tuple[dict[str, float], dict[str, float]]:
        return self.cluster, self.cluster


class FakeChannel(SimulatedChannel):
    """`SimulatedChannel` that remembers its calls, and fails the calls that the test names.

    Attributes:
        calls: `(name, arguments)` of all calls so far.
        values: their return values.
        next_error: error of the next call.
        errors: error of the next call of a function or method, by name.
    """

    def __init__(self, make: Callable[..., Any], args: tuple[Any, ...], name: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.values: list[Any] = []
        self.next_error: Exception | None = None
        self.errors: dict[str, Exception] = {}
        super().__init__(make, args, name)

    @property
    def index(self) -> int:
        """Of the worker."""
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
        transport: starts them.
        kind: class of the workers.
        up: workers count as started from the beginning. Replacements, too.
        meanwhile: see `WorkerSet`.

    Attributes:
        channels: of all workers that were started, in this order.
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
            self.changes += 1
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
    """Returns the config of workers. Default: two workers, two environments each, five steps."""
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
    """Returns an optimizer of class `cls`. `options` has the keys of its config."""
    optimizer: PolicyOptimizer = cls(workers, cls.config_class.parse(options))
    return optimizer


class RandomDelayDrift(Drift):
    """Drift whose steps take random times, so that results arrive in random order."""

    def step(self, action: int) -> Any:
        time.sleep(ord(os.urandom(1)) * 4e-5)
        return super().step(action)


def inside(worker: WorkerHandle, function: Callable[..., Any], *args: Any) -> Any:
    """Has `function(worker, *args)` run in the process of a worker that is not a fake, after the
    calls that were sent before. Returns Ray's reference to its value."""
    channel: Any = worker.channel
    if isinstance(channel, SocketChannel):
        channel.pause()
        channel = channel.through_ray
    return channel.actor.__ray_call__.remote(lambda process: function(process._target, *args))


def pid_of(worker: WorkerHandle) -> int:
    """Returns the process id of a worker that is up and not a fake."""
    pid = worker.channel.started.pid
    assert pid > 0, "it is not up, and a signal to process 0 reaches the processes of the test"
    return pid


def connect_workers(workers: WorkerSet) -> None:
    """All workers are up and, unless calls go through Ray, connected."""
    until_s = time.monotonic() + 60.0
    for worker in workers.up():
        channel = worker.channel
        if isinstance(channel, SocketChannel):
            channel.connect()
            while not channel.is_connected:
                assert time.monotonic() < until_s
                workers.transport.poll(1.0)  # type: ignore[attr-defined]


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
        right = fragment_policy.reduce_gradient
        fragment_policy.reduce_gradient = lambda policy, _, stats, group: right(
            policy, 1, stats, group
        )
        try:
            return super().learn_on_batch(batch, reducer)
        finally:
            fragment_policy.reduce_gradient = right


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
