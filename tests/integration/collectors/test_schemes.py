"""The scheme matrix: each cell runs, counts correctly, has the expected lag, and learns."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeWorkerSet, make_optimizer, worker_config
from learning import train_cartpole

from polopt.collectors.gradient_worker import GradientWorker, GradientWorkerSet
from polopt.collectors.scheme import (
    COLLECTIONS,
    GRADIENTS,
    UPDATES,
    Scheme,
    scheme_config,
    scheme_of,
)
from polopt.common.config import ConfigError
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.rank_group import checksum
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.experiment import Experiment
from polopt.trainers.trainer import PolicyOptimizerTrainer

CELLS = [Scheme(*words) for words in itertools.product(COLLECTIONS, GRADIENTS, UPDATES)]


def options_of(cell: Scheme) -> dict[str, Any]:
    """Returns the options of a cell, except `optimizer`."""
    return {key: value for key, value in scheme_config(*cell).items() if key != "optimizer"}


def has_meaning(cell: Scheme) -> bool:
    return cell.update == "central" or cell.gradients == "parallel sync"


MEANINGFUL = sorted(
    (cell for cell in CELLS if has_meaning(cell)),
    # Cells that can use the same processes follow each other.
    key=lambda cell: [scheme_config(*cell).get(k, 0) for k in ("num_workers", "num_workers_below")],
)
every_cell = pytest.mark.parametrize("cell", MEANINGFUL, ids=", ".join)
ROWS = 10  # rows of a fragment of 5 steps of 2 environments
#: With these options, each rollout gives four updates.
PPO = {"num_sgd_iter": 2, "sgd_minibatch_size": 5, "lr": 1e-3}


def test_the_matrix_has_20_cells_with_a_meaning() -> None:
    assert len(CELLS) == 32
    assert len(MEANINGFUL) == 20


@pytest.mark.parametrize("cell", [c for c in CELLS if not has_meaning(c)], ids=", ".join)
def test_meaningless_cell_error_names_the_reason(cell: Scheme) -> None:
    with pytest.raises(
        ConfigError, match=r"decentralized.*(needs several processes|waits for all)"
    ):
        scheme_config(*cell)


def test_unknown_scheme_word_is_refused() -> None:
    for words in (("central",), ("central sync", "async"), ("central sync", "central sync", "x")):
        with pytest.raises(ConfigError, match="Allowed: 'central"):
            scheme_config(*words)


@every_cell
def test_options_of_a_cell_make_a_trainer_of_that_cell(cell: Scheme) -> None:
    experiment = Experiment.parse({"env": "CartPole-v1", **scheme_config(*cell)}, {})
    workers = FakeWorkerSet(worker_config(rollout=options_of(cell)))
    optimizer = make_optimizer(experiment.optimizer_class, workers)
    optimizer.config = experiment.optimizer
    assert scheme_of(optimizer) == cell


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 0, "collection": "async"}, r"'collection'.*driver samples in its own"),
        ({"num_workers": 0, "collection": "overlapped"}, r"'collection'.*cannot do so while"),
        ({"optimizer": "async_gradients", "collection": "async"}, r"num_workers_below=0"),
        ({"optimizer": "decentralized_allreduce", "collection": "overlapped"}, r"each worker"),
        ({"num_workers_below": 2}, r"'num_workers_below'.*driver computes all gradients"),
        ({"compress_gradients": "topk"}, r"'compress_gradients'.*workers send no gradients"),
        ({"num_workers": 0, "compress_data": "lz4"}, r"'compress_data'.*no process sends batches"),
        ({"optimizer": "async_gradients", "compress_data": "lz4"}, r"no process sends batches"),
        (
            {"optimizer": "decentralized_allreduce", "compress_gradients": "fp16"},
            r"all-reduce sums gradients in place",
        ),
        ({"collection": "async"}, r"'async'.*optimizer 'async_samples'"),
        ({"fraction_workers_below": 0.5}, r"'fraction_workers_below'.*no process waits"),
        ({"fraction_samples_below": 0.5}, r"'fraction_samples_below'.*no process waits"),
        ({"topk_share": 0.5}, r"'topk_share': got 0.5.*workers send no gradients"),
        (
            {"optimizer": "decentralized_allreduce", "topk_share": 0.5},
            r"'topk_share': got 0.5.*cannot compress",
        ),
        (
            {
                "optimizer": "async_gradients",
                "num_workers_below": 2,
                "collection": "async",
                "fraction_workers_below": 0.5,
            },
            r"'fraction_workers_below'.*no process waits",
        ),
        (
            {"optimizer": {"name": "async_gradients", "sync": True}},
            r"'sync'.*optimizer 'sync_gradients'",
        ),
        (
            {"optimizer": "async_gradients", "sync": True},
            r"'sync'.*optimizer 'sync_gradients'",
        ),
        (
            {"optimizer": {"name": "sync_gradients", "max_policy_lag": 3}},
            r"unknown key 'max_policy_lag'",
        ),
        ({"optimizer": "async_samples", "num_workers": 0}, r"needs remote workers"),
        (
            {"optimizer": "async_samples", "collection": "overlapped"},
            r"'overlapped'.*'sync_samples'",
        ),
        ({"num_workers": 2, "compress_data": "topk"}, r"'compress_data'.*allowed"),
        ({"optimizer": "async_gradients", "num_workers": 0}, r"needs remote workers"),
        (
            {"optimizer": "decentralized_allreduce", "preemption_threshold": 0.5},
            r"'preemption_threshold' is now 'fraction_workers'",
        ),
        (
            {"optimizer": {"name": "decentralized_allreduce", "min_fragment_share": 0.5}},
            r"'min_fragment_share' is now 'fraction_samples'",
        ),
    ],
)
def test_contradictory_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Experiment.parse({"env": "CartPole-v1", **options}, {})


def test_tune_reserves_room_for_workers_below() -> None:
    cell = ("parallel async", "parallel sync", "decentralized")
    options = scheme_config(*cell, num_collection_workers=3, num_gradient_workers=2)
    config = {"env": "CartPole-v1", "num_cpus_per_worker": 0.5, **options}
    bundles = PolicyOptimizerTrainer.default_resource_request(config).bundles
    assert bundles == [{"CPU": 1.0}, *[{"CPU": 0.5}] * 2 * (1 + 3)]


# ---- with processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cell_workers(ray_session: None) -> Iterator[Callable[[WorkerConfig], WorkerSet]]:
    """Returns a function that makes worker sets, with or without workers below. A set uses the
    processes of the last set if possible."""
    last: list[WorkerSet] = []

    def get(config: WorkerConfig) -> WorkerSet:
        if not (last and last[0].reconfigure(config)):
            if last:
                last.pop().stop()
            kind = GradientWorkerSet if config.rollout.num_workers_below else WorkerSet
            last.append(kind(config))
        return last[0]

    yield get
    for workers in last:
        workers.stop()


def make(cell: Scheme, get: Callable[[WorkerConfig], WorkerSet]) -> Any:
    options, optimizer = options_of(cell), scheme_config(*cell)["optimizer"]
    named = optimizer if isinstance(optimizer, dict) else {"name": optimizer}
    name, own = named["name"], {k: v for k, v in named.items() if k != "name"}
    if name in ("async_gradients", "sync_gradients"):
        own["grads_per_step"] = 8
    config = worker_config("ppo", rollout={**options, "num_cpus_per_worker": 0.1}, **PPO)
    return make_optimizer(OPTIMIZERS.get(name), get(config), **own)


def checksums_below(worker: GradientWorker) -> set[str]:
    """Returns the checksums of the weights of a gradient worker and of the workers below it. This
    function runs in the gradient worker."""
    return {checksum(worker), *foreach_worker(worker.workers, checksum).values()}


@every_cell
def test_cell_runs_counts_and_has_expected_lag(
    cell: Scheme, cell_workers: Callable[[WorkerConfig], WorkerSet]
) -> None:
    optimizer = make(cell, cell_workers)
    rollout = optimizer.workers.config.rollout
    results = [optimizer.step() for _ in range(4)]
    stats = optimizer.stats()
    assert scheme_of(optimizer) == cell

    # Counts.
    sampled = sum(result.env_steps_sampled for result in results)
    assert sampled == optimizer.metrics.num_env_steps_sampled > 0
    assert sampled % ROWS == 0
    assert optimizer.metrics.num_env_steps_trained <= sampled
    assert sum(result.updates for result in results) == optimizer.policy.version > 0
    if cell.gradients == "central sync" or cell.update == "decentralized":
        assert optimizer.metrics.num_env_steps_trained == sampled

    # Lags.
    gradients, data = stats["gradient_lag"], stats["policy_lag_rollouts"]
    if cell.gradients.endswith(" sync"):
        assert gradients["max"] == stats["gradient_lag_rollouts"]["max"] == 0
    if cell.gradients == "central async":
        assert gradients["max"] == 1, "a gradient is applied while the next is computed"
    if cell.gradients.endswith(" sync") and cell.collection.endswith(" sync"):
        assert data["max"] == 0
    if cell.collection == "central async" and cell.gradients == "central sync":
        # Each batch counts twice, because it has two environments. The first batch has a lag of 0,
        # and all other batches have a lag of one rollout.
        assert data["histogram"][:3] == [2, 6, 0]
    # A rollout gives four updates, so the lag in updates is at least the lag in rollouts.
    assert stats["policy_lag"]["max"] >= data["max"]

    # Weights.
    optimizer.drain()
    if cell.update == "decentralized":
        sums = foreach_worker(optimizer.workers, checksum)
        assert set(sums.values()) == {checksum(optimizer.workers.local)}
    if rollout.num_workers_below and cell.collection.endswith(" sync"):
        optimizer.update_algorithm_parameter("lr", 0.0)  # weights do not change any more
        for _ in range(3):  # after two steps, the rollouts with earlier weights are used up
            optimizer.step()
        optimizer.drain()
        for sums_below in foreach_worker(optimizer.workers, checksums_below).values():
            assert len(sums_below) == 1
    assert optimizer.workers.faults.num_restarts == 0
    optimizer.stop()
    assert optimizer.calls.idle


@pytest.mark.slow
@pytest.mark.timeout(1200)
@every_cell
def test_a_cell_learns_cartpole(cell: Scheme, ray_session: None) -> None:
    assert train_cartpole(scheme_config(*cell)) >= 400.0
