"""Reruns of recorded runs on Ray, in which a worker was killed, are equal bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import pid_of
from plugin_page import PLUGINS, plugin
from toy_envs import Drift

import polopt
from polopt.common.config import ConfigError
from polopt.recording.run_record import digest_of
from polopt.trainers.trainer import PolicyOptimizerTrainer

_REPLAY: dict[str, Any] = {"learning_starts": 100, "train_batch_size": 16}
#: Options of a run with each strategy.
STRATEGIES: dict[str, dict[str, Any]] = {
    "async_gradients": {"optimizer": "async_gradients", "policy": "a2c"},
    "sync_gradients": {"optimizer": "sync_gradients", "policy": "a2c"},
    "sync_samples": {"optimizer": "sync_samples", "policy": "ppo"},
    "async_samples": {"optimizer": "async_samples", "policy": "impala"},
    "allreduce": {"optimizer": "decentralized_allreduce"},
    "elastic": {"optimizer": "elastic_averaging", "policy": "a2c"},
    "local_sgd": {"optimizer": "local_sgd", "policy": "a2c"},
    "sync_replay": {"optimizer": {"name": "sync_replay", **_REPLAY}, "policy": "dqn"},
    "async_replay": {
        "optimizer": {"name": "async_replay", "num_cpus_per_replay_shard": 0.1, **_REPLAY},
        "policy": "dqn",
    },
    "workers below": {
        "optimizer": "async_gradients",
        "policy": "a2c",
        "num_workers": 1,
        "num_workers_below": 2,
        "collection": "async",
    },
}
#: Cases that `make test-integration` runs. `make test-slow` runs each strategy on each transport.
OFTEN = [
    ("async_gradients", "socket"),
    ("allreduce", "socket"),
    ("async_replay", "ray"),
]
#: Strategies whose results depend on the order in which replies arrive.
ASYNCHRONOUS = ["async_gradients", "async_samples", "elastic", "async_replay"]


def cases() -> Iterator[Any]:
    for name in STRATEGIES:
        for transport in ("ray", "socket"):
            marks = [] if (name, transport) in OFTEN else [pytest.mark.slow]
            yield pytest.param(name, transport, marks=marks, id=f"{name}-{transport}")


def options_of(name: str, transport: str) -> dict[str, Any]:
    for one in PLUGINS:
        plugin(one)
    return {
        "env": "CartPole-v1",
        "num_workers": 2,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 10,
        "num_cpus_per_worker": 0.3,
        "min_sample_timesteps_per_iteration": 200,
        "model": {"fcnet_hiddens": [16]},
        "seed": 3,
        "record_arrivals": True,
        "transport": transport,
        **STRATEGIES[name],
    }


def train(options: dict[str, Any]) -> tuple[str, list[str], int]:
    """Runs three iterations. In the second iteration, a worker dies. Returns the directory, the
    digests, and the number of restarts."""
    trainer = PolicyOptimizerTrainer(options)
    digests = []
    for iteration in range(3):
        if iteration == 1:
            os.kill(pid_of(trainer.workers.remote[-1]), signal.SIGKILL)
        trainer.train()
        digests.append(digest_of(trainer.get_policy()))
        if iteration == 1:
            trainer.save()
    restarts = trainer.workers.faults.num_restarts
    trainer.stop()
    return trainer.logdir, digests, restarts


@pytest.mark.parametrize(("name", "transport"), list(cases()))
def test_a_run_with_a_killed_worker_is_repeated(
    ray_session: None, name: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.trainers.trainer.storage_folder", lambda: str(tmp_path))
    folder, digests, restarts = train(options_of(name, transport))
    assert restarts == 1
    assert len(set(digests)) == len(digests), "the weights change in each iteration"
    again = []
    for trainer in polopt.rerun(folder):
        again.append(digest_of(trainer.get_policy()))
        restarts = trainer.workers.faults.num_restarts
    assert again == digests
    assert restarts == 1, "the rerun repeats the recorded death"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["async_gradients", "sync_replay", "async_replay"])
def test_a_rerun_begins_at_a_checkpoint(
    ray_session: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.trainers.trainer.storage_folder", lambda: str(tmp_path))
    folder, digests, _ = train({**options_of(name, "socket"), "record_restarts": True})
    start = Path(folder) / "checkpoint_000000"
    again = [digest_of(trainer.get_policy()) for trainer in polopt.rerun(folder, start=start)]
    assert again == digests[2:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_second_run_without_the_record_differs(
    ray_session: None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rerun is equal because of the record, and not because of the seed."""
    monkeypatch.setattr("polopt.trainers.trainer.storage_folder", lambda: str(tmp_path))
    (_, first, _), (_, second, _) = (train(options_of(name, "ray")) for _ in range(2))
    assert first[-1] != second[-1]


def collected(seed: int = 5, **options: Any) -> list[np.ndarray]:
    """Returns the weights after each batch of an asynchronous collector. In the recorded run, a
    worker is killed."""
    collectors = pytest.importorskip("polopt.collectors.collector")
    batches, killed = [], False
    with collectors.Collector(
        Drift,
        "a2c",
        num_collectors=2,
        num_envs=2,
        frames_per_batch=20,
        total_frames=400,
        remote_configs={"num_cpus": 0.3},
        seed=seed,
        **options,
    ) as collector:
        for batch in collector:
            up = [worker for worker in collector.workers.remote if worker.up]
            if up and not killed and len(batches) >= 3 and "record_to" in options:
                os.kill(pid_of(up[-1]), signal.SIGKILL)
                killed = True
            collector.policy.learn_on_batch(batch)
            collector.update_policy_weights_()
            batches.append(collector.policy.get_weights().flat.copy())
        assert killed == ("record_to" in options)
    return batches


def test_rerun_of_a_collector_has_equal_batches(ray_session: None, tmp_path: Path) -> None:
    record = tmp_path / "collected.jsonl.gz"
    first = collected(record_to=record)
    again = collected(rerun_of=record)
    assert len(first) >= 10
    np.testing.assert_array_equal(again, first)
    with pytest.raises(polopt.RerunDifference, match=r"event \d+, the rerun differs: worker "):
        collected(seed=6, rerun_of=record)
    with pytest.raises(ConfigError, match=r"'record_to': .*, which exists"):
        collected(record_to=record)
