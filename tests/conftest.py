"""Fixtures that all tests share."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Ray reads HOME when it is imported. This process sets its own HOME, so that results of tests, and
# of the programs that tests run, go to `ray_results` in this directory. The `TemporaryDirectory`
# object later removes exactly the directory that it has made. Do not remove a directory by the
# value of an environment variable.
os.environ["HOME"] = (_home := tempfile.TemporaryDirectory(prefix="polopt-tests-home-")).name

import ray
import torch

from polopt.optimizers import decentralized_allreduce
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.networks.model_config import NETWORKS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

# Tests, and the programs that tests run, start their own Ray even if a cluster is running.
os.environ["RAY_ADDRESS"] = "local"
#: The number of worker sets that `worker_pool` keeps.
POOL_SIZE = 4
FIGURES = pytest.StashKey[list[tuple[str, str, str]]]()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Returns a function that adds a fault and its measured cost to the table at the end of the
    run."""

    def add(fault: str, figures: str) -> None:
        callspec = getattr(request.node, "callspec", None)
        which = str(callspec.params.get("name", "")) if callspec else ""
        request.config.stash.setdefault(FIGURES, []).append((fault, which, figures))

    return add


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(FIGURES, [])
    if not rows:
        return
    terminalreporter.section("faults and their cost")
    for fault, which, figures in rows:
        terminalreporter.write_line(f"{fault:<32}{which:<25}{figures}")


#: The files of `make test-integration` that take longest.
LONGEST = (
    "command_line/test_cli.py",
    "trainers/test_trainer.py",
    "rollouts/transport/test_transport_training.py",
    "project/test_deletion.py",
    "dashboards/test_dashboard_page.py",
    "optimizers/test_many_policies.py",
    "project/test_write_an_optimizer.py",
    "optimizers/test_async_replay.py",
    "collectors/test_gradient_worker.py",
    "collectors/test_schemes.py",
    "project/test_first_contact.py",
    "metrics/test_worker_shares.py",
    "comparison/test_compare.py",
    "command_line/test_full_disk.py",
    "recording/test_rerun.py",
    "project/test_type_checkers.py",
    "trainers/test_tuned_examples.py",
    "rllib/test_migration_page.py",
    "rllib/test_rllib_scripts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first. All tests of a file run in one process, so at the end
    of a run, the other process would wait for a long file."""
    folder = Path(__file__).parent / "integration"
    place = {folder / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Makes cloudpickle pickle functions and classes of tests by value, because Ray's workers
    cannot import them."""
    folder = Path(__file__).parent
    for module in list(sys.modules.values()):
        if folder in Path(getattr(module, "__file__", None) or "").parents:
            ray.cloudpickle.register_pickle_by_value(module)


@pytest.fixture(autouse=True)
def _same_first_weights() -> None:
    """Each test builds networks with the same weights in each run, whatever ran before it.

    Only torch is seeded. Ray draws ports from Python's `random`, and two processes of tests must
    not draw the same ones.
    """
    torch.manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def _names_of_this_module() -> Iterator[None]:
    """After the tests of a module, removes the classes that they have registered or named in a
    config.

    Errors list all registered names. So without this fixture, tests of such errors would depend on
    the tests that ran earlier in the same process.
    """
    before = [(registry, dict(registry._known)) for registry in (OPTIMIZERS, POLICIES, NETWORKS)]
    yield
    for registry, known in before:
        registry._known.clear()
        registry._known.update(known)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder for results. Readers of results cache them in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "results"


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Makes `gc.collect()` fast: it visits only the objects that the test makes, and not a million
    older objects."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def compare_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `DecentralizedAllReduce` compare the weights of all ranks after each round."""
    monkeypatch.setattr(decentralized_allreduce, "CHECKSUM_INTERVAL", 1)


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Starts one Ray for all tests of a session.

    `num_cpus` is a logical number. It is so large that no trial waits for a CPU while `worker_pool`
    holds its workers.
    """
    ray.init(
        num_cpus=32,
        resources={"seat": 8.0},
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        # Without this private option, Ray starts one process per logical CPU, 32 here, before a
        # test needs any process. Ray has no public option against this.
        _system_config={"prestart_worker_first_driver": False},
    )
    yield
    ray.shutdown()


def reused(workers: WorkerSet, config: WorkerConfig) -> bool:
    """Reconfigures the workers. Returns False if the config needs other processes, or if a worker
    has died."""
    # A test may have removed workers and added new workers, which have other indices.
    expected = list(range(1, config.rollout.num_workers + 1))
    if [worker.index for worker in workers.remote] != expected:
        return False
    try:
        return workers.reconfigure(config) and workers.faults.num_restarts == 0
    except WorkersFailedError:
        return False


@pytest.fixture(scope="session")
def worker_pool(ray_session: None) -> Iterator[Callable[[WorkerConfig], WorkerSet]]:
    """Yields a function that returns a worker set for a config.

    The start of a process takes seconds. So the function reuses the processes of the last set with
    the same number of workers and the same transport. It starts new processes if the config
    requires this, or if a worker has died. It keeps `POOL_SIZE` sets, and stops the set that was
    not used for the longest time. A set is valid until the next call with the same number of
    workers and the same transport.
    """
    pool: dict[tuple[int, str], WorkerSet] = {}  # the set that was used last is the last one

    def get(config: WorkerConfig) -> WorkerSet:
        key = (config.rollout.num_workers, config.rollout.transport)
        workers = pool.pop(key, None)
        if workers is None or not reused(workers, config):
            if workers is not None:
                workers.stop()
            elif len(pool) == POOL_SIZE:
                pool.pop(next(iter(pool))).stop()
            workers = WorkerSet(config)
        pool[key] = workers
        return workers

    yield get
    for workers in pool.values():
        workers.stop()
