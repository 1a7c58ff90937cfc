"""Tests of the further files of a checkpoint, for example the files of a replay buffer. A
checkpoint with a damaged file is refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import (
    TENSORS,
    CheckpointError,
    DamagedCheckpoint,
    check_further_files,
    read_checkpoint,
    write_checkpoint,
)
from polopt.trainers.find_checkpoint import read_or_fall_back

ROWS = bytes(range(256)) * 20_000  # larger than one read of `check_further_files`


def state_of(number: int) -> dict[str, Any]:
    params = torch.full((5,), float(number))
    return {"config": {}, "optimizer": {"policy": {"params": params}, "number": number}}


def adds(**files: bytes) -> Callable[[Path], dict[str, str]]:
    """Returns a function that writes files under the names of the arguments."""

    def add_files(directory: Path) -> dict[str, str]:
        directory.mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)
        return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    return add_files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Returns the second of two checkpoints of a trial."""
    for number in (0, 1):
        directory = tmp_path / f"checkpoint_{number:06d}"
        write_checkpoint(directory, state_of(number), adds(rows=ROWS, more=b"x"))
    return directory


def test_manifest_has_the_sums_of_all_files(saved: Path) -> None:
    sums = json.loads((saved / "manifest.json").read_text())["sha256"]
    assert set(sums) == {TENSORS, "state.json", "replay/rows", "replay/more"}
    for name, expected in sums.items():
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == expected
    check_further_files(saved)


def remove(saved: Path) -> None:
    (saved / "replay" / "more").unlink()


def flip_a_bit(saved: Path) -> None:
    data = bytearray(ROWS)
    data[-1] ^= 1
    (saved / "replay" / "rows").write_bytes(data)


def cut_off(saved: Path) -> None:
    (saved / "replay" / "rows").write_bytes(ROWS[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove, "replay/more is missing"),
        (flip_a_bit, "the SHA-256 of replay/rows differs"),
        (cut_off, "the SHA-256 of replay/rows differs"),
    ],
)
def test_damage_of_a_file_falls_back_to_the_checkpoint_before(
    saved: Path, damage: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(saved)
    with pytest.raises(DamagedCheckpoint, match=said):
        check_further_files(saved)
    with caplog.at_level(logging.WARNING, "polopt"):
        found, state = read_or_fall_back(saved)
    assert found.name == "checkpoint_000000"
    assert state["optimizer"]["number"] == 0
    assert said in caplog.text


def test_a_policy_is_read_without_the_further_files(saved: Path) -> None:
    flip_a_bit(saved)
    assert read_trainer_state(saved)["optimizer"]["number"] == 1


def test_fallback_skips_a_checkpoint_with_a_damaged_file(saved: Path) -> None:
    flip_a_bit(saved)
    flip_a_bit(saved.with_name("checkpoint_000000"))
    with pytest.raises(DamagedCheckpoint):
        read_or_fall_back(saved)


@pytest.mark.parametrize("name", ["replay/../../x", "/etc/passwd", "replay/", "replay/a/b", "x"])
def test_manifest_with_other_names_of_files_is_refused(saved: Path, name: str) -> None:
    content = json.loads((saved / "manifest.json").read_text())
    content["sha256"][name] = "0"
    del content["seal"]
    (saved / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"manifest\.json names"):
        check_further_files(saved)


def test_fifo_is_refused(saved: Path) -> None:
    (saved / "replay" / "more").unlink()
    os.mkfifo(saved / "replay" / "more")
    with pytest.raises(CheckpointError, match="replay/more cannot be read: not a regular file"):
        check_further_files(saved)


def test_checkpoint_without_further_files_replaces_one_with_them(saved: Path) -> None:
    write_checkpoint(saved, state_of(2))
    assert sorted(path.name for path in saved.iterdir()) == [
        "manifest.json",
        "state.json",
        TENSORS,
    ]
    check_further_files(saved)
    assert read_checkpoint(saved)["optimizer"]["number"] == 2


def test_a_failed_write_leaves_no_complete_checkpoint(saved: Path) -> None:
    def full(directory: Path) -> dict[str, str]:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="No space left on device"):
        write_checkpoint(saved, state_of(2), full)
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is missing"):
        read_checkpoint(saved)


def test_sparse_file_is_not_hashed(saved: Path) -> None:
    name = next((saved / "replay").iterdir())
    with name.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="almost all of them holes"):
        check_further_files(saved)


def test_tensor_may_be_used_only_once(tmp_path: Path) -> None:
    """Otherwise, a space or a config with many uses of one array could take all memory."""
    write_checkpoint(tmp_path, {"low": np.zeros(3), "high": np.ones(3)})
    text = (tmp_path / "state.json").read_text().replace('": "high"', '": "low"')
    (tmp_path / "state.json").write_text(text)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["sha256"]["state.json"] = hashlib.sha256(text.encode()).hexdigest()
    del manifest["seal"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="cannot be decoded as type '__array__': KeyError"):
        read_checkpoint(tmp_path)
