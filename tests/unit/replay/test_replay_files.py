"""A replay buffer that is saved and loaded continues bit for bit. `save` writes only files whose
rows have changed, and `load` refuses damaged files."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_streams import GAMMA, Streams, fragment, with_state

from polopt.common.config import ConfigError
from polopt.replay import row_store
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.replay.row_store import RowFilesError, saved_specs
from polopt.trainers.checkpoints import read_checkpoint, write_checkpoint

KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"n_step": 3},
    "prioritized": {"n_step": 3, "alpha": 0.6},
    "ranged": {"n_step": (1, 3)},
    "sequences": {"unit": "sequence", "sequence_length": 6},
    "prioritized sequences": {"unit": "sequence", "sequence_length": 6, "alpha": 0.6},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `save` write files of about 20 rows."""
    monkeypatch.setattr(row_store, "_FILE_BYTES", 420)


def made(kind: str, capacity: int = 200, seed: int = 0) -> ReplayBuffer:
    return ReplayBuffer(capacity, GAMMA, seed=seed, **KINDS[kind])


def use(buffer: ReplayBuffer, streams: Streams, steps: int) -> list[Any]:
    """Adds fragments, draws rows, and sets priorities. Returns all drawn rows."""
    drawn: list[Any] = []
    for _ in range(steps):
        rng = streams.rng
        worker, gap = int(rng.integers(1, 4)), bool(rng.random() < 0.2)
        batch, _ = streams.fragment(worker, int(rng.integers(1, 6)), 2, gap)
        buffer.add(with_state(batch))
        if not buffer.num_drawable:
            continue
        if buffer.unit == "sequence":
            found = buffer.sample_sequences(8)
            drawn += [found.batch.all_obs, *found.batch.columns.values()]
            drawn += [found.batch.per_env["state"], found.weights, found.indices]
            buffer.update_priorities(found.indices, rng.random(8))
        else:
            rows = buffer.sample(8)
            drawn += rows
            buffer.update_priorities(rows.indices, rng.random(8))
    return drawn


def through_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    write_checkpoint(folder, {"replay": state})
    found: dict[str, Any] = read_checkpoint(folder)["replay"]
    return found


@every_kind
@pytest.mark.parametrize("before", [0, 5, 60])
def test_loaded_buffer_continues_bit_for_bit(tmp_path: Path, kind: str, before: int) -> None:
    buffer, streams = made(kind), Streams("same_step", 1)
    use(buffer, streams, before)
    state = through_checkpoint(buffer.save(tmp_path / "rows"), tmp_path / "checkpoint")
    again, same_streams = made(kind, seed=9), copy.deepcopy(streams)
    use(again, Streams("next_step", 2), 3)  # `load` replaces these rows
    again.load(tmp_path / "rows", state)
    assert (again.num_rows, again.num_drawable) == (buffer.num_rows, buffer.num_drawable)
    expected, found = use(buffer, streams, 60), use(again, same_streams, 60)
    assert len(expected) == len(found) > 100
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)
    last = [made_of.save(tmp_path / name) for made_of, name in ((buffer, "a"), (again, "b"))]
    assert last[0]["rows"] == last[1]["rows"]


