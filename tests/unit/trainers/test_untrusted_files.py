"""Tests with files of untrusted users. No reader blocks, uses up the memory, or prints control
characters."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import PARAMS, SMALL, refusal, resign, rewrite
from safetensors.torch import load_file

from polopt.common.files import open_regular, printable, read_regular
from polopt.trainers import checkpoints
from polopt.trainers.checkpoint_fields import read_trainer_state
from polopt.trainers.checkpoints import (
    TENSORS,
    CheckpointError,
    read_checkpoint,
    write_checkpoint,
)
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


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def sparse_file(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "state.json", TENSORS])
@pytest.mark.parametrize("make", [fifo, endless_device, sparse_file])
def test_only_regular_files_of_bounded_size_are_read(
    saved: Path, name: str, make: Callable[[Path], None]
) -> None:
    make(saved / name)
    message = refusal(saved)
    assert f"{name} cannot be read: " in message
    assert ("1,099,511,627,776 bytes" if make is sparse_file else "not a regular") in message
    trainer = PolicyOptimizerTrainer(SMALL)
    with pytest.raises(CheckpointError, match="cannot be read"):
        trainer.restore(str(saved))
    trainer.stop()


def test_files_change_while_they_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FIFO replaces the file after the first check."""
    path = tmp_path / "file"
    path.write_text("{}")
    real_open = os.open

    def replace(*arguments: Any) -> int:
        fifo(path)
        return real_open(*arguments)

    monkeypatch.setattr(os, "open", replace)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(path, 10)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_file_without_a_size_is_empty() -> None:
    assert read_regular(Path("/proc/self/maps"), 10**6) == b""


# ---- tensors ----------------------------------------------------------------------------------


