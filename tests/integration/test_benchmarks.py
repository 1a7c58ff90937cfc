"""The command lines of the benchmarks start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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
