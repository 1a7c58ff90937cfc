"""The buffers of several policies: each policy learns at its own training intensity, also from
sequences of different lengths."""

from __future__ import annotations

from typing import Any

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
