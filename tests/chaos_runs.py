"""Environments and policies that fail on command, and a thread that kills workers."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
from fakes import pid_of
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.a2c import A2CPolicy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.worker_handle import WorkerHandle
from polopt.rollouts.workers.worker_set import WorkerSet

#: If this file exists, one process removes the file and fails.
FAULT_FILE = Path(tempfile.gettempdir(), f"polopt-chaos-{os.getpid()}")
#: File with the time of the failure, in seconds of `time.time()`.
FAULT_TIME_FILE = FAULT_FILE.with_suffix(".stamp")


def claim_fault(path: Path = FAULT_FILE) -> bool:
    """Tries to remove the file. Returns True in the one process that succeeds, which also writes
    the time to `FAULT_TIME_FILE`."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    FAULT_TIME_FILE.write_text(repr(time.time()))
    return True


# ---- environments ------------------------------------------------------------------------


class PacedCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose steps take a configured time, like the steps of a simulator.

    Args:
        config: the options of the environment.
            `step_s`: seconds of a step.
            `slow`: index of the worker whose steps take ten times as long.
            `hangs`: index of the worker that hangs in the step in which it finds `FAULT_FILE`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        slow = config.get("slow") == config.worker_index
        self.step_s = config.get("step_s", 0.0) * (10.0 if slow else 1.0)
        self.hangs = config.get("hangs") == config.worker_index

    def step(self, action: Any) -> Any:
        if self.step_s:
            time.sleep(self.step_s)
        if self.hangs and claim_fault():
            time.sleep(3600.0)
        return self.env.step(action)


class DiesInConstructor(PacedCartPole):
    """An environment whose constructor kills its worker process while `FAULT_FILE` exists.

    The driver makes one environment to read the spaces. In the driver, whose worker index is 0, the
    constructor has no such effect.
    """

    def __init__(self, config: Any) -> None:
        if config.worker_index > 0 and FAULT_FILE.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(config)


# ---- policies ----------------------------------------------------------------------------


class NoRepeatA2C(A2CPolicy):
    """A policy that raises AssertionError if the same gradient is applied twice."""

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        refuse_repeated(self, gradients.flat.tobytes())
        return super().apply_gradients(gradients, lr_scale)


class NoRepeatPPO(PPOPolicy):
    """A policy that raises AssertionError if it learns from the same observations twice."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        for env in range(batch.all_obs.shape[1]):
            refuse_repeated(self, batch.all_obs[:, env].tobytes())
        return super().learn_on_batch(batch, reducer)


class HashingPPO(NoRepeatPPO):
    """A policy that keeps a hash of the weights of each version. In the rank that removes
    `FAULT_FILE`, the policy kills its process during an all-reduce."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        if claim_fault():
            self.__dict__["sums_left"] = random.Random(time.time()).randrange(1, 8)
        if "sums_left" in self.__dict__:
            reducer = DyingReducer(reducer, self.__dict__)
        return super().learn_on_batch(batch, reducer)

    def apply_flat(self, lr_scale: float = 1.0) -> dict[str, float]:
        stats = super().apply_flat(lr_scale)
        hashes = self.__dict__.setdefault("hashes", {})
        weights = self.flat.params.detach().numpy().tobytes()
        hashes[self.version] = hashlib.sha256(weights).hexdigest()
        return stats


class HangingPPO(PPOPolicy):
    """A policy that hangs in the rank that removes `FAULT_FILE`, while the other ranks wait in an
    all-reduce."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        if claim_fault():
            time.sleep(3600.0)
        return super().learn_on_batch(batch, reducer)


def refuse_repeated(policy: Any, data: bytes) -> None:
    seen = policy.__dict__.setdefault("seen", set())
    digest = hashlib.sha256(data).digest()
    assert digest not in seen, "applied twice"
    seen.add(digest)


class DyingReducer:
    """A reducer that kills its process during one of the sums of gradients.

    Args:
        reducer: computes the sums.
        left: a dict in which `sums_left` is the number of sums until the kill.
    """

    def __init__(self, reducer: Any, left: dict[str, Any]) -> None:
        self._reducer = reducer
        self._left = left
        self.world_size = reducer.world_size

    def sum_(self, tensor: Tensor) -> None:
        if tensor.numel() > 100:
            self._left["sums_left"] -= 1
            if self._left["sums_left"] == 0:
                threading.Thread(target=self._die).start()
        self._reducer.sum_(tensor)

    def _die(self) -> None:
        time.sleep(random.Random(time.time()).uniform(0.0, 0.002))
        FAULT_TIME_FILE.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


# ---- kills and steps -----------------------------------------------------------------------


def kill(worker: WorkerHandle) -> float:
    """Sends SIGKILL to a worker. Returns the time of the kill, in seconds of `time.time()`."""
    pid = pid_of(worker)
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
    return time.time()


class Killer(threading.Thread):
    """Kills random workers at random times while the main thread trains.

    Attributes:
        back_s: for each kill, the seconds until the replacement was up.
    """

    def __init__(self, workers: WorkerSet, kills: int, over_s: float, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self._workers = workers
        self._rng = random.Random(seed)
        self._pauses_s = [self._rng.uniform(0.5, 1.5) * over_s / kills for _ in range(kills)]
        self._gone: list[tuple[WorkerHandle, float]] = []
        self.stopped = threading.Event()
        self.num_kills = 0
        self.back_s: list[float] = []

    def run(self) -> None:
        for pause_s in self._pauses_s:
            # Each pause begins after the last kill, so that a late replacement is not killed at
            # once.
            due_s = time.time() + pause_s
            while not self._kill_one(due_s):
                if self.stopped.wait(0.01):
                    return
        while self._gone and not self.stopped.wait(0.01):
            self._look()

    def _kill_one(self, due_s: float) -> bool:
        self._look()
        if time.time() < due_s:
            return False
        dead = [worker for worker, _ in self._gone]
        alive = [w for w in list(self._workers.remote) if w.up and w not in dead]
        if not alive:
            return False
        victim = self._rng.choice(alive)
        self._gone.append((victim, kill(victim)))
        self.num_kills += 1
        return True

    def _look(self) -> None:
        there = {worker.index: worker for worker in list(self._workers.remote)}
        for victim, killed_s in list(self._gone):
            fresh = there.get(victim.index)
            if fresh is not None and fresh is not victim and fresh.up:
                self._gone.remove((victim, killed_s))
                self.back_s.append(time.time() - killed_s)


def steps_until(optimizer: Any, condition: Callable[[], Any], limit_s: float) -> list[float]:
    """Calls `step` until `condition()` is true. Returns the duration of each step in seconds.

    Raises:
        AssertionError: the condition is not true within `limit_s` seconds, or a result counts
            updates without data.
    """
    deadline_s = time.monotonic() + limit_s
    durations_s = []
    while not condition():
        began_s = time.monotonic()
        result = optimizer.step()
        durations_s.append(time.monotonic() - began_s)
        assert result.updates == 0 or result.env_steps_trained > 0, "an update without data"
        assert time.monotonic() < deadline_s, (
            f"not within {limit_s} s and {len(durations_s)} steps, the longest of "
            f"{max(durations_s):.1f} s; fault file exists: {FAULT_FILE.exists()}, "
            f"claimed: {FAULT_TIME_FILE.exists()}"
        )
    return durations_s
