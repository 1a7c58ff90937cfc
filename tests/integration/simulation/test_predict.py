"""Calibrates with two real workers, and predicts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from source_tree import ROOT
from typer.testing import CliRunner

import polopt
from polopt.command_line.cli import app


def test_the_code_of_the_page_runs(ray_session: Any) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plan.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "plan.md", "exec"), names)
    forecast: polopt.Forecast = names["forecast"]
    assert [one.workers for one in forecast.predictions] == [2, 32]
    assert all(one.env_steps_per_s > 0.0 for one in forecast.predictions)
    message = forecast.calibration.costs.message
    assert min(message.idle_s, message.busy_s, message.worker_s) > 0.0
    assert message.latency_s < 1.0
    assert forecast.calibration.costs.start_s > 0.1


def test_the_command_writes_predictions(ray_session: Any, tmp_path: Path) -> None:
    file = tmp_path / "predictions.json"
    options = ["--workers", "3", "--cores", "8", "--seconds", "1", "--repeats", "2"]
    given = ["env=CartPole-v1", "train_batch_size=200"]
    done = CliRunner().invoke(app, ["simulate", "IMPALA", *given, *options, "--json", str(file)])
    assert done.exit_code == 0, done.output
    (one,) = json.loads(file.read_text())["predictions"]
    assert one["workers"] == 3
    assert 0.0 < one["low"] <= one["env_steps_per_s"] <= one["high"]
    refused = CliRunner().invoke(app, ["simulate", "A3C", "env=CartPole-v1", "--latency", "3"])
    assert refused.exit_code != 0
    assert "nodes is 1" in refused.output
