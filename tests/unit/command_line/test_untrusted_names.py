"""Control characters in files and names do not reach the terminal."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoint_helpers import SMALL
from typer.testing import CliRunner

from polopt.command_line.cli import app
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: A reader that waits for a FIFO would wait forever. Each test therefore has 60 seconds.
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = PolicyOptimizerTrainer(SMALL)
    made.train()
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    made.save(str(path))
    made.stop()
    return path


@pytest.fixture
def saved(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "c"))


#: Sets the title of a terminal, and clears its screen.
ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"


@pytest.mark.parametrize("arguments", [["evaluate"], ["train", "cartpole_a3c", "--restore"]])
def test_names_of_directories_do_not_reach_the_terminal(saved: Path, arguments: list[str]) -> None:
    folder = saved.rename(saved.with_name(f"c{ESCAPES}"))
    (folder / "tensors.safetensors").write_bytes(b"")
    done = CliRunner().invoke(app, [*arguments, str(folder)])
    assert done.exit_code == 2
    assert r"c\x1b]0;title" in done.stderr
    assert done.stderr.removesuffix("\n").isprintable()


def test_evaluated_checkpoint_is_printed_without_escapes(saved: Path) -> None:
    folder = saved.rename(saved.with_name(f"c{ESCAPES}"))
    done = CliRunner().invoke(app, ["evaluate", str(folder), "--episodes", "1"])
    assert done.exit_code == 0, done.output
    assert "\x1b" not in done.stdout
    assert r"c\x1b]0;title" in done.stdout


def test_file_that_is_not_regular_is_one_error(saved: Path) -> None:
    (saved / "state.json").unlink()
    os.mkfifo(saved / "state.json")
    evaluated = CliRunner().invoke(app, ["evaluate", str(saved)])
    assert evaluated.exit_code == 2
    assert "cannot be read" in evaluated.stderr
