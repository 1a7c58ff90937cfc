"""The report of a comparison: a table for the terminal, JSON, and a paragraph for a paper."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from polopt import __version__
from polopt.comparison.comparison_plan import SECONDS, STEPS
from polopt.comparison.decisions import BETTER, EQUAL, OPEN, PairDecision
from polopt.comparison.records import ComparisonFiles, SeedRecord, decisions_of
from polopt.dashboards.data.statistics import (
    Estimate,
    estimate,
    probability_of_improvement,
    resampled,
)
from polopt.metrics.number_text import number_text

_AXES = {STEPS: 0, SECONDS: 1}
UNITS = {STEPS: "environment steps", SECONDS: "seconds of training"}
_WIDTH = 100


def make_report(files: ComparisonFiles) -> dict[str, Any]:
    """Returns the report of a comparison with its last plan as JSON values."""
    entry = files.plans[-1]
    plan = entry["plan"]
    records = {name: files.of(name) for name in plan["variants"]}
    decisions = decisions_of(files)
    last_look = plan["looks"][-1]
    failed = None if plan["failed"] == "worst" else plan["failed"]
    higher = plan["mode"] == "max"
    finite = [one.score for rs in records.values() for one in rs if one.score is not None]
    worst = (min if higher else max)(finite, default=0.0) if failed is None else failed

    def scores(name: str, count: int | None = None) -> Any:
        return np.array([worst if r.score is None else r.score for r in records[name][:count]])

    other, place = _other_axis(plan, records)
    variants: dict[str, dict[str, Any]] = {}
    for name, found in records.items():
        variants[name] = {
            "seeds": len(found),
            "added_by_hand": sum(one.added for one in found),
            "failed": [{"seed": one.seed, "error": one.error} for one in found if one.error],
            "score": _estimate(estimate([scores(name)])) if found else None,
            f"score_at_{'seconds' if other == SECONDS else 'steps'}": _at(found, other, place),
            "steps": sum(one.steps for one in found),
            "hours": sum(one.total_s for one in found) / 3600.0,
            "seeds_saved": max(0, last_look - sum(not one.added for one in found)),
        }
    pairs = []
    for pair in decisions.pairs:
        improvement = None
        if pair.seeds >= 2:
            x, y = scores(pair.first, pair.seeds), scores(pair.second, pair.seeds)
            improvement = _estimate(
                probability_of_improvement([x], [y])
                if higher
                else probability_of_improvement([y], [x])
            )
        pairs.append({**asdict(pair), "text": answer(pair, plan), "improvement": improvement})
    report = {
        "polopt": __version__,
        "plan_hash": entry["hash"],
        "plan": plan,
        "after_results": files.plans[0]["after_results"],
        "ended": not decisions.needed,
        "warnings": warnings(files),
        "variants": variants,
        "pairs": pairs,
        "other_axis": {"key": other, "at": place},
        "seeds_used": sum(map(len, records.values())),
        "seeds_saved": sum(one["seeds_saved"] for one in variants.values()),
    }
    return {**report, "paragraph": paragraph(report)}


def warnings(files: ComparisonFiles) -> list[str]:
    """Returns sentences about everything after which the level of the decisions may not hold."""
    found = []
    if files.plans[0]["after_results"]:
        found.append("The plan was written after the runs, which may have been seen before.")
    for number, entry in enumerate(files.plans[1:], 2):
        found.append(
            f"Plan {number} ({entry['hash']}, {entry['written']}) was written when "
            f"{entry['seeds_known']} seeds were known. The level does not hold for its decisions. "
            f"The first plan is {files.plans[0]['hash']}."
        )
    ((key, budget),) = files.plans[-1]["plan"]["budget"].items()
    late = sum(one.curve[0][_AXES[key]] > budget for one in files.records if one.curve)
    if late:
        found.append(
            f"{late} seeds have no result before the budget, so their scores were measured after "
            "it. A longer budget avoids this."
        )
    added = sum(one.added for one in files.records)
    if added:
        found.append(
            f"{added} seeds were added by hand. They count in the estimates, and not in the "
            "decisions."
        )
    return found


def answer(pair: PairDecision, plan: Mapping[str, Any]) -> str:
    """Returns the answer for a pair in words."""
    if pair.answer == BETTER:
        return f"{pair.better} better"
    if pair.answer == EQUAL:
        return f"equal within {plan['equal_within']:g}"
    if pair.answer == OPEN:
        return "not decided yet"
    return f"not decided at {plan['looks'][-1]} seeds"


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of the report for a terminal."""
    plan = report["plan"]
    ((key, budget),) = plan["budget"].items()
    better = "higher" if plan["mode"] == "max" else "lower"
    yield f"metric      {plan['metric']} after {budget:,.0f} {UNITS[key]}, {better} is better"
    yield from _table(variant_rows(report))
    yield from _table(pair_rows(report))
    for text in report["warnings"]:
        yield f"warning     {text}"


