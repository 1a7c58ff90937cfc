"""Environments and policies that fail on command, and who kills: for the tests marked `chaos`."""

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
import ray
from torch import Tensor

from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.policies.a2c import A2CPolicy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_set import WorkerSet

#: While this file is there, something fails; the first who is meant takes it away.
OMEN = Path(tempfile.gettempdir(), f"polopt-chaos-{os.getpid()}")
#: When it did, in seconds of `time.time()`.
STAMP = OMEN.with_suffix(".stamp")


def take(omen: Path = OMEN) -> bool:
    """Whether the omen was there; only one process gets it. Its time is kept in `STAMP`."""
    try:
        omen.unlink()
    except FileNotFoundError:
        return False
    STAMP.write_text(repr(time.time()))
    return True


# ---- environments ------------------------------------------------------------------------


class PacedCartPole(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole whose steps take a time of their own, as those of a simulator do.

    Args:
        config: `step_s`; `slow`: a worker whose steps take ten times as long; `hangs`: one that
            stops in the step in which it finds `OMEN`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        slow = config.get("slow") == config.worker_index
        self.step_s = config.get("step_s", 0.0) * (10.0 if slow else 1.0)
        self.hangs = config.get("hangs") == config.worker_index

    def step(self, action: Any) -> Any:
        if self.step_s:
            time.sleep(self.step_s)
        if self.hangs and take():
            time.sleep(3600.0)
        return self.env.step(action)


class Doomed(PacedCartPole):
    """Ends its process when it is made while `OMEN` is there. (The driver's own, which only looks
    at spaces, is spared.)"""

    def __init__(self, config: Any) -> None:
        if config.worker_index > 0 and OMEN.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        super().__init__(config)


# ---- policies ----------------------------------------------------------------------------


class OnceA2C(A2CPolicy):
    """Refuses to apply a gradient that it has applied before."""

    def apply_gradients(self, gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        refuse_twice(self, gradients.flat.tobytes())
        return super().apply_gradients(gradients, lr_scale)


class OncePPO(PPOPolicy):
    """Refuses to learn from what it has learned from before."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        for env in range(batch.all_obs.shape[1]):
            refuse_twice(self, batch.all_obs[:, env].tobytes())
        return super().learn_on_batch(batch, reducer)


class HashingPPO(OncePPO):
    """Keeps a hash of its weights after each update, by version. Kills itself in the middle of an
    all-reduce once it finds `OMEN`."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        if take():
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
    """Stops in the middle of an all-reduce once it finds `OMEN`."""

    def learn_on_batch(self, batch: SampleBatch, reducer: Any = None) -> dict[str, float]:
        if take():
            time.sleep(3600.0)
        return super().learn_on_batch(batch, reducer)


def refuse_twice(policy: Any, data: bytes) -> None:
    seen = policy.__dict__.setdefault("seen", set())
    digest = hashlib.sha256(data).digest()
    assert digest not in seen, "applied twice"
    seen.add(digest)


class DyingReducer:
    """Sums as the reducer it is given, but in one of the gradients' sums its process dies.

    Args:
        reducer: that one.
        left: `sums_left` counts how many it lives to see.
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
        STAMP.write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)


# ---- who kills, and what came of it ------------------------------------------------------


def pid_now(worker: RemoteWorker) -> int:
    """The process of a worker, without asking it: it may be busy. 0: none yet."""
    info = ray._private.state.actors(worker.actor._actor_id.hex())
    return int(info["Pid"]) if info else 0


def kill(worker: RemoteWorker) -> float:
    """SIGKILL; returns when, in seconds of `time.time()`."""
    pid = pid_now(worker)
    assert pid > 0
    os.kill(pid, signal.SIGKILL)
    return time.time()


class Killer(threading.Thread):
    """Kills workers, chosen and timed at random, while the main thread trains.

    Attributes:
        back_s: for each kill, seconds until the worker in the killed one's place had answered.
    """

    def __init__(self, workers: WorkerSet, kills: int, over_s: float, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self._workers = workers
        self._rng = random.Random(seed)
        self._pauses_s = [self._rng.uniform(0.5, 1.5) * over_s / kills for _ in range(kills)]
        self._gone: list[tuple[RemoteWorker, float]] = []
        self.stopped = threading.Event()
        self.num_kills = 0
        self.back_s: list[float] = []

    def run(self) -> None:
        for pause_s in self._pauses_s:
            # From the last kill on: those that come up late are not killed at birth.
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
    """Steps until something is the case; the seconds that each step took. No update is ever
    without data."""
    deadline_s = time.monotonic() + limit_s
    durations_s = []
    while not condition():
        began_s = time.monotonic()
        result = optimizer.step()
        durations_s.append(time.monotonic() - began_s)
        assert result.updates == 0 or result.env_steps_trained > 0, "an update without data"
        assert time.monotonic() < deadline_s, (
            f"not within {limit_s} s and {len(durations_s)} steps, the longest of "
            f"{max(durations_s):.1f} s; omen: {OMEN.exists()}, taken: {STAMP.exists()}"
        )
    return durations_s
