"""`DecentralizedAllReduce` after failures of ranks, and the results of its all-reduce."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FAULT_FILE, StallingPPO, inside, pid_of, worker_config
from rank_helpers import Pool, learned_state, make_decentralized, on_ranks, run_on

from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.rank_group import join, listen
from polopt.rollouts.transport.collective import (
    SMALL_TENSOR_BYTES,
    AllReducer,
    GroupBroken,
    GroupSpec,
    start_store,
)
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.worker_handle import WorkerHandle

KEY = b"0123456789abcdef"


def step_until_whole(optimizer: DecentralizedAllReduce, lost: list[WorkerHandle]) -> None:
    """Steps until the lost ranks are replaced and the replacements have trained."""
    deadline_s = time.monotonic() + 120.0
    while set(lost) & set(optimizer.workers.remote) or (
        optimizer.group.ranks != optimizer.workers.remote
    ):
        optimizer.step()
        assert time.monotonic() < deadline_s
    assert optimizer.step().updates > 0


@pytest.mark.usefixtures("compare_every_round")
def test_group_continues_without_killed_rank_until_replaced(
    worker_pool: Pool,
) -> None:
    optimizer = make_decentralized(worker_pool)
    for _ in range(2):
        optimizer.step()
    victim, survivor = optimizer.group.ranks
    survivor_pid, version = pid_of(survivor), optimizer.policy.version
    os.kill(pid_of(victim), signal.SIGKILL)
    step_until_whole(optimizer, [victim])
    assert pid_of(survivor) == survivor_pid
    optimizer.step()
    first, second = on_ranks(optimizer, learned_state)
    assert first == second, "weights, version, Adam's moments, coefficients"
    assert first[1] > version
    stats = optimizer.stats() | optimizer.workers.stats()
    assert stats["num_worker_deaths"] == stats["num_remote_worker_restarts"] == 1
    assert stats["num_broken_rounds"] >= 1
    assert stats["num_ranks"] == 2


def seconds_until_broken(worker: Any) -> float:
    """Returns the seconds until a sum fails."""
    began_s = time.time()
    try:
        worker.state["group"].sum_(torch.ones(20_000))
    except GroupBroken:
        return time.time() - began_s
    raise AssertionError("the sum succeeded without a rank")


def test_death_of_a_rank_reaches_all_waiting_ranks_at_once(worker_pool: Pool) -> None:
    # In a ring of four ranks, one survivor waits only for other survivors.
    optimizer = make_decentralized(worker_pool, rollout={"num_workers": 4})
    optimizer.step()
    optimizer.drain()
    victim, *others = optimizer.group.ranks
    pid = pid_of(victim)
    calls = [inside(worker, seconds_until_broken) for worker in others]
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    waited_s = [call() for call in calls]
    assert max(waited_s) < optimizer.config.allreduce_timeout_s / 2.0
    step_until_whole(optimizer, [victim])


def test_all_ranks_dead_group_continues_from_driver_state(
    worker_pool: Pool,
) -> None:
    optimizer = make_decentralized(worker_pool)
    for _ in range(3):
        optimizer.step()
    optimizer.drain()
    version = optimizer.policy.version
    lost = optimizer.group.ranks
    for pid in [pid_of(worker) for worker in lost]:
        os.kill(pid, signal.SIGKILL)
    result = optimizer.step()
    assert result.env_steps_trained == result.updates == 0, "no update without data"
    step_until_whole(optimizer, lost)
    assert optimizer.policy.version > version
    first, second = on_ranks(optimizer, learned_state)
    assert first == second
    assert first[1] == optimizer.policy.version


def test_death_of_all_ranks_is_an_error_where_the_driver_has_no_weights(
    worker_pool: Pool,
) -> None:
    optimizer = make_decentralized(worker_pool, keep_local_weights_in_sync=False)
    for _ in range(3):
        optimizer.step()
    optimizer.drain()
    version = optimizer.group.version
    for pid in [pid_of(worker) for worker in optimizer.group.ranks]:
        os.kill(pid, signal.SIGKILL)
    lost = rf"weights of version {version} are lost, because the driver only has version 0\. Rest"
    with pytest.raises(WorkersFailedError, match=lost):
        step_until_whole(optimizer, optimizer.group.ranks)
    with pytest.raises(WorkersFailedError, match="Restore a checkpoint"):
        optimizer.get_state()  # without the error, a checkpoint would contain the initial weights


def test_state_of_a_save_survives_the_death_of_all_ranks(worker_pool: Pool) -> None:
    optimizer = make_decentralized(worker_pool, keep_local_weights_in_sync=False)
    for _ in range(2):
        optimizer.step()
    version = optimizer.get_state()["policy"]["version"]
    lost = optimizer.group.ranks
    for pid in [pid_of(worker) for worker in lost]:
        os.kill(pid, signal.SIGKILL)
    step_until_whole(optimizer, lost)
    assert optimizer.get_state()["policy"]["version"] > version


def test_only_the_rank_that_stalls_in_allreduce_is_replaced(
    worker_pool: Pool,
) -> None:
    # A rank that waits in a sum for longer than `worker_timeout_s` does not count as hanging.
    rollout = {"num_workers": 2, "worker_timeout_s": 8.0}
    optimizer = make_decentralized(
        worker_pool, StallingPPO, rollout=rollout, allreduce_timeout_s=10.0
    )
    optimizer.step()
    version = optimizer.policy.version
    pids = {pid_of(worker) for worker in optimizer.group.ranks}
    optimizer.drain()
    Path(FAULT_FILE).touch()
    while optimizer.num_broken_rounds == 0:
        optimizer.step()
    message = optimizer.workers.faults.last.message
    found = re.search(r"no answer for ([\d.]+) s, and other processes that waited", message)
    assert found, message
    silent_s = float(found[1])
    # The other rank gives up after `allreduce_timeout_s` = 10 s. The stalled rank is then replaced
    # before another `worker_timeout_s` = 8 s have passed.
    assert 10.0 < silent_s < 17.5, "seconds until the stalled rank is replaced"
    step_until_whole(optimizer, [])
    stats = optimizer.workers.stats()
    assert stats["num_worker_hangs"] == stats["num_remote_worker_restarts"] == 1
    assert len(pids & {pid_of(worker) for worker in optimizer.group.ranks}) == 1
    assert optimizer.policy.version > version


def test_training_continues_after_a_group_did_not_form(worker_pool: Pool) -> None:
    optimizer = make_decentralized(worker_pool)
    optimizer.step()
    before = on_ranks(optimizer, learned_state)
    one = optimizer.group.ranks[0]
    incomplete = GroupSpec(900, 2, "socket", 1.0, 0.3, key=KEY)
    (address,) = run_on([one], lambda worker: listen(worker, incomplete, 0))
    (problem,) = run_on([one], lambda worker: join(worker, [address, address]))
    assert "could not join group 900 (socket) within 0.3 s" in problem
    optimizer.group.broken = True
    optimizer.group.ensure()
    assert on_ranks(optimizer, learned_state) == before
    assert optimizer.step().updates > 0
    assert optimizer.workers.faults.num_restarts == 0


# ---- sums of a group ----------------------------------------------------------------------


def start_listening(worker: Any, spec: GroupSpec, rank: int) -> Any:
    """Returns the address of a rank. The worker keeps its group in `worker.state`."""
    group = worker.state["group"] = AllReducer(spec, rank)
    return group.address


def sums_of(worker: Any, rank: int, addresses: list[str]) -> tuple[bytes, list[int], str]:
    """Takes part in three all-reduces: of floats, of counts, and of a large tensor. Returns the
    sums."""
    group = worker.state["group"]
    group.join(addresses)
    try:
        numbers = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
        counts = torch.tensor([rank, 1])
        group.sum_(numbers)
        group.sum_(counts)
        large = torch.full((SMALL_TENSOR_BYTES // 4 + 1,), float(rank))
        group.sum_(large)
        return numbers.numpy().tobytes(), counts.tolist(), str(large.unique().tolist())
    finally:
        group.close()


@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_sums_are_the_same_bits_on_all_ranks(worker_pool: Pool, backend: str) -> None:
    workers = worker_pool(worker_config("ppo", rollout={"num_workers": 5})).remote
    store = start_store("127.0.0.1")
    for world in (1, 2, 3, 4, 5):
        spec = GroupSpec(1000 + world, world, backend, 20.0, 60.0, key=KEY)
        if backend == "gloo":
            spec = spec._replace(host="127.0.0.1", port=store.port, prefix=str(world))
        ranks = list(enumerate(workers[:world]))
        calls = [inside(worker, start_listening, spec, rank) for rank, worker in ranks]
        addresses = [call() for call in calls]
        calls = [inside(worker, sums_of, rank, addresses) for rank, worker in ranks]
        results = [call() for call in calls]
        assert all(result == results[0] for result in results), world
        numbers, counts, large = results[0]
        terms = [
            torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        total = torch.frombuffer(bytearray(numbers), dtype=torch.float32)
        torch.testing.assert_close(total, torch.stack(terms).double().sum(0).float())
        assert counts == [world * (world - 1) // 2, world]
        assert large == str([float(counts[0])])


@pytest.mark.parametrize("backend", ["socket", "gloo"])
def test_backend_of_small_gradients_is_reported(worker_pool: Pool, backend: str) -> None:
    optimizer = make_decentralized(worker_pool, backend=backend)
    assert optimizer.step().updates >= 0
    assert optimizer.stats()["allreduce_backend"] == backend
