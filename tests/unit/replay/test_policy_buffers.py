"""The buffers of several policies: each policy learns at its own training intensity, also from
sequences of different lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix
from replay_streams import GAMMA, fragment, with_state

import polopt
from polopt.common.config import ConfigError
from polopt.common.multi_agent_batch import MultiAgentBatch
from polopt.metrics.memory import Memory
from polopt.replay import row_store
from polopt.replay.policy_buffers import PolicyBuffers
from polopt.replay.rate_limiter import RateLimiter
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.trainers.checkpoints import CheckpointError


def test_each_policy_counts_its_own_rows_of_sequences() -> None:
    """The sequences of `short` end after one step, because a reset of next-step autoreset mode, a
    row that is not valid, follows."""
    names = "long", "short"
    buffers = PolicyBuffers(
        {name: ReplayBuffer(200, GAMMA, unit="sequence", sequence_length=4) for name in names},
        {name: RateLimiter(1, 8) for name in names},
    )
    for first in range(0, 40, 4):
        parts = {name: with_state(fragment(first)) for name in names}
        parts["short"]["valid"][1:] = False
        counts = buffers.add(MultiAgentBatch(parts, num_env_steps=8, worker_index=1))
        buffers.limiter.inserted(counts)
    limiters = buffers.limiter.limiters
    before = {name: limiters[name].credit for name in names}
    assert buffers.limiter.can_learn(4)
    rows = buffers.sample_sequences(3)
    buffers.limiter.learned(rows.num_rows)
    learned = {name: limiters[name].num_learned for name in names}
    assert learned == {name: part.num_rows for name, part in rows.parts.items()}
    assert learned["long"] == 12 > learned["short"] > 0
    for name in names:
        assert limiters[name].credit == before[name] - learned[name]


def test_buffers_of_all_policies_must_fit_into_memory_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One buffer of 100,000 rows fits into the free memory, and two do not."""
    config: dict[str, Any] = {"env": Matrix, "num_workers": 0, "buffer_size": 100_000}
    alone = polopt.DQN({**config, "policies": ["a"]})
    alone.train()
    nbytes = alone.optimizer.buffer.buffers["a"].nbytes
    alone.stop()
    monkeypatch.setattr(row_store, "memory", lambda: Memory(10**9, 10**9, int(1.5 * nbytes)))
    polopt.DQN({**config, "policies": ["a"]}).stop()
    two = {"policies": ["a", "b"], "policy_mapping_fn": {"row": "a", "column": "b"}}
    with pytest.raises(ConfigError, match=r"'buffer_size': got 100,000.*up to about 7\d,\d+"):
        polopt.DQN({**config, **two})


SAVES: dict[str, Any] = {
    "env": Matrix,
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "policies": {"a": {}, "frozen": {}, "b": {"n_step": 2}},
    "policies_to_train": ["a", "b"],
    "learning_starts": 30,
    "buffer_size": 500,
    "prioritized_replay": True,
    "save_replay_buffer": True,
    "min_sample_timesteps_per_iteration": 150,
    "min_time_s_per_iteration": 0,
    "model": {"fcnet_hiddens": [4]},
    "seed": 1,
}


def mostly_b(agent_id: str, rng: np.random.Generator) -> str:
    return ("a", "b", "b", "frozen")[rng.integers(4)]


def test_rows_of_each_policy_are_in_checkpoints(tmp_path: Path) -> None:
    trainer = polopt.DQN({**SAVES, "policy_mapping_fn": mostly_b})
    trainer.train()
    trainer.save(str(tmp_path / "first"))
    trainer.train()
    trainer.save(str(tmp_path / "second"))
    files = sorted(str(f.relative_to(tmp_path)) for f in tmp_path.glob("second/replay/**/*.bin"))
    assert {name.split("/")[2] for name in files} == {"0", "1"}, "the frozen policy has no rows"
    again = polopt.DQN({**SAVES, "policy_mapping_fn": mostly_b, "seed": 9})
    again.restore(str(tmp_path / "second"))
    limiters = trainer.optimizer.limiter.get_state(), again.optimizer.limiter.get_state()
    assert limiters[0] == limiters[1]
    before, after = trainer.optimizer.buffer.buffers, again.optimizer.buffer.buffers
    assert before["a"].num_rows < before["b"].num_rows
    for name in ("a", "b"):
        assert after[name].num_rows == before[name].num_rows > 30
        rows, others = before[name].sample(20), after[name].sample(20)
        for column in ("indices", "obs", "actions", "rewards", "discounts", "weights"):
            np.testing.assert_array_equal(getattr(rows, column), getattr(others, column))
    updates = again.optimizer.metrics.num_updates
    again.optimizer.step()
    assert again.optimizer.metrics.num_updates > updates, "no rows must be sampled first"
    # Without one of the policies, and with another length of the returns of a policy.
    fewer = {"policies": {"b": {"n_step": 2}, "frozen": {}}, "policies_to_train": ["b"]}
    alone = polopt.DQN({**SAVES, **fewer, "policy_mapping_fn": {"row": "b", "*": "frozen"}})
    alone.restore(str(tmp_path / "second"))
    assert alone.optimizer.buffer.buffers["b"].num_rows == before["b"].num_rows
    other = polopt.DQN(
        {**SAVES, "policies": {"a": {}, "frozen": {}, "b": {}}, "policy_mapping_fn": mostly_b}
    )
    with pytest.raises(CheckpointError, match="policy 'b': key 'n_step': got 1; allowed: 2"):
        other.restore(str(tmp_path / "second"))
    for one in (trainer, again, alone, other):
        one.stop()
