"""`RankGroup`: after a failure, ranks agree on one policy, and keep the updates of survivors."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import CheckedWorker, FakeWorkerSet, make_optimizer, worker_config

from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.optimizers import rank_group
from polopt.optimizers.decentralized_allreduce import (
    DecentralizedAllReduce,
    DecentralizedAllReduceConfig,
)
from polopt.optimizers.rank_group import RankGroup
from polopt.policies.learning.reducer import LocalReducer
from polopt.rollouts.transport.channel import LostProcessError, Started, TransportError
from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_handle import WorkerHandle

DEATH = LostProcessError("the process died")


class Rank(CheckedWorker):
    """A rank that records its arguments, and does not join a real group.

    Attributes:
        problem: the reason why the rank cannot join. None if it can join.
    """

    spec: GroupSpec | None = None
    rank: int | None = None
    addresses: list[str] | None = None
    problem: str | None = None

    def learn_alone(self, updates: int) -> None:
        for _ in range(updates):
            self.policy.flat.grads.fill_(0.01 * self.index)
            self.policy.apply_flat()


def listen(worker: Rank, spec: GroupSpec, rank: int) -> str:
    worker.spec, worker.rank = spec, rank
    return f"address of {rank}"


def join(worker: Rank, addresses: list[str]) -> str | None:
    worker.addresses = addresses
    return worker.problem


@pytest.fixture(autouse=True)
def _fake_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "listen", listen)
    monkeypatch.setattr(rank_group, "join", join)


@pytest.fixture
def workers() -> FakeWorkerSet:
    return FakeWorkerSet(worker_config(rollout={"num_workers": 3}), kind=Rank, up=False)


@pytest.fixture
def group(workers: FakeWorkerSet) -> RankGroup:
    made = RankGroup(workers, "auto", timeout_s=60.0)
    made.ensure()
    return made


@pytest.mark.parametrize(("num_gpus", "backend"), [(0.5, "socket"), (1.0, "nccl")])
def test_workers_that_share_a_gpu_do_not_use_nccl(
    workers: FakeWorkerSet, monkeypatch: pytest.MonkeyPatch, num_gpus: float, backend: str
) -> None:
    monkeypatch.setattr(rank_group, "start_store", lambda host: None)
    rollout = workers.config.rollout.model_copy(update={"num_gpus_per_worker": num_gpus})
    workers.config = dataclasses.replace(workers.config, rollout=rollout, device="cuda")
    assert RankGroup(workers, "auto", timeout_s=60.0).backend == backend


@pytest.mark.parametrize(
    ("nodes", "hiddens", "expected"),
    [("aaa", 8, "socket"), ("aab", 8, "gloo"), ("aaa", 512, "gloo")],
    ids=["one node", "two nodes", "large gradients"],
)
def test_group_uses_sockets_for_small_gradients_on_one_node(
    monkeypatch: pytest.MonkeyPatch, nodes: str, hiddens: int, expected: str
) -> None:
    store = SimpleNamespace(host="10.0.0.1", port=7)
    monkeypatch.setattr(rank_group, "start_store", lambda host: store)
    model = {"fcnet_hiddens": (hiddens, hiddens)}
    config = worker_config(rollout={"num_workers": 3}, model=model)
    workers = FakeWorkerSet(config, kind=Rank, up=False)
    workers.up()
    for worker, node in zip(workers.remote, nodes, strict=True):
        worker.channel.started = Started(node=node)
    group = RankGroup(workers, "auto", timeout_s=60.0)
    group.ensure()
    spec = rank_of(workers.remote[0]).spec
    assert group.backend == spec.backend == expected
    assert bool(spec.key) == (expected == "socket")
    assert (spec.host, spec.port) == (("", 0) if expected == "socket" else ("10.0.0.1", 7))


def test_sockets_on_several_nodes_are_refused(workers: FakeWorkerSet) -> None:
    workers.up()
    for worker in workers.remote[:2]:
        worker.channel.started = Started(node="another")
    with pytest.raises(TransportError, match=r"on 2 nodes\. Allowed for several nodes: gloo"):
        RankGroup(workers, "socket", timeout_s=60.0).ensure()


def test_name_of_sockets_until_version_0_3_is_accepted() -> None:
    assert DecentralizedAllReduceConfig.parse({"backend": "zmq"}).backend == "socket"


def test_backend_changes_if_ranks_move_to_other_nodes(
    group: RankGroup, workers: FakeWorkerSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SimpleNamespace(host="10.0.0.1", port=7)
    monkeypatch.setattr(rank_group, "start_store", lambda host: store)
    assert group.backend == "socket"
    group.ranks[0].channel.next_error = DEATH
    group.broken = True
    group.ensure()  # forms a group without the dead rank
    assert group.backend == "socket"
    workers.remote[0].channel.start.answer = Started(node="another")
    grow(group, workers)
    assert (len(group.ranks), group.backend) == (3, "gloo")
    assert_equal(group)


def rank_of(worker: WorkerHandle) -> Any:
    return worker.channel.target


def versions(group: RankGroup) -> list[int]:
    return [rank_of(worker).policy.version for worker in group.ranks]


def grow(group: RankGroup, workers: FakeWorkerSet) -> None:
    """Waits until the replacements are up, and adds them to the group."""
    for worker in workers.remote:
        worker.channel.finish()
    group.ensure()


def assert_equal(group: RankGroup) -> None:
    states = [rank_of(worker).policy.get_state() for worker in group.ranks]
    for state in states[1:]:
        assert state["params"].equal(states[0]["params"])
        assert state["version"] == states[0]["version"]
        moments, first = state["adam"]["network"], states[0]["adam"]["network"]
        assert moments.keys() == first.keys()
        assert all(moments[key].equal(first[key]) for key in moments)
    assert [rank_of(worker).rank for worker in group.ranks] == list(range(len(group.ranks)))
    specs = [rank_of(worker).spec for worker in group.ranks]
    assert len(set(specs)) == 1
    assert specs[0].world_size == len(specs)
    addresses = [f"address of {rank}" for rank in range(len(specs))]
    assert all(rank_of(worker).addresses == addresses for worker in group.ranks)


def test_ranks_start_from_the_local_policy(group: RankGroup, workers: FakeWorkerSet) -> None:
    assert group.ranks == workers.remote
    assert not group.broken
    assert_equal(group)
    group.ensure()
    assert rank_of(group.ranks[0]).spec.generation == 1, "formed once"


def test_survivors_continue_from_the_policy_with_most_updates(
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
    "function", ["version_of", "policy_state", "take_policy_state", "listen", "join"]
)
@pytest.mark.parametrize("dying", [0, 1, 2])
def test_death_while_forming_replaces_one_rank(
    group: RankGroup, workers: FakeWorkerSet, function: str, dying: int
) -> None:
    for worker, updates in zip(group.ranks, [4, 5, 4], strict=True):
        rank_of(worker).learn_alone(updates)
    lost = group.ranks[dying]
    survivors = [worker for worker in group.ranks if worker is not lost]
    lost.channel.errors[function] = DEATH
    group.broken = True
    group.ensure()
    if function == "policy_state" and dying != 1:  # only the leader, rank 1, sends its state
        assert workers.faults.num_restarts == 0, "the function is not called"
        return
    assert workers.faults.num_restarts == 1
    assert group.ranks == survivors
    # Only rank 1 has made 5 updates. They are lost if it dies before its state is fetched.
    most = 4 if function in ("version_of", "policy_state") and dying == 1 else 5
    assert versions(group) == [most, most]
    assert_equal(group)

    grow(group, workers)
    assert group.ranks == workers.remote
    assert versions(group) == [most] * 3
    assert_equal(group)


def test_death_while_fetching_state_is_repaired(group: RankGroup, workers: FakeWorkerSet) -> None:
    for worker in group.ranks:
        rank_of(worker).learn_alone(2)
    group.ranks[0].channel.errors["policy_state"] = DEATH
    state = group.fetch_policy_state()
    assert state["version"] == 2
    assert workers.faults.num_restarts == 1


def test_ranks_start_from_the_local_policy_if_no_trained_rank_is_left(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    local = workers.local.policy
    for _ in range(3):
        local.flat.grads.fill_(0.5)
        local.apply_flat()
    for worker in group.ranks:
        worker.channel.next_error = DEATH
    group.broken = True
    group.ensure()
    assert workers.faults.num_restarts == 3
    grow(group, workers)
    assert group.ranks == workers.remote
    assert versions(group) == [3, 3, 3]
    assert rank_of(group.ranks[0]).policy.get_state()["params"].equal(local.get_state()["params"])
    assert_equal(group)


def test_group_that_does_not_form_is_not_counted_as_a_death(
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


def test_group_is_formed_again_after_a_new_member_died_joining(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    (new,) = workers.add_workers(1)
    new.channel.finish()
    new.channel.errors["listen"] = DEATH
    before = rank_of(group.ranks[0]).spec.generation
    group.ensure()
    assert group.ranks == [w for w in workers.remote if w.index <= 3], "without the dead rank"
    assert not group.broken
    # All ranks left their group when they listened for the group that did not form.
    assert rank_of(group.ranks[0]).spec.generation == before + 2
    assert workers.faults.num_restarts == 1
    assert_equal(group)


def test_weights_lost_with_all_ranks_are_an_error(group: RankGroup, workers: FakeWorkerSet) -> None:
    for worker in group.ranks:
        rank_of(worker).learn_alone(5)
        worker.channel.next_error = DEATH
    group.version, group.broken = 5, True
    with pytest.raises(WorkersFailedError, match=r"version 5 are lost, because the driver only"):
        group.ensure()


def test_ranks_that_fail_while_weights_are_compared_are_one_error(
    group: RankGroup, workers: FakeWorkerSet
) -> None:
    optimizer = make_optimizer(DecentralizedAllReduce, workers)
    optimizer.group = group
    group.version = 5
    for worker in group.ranks:
        worker.channel.errors["get_weights"] = DEATH
    optimizer._compare({worker.index: str(worker.index) for worker in group.ranks})
    with pytest.raises(WorkersFailedError, match=r"version 5 are lost"):
        group.ensure()


class RankWithSamples(RolloutWorker):
    """A rank that keeps the observations of its samples."""

    problem: str | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.observations: list[np.ndarray] = []

    def sample(self, *args: Any) -> SampleBatch:
        batch = super().sample(*args)
        self.observations.append(batch.flat("obs")[batch.flat("valid")])
        return batch


class BreaksOnce(LocalReducer):
    """The group of a single rank. The sum number `at` raises `GroupBroken`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def sum_(self, tensor: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            raise GroupBroken("another rank has died")

    def close(self) -> None:
        pass


@pytest.mark.parametrize("at", [1, 2, 3, 4])  # before, in and after the sums of the moments
@pytest.mark.parametrize("in_sync", [True, False])
def test_samples_of_a_broken_round_enter_the_moments_once(at: int, in_sync: bool) -> None:
    config = worker_config(rollout={"num_workers": 1}, normalize_observations=True)
    workers = FakeWorkerSet(config, kind=RankWithSamples)
    optimizer = make_optimizer(DecentralizedAllReduce, workers, keep_local_weights_in_sync=in_sync)
    rank = rank_of(workers.remote[0])
    rank.state["group"] = BreaksOnce(at)
    for _ in range(3):
        optimizer.step()
    optimizer.drain()
    assert optimizer.num_broken_rounds == 1
    expected = Moments.of(np.concatenate(rank.observations))
    for policy in (rank.policy, optimizer.policy):
        found = policy.get_weights().moments
        assert found.rows == optimizer.metrics.num_env_steps_sampled == expected.rows
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-10)
        np.testing.assert_allclose(found.m2, expected.m2, rtol=1e-10)
    assert optimizer.get_state()["policy"]["moments"]["rows"] == expected.rows


def test_sum_of_a_rank_that_only_listened_breaks_the_group() -> None:
    rank = AllReducer(GroupSpec(1, 2, "socket", 5.0, 5.0, key=b"0" * 32), 0)
    with pytest.raises(GroupBroken, match="this rank has left the group"):
        rank.sum_(torch.zeros(2))
