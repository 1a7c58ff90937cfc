"""Compares the speed and memory of polopt's replay buffer with other replay buffers.

    python benchmarks/replay_buffer.py          # 2 minutes
    python benchmarks/replay_buffer.py --page   # only writes the page

The script fills each buffer with a million rows, and then draws batches of 256 rows. A row is as in
HalfCheetah-v5: 17 floats of observation and 6 floats of action. The table has the rows added per
processor second, the bytes of a row, and the batches drawn per processor second. Fragments have 50
steps of 8 environments, or 4 steps of one, as DQN's in other libraries. "With update" means that
each batch also gets new priorities. Batches per second are the median of `--repeats`
rounds. The raw results are in `benchmarks/results/replay_buffer.jsonl`, and the page is
`docs/replay.md`. The script also prints the seconds that polopt needs to save its buffer.

Needs stable-baselines3, cpprb and ray[rllib]. Stable-Baselines3 has no prioritised replay. RLlib's
buffer is slow, so the script draws only 2 percent as many batches from it.
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
from stored_runs import between, facts_of, measure_or_page

from polopt import ReplayBuffer, SampleBatch

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/replay_buffer.jsonl"
PAGE = ROOT / "docs/replay.md"
BEGIN, END = "<!-- replay buffers: begin -->", "<!-- replay buffers: end -->"
OBS, ACTION, BATCH, ROWS = 17, 6, 256, 1_000_000
STEPS, ENVS = 50, 8  # steps and environments of a fragment
GAMMA = 0.99
Draw = Callable[[], Any]


def main() -> None:
    """Measures all buffers, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure, batches=1000, repeats=5)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measures all buffers."""
    found: dict[str, Any] = {}
    for name, make in CASES.items():
        added, row_bytes, draw = make(ROWS)
        rates, batches = [], args.batches
        if make is rllib_buffer:
            batches = max(1, batches // 50)
        for _ in range(args.repeats):
            start_s = time.process_time()
            for _ in range(batches):
                draw()
            rates.append(round(batches / (time.process_time() - start_s), 1))
        found[name] = {"rows_per_s": round(added), "row_bytes": row_bytes, "batches_per_s": rates}
        print(name, found[name], flush=True)
    saving()
    return found


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    lines = ["| buffer of 1M rows | rows added /s | bytes a row | batches of 256 /s |"]
    lines.append("|---|---:|---:|---:|")
    for name in CASES:
        row = store[name]
        size = "not measured" if row["row_bytes"] is None else f"{row['row_bytes']:,.0f}"
        batches = f"{statistics.median(row['batches_per_s']):,.0f}"
        lines.append(f"| {name} | {row['rows_per_s']:,.0f} | {size} | {batches} |")
    return between(
        text, BEGIN, END, [*lines, "", f"`benchmarks/replay_buffer.py`, {facts_of(store)}."]
    )


def fragments(steps: int = STEPS, envs: int = ENVS) -> list[SampleBatch]:
    """Returns the fragments of one episode of 1,000 steps in all environments. The episode ends by
    truncation.

    Args:
        steps: number of steps of a fragment.
        envs: number of environments.
    """
    rng = np.random.default_rng(0)
    made = []
    for start in range(0, 1000, steps):
        all_obs = rng.standard_normal((steps + 1, envs, OBS), dtype=np.float32)
        ended = start + steps == 1000
        truncated = np.zeros((steps, envs), dtype=bool)
        truncated[-1] = ended
        rows = (steps - 1) * envs + np.arange(envs * ended)
        columns = {
            "actions": rng.standard_normal((steps, envs, ACTION), dtype=np.float32),
            "rewards": rng.standard_normal((steps, envs), dtype=np.float32),
            "terminated": np.zeros((steps, envs), dtype=bool),
            "truncated": truncated,
            "valid": np.ones((steps, envs), dtype=bool),
        }
        made.append(SampleBatch(all_obs, columns, rows, all_obs[-1][: len(rows)] + 1))
    return made


def filled(buffer: ReplayBuffer, steps: int = STEPS, envs: int = ENVS) -> float:
    """Fills a buffer, and returns the rows added per processor second."""
    episode, added = fragments(steps, envs), 0
    start_s = time.process_time()
    while added < buffer.capacity:
        for batch in episode:
            added += buffer.add(batch, follows=True)
    return added / (time.process_time() - start_s)


def polopt_buffer(
    rows: int, n_step: int = 1, alpha: float | None = None, steps: int = STEPS, envs: int = ENVS
) -> tuple[float, float, Draw]:
    buffer = ReplayBuffer(rows, GAMMA, n_step, alpha=alpha)
    added = filled(buffer, steps, envs)
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


def rllib_buffer(rows: int) -> tuple[float, None, Draw]:
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

    return added, None, draw


def saving() -> None:
    """Prints the seconds of a first save, and of a second save after one more fragment."""
    buffer = ReplayBuffer(ROWS, GAMMA, alpha=0.6)
    filled(buffer)
    print("\n| save | seconds |\n|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("all rows", "after another fragment"):
            start_s = time.perf_counter()
            buffer.save(Path(folder, name))
            print(f"| {name} | {time.perf_counter() - start_s:.2f} |")
            buffer.add(fragments()[0], follows=True)


#: The buffers of the table, each with a function that fills it with a number of rows. The function
#: returns the rows added per second, the bytes of a row, and a function that draws a batch.
CASES: dict[str, Callable[[int], tuple[float, float | None, Draw]]] = {
    "polopt, uniform": polopt_buffer,
    "polopt, uniform, n = 3": lambda rows: polopt_buffer(rows, 3),
    "polopt, prioritised, with update": lambda rows: polopt_buffer(rows, alpha=0.6),
    "polopt, prioritised, n = 3, with update": lambda rows: polopt_buffer(rows, 3, 0.6),
    "polopt, uniform, fragments of 4 steps of one environment": lambda rows: polopt_buffer(
        rows, steps=4, envs=1
    ),
    "Stable-Baselines3, uniform": stable_baselines3,
    "cpprb, prioritised, with update": cpprb_buffer,
    "RLlib, prioritised, with update": rllib_buffer,
}

if __name__ == "__main__":
    main()
