"""The tables of `docs/metrics.md`, which are made from the declarations of numbers.

`python tests/generated_files.py` writes them, and `test_options.py` compares them with the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polopt.dashboards.data.prometheus import UNDECLARED, Metric, metrics_of
from polopt.metrics.number import Number, declared, within
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.numbers import numbers_of

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
#: The tables of numbers that all results have. A number is in the first table that accepts it.
_NUMBER_TABLES: dict[str, Callable[[Number], bool]] = {
    "other blocks": lambda number: not number.key.startswith("optimizer/"),
    "names": lambda number: number.kind == "text",
    "counters": lambda number: number.kind in ("counter", "total") and number.unit != "s",
    "lags": lambda number: "_lag" in number.key,
    "actions": lambda number: number.key.startswith("optimizer/actions/"),
    "machine": lambda number: bool(re.search("/machine/|/per_worker|/cpus|memory|gpu", number.key)),
    "rates and times": lambda number: True,
}


def metrics_page() -> str:
    """Returns the text of `docs/metrics.md`: the prose of the page, and new tables between its
    comments `<!-- table NAME -->` and `<!-- end -->`."""
    tables = dict([*_common_tables(), *_own_tables()])

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}\n\n{tables.pop(found[2])}\n\n{found[3]}"

    pattern = r"(<!-- table ([\w ]+) -->)\n.*?(<!-- end -->)"
    text = re.sub(pattern, replaced, PAGE.read_text(), flags=re.DOTALL)
    assert not tables, f"docs/metrics.md has no place for the tables {[*tables]}"
    return text


def number_table(numbers: Iterable[Number], block: str = "optimizer/") -> str:
    """Returns a table of numbers. Their keys are shown without `block`."""
    lines = ["| key | unit | meaning |", "|---|---|---|"]
    for number in numbers:
        key = number.key.removeprefix(block)
        lines.append(f"| `{key}` | {number.unit} | {number.meaning} |".replace("|  |", "| |"))
    return "\n".join(lines)


def _common_tables() -> Iterator[tuple[str, str]]:
    keys = {number.key.removesuffix("/<over>") for number in numbers_of()}
    common = [
        number
        for number in numbers_of()
        if number.key.replace("/per_worker/<place>", "") not in keys or "/<place>" not in number.key
        if not number.key.startswith("evaluation/fault_tolerance/")
    ]
    rows: dict[str, list[Number]] = {name: [] for name in _NUMBER_TABLES}
    for number in common:
        rows[next(name for name, accepts in _NUMBER_TABLES.items() if accepts(number))].append(
            number
        )
    yield from ((name, number_table(found)) for name, found in rows.items())
    yield "metrics", _metric_table(metrics_of([*numbers_of(), UNDECLARED]))


def _own_tables() -> Iterator[tuple[str, str]]:
    owners: dict[Number, list[str]] = {}
    for registry in (OPTIMIZERS, POLICIES):
        for name in _builtin(registry):
            for number in declared(registry.get(name)):
                owners.setdefault(number, []).append(f"`{name}`")
    parts = dict[str, list[Number]]()
    for number, names in owners.items():
        parts.setdefault(", ".join(names), []).append(number)
    shown = (f"**{names}.**\n\n{number_table(found)}" for names, found in parts.items())
    yield "own numbers", "\n\n".join(shown)
    common = metrics_of(numbers_of())
    every = (n for name in _builtin(OPTIMIZERS) for n in declared(OPTIMIZERS.get(name)))
    own = metrics_of(dict.fromkeys(within("optimizer", every)))
    yield "own metrics", _metric_table({k: v for k, v in own.items() if k not in common})


def _metric_table(metrics: Mapping[str, Metric]) -> str:
    lines = ["| metric | kind | unit | tag | result keys |", "|---" * 5 + "|"]
    for metric in metrics.values():
        tag = f"`{metric.tag}`" if metric.tag else ""
        keys = ", ".join(f"`{key}`" for key in metric.keys)
        if UNDECLARED.key in metric.keys:
            keys = f"`{UNDECLARED.key}`"
        row = f"| `{metric.name}` | {metric.kind} | {metric.unit} | {tag} | {keys} |"
        lines.append(row.replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def _builtin(registry: Any) -> list[str]:
    names = registry.names()
    return [name for name in names if registry.get(name).__module__.startswith("polopt.")]


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
