"""Tests of `polopt report`, `polopt trace`, and `polopt dashboard` before the server starts."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from commands import run_command
from dashboard_results import write_trial

from polopt.common.tracer import Event
from polopt.dashboards.data.chrome_trace import chrome_trace


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_trial(tmp_path / "results", "async_gradients", 0, 4)
    return tmp_path / "results"


def test_report_names_what_it_wrote(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra polopt[dashboard] is not installed")
    output = tmp_path / "report.html"
    done = run_command(["report", str(results), "-o", str(output)])
    assert done.exit_code == 0, done.output
    assert done.output.split() == ["report", str(output)]
    assert output.stat().st_size > 1_000_000  # plotly.js is part of it


def test_trace_says_what_is_wrong_with_the_run(tmp_path: Path) -> None:
    folder = write_trial(tmp_path, "async_gradients", 0, 5, env_faults=(2, 3))
    trace = chrome_trace(
        {"driver": [Event("driver", "wait", 0.0, 0.75)]},
        (0.0, 1.0),
        first_step=5,
        num_steps=3,
        truncated=[],
    )
    (folder / "trace.json").write_text(json.dumps(trace))
    done = run_command(["trace", str(folder)])
    assert done.exit_code == 0, done.output
    assert "driver      wait 75%  other 25%\n" in done.output
    assert "diagnosis   2 environment faults: ValueError: reward\n            -> fix" in done.output


@pytest.mark.parametrize("command", ["report", "dashboard"])
def test_missing_directory_is_one_error(command: str, tmp_path: Path) -> None:
    pytest.importorskip("streamlit", reason="the extra polopt[dashboard] is not installed")
    done = run_command([command, str(tmp_path / "none")])
    assert done.exit_code == 2
    assert "results directory does not exist" in done.output


def error_of(*arguments: str) -> str:
    """Runs a command with bad input, and returns the single line that it prints."""
    done = run_command(arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.output.splitlines()
    return line


@pytest.mark.parametrize("command", ["report", "dashboard"])
def test_file_in_place_of_a_directory_is_named(command: str, tmp_path: Path) -> None:
    pytest.importorskip("streamlit", reason="the extra polopt[dashboard] is not installed")
    (tmp_path / "file").touch()
    line = error_of(command, str(tmp_path / "file"))
    assert line.startswith(f"error: '{tmp_path / 'file'}' is a file. Allowed: the directory of")


def test_port_that_is_taken_is_one_error(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("streamlit", reason="the extra polopt[dashboard] is not installed")
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the server was started"))
    monkeypatch.setattr(os, "chdir", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        line = error_of("dashboard", str(results), "--port", str(port))
    assert line.startswith(f"error: port {port} is taken by another program. Allowed: another")


def test_missing_or_unreadable_trace_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    (tmp_path / "list").write_text("[]")
    assert error_of("trace", str(tmp_path / "none")).startswith(
        f"error: '{tmp_path / 'none'}' does not exist"
    )
    assert "A run with trace=true writes this file" in error_of("trace", str(tmp_path))
    for name in ("text", "list"):
        assert f"{str(tmp_path / name)!r} is not a trace of polopt" in error_of(
            "trace", str(tmp_path / name)
        )


@pytest.mark.parametrize("command", ["report", "dashboard"])
def test_missing_extra_is_one_error(
    command: str, results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def without_plotly(name: str, *rest: Any) -> Any:
        return None if name in {"plotly", "streamlit"} else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without_plotly)
    done = run_command([command, str(results)])
    assert done.exit_code == 2
    assert "pip install 'polopt[dashboard]'" in done.output


@pytest.mark.parametrize("browser", [True, False])
def test_server_binds_loopback_without_telemetry(
    results: Path, monkeypatch: pytest.MonkeyPatch, browser: bool
) -> None:
    pytest.importorskip("streamlit", reason="the extra polopt[dashboard] is not installed")
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, arguments: started.extend(arguments))
    monkeypatch.setattr(os, "chdir", lambda folder: started.append(folder))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    choice = [] if browser else ["--no-browser"]
    done = run_command(["dashboard", str(results), "--port", str(port), *choice])
    assert done.exit_code == 0, done.output
    assert started[-2:] == ["--", str(results)]
    assert {
        "--server.address=127.0.0.1",
        "--browser.gatherUsageStats=false",
        f"--server.port={port}",
    } <= set(started)
    assert ("--server.headless=true" in started) == (not browser)
