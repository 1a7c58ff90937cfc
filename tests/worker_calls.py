"""`Calls` for simulated workers, and functions for these workers."""

from __future__ import annotations

from typing import Any

from fakes import FakeTransport, FakeWorkerSet, worker_config
from toy_envs import Drift

from polopt.common.weights import Weights
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.rollout_worker import RolloutWorker

TIMEOUT_S, STARTUP_S = 10.0, 50.0


def calls_for(
    fake: FakeTransport, num_workers: int = 2, up: bool = True, **options: Any
) -> tuple[FakeWorkerSet, Calls]:
    """Makes simulated workers, and a `Calls` for them."""
    limits = {"worker_timeout_s": TIMEOUT_S, "worker_startup_timeout_s": STARTUP_S}
    rollout = {"num_workers": num_workers, **limits, **options.pop("rollout", {})}
    config = worker_config(env=options.pop("env", Drift), rollout=rollout)
    workers = FakeWorkerSet(config, fake, up=up)
    return workers, Calls(workers, "test", **options)


def echo(worker: RolloutWorker, value: Any = None) -> Any:
    return value


def version_of(worker: RolloutWorker, weights: Weights | None) -> int:
    worker.set_weights(weights)
    return worker.policy.version


def fail(worker: RolloutWorker) -> None:
    raise ValueError("expected failure")


def fail_if(worker: RolloutWorker, fails: bool) -> bool:
    if fails:
        raise ValueError("expected failure")
    return fails