def entry(dtype: str = "F32", shape: Any = (1,), start: int = 0, end: int = 4) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def packed(header: Any, data: bytes = b"1234", length: int | None = None) -> bytes:
    """Returns a file of safetensors. `header` is bytes, or an object that becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def twice(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    """Returns a header with two entries of the same name, once with an escape."""
    return f'{{"x": {json.dumps(first)}, "\\u0078": {json.dumps(second)}}}'.encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        packed({}, length=100),
        packed({}, length=(16 << 20) + 1),
        packed({}, length=2**63),
        packed({}, length=2**64 - 1),
        packed(b"no JSON"),
        packed(b'{"\xff": 1}'),
        packed(b'{"x": ' + b"[" * 100_000),
        packed([]),
        packed({"x": 3}),
        packed({"x": entry(end=8)}),
        packed({"x": entry(shape=[2])}),
        packed({"x": entry(shape=[1.5])}),
        packed({"x": entry(shape=[-1])}),
        packed({"x": entry(shape=[2**62, 8])}),
        packed({"x": entry(shape=[2**63, 2], end=0)}, b""),
        packed({"x": entry(shape=[0, 2**62, 2**62], end=0)}, b""),
        packed({"x": entry(shape=[10**9], end=4 * 10**9)}),
        packed({"x": entry("F4", shape=[8])}),
        packed({"x": entry("O")}),
        packed({"x": entry(start=-4, end=0)}),
        packed({"x": entry(), "y": entry()}),
        packed({"x": entry(), "y": entry(start=2, end=6)}, b"123456"),
        packed({"x": entry(), "y": entry(start=8, end=12)}, b"123456789012"),
        packed({"x": entry()}, b"12345678"),
        packed(twice(entry(), entry())),
        packed(twice(entry(), entry("I32"))),
        packed(twice(entry(), entry(start=4, end=8)), b"12345678"),
        pickle.dumps({"x": 1}),
    ],
)
def test_bad_file_of_tensors_is_one_error(saved: Path, data: bytes) -> None:
    (saved / TENSORS).write_bytes(data)
    resign(saved)
    tracemalloc.start()
    message = refusal(saved)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "tensors.safetensors does not hold plain tensors: " in message
    assert used < 20 << 20


def test_long_header_is_not_parsed(saved: Path) -> None:
    """Each name in it would cost a hundred times its size in memory."""
    header = json.dumps({"x": entry()}).encode()
    for size, said in ((1 << 20, "cannot be decoded as type"), (17 << 20, "its header has 17,8")):
        (saved / TENSORS).write_bytes(packed(header.ljust(size)))
        resign(saved)
        assert said in refusal(saved)


def test_every_cut_of_a_file_of_tensors_is_one_error(saved: Path) -> None:
    data = (saved / TENSORS).read_bytes()
    for end in (*range(0, 200, 7), *range(200, len(data), 997), len(data) - 1):
        (saved / TENSORS).write_bytes(data[:end])
        resign(saved)
        assert "does not hold plain tensors" in refusal(saved)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.uint64]
)
def test_parameters_of_another_dtype_are_one_error(saved: Path, dtype: torch.dtype) -> None:
    rewrite(saved, lambda t, _: t.update({PARAMS: torch.zeros(t[PARAMS].shape).to(dtype)}))
    assert "field 'optimizer/policy/params': got a tensor of " in refusal(saved)


def test_numbers_of_8_bits_are_checked(saved: Path) -> None:
    """`torch.isfinite` does not take this dtype."""
    numbers = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)
    rewrite(saved, lambda t, tree: tree["optimizer"].update(x={"__tensor__": "x"}))
    rewrite(saved, lambda t, tree: t.update(x=numbers))
    assert read_trainer_state(saved)["optimizer"]["x"].dtype == numbers.dtype
    rewrite(saved, lambda t, tree: t.update(x=(numbers.float() * torch.nan).to(numbers.dtype)))
    assert "field 'optimizer/x': got a tensor of float8_e4m3fn [2] with NaN" in refusal(saved)


def test_name_of_a_tensor_that_is_used_twice_is_saved(tmp_path: Path) -> None:
    """A path has only the beginning of a long key, so the paths of these tensors are the same."""
    keys = ["a key" * 40 + str(size) for size in range(3)]
    write_checkpoint(tmp_path, {key: torch.ones(size) for size, key in enumerate(keys)})
    assert len(load_file(tmp_path / TENSORS)) == 3
    read = read_checkpoint(tmp_path)
    assert [len(read[key]) for key in keys] == [0, 1, 2]


def test_views_are_saved_without_their_base_tensor(tmp_path: Path) -> None:
    numbers = torch.arange(10**6)
    write_checkpoint(tmp_path, {"few": numbers[:5], "same": numbers[:5], "grad": numbers[:2]})
    assert (tmp_path / TENSORS).stat().st_size < 10_000
    assert read_checkpoint(tmp_path)["same"].tolist() == [0, 1, 2, 3, 4]


def test_tensor_that_is_named_twice_is_one_error(saved: Path) -> None:
    """Each use of a tensor copies it, so a small file could take all memory."""
    write_checkpoint(saved, {"x": torch.ones(2), "y": torch.ones(3)})
    state = saved / "state.json"
    state.write_text(state.read_text().replace('": "y"', '": "x"'))
    resign(saved)
    assert "field 'y' cannot be decoded as type '__tensor__': KeyError" in refusal(saved)


def test_tensor_that_numpy_lacks_is_one_error(saved: Path) -> None:
    write_checkpoint(saved, {"x": torch.ones(2, dtype=torch.bfloat16)})
    state = saved / "state.json"
    state.write_text(state.read_text().replace("__tensor__", "__array__"))
    resign(saved)
    assert "field 'x' cannot be decoded as type '__array__': TypeError" in refusal(saved)


def test_checkpoint_that_is_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state in (
        ("state.json", {"text": "x" * 200}),
        (TENSORS, {"numbers": torch.zeros(100)}),
        ("header", {str(i): torch.zeros(()) for i in range(9)}),
    ):
        with monkeypatch.context() as limited:
            limited.setitem(checkpoints._MOST_BYTES, name, 100)
            with pytest.raises(CheckpointError, match=rf"{name} would have .* Allowed: 100"):
                write_checkpoint(tmp_path / "c", state)
    assert not (tmp_path / "c").exists()


# ---- names ------------------------------------------------------------------------------------

#: Sets the title of a terminal, and clears its screen.
ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e"


def test_printable_text_is_unchanged() -> None:
    for text in ("", "a path/with äöü 漢字 'quotes' \\x1b", 'checkpoint "c"'):
        assert printable(text) == text
    assert printable(ESCAPES) == r"\x1b]0;title\x07\x1b[2J\u202e"
    assert printable("two\nlines\udcff") == r"two\nlines\udcff"


def test_names_in_files_do_not_reach_the_terminal(saved: Path) -> None:
    rewrite(saved, lambda t, tree: tree["optimizer"].update({ESCAPES: float("nan")}))
    assert "x1b]0;title" in refusal(saved)
    rewrite(saved, lambda t, tree: tree.update(x={"__type__": ESCAPES}))
    assert "x1b]0;title" in refusal(saved)
    (saved / TENSORS).write_bytes(packed({ESCAPES: entry(start=2, end=6)}))
    resign(saved)
    assert "x1b]0;title" in refusal(saved)
