"""Each kind of failure has its own count, last traceback and worker."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
from fakes import make_optimizer, worker_config
from faulty_envs import BadReset, NeverMade, NeverSteps

from polopt.common.config import ConfigError
from polopt.common.faults import Fault, one_per_kind
from polopt.metrics.record import Record
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.envs.env_errors import EnvironmentAPIError, EnvironmentFailedError
from polopt.rollouts.workers.call_runner import CallError
from polopt.rollouts.workers.errors import FunctionError, NonFiniteError, WorkersFailedError
from polopt.rollouts.workers.fault_log import FaultLog
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.experiment import Experiment

Pool = Callable[[WorkerConfig], WorkerSet]
every_optimizer = pytest.mark.parametrize("cls", [AsyncGradients, SyncSamples])


def recorded(**fields: Any) -> Record:
    """Returns a record with the given counts."""
    record = Record()
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_each_kind_has_its_own_keys_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    log = FaultLog(max_consecutive_failures=10)
    log.success(1)
    with caplog.at_level(logging.WARNING, logger="polopt"):
        log.failure(1, Fault("death", "the process died"))
        log.failure(2, Fault("hang", "no answer for 3.0 s"))
        log.failure(3, Fault("exception", "Traceback\n  ...\nKeyError: 'x'"))
        log.failure(4, Fault("environment", "it fell\n  ...\nOSError: no display"))
        raised = Fault("raised", "environment 'E' in step():\n ...\nValueError: y", 7, count=2)
        log.add(5, recorded(faults=one_per_kind([raised])))
        log.add(6, recorded(faults=one_per_kind([Fault("non_finite", "reward is nan")])))
    stats = log.stats()
    for plural, kind, worker, said in (
        ("deaths", "death", 1, "the process died"),
        ("hangs", "hang", 2, "no answer"),
        ("exceptions", "exception", 3, "KeyError"),
        ("environment_failures", "environment", 4, "OSError: no display"),
    ):
        assert stats[f"num_worker_{plural}"] == 1
        assert stats[f"last_{kind}_worker"] == worker
        assert said in stats[f"last_{kind}"]
    assert stats["num_env_faults"] == 2
    assert (stats["last_env_fault_worker"], stats["last_env_fault_env"]) == (5, 7)
    assert stats["last_env_fault"].endswith("ValueError: y")
    assert stats["num_non_finite"] == 1
    assert (stats["last_non_finite_worker"], stats["last_non_finite"]) == (6, "reward is nan")
    lines = caplog.messages
    assert all("\n" not in line for line in lines)
    for worker, said in (
        (1, "death"), (2, "hang"), (3, "KeyError"), (4, "OSError"), (5, "ValueError"), (6, "nan")
    ):  # fmt: skip
        assert [said in line for line in lines if line.startswith(f"worker {worker}")] == [True]


@every_optimizer
@pytest.mark.parametrize(("env", "said"), [(NeverSteps, "no simulator"), (NeverMade, "no licence")])
def test_env_that_always_fails_ends_run_with_its_traceback(
    worker_pool: Pool, cls: Any, env: Any, said: str
) -> None:
    limits = {"max_consecutive_env_faults": 2, "max_consecutive_failures": 2}
    # The spaces of the environment are known, so the driver does not notice the error.
    config = worker_config("a2c", rollout={"num_workers": 1, **limits})
    workers = worker_pool(replaced(config, env))
    optimizer = make_optimizer(cls, workers)
    with pytest.raises(WorkersFailedError) as caught:
        optimizer.step()
    message = str(caught.value)
    assert said in message
    assert "faulty_envs.py" in message
    assert repr(env.__name__) in message
    assert "of worker 1" in message
    assert "ray::" not in message
    stats = workers.stats()
    assert stats["num_worker_environment_failures"] == 1
    assert stats["num_remote_worker_restarts"] == 0
    assert stats["num_worker_exceptions"] == stats["num_worker_deaths"] == 0
    assert said in stats["last_environment"]
    workers.faults = FaultLog(10)  # without failures, so another test can use these workers


def replaced(config: WorkerConfig, env: Any) -> WorkerConfig:
    return dataclasses.replace(config, env=env)


@pytest.mark.parametrize("cls", [AsyncGradients, SyncSamples, DecentralizedAllReduce])
def test_environment_that_breaks_the_api_ends_the_run_at_once(
    worker_pool: Pool, cls: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = worker_config("ppo", rollout={"num_workers": 1})
    workers = worker_pool(replaced(config, BadReset))
    with pytest.raises(EnvironmentAPIError, match=r"'BadReset' \(number 0 of worker 1\)") as caught:
        make_optimizer(cls, workers).step()
    assert "reset() must return a pair (observation, info); got array" in str(caught.value)
    assert "ray::" not in str(caught.value)
    stats = workers.stats()
    assert stats["num_remote_worker_restarts"] == 0, "another worker would fail the same way"
    assert "was replaced" not in caplog.text
    assert stats["num_env_faults"] == 0, "no environment was replaced"


@pytest.mark.parametrize(("env", "said"), [(NeverMade, "OSError: no licence"), (3, "got 3")])
def test_env_that_cannot_be_made_is_found_before_any_actor(env: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Experiment.parse({"env": env}, {}).make_worker_config()


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EnvironmentAPIError("it broke"), "api"),
        (EnvironmentFailedError("it broke"), "environment"),
        (NonFiniteError("it broke"), "non_finite"),
        (FunctionError("it broke"), "function"),
    ],
)
def test_call_error_has_the_kind_and_message_of_the_exception(error: Exception, kind: str) -> None:
    assert CallError.of(error) == CallError(kind, "it broke")  # type: ignore[arg-type]
    other = CallError.of(KeyError("it broke"))
    assert other.kind == "exception"
    assert other.message.startswith("KeyError: 'it broke'")