def as_older_versions_saved(tail: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of the end of a stream in which `steps` has the rows of environment 0, and
    the rows of the other environments follow."""
    older = {key: value for key, value in tail.items() if key != "rows"}
    older["steps"] = tail["rows"][:, 0].tolist()
    np.testing.assert_array_equal(tail["rows"] - tail["rows"][:, :1], [[0, 1]] * len(tail["rows"]))
    return older


@every_kind
def test_buffer_that_an_older_version_saved_continues_bit_for_bit(
    tmp_path: Path, kind: str
) -> None:
    buffer, streams = made(kind), Streams("same_step", 1)
    use(buffer, streams, 5)
    state = buffer.save(tmp_path / "rows")
    assert max(len(tail["rows"]) for tail in state["tails"]) > 1
    older = {**state, "tails": [as_older_versions_saved(tail) for tail in state["tails"]]}
    again, same_streams = made(kind, seed=9), copy.deepcopy(streams)
    again.load(tmp_path / "rows", through_checkpoint(older, tmp_path / "checkpoint"))
    for one, other in zip(use(buffer, streams, 20), use(again, same_streams, 20), strict=True):
        np.testing.assert_array_equal(one, other)


@every_kind
def test_later_save_does_not_change_an_earlier_save(tmp_path: Path, kind: str) -> None:
    buffer, streams = made(kind), Streams("same_step", 1)
    use(buffer, streams, 40)
    state = through_checkpoint(buffer.save(tmp_path / "first"), tmp_path / "state")
    remembered = copy.deepcopy(streams)
    expected = use(buffer, streams, 30)
    buffer.save(tmp_path / "second")
    use(buffer, streams, 30)
    buffer.save(tmp_path / "third")
    again = made(kind)
    again.load(tmp_path / "first", state)
    for one, other in zip(expected, use(again, remembered, 30), strict=True):
        np.testing.assert_array_equal(one, other)


def written_between(one: Path, other: Path) -> int:
    """Returns the number of files in `other` that are not hard links to files in `one`."""
    known = {path.stat().st_ino for path in one.glob("rows-*")}
    return sum(path.stat().st_ino not in known for path in other.glob("rows-*"))


def test_only_changed_files_are_written(tmp_path: Path) -> None:
    buffer = ReplayBuffer(2000, GAMMA)
    for first in range(0, 1200, 4):
        buffer.add(fragment(first))
    buffer.save(tmp_path / "a")
    assert len(list((tmp_path / "a").iterdir())) == 100
    buffer.add(fragment(1200))  # writes 8 rows, and links the 2 rows before them to the new rows
    buffer.save(tmp_path / "b")
    assert written_between(tmp_path / "a", tmp_path / "b") in (1, 2)
    buffer.save(tmp_path / "b")  # a second save into the same folder writes nothing
    buffer.save(tmp_path / "c")
    assert written_between(tmp_path / "b", tmp_path / "c") == 0
    again = ReplayBuffer(2000, GAMMA)
    again.load(tmp_path / "c", buffer.save(tmp_path / "c"))
    again.save(tmp_path / "d")
    assert written_between(tmp_path / "c", tmp_path / "d") == 0


def test_files_that_are_gone_are_written_again(tmp_path: Path) -> None:
    buffer = ReplayBuffer(200, GAMMA)
    buffer.add(fragment(0, steps=80))
    buffer.save(tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        path.unlink()
    again = ReplayBuffer(200, GAMMA)
    again.load(tmp_path / "b", buffer.save(tmp_path / "b"))
    assert again.num_rows == 160


def test_save_does_not_copy_the_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_store, "_FILE_BYTES", 1 << 20)
    buffer = ReplayBuffer(100_000, GAMMA)
    batch = fragment(0, steps=25_000, envs=4)
    batch.all_obs = np.zeros((25_001, 4, 64), dtype=np.float32)
    batch.successor_obs = np.zeros((0, 64), dtype=np.float32)
    buffer.add(batch)
    tracemalloc.start()
    try:
        state = buffer.save(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert buffer.nbytes > 27_000_000
    assert peak < 1_000_000
    again = ReplayBuffer(100_000, GAMMA)
    again.load(tmp_path, state)
    assert again.num_rows == 100_000


def test_state_without_rows_is_restored(tmp_path: Path) -> None:
    """The buffer continues with its counts and its random generator, but it is empty."""
    buffer = ReplayBuffer(100, GAMMA, alpha=0.6, beta_rows=100)
    buffer.add(fragment(0))
    buffer.update_priorities(buffer.sample(4).indices, np.full(4, 3.0))
    again = ReplayBuffer(100, GAMMA, alpha=0.6, beta_rows=100)
    again.set_state(through_checkpoint(buffer.get_state(), tmp_path))
    assert again.num_rows == 0
    assert again.beta_now == buffer.beta_now > 0.4
    assert again.stats()["max_priority"] == 3.0
    again.add(fragment(4))
    buffer.set_state(buffer.get_state())
    buffer.add(fragment(4))
    np.testing.assert_array_equal(buffer.sample(9).indices, again.sample(9).indices)


def test_saved_rows_are_drawn_with_the_changed_exponent(tmp_path: Path) -> None:
    """The priorities of the rows stay the same. Their probabilities follow from the new options."""
    old: dict[str, Any] = {"alpha": 0.6, "priority_epsilon": 1e-6}
    new: dict[str, Any] = {"alpha": 1.5, "priority_epsilon": 0.1}
    errors = np.linspace(0.0, 3.0, 30)
    buffers = [ReplayBuffer(200, GAMMA, **options) for options in (old, new)]
    for buffer in buffers:
        buffer.add(fragment(0, steps=31, envs=1))
        buffer.update_priorities(np.arange(30), errors)
    state = through_checkpoint(buffers[0].save(tmp_path), tmp_path)
    again = ReplayBuffer(200, GAMMA, **new)
    again.load(tmp_path, state)
    leaves = again._priorities.tree.leaves[:30]
    np.testing.assert_allclose(leaves, (errors + 0.1) ** 1.5, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(
        leaves, buffers[1]._priorities.tree.leaves[:30], rtol=1e-9, atol=1e-10
    )
    for key in ("alpha", "priority_epsilon"):  # a state of an older version has no such keys
        del state[key]
    again.load(tmp_path, state)
    np.testing.assert_array_equal(again._priorities.tree.leaves, buffers[0]._priorities.tree.leaves)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.parametrize("damage", [flip, grow, Path.unlink])
@pytest.mark.parametrize("name", ["rows-000001.bin", "priorities.bin"])
def test_damaged_files_are_refused(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    buffer = ReplayBuffer(200, GAMMA, alpha=0.6)
    buffer.add(fragment(0, steps=40))
    state = buffer.save(tmp_path)
    damage(tmp_path / name)
    with pytest.raises(RowFilesError, match=name):
        ReplayBuffer(200, GAMMA, alpha=0.6).load(tmp_path, state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state["rows"]["files"].pop(),
        lambda state: state["rows"]["files"][0].update(rows=10**6),
        lambda state: state["rows"]["files"][1].update(rows=1),
        lambda state: state["rows"]["columns"].update(obs=[[1], "|O"]),
        lambda state: state["rows"]["columns"].update(obs=[[1], "<f3"]),
        lambda state: state["rows"]["columns"].update(obs=[[1], "|b9"]),
        lambda state: state["rows"]["columns"].update(obs=[[1], ""]),
        lambda state: state["rows"]["columns"].update(obs=[[-1], "<f4"]),
        lambda state: state["tails"][0].update(next_obs=np.zeros((1, 4), np.uint8)),
        lambda state: state["rows"]["columns"].update(flags=[[], "<i8"]),
        lambda state: state["rows"]["columns"].pop("next"),
        lambda state: state.update(end=3),
    ],
)
def test_state_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    buffer = ReplayBuffer(200, GAMMA)
    buffer.add(fragment(0, steps=40))
    state = buffer.save(tmp_path)
    change(state)
    with pytest.raises(RowFilesError):
        ReplayBuffer(200, GAMMA).load(tmp_path, state)


@pytest.mark.parametrize("dtype", ["<U1", "<M8[s]", [["x", "|O", []]], [["x", "<U1", []]], [[1]]])
def test_rows_are_numbers(dtype: Any) -> None:
    with pytest.raises(RowFilesError, match="column 'obs': invalid; got shape"):
        saved_specs({"columns": {"obs": [[1], dtype]}})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity": 100}, "'replay_capacity': got 100; allowed: 200, the value of the saved"),
        ({"n_step": 2}, "'n_step': got 2; allowed: 1"),
        ({"alpha": 0.6}, "'prioritized_replay': got True; allowed: False"),
        ({"unit": "sequence", "sequence_length": 40}, "'replay_unit': got 'sequence'"),
    ],
)
def test_buffer_of_another_kind_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    buffer = ReplayBuffer(200, GAMMA)
    buffer.add(fragment(0, steps=40))
    state = buffer.save(tmp_path)
    with pytest.raises(ConfigError, match=said):
        ReplayBuffer(**{"capacity": 200, "gamma": GAMMA, **options}).load(tmp_path, state)


def test_edited_ends_of_streams_are_refused(tmp_path: Path) -> None:
    buffer = made("uniform")
    use(buffer, Streams("same_step", 1), 60)
    state = buffer.save(tmp_path / "rows")
    state["tails"][0]["nodes"] = state["tails"][0]["nodes"] + 10**12
    with pytest.raises(RowFilesError, match="ends of the streams"):
        made("uniform").load(tmp_path / "rows", state)
