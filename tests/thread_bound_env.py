"""An environment that works only in the main thread of its process."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import threading
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from polopt.rollouts.workers.worker_set import WorkerSet

#: With these options, one exception of an environment ends the run.
STRICT = {"max_consecutive_env_faults": 1, "max_consecutive_failures": 1}


class ThreadBound(gymnasium.Env[np.ndarray, int]):
    """An environment that uses timers with signals, the event loop of its thread, and a database.
    Environments with a time limit, a browser or recorded prices do the same."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.thread = threading.get_ident()
        self.prices = sqlite3.connect(":memory:")
        self.prices.execute("create table prices(time int, price real)")
        self.prices.executemany(
            "insert into prices values(?, ?)", [(time, 1.5 * time) for time in range(10)]
        )
        self.use()

    def use(self, time: int = 0) -> float:
        assert threading.get_ident() == self.thread
        assert threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGALRM, self.too_slow)
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        try:
            return asyncio.get_event_loop().run_until_complete(self.price(time))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)

    async def price(self, time: int) -> float:
        found = self.prices.execute("select price from prices where time = ?", (time,))
        return float(found.fetchone()[0])

    def too_slow(self, *_: Any) -> None:
        raise TimeoutError("the step takes too long")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.time = 0
        self.use()
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        price = self.use(self.time)
        return np.array([price], np.float32), 1.0, self.time >= 8, False, {}

    def close(self) -> None:
        assert threading.get_ident() == self.thread
        self.prices.close()


def check(workers: WorkerSet) -> None:
    """Checks that no environment and no worker has failed."""
    stats = workers.stats()
    assert stats["num_env_faults"] == 0, stats["last_env_fault"]
    assert stats["num_remote_worker_restarts"] == stats["num_restarts_below"] == 0
