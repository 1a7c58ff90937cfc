"""Compares the rates of PPO in training with the highest rates that two cores allow.

    python benchmarks/ceiling.py           # 8 minutes
    python benchmarks/ceiling.py --page    # only writes the page

`sample` and `learn` are processor times per environment step in one process, without Ray. For
`sample`, a worker samples 8 environments for 128 steps. For `learn`, a policy learns from two such
fragments with 4 epochs of minibatches of 256 rows. The ceiling is 2 / (sample + learn). It assumes
that both cores are always busy and that messages cost nothing. The limit without overlap is
1 / (sample / 2 + learn). It assumes that both workers sample, and then the driver learns alone, as
in `sync_samples`. In `async_samples`, with decoupled PPO, sampling and learning overlap. The rates
in training come from `peers/polopt/run.py`, in turn with the other two measurements. The raw
results are in `benchmarks/results/ceiling.jsonl`, and the page is `docs/performance.md`.

Needs MuJoCo and MinAtar: pip install -e '.[benchmark]'.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent / "peers" / "common"))

from environments import PEERS
from processes import STARTUP_LIMIT_S, run
from stored_runs import between, facts_of, measure_or_page
from tasks import make_breakout

import polopt

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "benchmarks/results/ceiling.jsonl"
PAGE = ROOT / "docs/performance.md"
BEGIN, END = "<!-- ceilings: begin -->", "<!-- ceilings: end -->"
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


def measure(env: Any, case: str, seconds: float) -> dict[str, float]:
    """Returns the results of one turn."""
    sample_us, learn_us = parts(env, seconds)
    rates = [rate(name, seconds) for name in (case, f"decoupled-{case}")]
    values = [sample_us, learn_us, *rates]
    names = ("sample_us", "learn_us", "sync_samples", "async_samples")
    return {name: round(value, 2) for name, value in zip(names, values, strict=True)}


def row(case: str, turns: list[dict[str, float]]) -> str:
    """Returns the row of a case in the table: medians, and the range of shares."""
    sample_us, learn_us = (
        median(turn[name] for turn in turns) for name in ("sample_us", "learn_us")
    )
    ceilings = [2e6 / (turn["sample_us"] + turn["learn_us"]) for turn in turns]
    limits = [1e6 / (turn["sample_us"] / 2 + turn["learn_us"]) for turn in turns]
    cells = [case, f"{sample_us:,.1f}", f"{learn_us:,.1f}"]
    cells += [f"{median(ceilings):,.0f}", f"{median(limits):,.0f}"]
    for name in ("sync_samples", "async_samples"):
        rates = [turn[name] for turn in turns]
        shares = [rate / ceiling for rate, ceiling in zip(rates, ceilings, strict=True)]
        spread = f"{min(shares):.0%} to {max(shares):.0%}"
        cells += [f"{median(rates):,.0f}", f"{median(shares):.0%} ({spread})"]
    return f"| {' | '.join(cells)} |"


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    head = ["case", "sample, us", "learn, us", "ceiling, steps/s", "without overlap"]
    for name in ("sync_samples", "async_samples"):
        head += [f"`{name}`", "share of the ceiling"]
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    lines += [row(case, store[case]["turns"]) for case in ENVS]
    reached = [
        median(turn["sync_samples"] * (turn["sample_us"] / 2 + turn["learn_us"]) for turn in turns)
        for turns in (store[case]["turns"] for case in ENVS)
    ]
    learning = [
        median(turn["async_samples"] * turn["learn_us"] for turn in turns)
        for turns in (store[case]["turns"] for case in ENVS)
    ]
    lines += [
        "",
        f"`sync_samples` reaches {1e-4 * min(reached):.0f} to {1e-4 * max(reached):.0f} percent of "
        "the rate without overlap. Only the driver learns. In `async_samples`, learning takes "
        f"{1e-4 * min(learning):.0f} to {1e-4 * max(learning):.0f} percent of its time.",
        "",
        f"`python benchmarks/ceiling.py`, {facts_of(store)}.",
    ]
    return between(text, BEGIN, END, lines)


def measure_all(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the results of all turns, by case."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    found: dict[str, Any] = {}
    for case, env in ENVS.items():
        found[case] = {"turns": [measure(env, case, args.seconds) for _ in range(args.repeats)]}
        print(case, found[case], flush=True)
    return found


def main() -> None:
    """Measures all cases, and writes the page."""
    measure_or_page(__doc__, STORE, PAGE, page, measure_all, seconds=3.0, repeats=5)


if __name__ == "__main__":
    main()
