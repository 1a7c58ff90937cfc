"""AsyncSamples: fragments that are learned from as they arrive."""

from __future__ import annotations

import pytest
from fakes import FakeWorkerSet, install, make_optimizer, worker_config

from polopt.optimizers.async_samples import AsyncSamples

ROWS = 10  # of a fragment


def test_fragments_do_not_grow_in_number_after_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 3}))
    optimizer = make_optimizer(AsyncSamples, workers)
    for _ in range(10):
        assert optimizer.step().env_steps_trained == ROWS
        optimizer.drain()  # as for a checkpoint
        assert len(optimizer.gatherer.landed) <= 3
    made = sum(len(actor.results) for actor in workers.actors)
    assert made == 10 + len(optimizer.gatherer.landed), "each is learned from, or kept"


def test_worker_samples_while_its_last_fragment_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 2}))
    optimizer = make_optimizer(AsyncSamples, workers)
    pending: list[int] = []
    learn = optimizer.policy.learn_on_batch

    def spy(*args: object) -> object:
        pending.append(len(optimizer.in_flight))
        return learn(*args)

    monkeypatch.setattr(optimizer.policy, "learn_on_batch", spy)
    for _ in range(4):
        optimizer.step()
    assert pending == [2, 2, 2, 2]
