"""Tests the command lines of the benchmarks, and how they combine measurements."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from source_tree import ROOT

BENCHMARKS = ROOT / "benchmarks"
REQUIREMENTS = sorted((BENCHMARKS / "peers").glob("*/requirements.txt"))


@pytest.mark.parametrize("script", ["suite", "compare"])
def test_benchmark_shows_its_help(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--only" in done.stdout


def test_unknown_case_is_refused_with_the_names() -> None:
    command = [sys.executable, str(BENCHMARKS / "suite.py"), "--only", "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "a3c" in done.stderr


def test_cases_name_settings_of_polopt_and_folders_of_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = importlib.import_module("suite_cases").CASES
    assert len({case.name for case in cases}) == len(cases)
    command = [sys.executable, str(BENCHMARKS / "peers" / "polopt" / "run.py"), "nonsense"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    settings = set(re.findall(r"[\w-]+", done.stderr.partition("choose from")[2]))
    assert {case.ours for case in cases} <= settings, done.stderr
    peers = {opponent.peer for case in cases for opponent in case.opponents}
    for peer in peers - {"polopt"}:
        assert (BENCHMARKS / "peers" / peer / "requirements.txt").is_file()


@pytest.mark.parametrize("path", REQUIREMENTS, ids=lambda path: path.parent.name)
def test_requirements_of_a_peer_are_pinned(path: Path) -> None:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    packages = [line for line in lines if line and not line.startswith("-c ")]
    assert packages
    assert [line for line in packages if "==" not in line] == []


def test_fastest_setting_of_a_peer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suite = importlib.import_module("suite")

    def best(*turns: dict[str, Any] | None) -> str:
        sides = [
            suite.Side("peer", f"setting {i}", {} if turn is None else {0: turn})
            for i, turn in enumerate(turns)
        ]
        return suite.best_of(sides).case

    late, soon = ({"reached": True, "seconds_to_goal": seconds} for seconds in (80.0, 49.0))
    never = {"reached": False, "seconds_to_goal": 30.0}  # an error ended the run
    assert best(None, late, never, soon) == "setting 3"
    assert best(None, never) == "setting 1"
    assert best({"rate": 1.0}, {"rate": 3.0}, None) == "setting 1"


def test_stored_turns_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    suite = importlib.import_module("suite")
    case = next(case for case in suite.CASES if case.name == "learn-sac")
    measured = []

    class Runner(suite.Runner):
        def _python(self, peer: str) -> Path:
            return Path(peer)

    def run(command: list[str], *_: Any) -> dict[str, Any]:
        turn = int(command[-1])
        measured.append((command[0], turn))
        return {"reached": True, "seconds_to_goal": 10.0 + turn}

    monkeypatch.setattr(suite, "run", run)
    runner = Runner(mock.Mock(seconds=1.0))
    stored = json.loads(json.dumps(suite.measure(case, 1, runner)))
    peers = [Path(command).name for command, _ in measured]
    assert len(peers) == 3
    measured.clear()
    stored[1] |= {"turns": {}, "error": "it was not installed"}
    sides = suite.measure(case, 2, runner, stored)
    assert [turn for _, turn in measured] == [0, 1, 1, 1]
    assert [sorted(side["turns"]) for side in sides] == [[0, 1]] * 3
    assert not any(side["error"] for side in sides)

    # Of the settings of a peer, only the fastest one is stored and continued.
    case = next(case for case in suite.CASES if any(len(one.cases) > 1 for one in case.opponents))
    stored = suite.measure(case, 1, runner)
    measured.clear()
    suite.measure(case, 2, runner, stored)
    assert len(measured) == len(stored)


def test_pairs_of_one_process_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    compare = importlib.import_module("compare")

    def group(*ratios: float) -> list[Any]:
        figures = ("rate", "cpu_s_per_1000_steps")
        return [
            compare.Pair(*(dict.fromkeys(figures, value) for value in (2.0, 2.0 * ratio)))
            for ratio in ratios
        ]

    # Of three processes, one has many pairs. It counts once and does not narrow the interval.
    row = compare.table_row("a3c", [group(*[1.5] * 20), group(0.9, 1.0, 1.9), group(0.8)])
    assert row.count("1.000 (0.800 to 1.500)") == 2
    assert row.startswith("| a3c | 2 | 3 |")


def test_a_stored_run_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    stored_runs = importlib.import_module("stored_runs")
    assert stored_runs.read_runs(tmp_path / "runs.jsonl") == {}
    for path in (BENCHMARKS / "results").glob("*.jsonl"):
        runs = stored_runs.read_runs(path)
        assert "about" in runs
        stored_runs.write_runs(tmp_path / "runs.jsonl", runs)
        text = (tmp_path / "runs.jsonl").read_text()
        assert text == path.read_text()
        assert text.count("\n") == len(runs)


def test_call_without_new_steps_does_not_count_as_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers" / "common"))
    measuring = importlib.import_module("measuring")
    monkeypatch.setattr(measuring, "WARM_UP_S", 0.0)
    clock = measuring.RateClock(0.0)
    for _ in range(5):
        assert not clock.tick(0)
    assert not clock.tick(100)
    assert not clock.tick(100)
    assert not clock.tick(200)  # the second round ends the warm-up
    assert not clock.tick(200)
    assert clock.tick(300)
    assert clock.result()["steps"] == 100


def test_only_other_programs_count_as_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    quiet = importlib.import_module("quiet")
    # 10 is the benchmark, 11 is Ray, and 12 is a worker. Ray does not wait for its workers.
    before = {1: (0, 5), 10: (1, 100), 11: (10, 50), 12: (11, 1000), 20: (1, 7)}
    after = {1: (0, 5), 10: (1, 180), 11: (10, 60), 20: (1, 7)}
    assert quiet.ticks_elsewhere(before, 10) == quiet.ticks_elsewhere(after, 10) == 12
    after[21] = (20, 40)  # another program starts a process
    assert quiet.ticks_elsewhere(after, 10) == 52

    # A process that has left this one, as a program of somebody else.
    burn = "import time; end = time.process_time() + 1.0\nwhile time.process_time() < end: pass"
    leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    with quiet.watching_others() as others:
        subprocess.run([sys.executable, "-c", leave], check=True, timeout=60)
        deadline_s = time.monotonic() + 60.0
        began = quiet.ticks_elsewhere(quiet._processes(), os.getpid())
        while quiet.ticks_elsewhere(quiet._processes(), os.getpid()) < began + 80:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
    assert others.cores > 0.0
