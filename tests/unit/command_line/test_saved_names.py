"""Commands with checkpoints whose environment, options or callbacks have to be given again."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import trainer
from command_helpers import SMALL, error_of, polopt
from gymnasium import spaces
from typer.testing import CliRunner

from polopt.command_line.cli import app
from polopt.command_line.tune_run import _next_step
from polopt.trainers import saved_policy
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.experiment import Experiment
from polopt.trainers.find_checkpoint import name_previous
from polopt.trainers.trainer import PolicyOptimizerTrainer


def test_module_that_only_a_checkpoint_names_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    good = "import polopt\nclass Mine(polopt.Callbacks): pass\n"
    (tmp_path / "evilcalls.py").write_text(good)
    made = trainer(callbacks="evilcalls:Mine")
    made.train()
    made.save(str(tmp_path / "c"))
    made.stop()
    state = json.loads((tmp_path / "c" / "state.json").read_text())
    assert state["config"]["callbacks"] == "evilcalls:Mine"
    monkeypatch.delitem(sys.modules, "evilcalls")
    (tmp_path / "evilcalls.py").write_text("raise SystemExit('imported')")
    played = CliRunner().invoke(app, ["evaluate", str(tmp_path / "c"), "--episodes", "1"])
    assert played.exit_code == 0, played.output
    again = trainer()
    again.restore(str(tmp_path / "c"))
    again.stop()


def test_command_line_names_the_previous_one(tmp_path: Path) -> None:
    made = trainer()
    for number in range(3):
        made.train()
        made.save(str(tmp_path / f"checkpoint_{number:06d}"))
    made.stop()
    newest = tmp_path / "checkpoint_000002"
    tensors = newest / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    result = CliRunner().invoke(app, ["evaluate", str(newest)])
    assert result.exit_code == 2
    assert "is damaged: the SHA-256 of tensors.safetensors" in result.output
    assert str(tmp_path / "checkpoint_000001") in result.output
    assert "Traceback" not in result.output
    assert name_previous(tmp_path / "checkpoint_000000") == ""


class Loader:
    """A value that checkpoints cannot contain."""


class Maze(gymnasium.Env[Any, Any]):
    """An environment with 5 steps in each episode. The rewards depend on the options."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, config: Any) -> None:
        self.cost = config.get("difficulty", 1) * (2 if config.get("loader") else 1)
        cells = config.get("cells", {})
        self.cost += cells.get((0, 1), 0) + float(np.sum(config.get("weights", 0)))

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.zeros(2, np.float32), -float(self.cost), self.steps >= 5, False, {}


def saved(folder: Path, env_config: Any, **options: Any) -> Path:
    trainer = PolicyOptimizerTrainer(
        {**SMALL, "env": Maze, "env_config": env_config, "min_sample_timesteps_per_iteration": 0}
        | options
    )
    trainer.train()
    trainer.save(str(folder / "c"))
    trainer.save(str(folder / "c"))
    trainer.stop()
    return folder / "c"


def mean_of(*arguments: Any) -> float:
    played = polopt("evaluate", *arguments, "--episodes", 2, "--env", f"{__name__}:Maze")
    assert played.exit_code == 0, played.output
    [line] = [line for line in played.stdout.splitlines() if line.startswith("return")]
    return float(line.split()[2])


def test_evaluate_plays_the_environment_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        "difficulty": np.int64(7),
        "cells": {(0, 1): 2},
        "weights": np.ones(3),
        "data": Path("data"),
    }
    checkpoint = saved(tmp_path, options)
    assert mean_of(checkpoint) == -5 * (7 + 2 + 3)
    assert not caplog.records


def test_missing_option_of_the_environment_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = saved(tmp_path, {"difficulty": 7, "loader": Loader(), "more": [1, Loader()]})
    [warning] = caplog.records  # only the first of the two saves warns
    assert f"env_config.loader ({__name__}.Loader), env_config.more[1]" in warning.message
    assert warning.levelno == logging.WARNING
    state = read_trainer_state(checkpoint)
    assert set(state["unsaved"]) == {"env", "env_config.loader", "env_config.more[1]"}
    assert state["config"]["env_config"] == {"difficulty": 7, "more": [1, None]}

    named = ["--env", f"{__name__}:Maze"]
    said = error_of(polopt("evaluate", checkpoint, *named))
    assert f"does not contain env_config.loader ({__name__}.Loader), env_config.more[1]" in said
    assert "evaluate ... env_config.loader=VALUE env_config.more=VALUE" in said
    said = error_of(polopt("evaluate", checkpoint, "env_config.more=[]", *named))
    assert f"does not contain env_config.loader ({__name__}.Loader), because" in said
    assert mean_of(checkpoint, "env_config.loader=x", "env_config.more=[]") == -5 * 14
    assert mean_of(checkpoint, "env_config.loader=null", "env_config={more: 3}") == -5 * 7
    assert "'lr=1' has no effect" in error_of(polopt("evaluate", checkpoint, "lr=1", *named))

    again = PolicyOptimizerTrainer({**SMALL, "env": Maze})  # this trainer's config is complete
    again.restore(str(checkpoint))
    again.stop()
    assert saved_policy.load(checkpoint).action_space == Maze.action_space


def test_next_command_names_what_it_needs(tmp_path: Path) -> None:
    options = {
        "env": "CartPole-v1",
        "env_config": {"loader": Loader(), "size": np.int64(3)},
        "evaluation_config": {"env": "mygame:Game-v0"},
    }
    command = _next_step(tmp_path, Experiment.parse(options, {}))
    assert command.endswith(f"evaluate {tmp_path} --env mygame:Game-v0 env_config.loader=VALUE")
