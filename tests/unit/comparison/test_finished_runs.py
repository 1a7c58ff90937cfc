"""Finished runs in files and directories are compared without running anything."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

import polopt
from polopt.common.config import ConfigError
from polopt.comparison.comparison_plan import ComparisonConfig
from polopt.comparison.finished_runs import read_finished
from polopt.comparison.records import DECISIONS_FILE

SCORES = {"A": [1.0, 2.0, 3.0, 4.0, 5.0], "B": [11.0, 12.0, 13.0, 14.0, 15.0]}


def rows(**curves: Any) -> list[dict[str, Any]]:
    """Returns rows of final scores."""
    return [
        {"variant": name, "seed": seed, "score": score, **curves}
        for name, scores in SCORES.items()
        for seed, score in enumerate(scores)
    ]


def csv_file(path: Path, lines: list[dict[str, Any]]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0])
        writer.writeheader()
        writer.writerows(lines)
    return str(path)


def test_command_compares_a_file_of_scores(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "scores.csv", rows())
    found = run_command(["compare", "--runs", path, "--results-dir", str(tmp_path / "out")])
    assert found.exit_code == 0, found.output
    assert "B better" in found.stdout
    assert "The plan was written after the runs" in found.stdout
    (report,) = (tmp_path / "out").rglob(DECISIONS_FILE)
    report = json.loads(report.read_text())
    assert report["pairs"][0]["p_values"] == [pytest.approx(2 / 252)]
    assert report["variants"]["A"]["score"]["value"] == 3.0
    assert "written after the runs" in report["paragraph"]


def test_python_names_the_variants(tmp_path: Path) -> None:
    paths = {}
    for name in SCORES:
        lines = [row for row in rows() if row["variant"] == name]
        paths[f"mine {name}"] = tmp_path / f"{name}.jsonl"
        paths[f"mine {name}"].write_text("\n".join(map(json.dumps, lines)))
    result = polopt.compare(runs=paths, log_dir=tmp_path / "out")
    (pair,) = result.pairs
    assert (pair.better, pair.seeds) == ("mine B", 5)
    assert polopt.compare(runs=paths, log_dir=tmp_path / "out").pairs == result.pairs
    paths["mine A"].write_text(paths["mine A"].read_text().replace("1.0", "1.5"))
    with pytest.raises(ConfigError, match="a comparison of other runs"):
        polopt.compare(runs=paths, log_dir=tmp_path / "out")


def test_curves_are_compared_at_equal_steps_and_at_equal_time(tmp_path: Path) -> None:
    """A has the higher score at 100 steps, but needs ten times as long. At the time at which B has
    ended, A has a tenth of its score."""
    lines = [
        {"variant": name, "seed": seed, "steps": steps, "seconds": steps * pace, "score": score}
        for name, pace, slope in (("A", 1.0, 3.0), ("B", 0.1, 1.0))
        for seed in range(5)
        for steps, score in ((0, 0.0), (50, 50 * slope + seed), (100, 100 * slope + seed))
    ]
    path = csv_file(tmp_path / "curves.csv", lines)
    found = run_command(["compare", "--runs", path, "--results-dir", str(tmp_path / "steps")])
    (file,) = (tmp_path / "steps").rglob(DECISIONS_FILE)
    report = json.loads(file.read_text())
    assert found.exit_code == 0, found.output
    assert report["plan"]["budget"] == {"num_env_steps_sampled_lifetime": 100.0}
    assert report["pairs"][0]["better"] == "A"
    assert report["other_axis"]["at"] == pytest.approx(10.0)
    values = {name: one["score_at_seconds"]["value"] for name, one in report["variants"].items()}
    assert values["A"] == pytest.approx(10 * 3.0 + 0.4, rel=0.01)
    assert values["B"] == pytest.approx(102.0)
    arguments = ["--budget", "10s", "--results-dir", str(tmp_path / "time")]
    assert run_command(["compare", "--runs", path, *arguments]).exit_code == 0
    (file,) = (tmp_path / "time").rglob(DECISIONS_FILE)
    assert json.loads(file.read_text())["pairs"][0]["better"] == "B"


def test_run_that_ends_before_the_budget_has_failed(tmp_path: Path) -> None:
    lines = [{**row, "steps": 50 if row["score"] == 15.0 else 100, "seconds": 1} for row in rows()]
    settings = ComparisonConfig(budget=100)
    _, records = read_finished([csv_file(tmp_path / "runs.csv", lines)], settings)
    assert [one.error for one in records if one.error] == ["ended before the budget"]
    assert [one.score for one in records if one.error] == [None]


BAD = {
    "missing": ("no_such.csv", "", "'no_such.csv' does not exist"),
    "columns": ("a.csv", "name,value\nA,1\n", "columns 'variant' and 'score'"),
    "number": ("a.csv", "variant,score\nA,1\nA,x\n", "row 2: got 'x'"),
    "json": ("a.jsonl", "{\n", "cannot be read"),
    "empty": ("a.csv", "variant,score\n", "no runs with results"),
    "one variant": ("a.csv", "variant,score\nA,1\nA,2\n", "got 1 variant: A"),
    "one seed": ("a.csv", "variant,score\nA,1\nB,2\n", "a variant has one run only"),
    "unequal": ("a.csv", "variant,score\nA,1\nA,2\nB,2\n", r"different numbers .*\(A: 2, B: 1\)"),
    "hopeless": ("a.csv", "variant,score\nA,1\nA,2\nB,3\nB,4\n", "nothing could be decided"),
}


@pytest.mark.parametrize(("name", "text", "message"), BAD.values(), ids=BAD.keys())
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    if text:
        (tmp_path / name).write_text(text)
    source = str(tmp_path / name) if text else name
    with pytest.raises(ConfigError, match=message):
        read_finished([source], ComparisonConfig())


def test_directory_without_results(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no runs with results"):
        read_finished([str(tmp_path)], ComparisonConfig())
