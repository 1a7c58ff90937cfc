"""`RankGroup`: ranks agree on one policy after a failure and keep the survivors' updates."""

from __future__ import annotations

from typing import Any

import pytest
import ray
from fakes import CheckedWorker, FakeRay, FakeWorkerSet, install, worker_config

from polopt.optimizers.rank_group import RankGroup
from polopt.rollouts.transport.collective import GroupSpec
from polopt.rollouts.workers.failures import WorkersFailedError
from polopt.rollouts.workers.health import WorkerHealth
from polopt.rollouts.workers.remote_worker import RemoteWorker

DEATH = ray.exceptions.ActorDiedError()


class Rank(CheckedWorker):
    """Joins no real group; records the arguments."""

    joined: tuple[GroupSpec, int] | None = None
    addresses: list[str] | None = None
    problem: str | None = None

    def listen_for_group(self, spec: GroupSpec, rank: int) -> str:
        self.joined = (spec, rank)
        return f"address of {rank}"

    def join_group(self, addresses: list[str]) -> str | None:
        self.addresses = addresses
        return self.problem

    def learn_alone(self, updates: int) -> None:
        for _ in range(updates):
            self.policy.flat.grads.fill_(0.01 * self.index)
            self.policy.apply_flat()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    return install(monkeypatch)


@pytest.fixture
def workers(fake: FakeRay) -> FakeWorkerSet:
    return FakeWorkerSet(worker_config(rollout={"num_workers": 3}), Rank, up=False)


@pytest.fixture
def group(workers: FakeWorkerSet) -> RankGroup:
    made = RankGroup(workers, WorkerHealth(workers), "auto", timeout_s=60.0)
    made.ensure()
    return made


def rank_of(worker: RemoteWorker) -> Any:
    return worker.actor.worker


def versions(group: RankGroup) -> list[int]:
    return [rank_of(worker).policy.version for worker in group.ranks]


def grow(group: RankGroup, workers: FakeWorkerSet) -> None:
    """Adds the replacements to the group, once they are up."""
    group.ensure()  # pings them
    for worker in workers.remote:
        worker.actor.finish()
    group.ensure()


def assert_equal(group: RankGroup) -> None:
    states = [rank_of(worker).policy.get_state() for worker in group.ranks]
    for state in states[1:]:
        assert state["params"].equal(states[0]["params"])
        assert state["version"] == states[0]["version"]
        assert state["adam"].keys() == states[0]["adam"].keys()
        assert all(state["adam"][key].equal(states[0]["adam"][key]) for key in state["adam"])
    joined = [rank_of(worker).joined for worker in group.ranks]
    assert [rank for _, rank in joined] == list(range(len(joined)))
    assert len({spec._replace(secret_key=b"", passwords=()) for spec, _ in joined}) == 1
    assert len({spec.secret_key for spec, _ in joined}) == len(joined), "each has its own key"
    assert joined[0][0].world_size == len(joined)
    addresses = [f"address of {rank}" for rank in range(len(joined))]
    assert all(rank_of(worker).addresses == addresses for worker in group.ranks)


def test_ranks_start_from_the_local_policy(group: RankGroup, workers: FakeWorkerSet) -> None:
    assert group.ranks == workers.remote
    assert not group.broken
    assert_equal(group)
    group.ensure()
    assert rank_of(group.ranks[0]).joined[0].generation == 1, "formed once"


def test_survivors_take_the_policy_with_most_updates(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    for worker, updates in zip(group.ranks, [4, 5, 5], strict=True):
        rank_of(worker).learn_alone(updates)
    leader = rank_of(group.ranks[1]).policy.get_state()
    group.broken = True
    group.ensure()
    assert versions(group) == [5, 5, 5]
    assert rank_of(group.ranks[0]).policy.get_state()["params"].equal(leader["params"])
    assert_equal(group)
    assert workers.faults.num_restarts == 0


@pytest.mark.parametrize(
    "method", ["ping", "get_learner_state", "set_state", "listen_for_group", "join_group"]
)
@pytest.mark.parametrize("dying", [0, 1, 2])
def test_death_while_forming_replaces_one_rank(
    group: RankGroup, workers: FakeWorkerSet, method: str, dying: int
) -> None:
    for worker, updates in zip(group.ranks, [4, 5, 4], strict=True):
        rank_of(worker).learn_alone(updates)
    lost = group.ranks[dying]
    survivors = [worker for worker in group.ranks if worker is not lost]
    lost.actor.errors[method] = DEATH
    group.broken = True
    group.ensure()
    if (method, dying == 1) in {("get_learner_state", False), ("set_state", True)}:
        assert workers.faults.num_restarts == 0, "the method is not called"
        return
    assert workers.faults.num_restarts == 1
    assert group.ranks == survivors
    most = 4 if method in ("ping", "get_learner_state") and dying == 1 else 5
    assert versions(group) == [most, most]
    assert_equal(group)

    grow(group, workers)
    assert group.ranks == workers.remote
    assert versions(group) == [most] * 3
    assert_equal(group)


def test_death_while_fetching_state_is_repaired(group: RankGroup, workers: FakeWorkerSet) -> None:
    for worker in group.ranks:
        rank_of(worker).learn_alone(2)
    group.ranks[0].actor.errors["get_learner_state"] = DEATH
    state = group.fetch_policy_state()
    assert state["version"] == 2
    assert workers.faults.num_restarts == 1


def test_local_policy_leads_if_no_trained_rank_is_left(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    local = workers.local.policy
    for _ in range(3):
        local.flat.grads.fill_(0.5)
        local.apply_flat()
    for worker in group.ranks:
        worker.actor.next_error = DEATH
    group.broken = True
    group.ensure()
    assert workers.faults.num_restarts == 3
    grow(group, workers)
    assert group.ranks == workers.remote
    assert versions(group) == [3, 3, 3]
    assert rank_of(group.ranks[0]).policy.get_state()["params"].equal(local.get_state()["params"])
    assert_equal(group)


def test_group_that_does_not_form_is_no_worker_death(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    rank_of(group.ranks[0]).learn_alone(1)
    rank_of(group.ranks[2]).problem = "worker 1 is not reachable"
    group.broken = True
    with pytest.raises(WorkersFailedError, match=r"cannot form a group.*worker 1 is not reachable"):
        group.ensure()
    assert workers.faults.num_restarts == 0
    rank_of(workers.remote[2]).problem = None
    group.ensure()
    assert versions(group) == [1, 1, 1]
    assert_equal(group)
