"""Fragments of streams with known episode ends, for a replay buffer."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.common.sample_batch import SampleBatch

GAMMA = 0.9


def fragment(
    first: int, steps: int = 4, envs: int = 2, follows: bool = True, **changes: Any
) -> SampleBatch:
    """Returns the steps from `first` on of a stream without episode ends. The observation and the
    reward of a step are the number of the step, plus 1,000 times the index of the environment."""
    numbers = np.arange(first, first + steps + 1)[:, None] + 1000 * np.arange(envs)
    shape = steps, envs
    columns = {
        "actions": numbers[:-1] % 3,
        "rewards": numbers[:-1].astype(np.float32),
        "terminated": np.zeros(shape, dtype=bool),
        "truncated": np.zeros(shape, dtype=bool),
        "valid": np.ones(shape, dtype=bool),
    }
    batch = SampleBatch(
        all_obs=numbers[..., None].astype(np.float32),
        columns=columns,
        successor_index=np.zeros(0, dtype=np.int64),
        successor_obs=np.zeros((0, 1), dtype=np.float32),
        worker_index=1,
        place=(7, first),
    )
    for name, value in changes.items():
        setattr(batch, name, value)
    return batch


class Streams:
    """Fragments with random episode ends, from several workers in random order. Every observation
    is unique, so that it identifies its row."""

    def __init__(self, mode: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.next_step = mode == "next_step"
        self.number = 0
        self.workers: dict[int, dict[str, Any]] = {}

    def observation(self) -> float:
        self.number += 1
        return float(self.number)

    def fragment(self, worker: int, steps: int, envs: int, gap: bool) -> tuple[SampleBatch, bool]:
        """Returns the next fragment of a worker, and whether it continues the previous one."""
        state, rng = self.workers.get(worker), self.rng
        follows = state is not None and not gap and len(state["obs"]) == envs
        if state is None or not follows:
            place = (int(rng.integers(2**62)), 0)
            obs = [self.observation() for _ in range(envs)]
            state = {"obs": obs, "resets": [False] * envs, "place": place}
            self.workers[worker] = state
        all_obs = np.zeros((steps + 1, envs, 1), dtype=np.float32)
        all_obs[0, :, 0] = state["obs"]
        columns: dict[str, np.ndarray] = {
            "actions": rng.integers(0, 3, (steps, envs)),
            "rewards": rng.normal(size=(steps, envs)).astype(np.float32),
            "terminated": np.zeros((steps, envs), dtype=bool),
            "truncated": np.zeros((steps, envs), dtype=bool),
            "valid": np.ones((steps, envs), dtype=bool),
        }
        index, successors = [], []
        for t in range(steps):
            for e in range(envs):
                all_obs[t + 1, e] = self.observation()
                if state["resets"][e]:
                    columns["valid"][t, e] = columns["rewards"][t, e] = False
                    state["resets"][e] = False
                    continue
                chance = rng.random()
                if chance < 0.05:  # the environment raised
                    columns["valid"][t, e] = columns["rewards"][t, e] = False
                    columns["truncated"][t, e] = True
                elif chance < 0.3:
                    columns["terminated"][t, e] = chance < 0.15
                    columns["truncated"][t, e] = chance > 0.12
                    if self.next_step:
                        state["resets"][e] = True
                    else:
                        index.append(t * envs + e)
                        successors.append([self.observation()])
        batch = SampleBatch(
            all_obs=all_obs,
            columns=columns,
            successor_index=np.array(index, dtype=np.int64),
            successor_obs=np.array(successors, dtype=np.float32).reshape(-1, 1),
            worker_index=worker,
            place=state["place"],
        )
        state["obs"], state["place"] = all_obs[-1, :, 0].tolist(), batch.next_place
        return batch, follows


def with_state(batch: SampleBatch) -> SampleBatch:
    batch.per_env["state"] = batch.all_obs[0] * np.ones((1, 3), dtype=np.float32)
    return batch
