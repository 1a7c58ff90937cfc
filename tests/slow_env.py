"""Environments with slow steps, and an environment that hangs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LIMIT_S = 3.0


#: The number of steps in a fragment. Each step takes 0.1 s.
STEPS = 40


class Slow(gymnasium.Env[np.ndarray, int]):
    """An environment whose steps take `step_s`, by default 0.1 s. The first `fast_steps` steps take
    no time. The first process that finds the file `hang` removes the file and hangs."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.hang = Path(config.get("hang", "/no such file"))
        self.step_s = config.get("step_s", 0.1)
        self.fast_steps = config.get("fast_steps", 0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.fast_steps -= 1
        if self.fast_steps < 0:
            time.sleep(self.step_s)
        if self.hang.exists():
            self.hang.unlink()
            while True:
                time.sleep(3600.0)
        return np.zeros(2, np.float32), 1.0, False, False, {}
