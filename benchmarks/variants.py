"""Measures the cost of transports, of torch, and of evaluation during training.

    python benchmarks/variants.py              # 15 minutes
    python benchmarks/variants.py --only a3c   # replaces one case
    python benchmarks/variants.py --page       # only writes the page

The transports are sockets, Ray, and gloo's all-reduce. `torch` is `fast_cpu: false`. Evaluation
runs between iterations, or in an evaluation worker during training, or not at all. As in
`compare.py`, the script measures environment steps/s, and the processor time of the driver and all
workers per 1,000 environment steps. Each measurement is a new process. A turn measures a case and
each of its variants once. A row shows the median ratio of the turns, with the smallest and the
largest ratio. The raw results are in `benchmarks/results/variants.jsonl`, and the page is
`docs/benchmarks.md`. Needs the MuJoCo environments for HalfCheetah-v5: pip install -e
'.[benchmark]'.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from about import about
from environments import PEERS
from processes import STARTUP_LIMIT_S, run
from stored_runs import between, facts_of, read_runs, write_runs

ROOT = Path(__file__).resolve().parents[1]
STORE = ROOT / "benchmarks/results/variants.jsonl"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- variants: begin -->", "<!-- variants: end -->"
COST = "cpu_s_per_1000_steps"
ENVS = ("", "-halfcheetah")
#: From a case of `peers/polopt/run.py`, with sockets and without evaluation, to its variants.
CASES = {
    "a3c": ("-ray", "-torch"),
    "a3c-halfcheetah": ("-ray",),
    **{f"async-samples{env}": ("-ray",) for env in ENVS},
    "ddppo": ("-ray", "-gloo", "-torch"),
    "ddppo-halfcheetah": ("-ray", "-gloo"),
    "ppo": ("-torch",),
    "ppo-halfcheetah": ("-evaluated", "-evaluated-beside"),
}


def measure(case: str, seconds: float, seed: int) -> dict[str, float]:
    """Returns the rate and processor time of one run."""
    command = [sys.executable, str(PEERS / "polopt" / "run.py"), case]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    result = run(command, 2 * seconds + STARTUP_LIMIT_S, ROOT / "src")
    print(f"{case}: {result['rate']:,.0f} steps/s", file=sys.stderr, flush=True)
    return {name: round(float(result[name]), 4) for name in ("rate", COST)}


def spread(values: list[float]) -> str:
    """Formats values as median (smallest to largest)."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def rows(case: str, turns: list[dict[str, dict[str, float]]]) -> list[str]:
    """Returns the rows of a case.

    Args:
        case: the case.
        turns: for each turn, the results of the case (the key is empty) and of its variants.
    """
    found = []
    for variant in [name for name in turns[0] if name]:
        ratios = {
            name: spread([turn[""][name] / turn[variant][name] for turn in turns])
            for name in ("rate", COST)
        }
        own, other = (
            f"{statistics.median(turn[side]['rate'] for turn in turns):,.0f}"
            for side in ("", variant)
        )
        cells = [case, own, variant.lstrip("-"), other, ratios["rate"], ratios[COST]]
        found.append(f"| {' | '.join(cells)} |")
    return found


def page(store: dict[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored results."""
    lines = [
        "| case | case, steps/s | variant | variant, steps/s "
        "| case / variant, steps/s | case / variant, CPU time |",
        "|---|---:|---|---:|---|---|",
    ]
    for case in CASES:
        if case in store:
            lines += rows(case, store[case]["turns"])
    commits = dict.fromkeys(store[case]["commit"] for case in CASES if case in store)
    facts = facts_of({"about": {**store["about"], "commit": " and ".join(commits)}})
    return between(text, BEGIN, END, [*lines, "", f"`python benchmarks/variants.py`, {facts}."])


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    facts = about()
    for case in [] if args.page else args.only:
        variants = ("", *CASES[case])
        turns = [
            {variant: measure(case + variant, args.seconds, seed) for variant in variants}
            for seed in range(args.turns)
        ]
        run_of_case = {"turns": turns, "commit": facts["commit"]}
        write_runs(STORE, {**read_runs(STORE), case: run_of_case, "about": facts})
        print("\n".join(rows(case, turns)), flush=True)
    PAGE.write_text(page(read_runs(STORE), PAGE.read_text()))


if __name__ == "__main__":
    main()
