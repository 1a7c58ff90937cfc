"""n-step returns of several agents: each window goes over the transitions of one agent. In random
schedules, they agree with a slow reference of lists for each agent."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from agent_schedules import AGENTS, Step, reference, schedule_slots
from toy_envs import make_policy

from polopt.common.sample_batch import SampleBatch
from polopt.optimizers import async_replay
from polopt.replay.n_step import windows_of
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.worker_sampler import join_in_time
from polopt.rollouts.seeds import worker_seeds

GAMMA = 0.9
MODES = ["together", "turns", "random"]
#: What a window of the reference does, and variants of it that are wrong.
WRONG = ["environment steps", "fragments", "bootstrap", "next episode"]
Window = tuple[float, float, tuple[float, ...] | None]


def fragments_of(
    seed: int, mode: str, length: int = 4, faults: float = 0.03, count: int = 12
) -> tuple[list[SampleBatch], list[Any]]:
    """Returns consecutive fragments of random schedules, and the log of each copy."""
    slots, logs = schedule_slots(seed, 2, mode, faults)
    sampler = VectorSampler(slots, make_policy("a2c", slots), length, worker_seeds(3, 0, 0, 2))
    return [sampler.sample() for _ in range(count)], logs


def window_of(steps: list[Step], i: int, n: int, variant: str = "") -> Window | None:
    """Returns the n-step return, the discount and the next observation of transition `i` of an
    agent. None if transitions are missing that have not closed yet."""
    total, steps_of_window = 0.0, steps[i : i + n]
    for k, step in enumerate(steps_of_window):
        total += GAMMA**k * step.reward
        following = tuple(step.next_obs.tolist())
        if step.terminated and variant != "next episode":
            bootstraps = variant == "bootstrap"
            return total, GAMMA ** (k + 1) if bootstraps else 0.0, following
        if (step.truncated or step.cut) and variant != "next episode":
            return total, GAMMA ** (k + 1), following
        late = i + k + 1 == len(steps)  # its next observation is not known yet
        if late:
            return None
        passed = steps[i + k + 1].env_step - steps[i].env_step
        if k == n - 1 or (variant == "environment steps" and passed >= n):
            return total, GAMMA ** (k + 1), following
    return None


def windows_of_log(logs: list[Any], n: int, variant: str = "") -> dict[Any, Window]:
    """Returns the windows of all agents that are complete, by the observation of their row."""
    found = {}
    for log in logs:
        for steps in reference(log).values():
            for i, step in enumerate(steps):
                window = window_of(steps, i, n, variant)
                if window is not None:
                    found[tuple(step.obs.tolist())] = window
    return found


def stored(batches: list[SampleBatch], buffer: ReplayBuffer) -> dict[Any, Window]:
    """Returns the windows that a buffer can draw."""
    for batch in batches:
        buffer.add(batch)
    return drawn(buffer)


def drawn(buffer: ReplayBuffer) -> dict[Any, Window]:
    rows = buffer.sample(4000)
    found = zip(rows.obs, rows.rewards, rows.discounts, rows.next_obs, strict=True)
    windows = {
        tuple(obs.tolist()): (float(reward), float(discount), tuple(following.tolist()))
        for obs, reward, discount, following in found
    }
    assert len(windows) == buffer.num_drawable
    return windows


def equal(found: dict[Any, Window], expected: dict[Any, Window]) -> bool:
    """Whether two sets of windows agree. The next observation counts only with a discount."""
    return set(found) == set(expected) and all(
        found[row][:2] == pytest.approx(expected[row][:2], abs=1e-4)
        and (expected[row][1] == 0.0 or found[row][2] == expected[row][2])
        for row in expected
    )


@pytest.mark.parametrize("mode", MODES)
def test_windows_agree_with_the_reference(mode: str) -> None:
    for seed in range(16):
        n, length = 1 + seed % 4, 1 + seed % 7
        batches, logs = fragments_of(seed, mode, length)
        found = stored(batches, ReplayBuffer(2000, GAMMA, n))
        assert equal(found, windows_of_log(logs, n)), (seed, n, length)
        whole = batches[0]
        for batch in batches[1:]:
            whole = join_in_time(whole, batch)
        rows = windows_of(whole, GAMMA, n).rows
        for obs, reward, discount in zip(rows.obs, rows.rewards, rows.discounts, strict=True):
            if (key := tuple(obs.tolist())) in found:  # others need their next observation
                assert found[key][:2] == pytest.approx((reward, discount), abs=1e-5)


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_windows_do_not_agree(wrong: str) -> None:
    batches, logs = fragments_of(1, "turns")
    if wrong == "fragments":
        for batch in batches:
            batch.row_counts = None  # then rows that only fill the arrays end windows
    found = stored(batches, ReplayBuffer(2000, GAMMA, 3))
    assert not equal(found, windows_of_log(logs, 3, wrong))


def test_an_interrupted_stream_ends_windows_at_the_last_observation() -> None:
    batches, logs = fragments_of(2, "turns", faults=0.0)
    buffer = ReplayBuffer(2000, GAMMA, 3)
    stored(batches, buffer)
    before = buffer.num_drawable
    buffer.cut(batches[0].worker_index)
    found, waiting = drawn(buffer), 0
    for log in logs:
        for steps in reference(log).values():
            for i in range(max(0, len(steps) - 3), len(steps)):
                if window_of(steps, i, 3) is None:
                    waiting += 1
                    reward, discount, following = found[tuple(steps[i].obs.tolist())]
                    own = steps[i:]
                    expected = sum(GAMMA**k * one.reward for k, one in enumerate(own))
                    assert reward == pytest.approx(expected, abs=1e-5)
                    assert discount == pytest.approx(GAMMA ** len(own))
                    assert following == tuple(own[-1].next_obs.tolist())
    assert buffer.num_drawable == before + waiting > before


@pytest.mark.parametrize("mode", ["turns", "random"])
def test_samplers_compute_priorities_of_whole_windows(mode: str) -> None:
    """As for one agent, the rows whose windows end in a later fragment get them with it."""
    for seed, n in ((3, 2), (4, 3), (5, 6)):
        batches, logs = fragments_of(seed, mode)
        policy = SimpleNamespace(
            config=SimpleNamespace(gamma=GAMMA, most_steps=n),
            td_errors=lambda rows: np.abs(rows.rewards) + 10.0 * rows.discounts,
        )
        worker: Any = SimpleNamespace(state={}, phase=lambda name: contextlib.nullcontext())
        buffer = ReplayBuffer(2000, GAMMA, n, alpha=1.0, priority_epsilon=1e-9)
        for batch in batches:
            made = async_replay._with_priorities(worker, "", policy, batch, True)
            buffer.add(made.batch, made.priorities)
        rows = buffer.sample(4000)
        leaves = buffer._priorities.tree.leaves[rows.indices % 2000]  # type: ignore[union-attr]
        given = {tuple(o.tolist()): leaf for o, leaf in zip(rows.obs, leaves, strict=True)}
        expected = windows_of_log(logs, n)
        assert len(given) > 40
        for row, leaf in given.items():
            reward, discount, _ = expected[row]
            assert leaf == pytest.approx(abs(reward) + 10.0 * discount, rel=1e-4)


def test_waiting_windows_survive_a_checkpoint(tmp_path: Path) -> None:
    batches, logs = fragments_of(6, "turns")
    buffer = ReplayBuffer(2000, GAMMA, 3)
    stored(batches[:7], buffer)
    again = ReplayBuffer(2000, GAMMA, 3)
    again.load(tmp_path, buffer.save(tmp_path))
    assert equal(stored(batches[7:], again), windows_of_log(logs, 3))


def test_agents_without_a_row_in_a_fragment_keep_their_windows() -> None:
    """With fragments of one step, at most one of the agents that take turns has a row."""
    batches, logs = fragments_of(7, "turns", length=1, faults=0.0, count=60)
    assert max(int(batch.is_row.sum(axis=0).max()) for batch in batches) == 1
    assert min(int(batch.is_row.sum()) for batch in batches) == 0
    found = stored(batches, ReplayBuffer(2000, GAMMA, 3))
    assert equal(found, windows_of_log(logs, 3))
    assert max(AGENTS.index(agent) for log in logs for agent in reference(log)) == 2
