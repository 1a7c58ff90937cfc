"""The benchmarks of cost: their arithmetic against closed forms, and each by a short run."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports one by its name; they import each other by bare names, as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (BENCHMARKS / f"{name}.py").exists():
            del sys.modules[name]


# ---- memory -----------------------------------------------------------------------------------


def test_slope_of_a_line_is_exact(benchmark: Any) -> None:
    seconds = np.arange(600.0)
    found = benchmark("memory").slope(seconds, 100.0 + 7.2 * seconds / 3600.0)
    assert found.per_hour == pytest.approx(7.2)
    assert found.error == pytest.approx(0.0, abs=1e-6)
    assert found.last - found.first == pytest.approx(7.2 * 525 / 3600.0)


def test_error_of_a_slope_allows_for_what_seconds_have_in_common(benchmark: Any) -> None:
    """Of series without a trend, of which each second remembers the one before: about one in 20 is
    further from zero than two errors. An error from single seconds calls most of them growth."""
    memory, rng = benchmark("memory"), np.random.default_rng(0)
    seconds = np.arange(900.0)
    called, called_by_seconds = 0, 0
    for _ in range(200):
        noise = rng.normal(size=900)
        for i in range(1, 900):
            noise[i] += 0.95 * noise[i - 1]
        found = memory.slope(seconds, 300.0 + noise)
        called += abs(found.per_hour) > 2.0 * found.error
        naive = memory.slope(seconds, 300.0 + noise, blocks=900)
        called_by_seconds += abs(naive.per_hour) > 2.0 * naive.error
    assert called < 40
    assert called_by_seconds > 100


@pytest.mark.parametrize(
    ("per_hour", "error", "verdict"),
    [
        (-50.0, 1.0, "flat"),
        (9.0, 0.1, "flat"),
        (30.0, 20.0, "flat, within noise"),
        (30.0, 3.0, "GROWS"),
    ],
)
def test_verdicts(benchmark: Any, per_hour: float, error: float, verdict: str) -> None:
    assert benchmark("memory").Slope(per_hour, error, 0.0, 0.0).verdict(10.0) == verdict


def test_a_process_that_ended_is_not_called_flat(benchmark: Any) -> None:
    memory = benchmark("memory")
    series = {"seconds": [*range(60)], "driver": [1.0] * 60, "worker 1": [1.0] * 59 + [np.nan]}
    with pytest.raises(RuntimeError, match="ended before the run did: worker 1"):
        memory.judge(series)


# ---- limits -----------------------------------------------------------------------------------


def test_ceilings_are_what_their_formulas_say(benchmark: Any) -> None:
    limits = benchmark("limits")
    cost = dict.fromkeys(limits.NAMES, 0.0)
    cost |= {"env": 54e-6, "act": 21e-6, "write": 8e-6, "gradient": 720e-6, "direct": 170e-6}
    cost |= {"learn128": 990e-6, "learn256": 1500e-6, "call": 830e-6, "sum": 320e-6}
    two = limits.ceilings(cost, cores=2)
    assert two["A3C"][0] == pytest.approx(2 * 160 / (20 * 83e-6 + 890e-6))
    assert two["SyncPPO"][0] == pytest.approx(2048 / (128 * 83e-6 + 32 * 1500e-6 + 830e-6))
    assert two["DDPPO"][0] == pytest.approx(2048 / (128 * 83e-6 + 32 * 1310e-6 + 830e-6))
    for ceiling, formula in two.values():
        numbers = formula.split("(driver")[0].replace("us of the driver", "us")
        assert eval(_arithmetic(numbers)) == pytest.approx(ceiling, rel=1e-3)
    bare = limits.bare_ceilings(cost | {"bare": 34e-6}, cores=2)
    assert bare["A3C"][0] == pytest.approx(2 * 160 / (20 * 63e-6 + 890e-6))
    one = limits.ceilings(cost, cores=1)
    assert one["A3C"][0] == pytest.approx(two["A3C"][0] / 2)
    assert one["DDPPO"][0] < two["DDPPO"][0]


def _arithmetic(formula: str) -> str:
    """A formula as it is printed, with microseconds as seconds and without words."""
    kept = formula.replace(",", "").replace(" x ", " * ").replace("us", "* 1e-6")
    words = {word for word in kept.split() if word.isalpha()}
    return " ".join(word for word in kept.split() if word not in words)


# ---- start-up ---------------------------------------------------------------------------------


def test_processor_time_goes_to_the_kind_of_process(benchmark: Any) -> None:
    startup = benchmark("startup")
    processes = {
        1: ("/x/raylet/raylet --agent=/x/dashboard/agent.py --w=/x/default_worker.py ", 0.5),
        2: ("ray::RolloutWorker.sample ", 2.0),
        3: ("ray::RolloutWorker ", 3.0),
        4: ("python /x/ray/autoscaler/_private/monitor.py --logs-dir=/x ", 4.0),
        5: ("python /venv/bin/polopt train cartpole_a3c ", 5.0),
    }
    assert startup.cpu_by_kind(processes) == {
        "Ray: raylet": 0.5,
        "rollout workers": 5.0,
        "Ray: autoscaler's monitor": 4.0,
        "driver (the command)": 5.0,
    }


def test_milestones_of_workers_are_those_of_the_last(benchmark: Any) -> None:
    events = [
        (0.5, 1, "process begins"),
        (1.0, 1, "polopt.trainers.running imported"),
        (1.1, 1, "init begins"),
        (1.2, 7, "process begins"),  # of Ray: no worker
        (1.3, 8, "process begins"),
        (1.4, 9, "process begins"),
        (2.0, 1, "init ends"),
        (3.0, 1, "_train begins"),
        (4.0, 8, "__init__ begins"),
        (4.2, 8, "__init__ ends"),
        (4.1, 9, "__init__ begins"),
        (4.5, 9, "__init__ ends"),
        (5.0, 6, "process begins"),  # too late for anything
        (6.0, 1, "apply_gradients ends"),
    ]
    at = benchmark("startup").reached(events)
    assert list(at.values()) == [1.0, 1.1, 2.0, 1.4, 3.0, 4.1, 4.5, 6.0]


# ---- short runs -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("limits", ["--repeats", "1", "--seconds", "1"], "| A3C | "),
        ("memory", ["--minutes", "0.25", "--presets", "A3C", "--workers", "1"], "| object store |"),
        (
            "scaling",
            ["--workers", "1", "2", "--seconds", "2", "--repeats", "1"],
            "| AsyncGradients | 2 | ",
        ),
        ("startup", ["--repeats", "1"], "| first gradient applied | "),
    ],
)
def test_short_run(tmp_path: Path, script: str, arguments: list[str], told: str) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380)
    # Status 1 of `memory` is a finding; so short a run may grow.
    assert done.returncode == 0 or (script == "memory" and done.returncode == 1), done.stderr
    assert told in done.stdout
    assert "commit " in done.stdout
    assert f"{script}.py" in done.stdout
    assert json.loads(out.read_text())["about"]["ray"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_are_processes_that_ray_started_ahead(tmp_path: Path, benchmark: Any) -> None:
    """Without any of what `start_ray` tells Ray, at least one is started for a worker then."""
    at, _ = benchmark("startup").run_once("cartpole_a3c", tmp_path)
    assert at["workers' processes are started"] < at["trainer begins its setup"]


@pytest.mark.parametrize("script", ["limits", "memory", "scaling", "startup"])
def test_help(script: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "--out" in done.stdout
