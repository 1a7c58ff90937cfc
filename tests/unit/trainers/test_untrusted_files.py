"""Tests with files of untrusted users. No reader blocks, uses up the memory, or prints control
characters."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import PARAMS, SMALL, resign, rewrite

from polopt.common.files import open_regular, printable, read_regular
from polopt.trainers import checkpoints
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from polopt.trainers.saved_trainer import read_trainer_state
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


def refusal(checkpoint: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_trainer_state(checkpoint)
    message = str(caught.value)
    assert str(checkpoint) in message
    assert message.isprintable()
    assert len(message) < 500 + len(str(checkpoint))
    return message


# ---- files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors.pt"])
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


def replace(make: Callable[[torch.Tensor], Any]) -> Callable[[Path], None]:
    """Returns a function that replaces the parameters in a checkpoint by another value."""
    return lambda path: rewrite(path, lambda t, _: t.update({PARAMS: make(t[PARAMS])}))


def compressed(path: Path) -> None:
    """Adds 4 MB of zeros to the file of tensors, compressed to a few KB."""
    tensors = torch.load(path / "tensors.pt", weights_only=True)
    packed = io.BytesIO()
    torch.save(tensors | {"/zeros": torch.zeros(10**6)}, packed)
    rezip(path, packed, lambda name, content: content, zipfile.ZIP_DEFLATED)


def rezip(
    path: Path,
    packed: io.BytesIO,
    change: Callable[[str, bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    with (
        zipfile.ZipFile(packed) as source,
        zipfile.ZipFile(path / "tensors.pt", "w", compression) as target,
    ):
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    resign(path)


class _Array:
    """An object that is pickled as the call `bytearray(size)`, which `weights_only` allows."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 20,)


def constructor(path: Path) -> None:
    """Writes a pickle that allocates a `bytearray` of a size that the pickle names."""

    def change(name: str, content: bytes) -> bytes:
        made = pickle.dumps({"x": _Array()}, protocol=2)
        return made.replace(b"__builtin__", b"builtins") if name.endswith("data.pkl") else content

    rezip(path, io.BytesIO((path / "tensors.pt").read_bytes()), change)


def long_pickle(path: Path) -> None:
    def change(name: str, content: bytes) -> bytes:
        return content + b"\x00" * (17 << 20) if name.endswith("data.pkl") else content

    rezip(path, io.BytesIO((path / "tensors.pt").read_bytes()), change)


def upper_case(path: Path) -> None:
    """Writes the name of the pickle in upper case. torch's reader ignores case."""
    source = io.BytesIO((path / "tensors.pt").read_bytes())
    with (
        zipfile.ZipFile(source) as archive,
        zipfile.ZipFile(path / "tensors.pt", "w") as target,
    ):
        for name in archive.namelist():
            target.writestr(name.replace("data.pkl", "DATA.pkl"), archive.read(name))
    resign(path)


def quantized(tensor: torch.Tensor) -> torch.Tensor:
    if not hasattr(torch, "quantize_per_tensor"):
        pytest.skip("this version of torch has no quantized tensors")
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (replace(lambda p: p[:1].expand(1 << 20)), "of shape [1048576] with strides [0]"),
        (
            replace(lambda p: p.to("meta")),
            "its pickle refers to 'torch._utils _rebuild_meta_tensor",
        ),
        (replace(quantized), "its pickle refers to 'torch._utils _rebuild_qtensor'"),
        (
            replace(lambda p: p.to_sparse()),
            "its pickle refers to 'torch._utils _rebuild_sparse_tensor'",
        ),
        (replace(lambda p: {"nested": p}), "got a dict. Allowed: a dense tensor"),
        (replace(lambda p: p[::2]), "with strides [2]"),
        (lambda path: rewrite(path, lambda t, _: t.update({3: t[PARAMS]})), "a name of type int"),
        (compressed, "its entries are larger than the file"),
        (constructor, "its pickle refers to 'builtins bytearray'"),
        (long_pickle, "its pickle has 17,"),
        (upper_case, "it has an entry 'archive/DATA.pkl'"),
    ],
)
def test_tensors_take_no_more_memory_than_their_file(
    saved: Path, change: Callable[[Path], None], said: str
) -> None:
    change(saved)
    assert said in refusal(saved)


def test_aliases_of_one_tensor_are_refused(saved: Path) -> None:
    """Each name costs a few bytes in the file, but checking each tensor takes its full size."""
    rewrite(saved, lambda t, _: t.update({f"/{i}": t[PARAMS] for i in range(1000)}))
    assert "need more bytes than the file has" in refusal(saved)


def test_views_are_saved_without_their_base_tensor(tmp_path: Path) -> None:
    numbers = torch.arange(10**6)
    write_checkpoint(tmp_path, {"few": numbers[:5], "same": numbers[:5], "grad": numbers[:2]})
    assert (tmp_path / "tensors.pt").stat().st_size < 10_000
    assert read_checkpoint(tmp_path)["same"].tolist() == [0, 1, 2, 3, 4]


def test_tensor_that_is_named_twice_is_one_error(saved: Path) -> None:
    """Each use of a tensor copies it, so a small file could take all memory."""
    write_checkpoint(saved, {"x": torch.ones(2), "y": torch.ones(3)})
    state = saved / "state.json"
    state.write_text(state.read_text().replace('"/y"', '"/x"'))
    resign(saved)
    assert "names a tensor that cannot be used: KeyError" in refusal(saved)


def test_tensor_that_numpy_lacks_is_one_error(saved: Path) -> None:
    write_checkpoint(saved, {"x": torch.ones(2, dtype=torch.bfloat16)})
    state = saved / "state.json"
    state.write_text(state.read_text().replace("__tensor__", "__array__"))
    resign(saved)
    assert "names a tensor that cannot be used: TypeError" in refusal(saved)


def test_checkpoint_that_is_too_large_to_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, state in (
        ("state.json", {"text": "x" * 200}),
        ("tensors.pt", {"numbers": torch.zeros(100)}),
        ("data.pkl", {str(i): torch.zeros(()) for i in range(9)}),
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
    rewrite(saved, lambda t, tree: t.update({ESCAPES: {}}))
    assert "x1b]0;title" in refusal(saved)
