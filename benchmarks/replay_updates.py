"""Compares updates per processor second of DQN and SAC in polopt and Stable-Baselines3.

    python benchmarks/replay_updates.py [--seconds 3] [--turns 5] [--only dqn-64 ...] [--cuda]

An update draws a batch from the replay buffer and makes one step of each torch optimizer. It also
updates the target networks, except in Stable-Baselines3's DQN, which updates its target network
while it samples. Both libraries have the same environment, network and batch size. They learn in
turns (A B A B), in this process and on one thread. The script prints a table in Markdown with
medians over the turns. It measures processor time, because other programs on the machine affect it
little. With `--cuda`, both libraries learn on a GPU, and the script measures updates per second of
wall time, without a goal. The exit status is 1 if polopt misses a goal. Needs `stable-baselines3`,
and `mujoco` for SAC.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import torch
from about import about

ROWS = 4000  # size of the buffer
Update = Callable[[], Any]


class Case(NamedTuple):
    """The settings of one comparison. `goal` is the smallest allowed ratio of polopt's rate to the
    rate of Stable-Baselines3."""

    algorithm: str
    env: str
    batch: int
    widths: list[int]
    goal: float


CASES = {
    "dqn-64": Case("DQN", "CartPole-v1", 32, [64, 64], 4.0),
    "dqn-256": Case("DQN", "CartPole-v1", 128, [256, 256], 1.5),
    "sac-256": Case("SAC", "HalfCheetah-v5", 256, [256, 256], 1.4),
}


def polopt_update(case: Case, cuda: bool) -> Update:
    """Fills a buffer of polopt, and returns a function that makes one update.

    Dueling networks and double Q-learning are off, because Stable-Baselines3's DQN has neither.
    """
    import polopt

    options: dict[str, Any] = {}
    if case.algorithm == "DQN":
        options = {"dueling": False, "double_q": False}
    trainer = getattr(polopt, case.algorithm)(
        env=case.env,
        num_workers=0,
        buffer_size=ROWS,
        learning_starts=ROWS,
        train_batch_size=case.batch,
        model={"fcnet_hiddens": case.widths},
        seed=0,
        num_gpus=int(cuda),
        **options,
    )
    optimizer = trainer.optimizer
    while optimizer.metrics.num_env_steps_sampled < ROWS - 100:
        optimizer.step()
    return lambda: optimizer.learn_transitions(optimizer.buffer.sample(case.batch))


def sb3_update(case: Case, cuda: bool) -> Update:
    """Fills a buffer of Stable-Baselines3, and returns a function that makes 50 updates."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    model = getattr(stable_baselines3, case.algorithm)(
        "MlpPolicy",
        case.env,
        buffer_size=ROWS,
        learning_starts=ROWS,
        batch_size=case.batch,
        policy_kwargs={"net_arch": case.widths},
        seed=0,
        device="cuda" if cuda else "cpu",
    )
    model.learn(ROWS - 100)
    model.set_logger(Logger(None, []))
    return lambda: model.train(gradient_steps=50, batch_size=case.batch)


def rate(
    update: Update, seconds: float, updates: int, clock: Callable[[], float] = time.process_time
) -> float:
    """Returns the updates per second.

    Args:
        update: the function to measure.
        seconds: minimum time of the measurement.
        updates: number of updates that one call of `update` makes.
        clock: the clock that measures the time, in seconds.
    """
    began_s, made = clock(), 0
    while (elapsed_s := clock() - began_s) < seconds:
        update()
        made += updates
    return made / elapsed_s


def main() -> None:
    """Measures the cases and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    clock = time.perf_counter if args.cuda else time.process_time
    torch.set_num_threads(1)
    kind = "second" if args.cuda else "processor second"
    print(f"| updates per {kind} | polopt | Stable-Baselines3 | ratio | goal |")
    print("|---|---:|---:|---:|---:|")
    missed = False
    for name in args.only:
        case = CASES[name]
        ours, theirs = polopt_update(case, args.cuda), sb3_update(case, args.cuda)
        rate(ours, 0.2, 1), rate(theirs, 0.2, 50)
        pairs = [
            (rate(ours, args.seconds, 1, clock), rate(theirs, args.seconds, 50, clock))
            for _ in range(args.turns)
        ]
        own, other = (median(values) for values in zip(*pairs, strict=True))
        missed |= own < case.goal * other and not args.cuda
        shape = f"{case.algorithm}, {'x'.join(map(str, case.widths))}, batch {case.batch}"
        print(f"| {shape} | {own:,.0f} | {other:,.0f} | {own / other:.2f} | {case.goal:g} |")
        sys.stdout.flush()
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    sys.exit(missed)


if __name__ == "__main__":
    main()
