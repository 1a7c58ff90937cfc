"""Ranks that die or hang during an all-reduce. Partial sums must not be used, and all ranks must
have the same bits after every update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from chaos_runs import FAULT_FILE, FAULT_TIME_FILE, HangingPPO, HashingPPO, steps_until
from fakes import make_optimizer, pid_of, worker_config
from rank_helpers import Pool, learned_state, on_ranks

from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce

Report = Callable[[str, str], None]
pytestmark = pytest.mark.timeout(900)
KILLS = 20


@pytest.fixture(autouse=True)
def _toys(ray_session: None) -> Iterator[None]:
    for path in (FAULT_FILE, FAULT_TIME_FILE):
        path.unlink(missing_ok=True)
    yield
    for path in (FAULT_FILE, FAULT_TIME_FILE):
        path.unlink(missing_ok=True)


def hashes(worker: Any) -> dict[int, str]:
    return worker.policy.__dict__.get("hashes", {})


class FailureWatcher:
    """Records the times at which survivors report a broken group, and the seconds in which each new
    group forms."""

    def __init__(self, optimizer: DecentralizedAllReduce) -> None:
        self.noticed_s: list[float] = []
        self.formed_s: list[float] = []
        self._next, self._ensure = optimizer.calls.next, optimizer.group.ensure
        self._group = optimizer.group
        optimizer.calls.next = self.next  # type: ignore[method-assign]
        optimizer.group.ensure = self.ensure  # type: ignore[method-assign]

    def next(self, count: bool = True) -> Any:
        reply = self._next(count)
        if reply.failure is None and getattr(reply.value, "broken", None):
            self.noticed_s.append(time.time())
        return reply

    def ensure(self) -> None:
        began_s, broken = time.time(), self._group.broken
        self._ensure()
        if broken:
            self.formed_s.append(time.time() - began_s)


def make(pool: Pool, policy: type, **options: Any) -> Any:
    learning = {
        "num_sgd_iter": 4,
        "sgd_minibatch_size": 16,
        "kl_coeff": 0.2,
        "entropy_coeff": [[0, 0.1], [20_000, 0.0]],
        "model": {"fcnet_hiddens": (128, 128)},
    }
    # These options give three minibatches per epoch to each rank.
    rollout = {"num_workers": 4, "rollout_fragment_length": 20, "worker_timeout_s": 10.0}
    optimizer = make_optimizer(
        DecentralizedAllReduce, pool(worker_config(policy, rollout=rollout, **learning)), **options
    )
    optimizer.step()
    return optimizer


def whole(optimizer: DecentralizedAllReduce) -> bool:
    ranks = optimizer.group.ranks
    return ranks == optimizer.workers.remote and not optimizer.group.broken


@pytest.mark.usefixtures("compare_every_round")
def test_twenty_kills_during_allreduce(worker_pool: Pool, report: Report) -> None:
    optimizer = make(worker_pool, HashingPPO)
    watch = FailureWatcher(optimizer)
    notice_s: list[float] = []
    going_on_s: list[float] = []
    num_compared = 0
    for count in range(1, KILLS + 1):
        pids = {worker.index: pid_of(worker) for worker in optimizer.group.ranks}
        watch.noticed_s.clear()
        FAULT_TIME_FILE.unlink(missing_ok=True)
        version = optimizer.policy.version
        FAULT_FILE.touch()
        steps_until(optimizer, lambda n=count: optimizer.workers.faults.num_restarts == n, 60.0)
        died_s = float(FAULT_TIME_FILE.read_text())
        updates = optimizer.metrics.num_updates
        steps_until(optimizer, lambda n=updates: optimizer.metrics.num_updates > n, 60.0)
        going_on_s.append(time.time() - died_s)
        notice_s.append(max(watch.noticed_s) - died_s)
        # All survivors must have had the same weights after each update that they made together.
        seen = on_ranks(optimizer, hashes)
        for other in seen[1:]:
            common = seen[0].keys() & other.keys()
            num_compared += len(common)
            assert all(seen[0][at] == other[at] for at in common)
        steps_until(optimizer, lambda: whole(optimizer), 120.0)
        states = on_ranks(optimizer, learned_state)
        assert len(states) == 4
        assert all(state == states[0] for state in states), (
            "the replacement must have the state of the other ranks"
        )
        assert np.frombuffer(states[0][2], np.float32).any(), "Adam's moments must not be 0"
        assert states[0][1] > version
        now = {worker.index: pid_of(worker) for worker in optimizer.group.ranks}
        assert sum(now[index] != pids[index] for index in pids) == 1, "one process is replaced"
    stats = optimizer.workers.stats()
    assert stats["num_worker_deaths"] == stats["num_remote_worker_restarts"] == KILLS
    assert stats["num_worker_hangs"] == stats["num_worker_exceptions"] == 0
    assert num_compared > KILLS
    # The test checks medians, because the driver may be slow while processes start on few cores.
    assert sorted(notice_s)[KILLS // 2] < 1.0
    assert sorted(watch.formed_s)[len(watch.formed_s) // 2] < 2.0
    report(
        "SIGKILL in all-reduce, 20 times",
        f"survivors get the error after {sorted(notice_s)[KILLS // 2]:.2f} s (median), "
        f"{max(notice_s):.2f} s (longest); group formed again in "
        f"{sorted(watch.formed_s)[len(watch.formed_s) // 2]:.2f} s, {max(watch.formed_s):.2f} s; "
        f"learning again after {sorted(going_on_s)[KILLS // 2]:.2f} s, {max(going_on_s):.2f} s; "
        f"{num_compared} hashes compared",
    )


@pytest.mark.usefixtures("compare_every_round")
def test_rank_that_hangs_in_allreduce(worker_pool: Pool, report: Report) -> None:
    timeout_s = 5.0
    optimizer = make(worker_pool, HangingPPO, allreduce_timeout_s=timeout_s)
    assert DecentralizedAllReduce.config_class().allreduce_timeout_s <= 60.0
    optimizer.drain()
    watch = FailureWatcher(optimizer)
    FAULT_FILE.touch()
    steps_until(optimizer, lambda: optimizer.num_broken_rounds, 60.0)
    updates = optimizer.metrics.num_updates
    steps_until(optimizer, lambda: optimizer.metrics.num_updates > updates, 60.0)
    recovered_s = time.time() - float(FAULT_TIME_FILE.read_text())
    stats = optimizer.workers.stats()
    assert stats["num_worker_hangs"] == stats["num_remote_worker_restarts"] == 1
    noticed_s = watch.noticed_s[0] - float(FAULT_TIME_FILE.read_text())
    assert noticed_s < timeout_s + 1.0
    assert recovered_s < timeout_s + 4.0, (noticed_s, watch.formed_s)
    steps_until(optimizer, lambda: whole(optimizer), 120.0)
    states = on_ranks(optimizer, learned_state)
    assert all(state == states[0] for state in states)
    report(
        "a rank hangs in all-reduce",
        f"timeout {timeout_s:.0f} s; survivors get the error after {noticed_s:.1f} s; "
        f"group formed again in {watch.formed_s[0]:.2f} s; learning after {recovered_s:.1f} s",
    )
