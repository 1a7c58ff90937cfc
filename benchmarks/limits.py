"""What this machine can do at most, and how far each optimizer is from it.

    .venv/bin/python benchmarks/limits.py [--repeats 5] [--seconds 3]

First the cost of each thing that training is made of, on one core, CartPole-v1, MLP 64x64; then the
rate at which an optimizer would train if there were nothing but those, as formulas with the numbers
in them; then the rate at which it trains. All take turns, so that a change in the machine's speed
meets all alike: medians of the costs go into the formulas, and the share is the median of those of
each turn. Prints Markdown, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import torch
from about import about
from limit_costs import ENVS, NAMES, cases
from training_speed import measure

WORKERS = 2


def ceilings(cost: dict[str, float], cores: int) -> dict[str, tuple[float, str]]:
    """Environment steps per second that the costs (seconds) allow, and how that comes out."""
    us = {name: f"{seconds * 1e6:.0f}" for name, seconds in cost.items()}
    step = cost["env"] + cost["act"] + cost["write"]
    step_said = f"({us['env']} + {us['act']} + {us['write']})"
    driver = cost["direct"] + cost["apply"]
    round_s = 20 * step + cost["gradient"]
    share = min(WORKERS, cores)  # of workers that can run at once
    rows = WORKERS * ENVS * 128
    turns = -(-WORKERS // share)  # sampling takes so many times that of one worker
    sync_s = turns * 128 * step + 32 * cost["learn256"] + cost["call"]
    ddppo_s = turns * (128 * step + 32 * cost["learn128"]) + 32 * cost["sum"] + cost["call"]
    return {
        # A core that works for the driver does not work for a worker meanwhile.
        "A3C": (
            share * 160 / (round_s + driver * share / cores),
            f"{share} workers at once x 160 steps / (20 x {step_said} us + {us['gradient']} us + "
            f"{share}/{cores} x ({us['direct']} + {us['apply']}) us of the driver)",
        ),
        "SyncPPO": (
            rows / sync_s,
            f"{rows:,} steps / ({turns} x 128 x {step_said} us + 4 epochs x 8 minibatches x "
            f"{us['learn256']} us + {us['call']} us)",
        ),
        "DDPPO": (
            rows / ddppo_s,
            f"{rows:,} steps / ({turns} x (128 x {step_said} us + 4 x 8 x {us['learn128']} us) + "
            f"4 x 8 x {us['sum']} us + {us['call']} us)",
        ),
    }


def bare_ceilings(cost: dict[str, float], cores: int) -> dict[str, tuple[float, str]]:
    """As `ceilings`, if a vector of environments cost nothing but the environments."""
    return ceilings(cost | {"env": cost["bare"]}, cores)


#: Ceilings by which shares are told.
KINDS = {"sync": ceilings, "bare": bare_ceilings}


def print_costs(costs: dict[str, list[float]]) -> None:
    """Median and range of each, and steps per second where it steps."""
    print("| what | us, median (range) | a second |\n|---|---:|---:|")
    for name, values in costs.items():
        median = statistics.median(values)
        spread = f"{min(values) * 1e6:,.1f} to {max(values) * 1e6:,.1f}"
        envs = {"bare": ENVS, "env": ENVS, "own": ENVS, "env64": 64, "round": 20 * ENVS}.get(name)
        rate = f"{envs / median:,.0f} steps" if envs else f"{1 / median:,.0f}"
        print(f"| {NAMES[name]} | {median * 1e6:,.1f} ({spread}) | {rate} |")


def _percent(shares: list[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def main() -> None:
    """Measures, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="turns")
    parser.add_argument("--seconds", type=float, default=3.0, help="of training; 0: none")
    parser.add_argument("--out", type=Path, default=Path("results/limits.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=8, include_dashboard=False, logging_level=logging.ERROR)
    costs: dict[str, list[float]] = {name: [] for name in NAMES}
    config = {"env": "CartPole-v1", "num_workers": WORKERS, "num_envs_per_worker": ENVS, "seed": 0}
    config["vectorization_mode"] = "sync"  # as it is stepped for the costs
    rates: dict[str, list[float]] = {}
    shares: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        measured = cases(folder)
        for _ in range(args.repeats):
            now = {name: measured[name]() for name in costs}
            for name, seconds in now.items():
                costs[name].append(seconds)
            for name in ceilings(now, cores) if args.seconds > 0 else ():
                rate = measure(name, config, args.seconds)
                rates.setdefault(name, []).append(rate)
                for kind, limit in KINDS.items():
                    shares[kind].setdefault(name, []).append(rate / limit(now, cores)[name][0])
        del measured  # and with it the actors
    cost = {name: statistics.median(values) for name, values in costs.items()}
    limits = {kind: limit(cost, cores) for kind, limit in KINDS.items()}
    ray.shutdown()

    print_costs(costs)
    print(f"\n| {WORKERS} workers x {ENVS} | trains at, steps/s | ceiling | share ", end="")
    print("| ceiling, environments alone | share |\n|---|---:|---:|---:|---:|---:|")
    for name in limits["sync"]:
        cells = [f"{statistics.median(rates[name]):,.0f}" if rates else "-"]
        for kind in KINDS:
            cells.append(f"{limits[kind][name][0]:,.0f}")
            cells.append(_percent(shares[kind][name]) if rates else "-")
        print(f"| {name} | {' | '.join(cells)} |")
    print()
    for name, (ceiling, formula) in limits["sync"].items():
        print(f"- {name}: {formula} = {ceiling:,.0f} steps/s")
    where = about()
    print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {"about": where, "costs_s": costs, "ceilings": limits, "rates": rates, "shares": shares}
    args.out.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