def variant_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a table of the variants. Its first row has the names of the columns."""
    other = report["other_axis"]
    column = "score_at_seconds" if other["key"] == SECONDS else "score_at_steps"
    after = f"after {number_text(other['at'])} {'s' if other['key'] == SECONDS else 'steps'}"
    head = ("variant", "seeds", "failed", "score (95% interval)", after, "steps", "hours")
    rows: list[tuple[str, ...]] = [(*head, "seeds saved")]
    for name, one in report["variants"].items():
        added = f" ({one['added_by_hand']} added)" if one["added_by_hand"] else ""
        rows.append(
            (
                name,
                f"{one['seeds']}{added}",
                str(len(one["failed"])),
                _text(one["score"]),
                _text(one[column]),
                f"{one['steps']:,.0f}",
                f"{one['hours']:.2f}",
                str(one["seeds_saved"]),
            )
        )
    return rows


def pair_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Returns a table of the pairs. Its first row has the names of the columns."""
    rows: list[tuple[str, ...]] = [
        ("pair", "answer", "seeds", "difference", "P(first better)", "p at each look")
    ]
    for pair in report["pairs"]:
        rows.append(
            (
                f"{pair['first']} and {pair['second']}",
                pair["text"],
                str(pair["seeds"]),
                number_text(pair["differences"][-1]) if pair["differences"] else "-",
                _text(pair["improvement"], ".2f"),
                ", ".join(f"{p:.2g}" for p in pair["p_values"]) or "-",
            )
        )
    return rows


def paragraph(report: Mapping[str, Any]) -> str:
    """Returns a paragraph for a paper: method, results, and sources."""
    plan = report["plan"]
    ((key, budget),) = plan["budget"].items()
    looks = ", ".join(map(str, plan["looks"]))
    names = list(report["variants"])
    several = len(plan["looks"]) > 1
    variants = report["variants"].items()
    scores = "; ".join(f"{name}: {_text(one['score'])}" for name, one in variants)
    used = ", ".join(f"{one['seeds']} of {name}" for name, one in variants)
    answers = "; ".join(
        f"{pair['first']} and {pair['second']}: {pair['text']}"
        + (f" (after {pair['seeds']} seeds each)" if pair["answer"] in (BETTER, EQUAL) else "")
        for pair in report["pairs"]
    )
    failed = sum(len(one["failed"]) for one in report["variants"].values())
    parts = [
        f"We compared {', '.join(names[:-1])} and {names[-1]} by {plan['metric']} after "
        f"{budget:,.0f} {UNITS[key]}.",
        f"The results were looked at {'after' if several else 'once, after'} {looks} seeds of each "
        f"variant{', until all pairs were decided' if several else ''}.",
        "Differences of means were tested by a permutation test with a family-wise level of "
        f"{plan['level']:g}, divided over {'the looks (Bonferroni) and ' if several else ''}the "
        "pairs (closed test, Marcus et al., 1976).",
    ]
    if plan["equal_within"] is not None:
        parts.append(
            f"A pair is equal within {plan['equal_within']:g} if two one-sided tests (Schuirmann, "
            "1987) reject a larger difference of means at the same level."
        )
    parts.append(
        "Seeds that crashed or diverged count as "
        + ("the worst score" if plan["failed"] == "worst" else f"{plan['failed']:g}")
        + f" ({failed} of {report['seeds_used']})."
    )
    parts.append(f"Result: {answers}.")
    parts.append(
        f"Interquartile mean with 95 percent bootstrap interval (Agarwal et al., 2021), not "
        f"adjusted for the looks: {scores}."
    )
    parts.append(
        f"Seeds: {used}. polopt {report['polopt']}, plan {report['plan_hash']}"
        + f", written {'after the runs' if report['after_results'] else 'before the first run'}."
    )
    return " ".join(parts)


def wrapped(text: str) -> list[str]:
    """Returns the lines of a paragraph for a terminal."""
    return textwrap.wrap(text, _WIDTH, break_on_hyphens=False)


def _other_axis(
    plan: Mapping[str, Any], records: Mapping[str, Sequence[SeedRecord]]
) -> tuple[str, float]:
    """Returns the axis on which the budget is not, and the place on it that at least half of the
    seeds of each variant have reached."""
    other = SECONDS if STEPS in plan["budget"] else STEPS
    ends = [
        float(np.median([one.curve[-1][_AXES[other]] for one in found if one.curve]))
        for found in records.values()
        if any(one.curve for one in found)
    ]
    return other, min(ends, default=0.0)


def _at(found: Sequence[SeedRecord], axis: str, place: float) -> dict[str, float | None] | None:
    """Returns the estimate of the metric at a place of an axis. Leaves out seeds without a value
    there."""
    values = []
    for one in found:
        points = np.array([[p[_AXES[axis]], np.nan if p[2] is None else p[2]] for p in one.curve])
        if len(points):
            values.append(resampled(points[:, 0], points[:, 1], np.array([place]), hold=True)[0])
    known = np.array([value for value in values if np.isfinite(value)])
    return _estimate(estimate([known])) if len(known) else None


def _estimate(found: Estimate) -> dict[str, float | None]:
    bounds = {"low": found.low, "high": found.high}
    return {"value": found.value, **{k: v if np.isfinite(v) else None for k, v in bounds.items()}}


def _text(found: Mapping[str, float | None] | None, form: str = "") -> str:
    if found is None:
        return "-"
    value, low, high = (
        None if v is None else format(v, form) if form else number_text(v)
        for v in (found["value"], found["low"], found["high"])
    )
    return f"{value}" if low is None else f"{value} ({low} to {high})"


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()
