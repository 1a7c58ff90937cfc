"""Compares the rates of PPO in training with the highest rates that two cores allow.

    python benchmarks/ceiling.py [--seconds 3] [--repeats 5]

`sample` and `learn` are processor times per environment step in one process, without Ray. For
`sample`, a worker samples 8 environments for 128 steps. For `learn`, a policy learns from two such
fragments with 4 epochs of minibatches of 256 rows. The ceiling is 2 / (sample + learn). It assumes
that both cores are always busy and that messages cost nothing. The limit without overlap is
1 / (sample / 2 + learn). It assumes that both workers sample, and then the driver learns alone, as
in `sync_samples`. In `async_samples`, with decoupled PPO, sampling and learning overlap. The rates
in training come from `peers/polopt/run.py`, in turn with the other two measurements.

Needs MuJoCo and MinAtar: pip install -e '.[benchmark]'.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "common"))

from about import about
from environments import PEERS
from processes import STARTUP_LIMIT_S, run
from tasks import make_breakout

import polopt

ENVS: dict[str, Any] = {
    "ppo": "CartPole-v1",
    "ppo-halfcheetah": "HalfCheetah-v5",
    "ppo-breakout": lambda _: make_breakout(),
}


def parts(env: Any, seconds: float) -> tuple[float, float]:
    """Returns the processor microseconds per environment step of sampling and of learning."""
    worker = polopt.GradientWorkerSet.create_factory(
        env,
        ("ppo", {"num_sgd_iter": 4, "sgd_minibatch_size": 256}),
        num_workers=0,
        num_envs_per_worker=8,
        rollout_fragment_length=128,
        vectorization_mode="sync",
        seed=0,
    )().local
    spent_s = [0.0, 0.0]
    steps, began_s = 0, time.perf_counter()
    while time.perf_counter() - began_s < seconds or not steps:
        times_s = [time.process_time()]
        fragments = [worker.sample(), worker.sample()]
        times_s.append(time.process_time())
        worker.policy.learn_on_batch(polopt.SampleBatch.concat(fragments))
        times_s.append(time.process_time())
        spent_s = [s + b - a for s, a, b in zip(spent_s, times_s[:-1], times_s[1:], strict=True)]
        steps += sum(fragment.env_steps for fragment in fragments)
    sample_s, learn_s = spent_s
    return 1e6 * sample_s / steps, 1e6 * learn_s / steps


def rate(case: str, seconds: float) -> float:
    """Trains and returns the environment steps per second."""
    source = Path(__file__).resolve().parents[1] / "src"
    command = [sys.executable, str(PEERS / "polopt" / "run.py"), case, "--seconds", str(seconds)]
    return float(run(command, 2 * seconds + STARTUP_LIMIT_S, source)["rate"])


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    print("| case | sample, us | learn, us | ceiling, steps/s | without overlap ", end="")
    print("| `sync_samples` | share of the ceiling | `async_samples` | share of the ceiling |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for case, env in ENVS.items():
        rows = []
        for _ in range(args.repeats):
            sample_us, learn_us = parts(env, args.seconds)
            ceiling = 2e6 / (sample_us + learn_us)
            limit = 1e6 / (sample_us / 2 + learn_us)
            rates = [rate(name, args.seconds) for name in (case, f"decoupled-{case}")]
            shares = [each / ceiling for each in rates]
            rows.append((sample_us, learn_us, ceiling, limit, *rates, *shares))
        sample_us, learn_us, *steps = (statistics.median(row) for row in zip(*rows, strict=True))
        cells = [case, f"{sample_us:,.1f}", f"{learn_us:,.1f}", *(f"{s:,.0f}" for s in steps[:2])]
        for trainer in (0, 1):
            shares = [row[6 + trainer] for row in rows]
            spread = f"{min(shares):.0%} to {max(shares):.0%}"
            cells += [f"{steps[2 + trainer]:,.0f}", f"{steps[4 + trainer]:.0%} ({spread})"]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\n{', '.join(f'{key} {value}' for key, value in about().items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
