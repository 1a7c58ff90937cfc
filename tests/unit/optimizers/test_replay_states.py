"""The state of a rate limiter is the same for all replay strategies. Former states load, too."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeWorkerSet, make_optimizer, worker_config

from polopt.optimizers.async_replay import AsyncReplay
from polopt.optimizers.sync_replay import SyncReplay
from polopt.policies.dqn import DQNPolicy

OPTIONS = {"buffer_size": 200, "learning_starts": 20, "train_batch_size": 16}


def make(cls: Any) -> Any:
    rollout = {"num_workers": 2, "rollout_fragment_length": 8}
    return make_optimizer(cls, FakeWorkerSet(worker_config(DQNPolicy, rollout=rollout)), **OPTIONS)


def sampled() -> dict[str, Any]:
    """Returns the state of a SyncReplay that has sampled and learned."""
    optimizer = make(SyncReplay)
    for _ in range(3):
        optimizer.step()
    state: dict[str, Any] = optimizer.get_state()
    optimizer.stop()
    return state


@pytest.mark.parametrize("cls", [SyncReplay, AsyncReplay])
def test_counts_of_the_limiter_continue_from_old_and_new_states(cls: Any) -> None:
    state = sampled()
    assert set(state["replay"]) == {"buffer"}
    limiter = state["limiter"]
    assert limiter["num_counted"] > 0
    former = {key: value for key, value in state.items() if key != "limiter"}
    former["replay"] = {**state["replay"], "limiter": limiter}
    for saved in (state, former):
        optimizer = make(cls)
        optimizer.set_state(saved)
        restored = optimizer.limiter.get_state()
        assert {**restored, "missing": 0} == {**limiter, "missing": 0}
        assert restored["missing"] >= OPTIONS["learning_starts"], "the buffer is empty"
        optimizer.stop()
