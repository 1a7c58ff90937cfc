"""Calibrates with two real workers, and predicts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

import polopt
from polopt.simulation.simulate_command import simulate


def test_the_code_of_the_page_runs(ray_session: Any) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/plan.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "plan.md", "exec"), names)
    forecast: polopt.Forecast = names["forecast"]
    assert [one.workers for one in forecast.predictions] == [2, 32]
    assert all(one.env_steps_per_s > 0.0 for one in forecast.predictions)
    message = forecast.calibration.costs.message
    assert min(message.driver_s, message.worker_s) > 0.0
    assert message.cold >= 1.0
    assert message.latency_s < 1.0
    assert forecast.calibration.costs.start_s > 0.1


def test_the_command_writes_predictions(
    ray_session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "predictions.json"
    given = ["env=CartPole-v1", "train_batch_size=200"]
    simulate(
        "IMPALA", given, workers="3", cores=8.0, seconds=1.0, repeats=2, json_file=file, nodes=1
    )
    (one,) = json.loads(file.read_text())["predictions"]
    assert one["workers"] == 3
    assert 0.0 < one["low"] <= one["env_steps_per_s"] <= one["high"]
    assert f"{one['env_steps_per_s']:,.0f}" in capsys.readouterr().out
