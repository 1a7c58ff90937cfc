"""`polopt export` writes the model that the policy of the checkpoint exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_helpers import SMALL
from onnx_checks import check_model, needs_onnx
from typer.testing import CliRunner

import polopt
from polopt.command_line.cli import app
from polopt.common.config import ConfigError
from polopt.trainers.trainer import PolicyOptimizerTrainer


@needs_onnx
def test_export_command_writes_what_load_returns(tmp_path: Path) -> None:
    made = PolicyOptimizerTrainer({**SMALL, "lr": 0.05})
    made.train()
    made.save(str(tmp_path / "c"))
    made.stop()
    model = tmp_path / "policy.onnx"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "c"), str(model)])
    assert done.exit_code == 0, done.output
    assert str(model) in done.stdout
    check_model(polopt.load(tmp_path / "c"), model)
    unwritable = CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "no" / "p.onnx")])
    assert unwritable.exit_code == 2
    assert "cannot be written: No such file" in unwritable.stderr
    with pytest.raises(ConfigError, match="cannot be written: Not a directory"):
        polopt.load(tmp_path / "c").export_onnx(model / "policy.onnx")
