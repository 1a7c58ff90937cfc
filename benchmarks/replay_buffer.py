"""Compares the speed and memory of polopt's replay buffer with other replay buffers.

    python benchmarks/replay_buffer.py

The script fills each buffer with `--rows` rows, and then draws batches of 256 rows. A row is as in
HalfCheetah-v5: 17 floats of observation and 6 floats of action. The script prints a table with the
rows added per processor second, the bytes of a row, and the batches drawn per processor second.
Batches per second are the median of `--repeats` rounds. A second table shows the seconds that
polopt needs to save its buffer.

Stable-Baselines3, cpprb and RLlib are measured if they are installed. Stable-Baselines3 does not
have prioritised replay. RLlib's buffer is slow, so the script draws only 2 percent as many batches
from it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from about import about

from polopt import ReplayBuffer, SampleBatch

OBS, ACTION, BATCH = 17, 6, 256
STEPS, ENVS = 50, 8  # steps and environments of a fragment
GAMMA = 0.99
Draw = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(about())
    print("| buffer | rows added /s | bytes a row | batches /s |\n|---|---:|---:|---:|")
    cases = {
        "polopt, uniform": lambda rows: polopt_buffer(rows, 1, None),
        "polopt, uniform, n = 3": lambda rows: polopt_buffer(rows, 3, None),
        "polopt, prioritised, with update": lambda rows: polopt_buffer(rows, 1, 0.6),
        "polopt, prioritised, n = 3, with update": lambda rows: polopt_buffer(rows, 3, 0.6),
        "Stable-Baselines3, uniform": stable_baselines3,
        "cpprb, prioritised, with update": cpprb_buffer,
        "RLlib, prioritised, with update": rllib_buffer,
    }
    for name, make in cases.items():
        try:
            added, row_bytes, draw = make(options.rows)
        except ImportError:
            print(f"| {name} | not installed | | |")
            continue
        rates, batches = [], options.batches
        if make is rllib_buffer:
            batches = max(1, batches // 50)
        for _ in range(options.repeats):
            start_s = time.process_time()
            for _ in range(batches):
                draw()
            rates.append(batches / (time.process_time() - start_s))
        print(f"| {name} | {added:,.0f} | {row_bytes:,.0f} | {statistics.median(rates):,.0f} |")
    saving(options.rows)


def fragments() -> list[SampleBatch]:
    """Returns the fragments of one episode of 1,000 steps in all environments. The episode ends by
    truncation."""
    rng = np.random.default_rng(0)
    made = []
    for start in range(0, 1000, STEPS):
        all_obs = rng.standard_normal((STEPS + 1, ENVS, OBS), dtype=np.float32)
        ended = start + STEPS == 1000
        truncated = np.zeros((STEPS, ENVS), dtype=bool)
        truncated[-1] = ended
        rows = (STEPS - 1) * ENVS + np.arange(ENVS * ended)
        columns = {
            "actions": rng.standard_normal((STEPS, ENVS, ACTION), dtype=np.float32),
            "rewards": rng.standard_normal((STEPS, ENVS), dtype=np.float32),
            "terminated": np.zeros((STEPS, ENVS), dtype=bool),
            "truncated": truncated,
            "valid": np.ones((STEPS, ENVS), dtype=bool),
        }
        made.append(SampleBatch(all_obs, columns, rows, all_obs[-1][: len(rows)] + 1))
    return made


def filled(buffer: ReplayBuffer) -> float:
    """Fills a buffer, and returns the rows added per processor second."""
    episode, added = fragments(), 0
    start_s = time.process_time()
    while added < buffer.capacity:
        for batch in episode:
            added += buffer.add(batch, follows=True)
    return added / (time.process_time() - start_s)


def polopt_buffer(rows: int, n_step: int, alpha: float | None) -> tuple[float, float, Draw]:
    buffer = ReplayBuffer(rows, GAMMA, n_step, alpha=alpha)
    added = filled(buffer)
    priorities = np.random.default_rng(0).random(BATCH)

    def draw() -> None:
        drawn = buffer.sample(BATCH)
        if alpha is not None:
            buffer.update_priorities(drawn.indices, priorities)

    return added, buffer.nbytes / rows, draw


def stable_baselines3(rows: int) -> tuple[float, float, Draw]:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer as OtherBuffer

    box = spaces.Box(-1.0, 1.0, (OBS,), np.float32), spaces.Box(-1.0, 1.0, (ACTION,), np.float32)
    buffer = OtherBuffer(rows, *box, device="cpu", n_envs=ENVS)
    obs = np.zeros((ENVS, OBS), dtype=np.float32)
    actions, zeros = np.zeros((ENVS, ACTION), dtype=np.float32), np.zeros(ENVS)
    start_s = time.process_time()
    for _ in range(rows // ENVS):
        buffer.add(obs, obs, actions, zeros, zeros, [{}] * ENVS)
    added = rows / (time.process_time() - start_s)
    arrays = [value for value in vars(buffer).values() if isinstance(value, np.ndarray)]
    return added, sum(array.nbytes for array in arrays) / rows, lambda: buffer.sample(BATCH)


def cpprb_buffer(rows: int) -> tuple[float, float, Draw]:
    import cpprb

    shapes = {"obs": OBS, "act": ACTION, "rew": 1, "next_obs": OBS, "done": 1}
    fields = {name: {"shape": size, "dtype": np.float32} for name, size in shapes.items()}
    buffer = cpprb.PrioritizedReplayBuffer(rows, fields, alpha=0.6)
    data = {n: np.zeros((STEPS * ENVS, size), dtype=np.float32) for n, size in shapes.items()}
    start_s = time.process_time()
    for _ in range(-(-rows // (STEPS * ENVS))):
        buffer.add(**data)
    added = rows / (time.process_time() - start_s)
    priorities = np.random.default_rng(0).random(BATCH)

    def draw() -> None:
        drawn = buffer.sample(BATCH, beta=0.4)
        buffer.update_priorities(drawn["indexes"], priorities)

    return added, 4.0 * sum(shapes.values()), draw


def rllib_buffer(rows: int) -> tuple[float, float, Draw]:
    from gymnasium import spaces
    from ray.rllib.env.single_agent_episode import SingleAgentEpisode
    from ray.rllib.utils.replay_buffers import PrioritizedEpisodeReplayBuffer

    buffer = PrioritizedEpisodeReplayBuffer(rows, alpha=0.6)
    obs = np.zeros((1001, OBS), dtype=np.float32)
    actions, rewards = np.zeros((1000, ACTION), dtype=np.float32), np.zeros(1000, np.float32)
    bounds = {"observation_space": spaces.Box(-1.0, 1.0, (OBS,), np.float32)}
    bounds["action_space"] = spaces.Box(-1.0, 1.0, (ACTION,), np.float32)
    start_s = time.process_time()
    for number in range(rows // 1000):
        episode = SingleAgentEpisode(
            id_=str(number),
            observations=list(obs),
            actions=list(actions),
            rewards=list(rewards),
            truncated=True,
            len_lookback_buffer=0,
            **bounds,
        )
        episode.to_numpy()
        buffer.add(episode)
    added = rows / (time.process_time() - start_s)
    priorities = np.random.default_rng(0).random(BATCH)

    def draw() -> None:
        buffer.sample(BATCH, n_step=1, beta=0.4, to_numpy=True)
        buffer.update_priorities(priorities)

    return added, float("nan"), draw


def saving(rows: int) -> None:
    """Prints the seconds of a first save, and of a second save after one more fragment."""
    buffer = ReplayBuffer(rows, GAMMA, alpha=0.6)
    filled(buffer)
    print("\n| save | seconds |\n|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("all rows", "after another fragment"):
            start_s = time.perf_counter()
            buffer.save(Path(folder, name))
            print(f"| {name} | {time.perf_counter() - start_s:.2f} |")
            buffer.add(fragments()[0], follows=True)


if __name__ == "__main__":
    main()
