"""Errors of policies and environments in the processes of a `Collector`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fakes import worker_config
from faulty_envs import NotInWorkers, WrongShape
from toy_envs import Drift

from polopt.collectors.collector import Collector
from polopt.collectors.resolve_policy import resolve_policy
from polopt.rollouts.envs.env_errors import EnvironmentFailedError
from polopt.rollouts.workers.errors import FunctionError, WorkersFailedError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]


def test_first_error_of_a_policy_is_reported_once(worker_pool: Pool) -> None:
    adapter, options = resolve_policy(WrongShape())
    config = worker_config("a2c", rollout={"num_workers": 1})
    config = dataclasses.replace(config, policy_class=adapter, policy=options)
    collector = Collector.over(worker_pool(config), sync=True)
    with pytest.raises(FunctionError, match="policy 'WrongShape', environment 'Drift'") as e:
        next(collector)
    assert "ray::" not in str(e.value)
    stats = collector.workers.stats()
    assert stats["num_remote_worker_restarts"] == stats["num_worker_exceptions"] == 0


def test_policy_that_workers_cannot_unpickle_is_reported_once(ray_session: None) -> None:
    adapter, options = resolve_policy(NotInWorkers())
    config = worker_config("a2c", rollout={"num_workers": 1, "num_cpus_per_worker": 0.1})
    workers = WorkerSet(dataclasses.replace(config, policy_class=adapter, policy=options))
    try:
        with pytest.raises(WorkersFailedError, match="No module named 'users_module'"):
            next(Collector.over(workers, sync=True))
        assert workers.stats()["num_remote_worker_restarts"] == 0
    finally:
        workers.stop()


def test_local_collector_reports_why_environments_fail() -> None:
    # The driver makes one environment to read its spaces. Only the second environment fails.
    made: list[int] = []

    def make() -> Any:
        made.append(1)
        if len(made) > 1:
            raise OSError("no licence")
        return Drift()

    collector = Collector(make, num_collectors=0, frames_per_batch=4)
    with pytest.raises(EnvironmentFailedError, match="no licence"):
        next(collector)
