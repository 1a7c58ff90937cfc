"""Measures how much the samplers and the learner of AsyncReplay slow each other down.

    python benchmarks/async_replay.py [--seconds 10] [--workers 4] [--shards 2] [--step-ms 5]
                                      [--prefetch 16]

The environment is CartPole-v1, with a pause of `--step-ms` in each step, as in a slow simulator. So
the samplers need little processor time. DQN learns from prioritised batches of 512 rows. The script
makes four runs, each with its own session of Ray:

- one sampler without a learner
- `--workers` samplers without a learner
- the learner, while the samplers wait
- samplers and learner at the same time, so that neither waits for the training intensity

The script prints two ratios of the last run in Markdown. The first ratio is the rate of sampling,
divided by `--workers` times the rate of one sampler. The second ratio is the rate of learning,
divided by the rate of the learner alone. The goal of both ratios is 90 percent. To reach this goal,
the machine needs as many cores as the samplers use alone, plus as many as the learner uses alone.
The script therefore also prints the processor seconds per second of the last three runs, summed
over all processes of a run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "common"))

import gymnasium
import measuring
import ray
from about import about

#: An `error_buffer` so large that samplers never wait for the learner.
_NO_BOUND = 10**12


class Paced(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole-v1 with a pause of `step_s` seconds in each step."""

    def __init__(self, config: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._step_s = config["step_s"]

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        return super().step(action)


class Rates(NamedTuple):
    """The rates of one run.

    Attributes:
        sampled: environment steps per second.
        learned: updates per second.
        cores: processor seconds per second, of the driver, the samplers and the shards.
    """

    sampled: float
    learned: float
    cores: float


def rates(args: argparse.Namespace, workers: int, **options: Any) -> Rates:
    """Trains for `args.seconds` and returns the rates. The warm-up before that takes at least a
    third of `args.seconds`.

    Args:
        args: parsed command line.
        workers: number of samplers.
        options: options of `ApexDQN` that differ between the runs.
    """
    import polopt

    ray.init(num_cpus=workers + args.shards + 1, include_dashboard=False, log_to_driver=False)
    trainer = polopt.ApexDQN(
        {
            "env": lambda context: Paced(context),
            "env_config": {"step_s": args.step_ms / 1000.0},
            "num_workers": workers,
            "num_replay_shards": min(args.shards, workers),
            "num_envs_per_worker": 1,
            "rollout_fragment_length": 50,
            "buffer_size": 100_000,
            "learning_starts": 2000,
            "training_intensity": 1e6,
            "prefetch_batches": args.prefetch,
            "error_buffer": _NO_BOUND,
            "model": {"fcnet_hiddens": [256, 256]},
            "seed": 0,
            **options,
        }
    )
    optimizer = trainer.optimizer
    metrics = optimizer.metrics
    learns = "learning_starts" not in options
    while metrics.num_env_steps_sampled < 200 * workers or (learns and metrics.num_updates < 10):
        optimizer.step()
    begun: tuple[float, int, int, float] | None = None
    started_s = time.perf_counter()
    while (now_s := time.perf_counter()) < started_s + args.seconds * 4 / 3:
        optimizer.step()
        if begun is None and now_s > started_s + args.seconds / 3:
            cpu_s = measuring.processor_seconds()
            begun = now_s, metrics.num_env_steps_sampled, metrics.num_updates, cpu_s
    assert begun is not None
    elapsed_s = time.perf_counter() - begun[0]
    sampled = (metrics.num_env_steps_sampled - begun[1]) / elapsed_s
    learned = (metrics.num_updates - begun[2]) / elapsed_s
    cores = (measuring.processor_seconds() - begun[3]) / elapsed_s
    trainer.stop()
    ray.shutdown()
    return Rates(sampled, learned, cores)


def main() -> None:
    """Makes the four runs and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--prefetch", type=int, default=16, help="`prefetch_batches`")
    args = parser.parse_args()
    no_learner = {"learning_starts": 90_000}
    one, _, _ = rates(args, 1, **no_learner)
    several, _, samplers = rates(args, args.workers, **no_learner)
    # The smallest bound that is allowed: one batch plus the credit of one fragment of 50 rows. Two
    # fragments exceed this bound, so the samplers wait soon after the learner has started.
    least = 512 + 50 * 1_000_000
    _, alone, learner = rates(args, args.workers, error_buffer=least)
    sampled, learned, both_cores = rates(args, args.workers)
    share = several / (args.workers * one)
    print("| | steps/s | share of samplers alone | updates/s | share of learner alone |")
    print("|---|---:|---:|---:|---:|")
    print(f"| one sampler | {one:,.0f} | | | |")
    print(f"| {args.workers} samplers | {several:,.0f} | {share:.0%} | | |")
    print(f"| learner alone | | | {alone:,.1f} | |")
    both = f"{sampled / (args.workers * one):.0%} | {learned:,.1f} | {learned / alone:.0%}"
    print(f"| at the same time | {sampled:,.0f} | {both} |")
    print(
        f"\nProcessor seconds per second: samplers alone {samplers:.2f}, learner and shards alone "
        f"{learner:.2f}, at the same time {both_cores:.2f} of {os.cpu_count()} cores. Other "
        "programs also use these cores."
    )
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
