"""Commands say which package an environment or a video needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hidden_packages import NEEDED, hide
from typer.testing import CliRunner

import polopt
from polopt.command_line.cli import app

SMALL = {"num_workers": 0, "num_envs_per_worker": 1, "rollout_fragment_length": 8}


def test_train_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "mujoco")
    result = CliRunner().invoke(app, ["train", "halfcheetah_ppo"])
    assert result.exit_code == 2
    assert result.stderr == f"error: {NEEDED[0][2]}\n"


def test_video_needs_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = polopt.SyncPPO(env="CartPole-v1", **SMALL)
    trainer.save(str(tmp_path))
    trainer.stop()
    # All packages appear as installed, also MoviePy.
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    hide(monkeypatch, "pygame")
    command = ["evaluate", str(tmp_path), "--video", str(tmp_path / "video"), "--episodes", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    pygame = 'error: CartPole-v1 needs pygame: pip install "gymnasium[classic-control]"'
    moviepy = 'error: CartPole-v1 needs MoviePy: pip install "gymnasium[other]"'
    assert result.stderr.strip().replace("_", "-") in (pygame, moviepy)


def test_evaluate_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = polopt.SyncPPO(env="CartPole-v1", **SMALL)
    trainer.save(str(tmp_path))
    trainer.stop()
    hide(monkeypatch, "mujoco")
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--env", "HalfCheetah-v5"])
    assert result.exit_code == 2
    assert result.stderr == f"error: {NEEDED[0][2]}\n"
