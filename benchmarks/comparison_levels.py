"""Simulates comparisons: how often `polopt compare` decides wrongly, how often it finds a
difference, and with how many seeds.

    python benchmarks/comparison_levels.py                          # about 20 minutes
    python benchmarks/comparison_levels.py --only ties --repeats 200
    python benchmarks/comparison_levels.py --adastop PYTHON --examples DIR

Scores have the standard deviation 1. The shapes are a normal distribution, a mixture in which one
seed in five fails, and a t distribution with 3 degrees of freedom. `benchmarks/results/
comparison_levels.jsonl` holds the decisions and the seeds of every simulated comparison, as one
line for each case. Each repetition has its own random numbers, so a run with fewer repetitions
gives the first numbers of a longer run.

With `--adastop`, also decides with the package adastop 0.1.3 and compares. The given Python needs
this package. The cases are the files `walker1.csv` to `walker5.csv` of its tutorial, in the
directory `examples` of https://github.com/TimotheeMathieu/adastop, and simulated ones.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the processes use all cores

import numpy as np
from about import about
from scipy import stats
from stored_runs import read_runs, write_runs

import polopt

OUT = Path(__file__).parent / "results" / "comparison_levels.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "comparisons.md"
#: The rows of the table on the page: title, the case without its shape, and what cells show.
ROWS = (
    ("two equal variants: wrong", "tie of two", "wrong"),
    ("four equal variants: wrong", "tie of four", "wrong"),
    (
        "two equal variants, Welch's test after each of 3 to 20 seeds: wrong",
        "tie of two, Welch's test after each seed",
        "wrong",
    ),
    ("difference of 1: decided (seeds of each variant)", "difference 1", "seeds"),
    ("difference of 1.5: decided (seeds of each variant)", "difference 1.5", "seeds"),
    ("difference of 1.5, 5 fixed seeds: decided", "difference 1.5, 5 fixed", "decided"),
    ("difference of 1.5, 20 fixed seeds: decided", "difference 1.5, 20 fixed", "decided"),
    ("difference of exactly M = 1: wrongly equal", "difference is the margin 1", "wrong"),
    ("difference of exactly M = 1.5: wrongly equal", "difference is the margin 1.5", "wrong"),
    (
        "equal variants, M = 1.5: decided (seeds of each variant)",
        "tie with the margin 1.5",
        "seeds",
    ),
    ("four variants, one better by 1.5: wrong", "one of four better by 1.5", "wrong"),
)
LOOKS = (5, 10, 15, 20)
LEVEL = 0.05
#: The offset of a failed seed that gives a standard deviation of 1, if that of other seeds is 0.5.
FAILS = np.sqrt((1.0 - 0.25) / 0.16)
Draw = Callable[[np.random.Generator, tuple[int, int]], Any]
SHAPES: dict[str, Draw] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "one in five fails": lambda rng, size: (
        rng.normal(scale=0.5, size=size) - FAILS * (rng.random(size) < 0.2)
    ),
    "heavy tails": lambda rng, size: rng.standard_t(3, size=size) / np.sqrt(3.0),
}
ADASTOP = """
import json, sys
from adastop import MultipleAgentsComparator
for line in sys.stdin:
    scores = json.loads(line)
    size = len(next(iter(scores.values())))
    test = MultipleAgentsComparator(n=5, K=size // 5, B=10000, alpha=0.05, seed=0)
    import numpy as np
    for number in range(size // 5):
        test.partial_compare({k: np.array(v[: 5 * (number + 1)]) for k, v in scores.items()}, False)
        if test.is_finished:
            break
    names = list(scores)
    print(json.dumps({
        f"{names[c[0]]}, {names[c[1]]}": str(test.decisions[str(c)]) for c in test.comparisons
    }), flush=True)
"""


def simulate(job: tuple[str, tuple[float, ...], float | None, tuple[int, ...], int]) -> list[Any]:
    """Returns the answer and the seeds of each pair, and the seeds of each variant, of one
    comparison.

    Args:
        job: shape, mean of each variant, margin of equality, looks, number of the repetition.
    """
    shape, means, margin, looks, number = job
    rng = np.random.default_rng([number, len(means), list(SHAPES).index(shape)])
    scores = SHAPES[shape](rng, (len(means), looks[-1])) + np.array(means)[:, None]
    rules = polopt.DecisionRules(looks, LEVEL, margin)
    found = polopt.decide(dict(zip("ABCDEFGH", scores.tolist(), strict=False)), rules).pairs
    letters = {"better": "B", "equal": "E", "not decided": "U"}
    answers = "".join(
        letters[one.answer] if one.better != one.second else "W" for one in found
    )  # "B": the first is better, "W": the second is better
    used = {
        name: max(one.seeds for one in found if name in (one.first, one.second))
        for name in dict.fromkeys(itertools.chain(*((one.first, one.second) for one in found)))
    }
    return [answers, [one.seeds for one in found], list(used.values())]


def cases(only: str) -> dict[str, tuple[str, tuple[float, ...], float | None, tuple[int, ...]]]:
    """Returns the simulated cases of a group: shape, means, margin and looks."""
    found: dict[str, Any] = {}
    for shape in SHAPES:
        if only == "ties":
            found[f"tie of two, {shape}"] = shape, (0.0, 0.0), None, LOOKS
            found[f"tie of four, {shape}"] = shape, (0.0,) * 4, None, LOOKS
        if only == "power":
            for mean in (1.0, 1.5, 2.0):
                found[f"difference {mean:g}, {shape}"] = shape, (mean, 0.0), None, LOOKS
                found[f"difference {mean:g}, 5 fixed, {shape}"] = shape, (mean, 0.0), None, (5,)
                found[f"difference {mean:g}, 20 fixed, {shape}"] = shape, (mean, 0.0), None, (20,)
            found[f"one of four better by 1.5, {shape}"] = shape, (1.5, 0, 0, 0), None, LOOKS
        if only == "equality":
            for margin in (1.0, 1.5):
                means = (margin, 0.0)
                found[f"difference is the margin {margin:g}, {shape}"] = shape, means, margin, LOOKS
                found[f"tie with the margin {margin:g}, {shape}"] = shape, (0, 0), margin, LOOKS
            means = (0.0, 1.0, 2.0, 3.0)
            found[f"four, each next to a margin of 1, {shape}"] = shape, means, 1.0, LOOKS
    return found


def peeking(shape: str, repeats: int) -> list[bool]:
    """Returns whether Welch's test finds a difference of a tie at level 0.05 at any of 3 to 20
    seeds."""
    found = []
    for number in range(repeats):
        rng = np.random.default_rng([number, 2, list(SHAPES).index(shape)])
        first, second = SHAPES[shape](rng, (2, LOOKS[-1]))
        p_values = [
            stats.ttest_ind(first[:n], second[:n], equal_var=False).pvalue
            for n in range(3, LOOKS[-1] + 1)
        ]
        found.append(min(p_values) <= LEVEL)
    return found


def shares(
    means: Sequence[float], margin: float | None, answers_of: Sequence[str]
) -> tuple[float, float]:
    """Returns the shares of comparisons with a wrong and with a complete decision."""
    pairs = list(itertools.combinations(means, 2))
    wrong = decided = 0
    for answers in answers_of:
        bad = False
        for answer, (first, second) in zip(answers, pairs, strict=True):
            bad |= answer == "B" and first <= second
            bad |= answer == "W" and second <= first
            bad |= answer == "E" and margin is not None and abs(first - second) >= margin
        wrong += bad
        different = [a for a, (x, y) in zip(answers, pairs, strict=True) if x != y]
        decided += all(answer != "U" for answer in different or answers)
    return wrong / len(answers_of), decided / len(answers_of)


def cell(run: Mapping[str, Any], shows: str) -> str:
    """Returns a cell of the table on the page. `shows` is `wrong`, `decided` or `seeds`, which also
    shows the share of complete decisions."""
    if shows == "wrong" and "wrong" in run:
        return f"{np.mean(run['wrong']):.1%}"
    wrong, decided = shares(run["means"], run["margin"], run["answers"])
    seeds = np.mean([np.mean(used) for used in run["seeds"]])
    texts = {"wrong": f"{wrong:.1%}", "decided": f"{decided:.1%}"}
    return texts.get(shows, f"{decided:.1%} ({seeds:.1f})")


def page(store: Mapping[str, Any], text: str) -> str:
    """Returns the text of the page with the table of the stored comparisons."""
    lines = [f"| case | {' | '.join(SHAPES)} |", "|---|" + "---:|" * len(SHAPES)]
    for title, name, shows in ROWS:
        cells = [cell(store[f"{name}, {shape}"], shows) for shape in SHAPES]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    marks = r"(<!-- levels: begin -->\n).*(\n<!-- levels: end -->)"
    return re.sub(marks, lambda m: m[1] + "\n".join(lines) + m[2], text, flags=re.DOTALL)


def compare_with_adastop(python: str, examples: Path, repeats: int) -> dict[str, Any]:
    """Returns the decisions of both programs for the published case and for simulated cases."""
    published: dict[str, list[float]] = {}
    for number in range(1, 6):
        with (examples / f"walker{number}.csv").open() as file:
            for line in csv.DictReader(file):
                for name, score in line.items():
                    if name:
                        published.setdefault(name, []).append(float(score))
    # After its second file, the tutorial has no more scores of PPO and SAC, which are decided.
    whole = max(map(len, published.values()))
    cases: dict[str, Mapping[str, list[float]]] = {
        "published: Walker2d": {
            name: scores + [float("nan")] * (whole - len(scores))
            for name, scores in published.items()
        }
    }
    for shape, mean, number in itertools.product(SHAPES, (0.0, 1.0, 2.0), range(repeats)):
        rng = np.random.default_rng([number, 2, list(SHAPES).index(shape)])
        scores = SHAPES[shape](rng, (2, 25)) + np.array([[mean], [0.0]])
        both = dict(zip("AB", scores.tolist(), strict=True))
        cases[f"{shape}, difference {mean:g}, repetition {number}"] = both
    sent = "".join(f"{json.dumps(scores)}\n" for scores in cases.values())
    done = subprocess.run(
        [python, "-c", ADASTOP],
        input=sent,
        capture_output=True,
        text=True,
        timeout=3600,
        check=True,
    )
    found: dict[str, Any] = {}
    for (name, scores), line in zip(cases.items(), done.stdout.splitlines(), strict=True):
        known = {
            variant: [score for score in values if score == score]
            for variant, values in scores.items()
        }
        pairs = polopt.decide(known, polopt.DecisionRules((5, 10, 15, 20, 25), LEVEL)).pairs
        ours = {
            f"{one.first}, {one.second}": {one.first: "larger", one.second: "smaller"}.get(
                one.better, one.answer
            )
            for one in pairs
        }
        found[name] = {"polopt": ours, "adastop": json.loads(line)}
    return found


def agreement(found: Mapping[str, Any]) -> list[str]:
    """Returns rows of a table: how often both programs decide, and agree."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, both in found.items():
        group = name.partition(", repetition")[0]
        for pair, ours in both["polopt"].items():
            groups.setdefault(group, []).append((ours, both["adastop"][pair]))
    lines = [
        "| case | pairs | polopt decides | AdaStop decides | both decide | and agree |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    decisions = ("larger", "smaller")
    for group, pairs in groups.items():
        both_decide = [(a, b) for a, b in pairs if a in decisions and b in decisions]
        counts = (
            len(pairs),
            sum(a in decisions for a, _ in pairs),
            sum(b in decisions for _, b in pairs),
            len(both_decide),
            sum(a == b for a, b in both_decide),
        )
        lines.append(f"| {group} | " + " | ".join(map(str, counts)) + " |")
    return lines


def main() -> None:
    """Simulates, writes JSON, and writes the table of the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=("ties", "power", "equality"))
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--adastop", metavar="PYTHON", help="a Python that has adastop")
    parser.add_argument("--examples", type=Path, help="its directory examples")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    facts = about()
    earlier = {name: run for name, run in read_runs(args.out).items() if name != "about"}
    kept: dict[str, Any] = {"about": facts, **earlier}
    command = " ".join(["python", *sys.argv])
    if args.adastop:
        found = compare_with_adastop(args.adastop, args.examples, 20)
        kept["adastop"] = {"commit": facts["commit"], "command": command, "cases": found}
        write_runs(args.out, kept)
        print("\n".join(agreement(found)))
        return
    with ProcessPoolExecutor(args.processes) as pool:
        for group in args.only or ("ties", "power", "equality"):
            for name, case in cases(group).items():
                jobs = [(*case, number) for number in range(args.repeats)]
                results = list(pool.map(simulate, jobs, chunksize=50))
                kept[name] = {
                    "commit": facts["commit"],
                    "command": command,
                    "means": case[1],
                    "margin": case[2],
                    "looks": case[3],
                    "answers": [answers for answers, _, _ in results],
                    "seeds": [used for _, _, used in results],
                }
                write_runs(args.out, kept)
                print(
                    f"{name}: {cell(kept[name], 'wrong')}, {cell(kept[name], 'seeds')}", flush=True
                )
            if group == "ties":
                for shape in SHAPES:
                    name = f"tie of two, Welch's test after each seed, {shape}"
                    wrong = peeking(shape, args.repeats)
                    line = {"commit": facts["commit"], "wrong": [int(one) for one in wrong]}
                    kept[name] = {**line, "command": command}
                    write_runs(args.out, kept)
                    print(f"{name}: {np.mean(wrong):.1%}", flush=True)
    if args.out == OUT:
        PAGE.write_text(page(kept, PAGE.read_text()))


if __name__ == "__main__":
    main()
