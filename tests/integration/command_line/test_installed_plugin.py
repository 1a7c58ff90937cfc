"""Commands know the names of an installed plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installed_plugin import install_plugin, with_plugin

CLI = "polopt.command_line.cli"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plugin(tmp_path_factory.mktemp("plugin"))


def test_checkpoint_of_a_plugin_is_evaluated_with_the_plugin(
    installed: Path, tmp_path: Path
) -> None:
    program = """
import polopt

config = {"env": "CartPole-v1", "num_workers": 0, "policy": "scaled_policy"}
trainer = polopt.PolicyOptimizerTrainer(config)
trainer.save("checkpoint")
trainer.stop()
"""
    saved = with_plugin(installed, "-c", program, cwd=tmp_path)
    assert saved.returncode == 0, saved.stderr
    # Without the plugin, evaluation fails with an error that names the plugin.
    evaluate = ["-m", CLI, "evaluate", "checkpoint", "--episodes", "1"]
    without = subprocess.run(
        [sys.executable, *evaluate], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert without.returncode == 2
    assert "key 'policy': got 'scaled_policy'" in without.stderr
    assert with_plugin(installed, *evaluate, cwd=tmp_path).returncode == 0


def test_installed_plugin_is_listed(installed: Path, tmp_path: Path) -> None:
    done = with_plugin(installed, "-m", CLI, "list", cwd=tmp_path)
    assert "  scaled_policy  A2C with a scaled loss\n" in done.stdout
    assert "Reports the number of its rounds" in done.stdout


def test_broken_plugin_fails_only_where_it_is_named(installed: Path, tmp_path: Path) -> None:
    train = ["-m", CLI, "train", "PolicyOptimizerTrainer", "env=CartPole-v1"]
    done = with_plugin(installed, *train, "optimizer=broken", cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such" in done.stderr
    assert done.stderr.count("\n") == 1
    done = with_plugin(installed, *train, "optimizer=unknown_name", cwd=tmp_path)
    assert "got 'unknown_name'" in done.stderr
