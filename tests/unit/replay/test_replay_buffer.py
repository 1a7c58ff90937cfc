"""Rows of a replay buffer equal closed forms: episode ends in every autoreset mode, borders of
fragments, interrupted streams, a ring that wraps, priorities and sequences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_streams import GAMMA, Streams, fragment, with_state
from toy_envs import AUTORESET, make_policy, make_sampler, sync_clocks

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Transitions
from polopt.metrics.memory import Memory
from polopt.replay import row_store
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.replay.row_store import ColumnSpec

LENGTHS = [5, 7]  # of the episodes of two environments

every_mode = pytest.mark.parametrize("mode", AUTORESET)
every_n = pytest.mark.parametrize("n", [1, 3])
every_alpha = pytest.mark.parametrize("alpha", [None, 0.6])


def drawn(buffer: ReplayBuffer, count: int = 3000) -> Transitions:
    """Draws enough rows to see every row of a small buffer."""
    return buffer.sample(count)


def places(rows: Transitions) -> set[int]:
    """Returns the distinct observations of rows."""
    return set(rows.obs.reshape(len(rows.obs), -1)[:, 0].astype(int).tolist())


# ---- episode ends, with the real sampler --------------------------------------------------------


@every_alpha
@every_n
@every_mode
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
@pytest.mark.parametrize("length", [1, 5, 6, 16])
def test_rows_equal_closed_form(
    mode: str, ends: str, n: int, length: int, alpha: float | None
) -> None:
    """The episodes have 5 and 7 steps with a reward of 1, and the observation is the time. The ring
    wraps at different steps of the episodes."""
    env = sync_clocks(LENGTHS, ends, mode)
    sampler = make_sampler(env, make_policy("a2c", env), length)
    buffer = ReplayBuffer(61, GAMMA, n, alpha=alpha)
    for _ in range(-(-100 // length)):
        buffer.add(sampler.sample())
    rows = drawn(buffer)
    now, after = rows.obs, rows.next_obs
    steps = after - now
    # An observation does not identify its environment. But only 7-step episodes have times of 5 and
    # 6, and a window that ends early shows the length of its episode.
    assert set(np.unique(now)) == set(range(7))
    cut = rows.discounts == 0 if ends == "terminated" else steps < n
    if ends == "truncated":
        assert (steps >= 1).all()
        assert (steps <= n).all()
        assert np.isin(after[cut], LENGTHS).all()
        np.testing.assert_allclose(rows.discounts, GAMMA**steps, rtol=1e-6)
        np.testing.assert_allclose(rows.rewards, (1 - GAMMA**steps) / (1 - GAMMA), rtol=1e-6)
    else:
        np.testing.assert_allclose(rows.discounts[~cut], GAMMA**n, rtol=1e-6)
        np.testing.assert_array_equal(steps[~cut], n)
        full = (1 - GAMMA**n) / (1 - GAMMA)
        np.testing.assert_allclose(rows.rewards[~cut], full, rtol=1e-6)
        # One of these two numbers is the length of the window, from 1 to n.
        left = [length - now[cut] for length in LENGTHS]
        sums = [(1 - GAMMA**steps) / (1 - GAMMA) for steps in left]
        fits = [
            np.isclose(rows.rewards[cut], total, rtol=1e-6) & (steps >= 1) & (steps <= n)
            for steps, total in zip(left, sums, strict=True)
        ]
        assert (fits[0] | fits[1]).all()
    # A window of n steps that ends exactly at the truncation is not shortened.
    shortened = n if ends == "terminated" else n - 1
    expected = {t for total in LENGTHS for t in range(total - shortened, total)}
    assert set(now[cut].tolist()) == expected


def test_number_of_steps_is_drawn_for_each_row() -> None:
    """As in the closed form above, with windows of 2 to 4 steps."""
    env = sync_clocks(LENGTHS, "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 6)
    buffer = ReplayBuffer(61, GAMMA, (2, 4))
    for _ in range(17):
        buffer.add(sampler.sample())
    rows = drawn(buffer)
    steps = rows.next_obs - rows.obs
    np.testing.assert_allclose(rows.discounts, GAMMA**steps, rtol=1e-6)
    np.testing.assert_allclose(rows.rewards, (1 - GAMMA**steps) / (1 - GAMMA), rtol=1e-6)
    early = rows.obs <= min(LENGTHS) - 4  # whose windows no episode ends
    _, counts = np.unique(steps[early], return_counts=True)
    assert set(np.unique(steps[early])) == {2, 3, 4}
    assert (np.abs(counts / early.sum() - 1 / 3) < 0.06).all()


# ---- any stream equals a slow reference ---------------------------------------------------------


class Reference:
    """A slow replay buffer, which keeps all steps in lists and walks through them for each row.

    A step is a dict with `obs`, `reward`, `terminated`, `truncated`, `valid`, and `own`, which is
    the successor or None. A stream has a list of steps for each environment, and the observation
    after the last step.
    """

    def __init__(self, capacity: int, n: int) -> None:
        self.capacity, self.n = capacity, n
        self.ring: list[float | None] = []  # the observation of each step, or None for a successor
        self.streams: list[dict[str, Any]] = []
        self.open: dict[int, dict[str, Any]] = {}

    def add(self, batch: SampleBatch, follows: bool) -> None:
        stream = self.open.get(batch.worker_index)
        if stream is not None and not follows:
            self._end(stream)
        if stream is None or not follows:
            stream = {"envs": [[] for _ in range(batch.shape[1])], "ended": False}
            self.streams.append(stream)
            self.open[batch.worker_index] = stream
        own = dict(zip(batch.successor_index.tolist(), batch.successor_obs[:, 0], strict=True))
        steps, envs = batch.shape
        for t in range(steps):
            for e in range(envs):
                step = {name: batch[name][t, e] for name in batch.columns}
                step |= {"obs": batch.obs[t, e, 0], "own": own.get(t * envs + e)}
                stream["envs"][e].append(step)
                self.ring.append(step["obs"])
        terminated = batch["terminated"].reshape(-1)
        self.ring += [None for row in own if not terminated[row]]
        stream["last"] = batch.bootstrap_obs[:, 0]

    def _end(self, stream: dict[str, Any]) -> None:
        stream["ended"] = True
        for steps in stream["envs"]:
            if not steps[-1]["terminated"] and steps[-1]["own"] is None:
                self.ring.append(None)

    def rows(self) -> dict[float, tuple[float, float, float | None]]:
        """Returns the n-step return, discount and next observation of each row that can be drawn,
        by the observation of the row."""
        kept = {obs for obs in self.ring[-self.capacity :] if obs is not None}
        found = {}
        for stream in self.streams:
            for steps, last in zip(stream["envs"], stream["last"], strict=True):
                for i, step in enumerate(steps):
                    row = self._row(steps, i, last if stream["ended"] else None)
                    if step["valid"] and row is not None and step["obs"] in kept:
                        found[step["obs"]] = row
        return found

    def _row(
        self, steps: list[dict[str, Any]], i: int, last: float | None
    ) -> tuple[float, float, float | None] | None:
        total = 0.0
        for k in range(self.n):
            step = steps[i + k]
            total += GAMMA**k * step["rewards"]
            if step["terminated"]:
                return total, 0.0, None
            if step["own"] is not None:
                return total, GAMMA ** (k + 1), step["own"]
            if i + k + 1 == len(steps):  # nothing is known after it, unless the stream has ended
                return None if last is None else (total, GAMMA ** (k + 1), last)
            following = steps[i + k + 1]
            if step["truncated"] or not following["valid"] or k == self.n - 1:
                return total, GAMMA ** (k + 1), following["obs"]
        return None


additions = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.booleans()),
    min_size=1,
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["next_step", "same_step"]),
    st.integers(1, 4),
    st.integers(40, 120),
    st.sampled_from([None, 0.7]),
    additions,
    st.integers(0, 10**6),
)
def test_random_streams_equal_slow_reference(
    mode: str, n: int, capacity: int, alpha: float | None, added: list[Any], seed: int
) -> None:
    streams, reference = Streams(mode, seed), Reference(capacity, n)
    buffer = ReplayBuffer(capacity, GAMMA, n, seed=seed, alpha=alpha)
    for worker, steps, envs, gap in added:
        batch, follows = streams.fragment(worker, steps, envs, gap)
        assert buffer.add(batch) == batch.env_steps
        reference.add(batch, follows)
        expected = reference.rows()
        assert buffer.num_drawable == len(expected)
        kept = reference.ring[-capacity:]
        assert buffer.stats()["fill"] == len(kept) / capacity
        if not expected:
            with pytest.raises(ValueError, match="nothing can be drawn yet"):
                buffer.sample(1)
            continue
        rows = drawn(buffer, 1500)
        assert set(rows.obs[:, 0].tolist()) == set(expected)
        for obs, reward, discount, next_obs in zip(
            rows.obs[:200, 0], rows.rewards, rows.discounts, rows.next_obs[:, 0], strict=False
        ):
            total, power, following = expected[float(obs)]
            assert reward == pytest.approx(total, abs=1e-5)
            assert discount == pytest.approx(power)
            assert following is None or next_obs == following


# ---- streams ------------------------------------------------------------------------------------


def test_last_rows_wait_for_the_next_fragment() -> None:
    """A row with a window of three steps waits until the observation after its window is stored.
    The next fragment stores the observation after the last step."""
    buffer = ReplayBuffer(100, GAMMA, 3)
    buffer.add(fragment(0))
    assert places(drawn(buffer)) == {0, 1000}
    buffer.add(fragment(4))
    rows = drawn(buffer)
    assert places(rows) == {*range(5), *range(1000, 1005)}
    np.testing.assert_array_equal(rows.next_obs - rows.obs, 3.0)


@pytest.mark.parametrize(
    "change",
    [
        {"place": (8, 4)},  # a worker that was replaced
        {"place": (7, 8)},  # a fragment was lost
        {"place": (7, 3)},
        {"place": None},
    ],
)
def test_no_window_reaches_into_a_fragment_that_does_not_follow(change: dict[str, Any]) -> None:
    buffer = ReplayBuffer(100, GAMMA, 3)
    buffer.add(fragment(0))
    buffer.add(fragment(4, **change))
    rows = drawn(buffer)
    assert places(rows) == {*range(5), *range(1000, 1005)}
    steps = (rows.next_obs - rows.obs)[:, 0]
    first = rows.obs[:, 0] % 1000 < 4
    np.testing.assert_array_equal(steps[first], np.minimum(3, 4 - rows.obs[first, 0] % 1000))
    np.testing.assert_allclose(rows.discounts, GAMMA**steps, rtol=1e-6)
    assert buffer.stats()["num_gaps"] == 1


def test_equal_observations_do_not_make_a_fragment_follow() -> None:
    buffer = ReplayBuffer(100, GAMMA, 1)
    buffer.add(fragment(0))
    # The first observation of this fragment equals the last observation of the first fragment.
    buffer.add(fragment(4, place=(9, 0)))
    assert buffer.stats()["num_gaps"] == 1


def test_argument_follows_overrides_places() -> None:
    buffer = ReplayBuffer(100, GAMMA, 3)
    buffer.add(fragment(0, place=None))
    buffer.add(fragment(4, place=None), follows=True)
    assert buffer.stats()["num_gaps"] == 0
    buffer.cut(1)
    buffer.cut(5)
    assert buffer.num_drawable == buffer.num_rows == 16
    assert buffer.stats()["num_gaps"] == 1


def test_workers_progress_at_their_own_speed() -> None:
    buffer = ReplayBuffer(100, GAMMA, 3)
    for first, worker in ((0, 1), (0, 2), (4, 1), (8, 1), (12, 1), (4, 2)):
        batch = fragment(first, envs=1, worker_index=worker, place=(worker, first))
        batch.all_obs += 100 * worker
        buffer.add(batch)
    rows = drawn(buffer)
    assert places(rows) == {*range(100, 113), *range(200, 205)}
    np.testing.assert_array_equal(rows.next_obs - rows.obs, 3.0)


def test_other_rows_in_the_places_of_a_waiting_stream_stay_as_they_are() -> None:
    """The ring overwrites the last rows of worker 1 before its next fragment arrives."""
    for capacity in range(8, 16):
        buffer, ring = ReplayBuffer(capacity, GAMMA, 3), []
        for first, worker in ((0, 1), (0, 2), (4, 2), (4, 1)):
            batch = fragment(first, envs=1, worker_index=worker, place=(worker, first))
            batch.all_obs += 100 * worker
            buffer.add(batch)
            ring += batch.obs[:, 0, 0].tolist()
        expected = {*range(100, 105), *range(200, 205)} & set(ring[-capacity:])
        rows = drawn(buffer, 300)
        assert places(rows) == expected
        assert buffer.num_drawable == len(expected)
        np.testing.assert_array_equal(rows.next_obs - rows.obs, 3.0)
        step = rows.obs[:, 0] % 100
        returns = step + GAMMA * (step + 1) + GAMMA**2 * (step + 2)
        np.testing.assert_allclose(rows.rewards, returns, rtol=1e-5)


def test_sampler_sets_places_of_fragments() -> None:
    env = sync_clocks([50, 60], "truncated", "same_step")
    sampler = make_sampler(env, make_policy("a2c", env), 4)
    first, second = sampler.sample(), sampler.sample(steps=3)
    third = sampler.sample()
    assert second.place == first.next_place != first.place
    assert third.place == second.next_place
    assert third.steps(1, 3).place == (third.place[0], third.place[1] + 1)
    saved = sampler.get_state()
    sampler.reset_some(np.array([True, False]))
    sampler.leave_gap()
    assert sampler.sample().place != third.next_place
    sampler.reset()
    assert sampler.sample().place[0] == first.place[0]
    if saved is not None:
        sampler.set_state(saved)
        assert sampler.sample().place == third.next_place
    other = make_sampler(env, make_policy("a2c", env), 4, seed=1)
    assert other.sample().place[0] != first.place[0]


# ---- storage ------------------------------------------------------------------------------------


def test_bytes_stay_bytes_and_are_stored_once() -> None:
    batch = fragment(0)
    batch.all_obs = np.zeros((5, 2, 8, 8, 3), dtype=np.uint8)
    batch.successor_obs = np.zeros((0, 8, 8, 3), dtype=np.uint8)
    buffer = ReplayBuffer(1000, GAMMA)
    buffer.add(batch)
    assert buffer.sample(4).next_obs.dtype == np.uint8
    # The bytes of the image, the action, the reward, the place of the next row, and the flags.
    assert buffer.nbytes == 1000 * (192 + 8 + 4 + 4 + 1)


def test_size_is_known_before_the_buffer_is_filled() -> None:
    buffer = ReplayBuffer(1_000_000, GAMMA)
    spec = ColumnSpec((17,), np.dtype(np.float32)), ColumnSpec((6,), np.dtype(np.float32))
    assert buffer.nbytes == 0
    assert buffer.nbytes_of(*spec) == 101_000_000 == buffer.allocate(*spec) == buffer.nbytes


def test_more_than_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    free = Memory(10**9, 10**9, 50_500_000)
    monkeypatch.setattr(row_store, "memory", lambda: free)
    spec = ColumnSpec((17,), np.dtype(np.float32)), ColumnSpec((6,), np.dtype(np.float32))
    said = (
        r"key 'replay_capacity': got 1,000,000; the full buffer needs 101.0 MB \(101 bytes a row\),"
        r" and 50.5 MB of memory are free. Allowed: up to about 500,000"
    )
    with pytest.raises(ConfigError, match=said):
        ReplayBuffer(1_000_000, GAMMA).allocate(*spec)


def test_memory_that_the_system_refuses_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("Unable to allocate 101. MiB")

    monkeypatch.setattr(row_store, "_array", refuse)
    spec = ColumnSpec((17,), np.dtype(np.float32)), ColumnSpec((6,), np.dtype(np.float32))
    said = r"key 'replay_capacity': got 1,000,000; the full buffer needs 101.0 MB, .* Unable to"
    with pytest.raises(ConfigError, match=said):
        ReplayBuffer(1_000_000, GAMMA).allocate(*spec)


def test_mapped_from_a_directory(tmp_path: Path) -> None:
    in_memory, mapped = ReplayBuffer(30, GAMMA), ReplayBuffer(30, GAMMA, directory=tmp_path)
    for first in range(0, 40, 4):
        for buffer in (in_memory, mapped):
            buffer.add(fragment(first))
    assert list(tmp_path.iterdir()) == []  # the files have no names
    for one, other in zip(in_memory.sample(50), mapped.sample(50), strict=True):
        np.testing.assert_array_equal(one, other)


def test_other_rows_than_before_are_refused() -> None:
    buffer = ReplayBuffer(100, GAMMA)
    buffer.add(fragment(0))
    batch = fragment(4)
    batch.all_obs = batch.all_obs.astype(np.float64)
    with pytest.raises(ValueError, match=r"obs must have shape \[1\] and dtype float32"):
        buffer.add(batch)
    with pytest.raises(ConfigError, match="'replay_capacity': got 7; allowed: 8 or more"):
        ReplayBuffer(7, GAMMA).add(fragment(0))


def test_few_drawable_rows_among_many() -> None:
    buffer = ReplayBuffer(2000, GAMMA)
    batch = fragment(0, steps=1000)
    batch["valid"][:] = False
    batch["valid"][500, 1] = True
    buffer.add(batch)
    assert places(buffer.sample(300)) == {1500}


def test_draws_are_uniform() -> None:
    buffer = ReplayBuffer(64, GAMMA)
    for first in range(0, 100, 4):
        buffer.add(fragment(first))
    _, counts = np.unique(buffer.sample(62_000).indices, return_counts=True)
    assert len(counts) == 62  # the last step of both environments is not complete
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(1000)


# ---- priorities ---------------------------------------------------------------------------------


def prioritized(capacity: int = 100, **options: Any) -> ReplayBuffer:
    options = {"alpha": 0.5, "beta": 0.4, "priority_epsilon": 0.0, **options}
    return ReplayBuffer(capacity, GAMMA, **options)


def test_probabilities_and_weights() -> None:
    buffer = prioritized(beta_rows=16)
    buffer.add(fragment(0), np.arange(1.0, 9.0).reshape(4, 2))
    buffer.cut(1)
    rows = buffer.sample(100_000)
    place = (rows.obs[:, 0] % 1000 * 2 + rows.obs[:, 0] // 1000).astype(int)
    chances = np.sqrt(np.arange(1.0, 9.0))
    chances /= chances.sum()
    np.testing.assert_allclose(np.bincount(place) / 100_000, chances, atol=1e-4)
    weights = (8 * chances) ** -0.7  # half of the 16 `beta_rows` have been added
    np.testing.assert_allclose(rows.weights, (weights / weights.max())[place], rtol=1e-5)
    assert buffer.beta_now == pytest.approx(0.7)
    buffer.add(fragment(4, place=None))
    buffer.add(fragment(8, place=None))
    assert buffer.beta_now == 1.0


def test_new_rows_have_the_largest_priority() -> None:
    buffer = prioritized(alpha=1.0)
    buffer.add(fragment(0))
    rows = buffer.sample(50)
    buffer.update_priorities(rows.indices, np.full(50, 0.5))
    assert buffer.stats()["max_priority"] == 1.0
    buffer.update_priorities(rows.indices[:1], np.array([9.0]))
    buffer.add(fragment(4))  # makes the last 2 rows drawable, and 6 new rows
    total = 5 * 0.5 + 9 * 9.0  # 9.0 is the priority of the updated row and of the 8 new rows
    rows = buffer.sample(40_000)
    shares = np.array([np.mean(rows.obs[:, 0] == place) for place in (3, 1003, 5, 1006)])
    np.testing.assert_allclose(shares, 9 / total, rtol=0.01)


def test_given_priorities_wait_with_their_rows() -> None:
    buffer = ReplayBuffer(100, GAMMA, 3, alpha=1.0, priority_epsilon=0.0)
    buffer.add(fragment(0, envs=1), np.array([[1.0], [2.0], [3.0], [4.0]]))
    buffer.add(fragment(4, envs=1), np.array([[5.0], [6.0], [7.0], [8.0]]))
    rows = buffer.sample(15_000)
    np.testing.assert_allclose(
        np.bincount(rows.obs[:, 0].astype(int)) / 1000, [1, 2, 3, 4, 5], rtol=0.01
    )


def test_completed_rows_keep_their_learned_priorities() -> None:
    """A new fragment does not reset the priorities of rows of the previous fragment."""
    buffer = prioritized(alpha=1.0)
    buffer.add(fragment(0, envs=1))
    rows = buffer.sample(30)
    buffer.update_priorities(rows.indices, np.full(30, 0.001))
    buffer.add(fragment(4, envs=1))
    assert np.mean(buffer.sample(1000).obs[:, 0] < 3) < 0.01


def test_priorities_of_overwritten_rows_are_ignored() -> None:
    buffer = prioritized(16, alpha=1.0)
    buffer.add(fragment(0))
    old = buffer.sample(20).indices
    for first in (4, 8):
        buffer.add(fragment(first))
    before = buffer.sample(2000)
    buffer.update_priorities(old, np.full(20, 1e9))
    assert buffer.stats()["num_stale_priorities"] == 20
    assert buffer.stats()["max_priority"] == 1.0
    assert len(np.unique(buffer.sample(2000).indices)) == len(np.unique(before.indices))


@pytest.mark.parametrize("wrong", [-1.0, np.nan, np.inf])
def test_wrong_priorities_are_refused(wrong: float) -> None:
    buffer = prioritized()
    buffer.add(fragment(0))
    with pytest.raises(ValueError, match="priorities must be finite and 0 or larger; got"):
        buffer.update_priorities(np.array([0, 1]), np.array([1.0, wrong]))


def test_age_of_rows() -> None:
    buffer = ReplayBuffer(1000, GAMMA)
    buffer.add(fragment(0, steps=100, envs=1))
    rows = buffer.sample(5000)
    age = buffer.stats()["row_age"]
    assert (age["mean"], age["max"]) == (np.mean(99 - rows.indices), 99)
    assert buffer.stats()["row_age"]["max"] == 0


# ---- sequences ----------------------------------------------------------------------------------


def sequences(length: int, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(200, GAMMA, unit="sequence", sequence_length=length, **options)


@every_alpha
@pytest.mark.parametrize("length", [4, 6, 9])
def test_sequences_begin_with_the_stored_state(length: int, alpha: float | None) -> None:
    buffer = sequences(length, alpha=alpha, burn_in=2)
    for first in range(0, 240, 4):
        buffer.add(with_state(fragment(first)))
    found = buffer.sample_sequences(500)
    batch = found.batch
    assert batch.shape == (length, 500)
    np.testing.assert_array_equal(np.diff(batch.all_obs, axis=0), 1.0)
    np.testing.assert_array_equal(batch["rewards"], batch.obs[..., 0])
    np.testing.assert_array_equal(batch["actions"], batch.obs[..., 0] % 3)
    assert (batch.obs[0, :, 0] % 4 == 0).all()  # sequences begin where fragments begin
    np.testing.assert_array_equal(batch.per_env["state"][:, 2], batch.obs[0, :, 0])
    assert batch["valid"].all()
    assert found.num_rows == (length - 2) * 500
    firsts = set(batch.obs[0, :, 0].astype(int) % 1000)
    kept = range(140, 240 - length, 4)  # 200 rows are 100 steps, and the last step is not complete
    assert firsts == set(kept)


def test_sequence_of_an_interrupted_stream_is_filled_up() -> None:
    buffer = sequences(10, burn_in=3)
    buffer.add(with_state(fragment(0, envs=1)))
    buffer.add(with_state(fragment(4, envs=1)))
    assert buffer.num_drawable == 0
    buffer.cut(1)
    batch = buffer.sample_sequences(50).batch
    firsts = batch.obs[0, :, 0]
    assert set(firsts.tolist()) == {0.0, 4.0}
    lengths = batch["valid"].sum(axis=0)
    np.testing.assert_array_equal(lengths, 8 - firsts)
    t, b = np.divmod(batch.successor_index, 50)
    order = np.argsort(b)
    np.testing.assert_array_equal(b[order], np.arange(50))
    np.testing.assert_array_equal(t[order], lengths - 1)
    np.testing.assert_array_equal(batch.successor_obs, 8.0)


def test_sequence_without_a_row_after_its_burn_in_is_not_drawn() -> None:
    buffer = sequences(10, burn_in=4)
    buffer.add(with_state(fragment(0, envs=1)))
    buffer.add(with_state(fragment(4, envs=1)))
    buffer.cut(1)
    assert set(buffer.sample_sequences(50).batch.obs[0, :, 0].tolist()) == {0.0}


@every_mode
def test_sequences_equal_the_fragments_that_they_came_from(mode: str) -> None:
    env = sync_clocks(LENGTHS, "truncated", mode)
    sampler = make_sampler(env, make_policy("a2c", env), 8)
    buffer = sequences(8)
    batches = [sampler.sample() for _ in range(5)]
    for batch in batches:
        buffer.add(batch)
    found = buffer.sample_sequences(200)
    envs = batches[0].shape[1]
    for b, index in enumerate(found.indices.tolist()):
        start = [i for i in range(len(batches)) if _start(batches, i) <= index][-1]
        column = index - _start(batches, start)
        assert column < envs
        source = batches[start].select(np.array([column]))
        got = found.batch.select(np.array([b]))
        for name in found.batch.columns:
            np.testing.assert_array_equal(got[name], source[name], err_msg=name)
        np.testing.assert_array_equal(got.all_obs, source.all_obs)
        np.testing.assert_array_equal(got.successor_index, source.successor_index)
        np.testing.assert_array_equal(got.successor_obs, source.successor_obs)


def _start(batches: list[SampleBatch], i: int) -> int:
    """Returns the serial number of the first row of a fragment."""
    return sum(len(batch) + len(batch.successor_index) for batch in batches[:i])


def test_fragment_longer_than_a_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sequence_length': got 3; allowed: 4 or more"):
        sequences(3).add(fragment(0))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ReplayBuffer(0, GAMMA), "'replay_capacity': got 0"),
        (lambda: ReplayBuffer(0, GAMMA, capacity_key="buffer_size"), "'buffer_size': got 0"),
        (lambda: ReplayBuffer(10, 1.5), "'gamma': got 1.5; allowed: 0 to 1"),
        (lambda: ReplayBuffer(10, GAMMA, 0), "'n_step': got 0; allowed: 1 or larger"),
        (lambda: ReplayBuffer(10, GAMMA, (3, 2)), "'n_step': got .3, 2.; allowed: 1 or larger, or"),
        (lambda: ReplayBuffer(10, GAMMA, unit="episode"), "allowed: transition, sequence"),
        (lambda: ReplayBuffer(10, GAMMA, unit="sequence"), "'sequence_length': got None"),
        (lambda: sequences(4, burn_in=4), "'burn_in': got 4; allowed: 0 to 3"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()


def test_unit_decides_what_is_drawn() -> None:
    with pytest.raises(ValueError, match="call sample_sequences"):
        sequences(4).sample(1)
    with pytest.raises(ValueError, match="call sample"):
        ReplayBuffer(10, GAMMA).sample_sequences(1)
