"""`SyncSamples` and synchronous Collectors stop slow workers early. Also tests the classes that
implement this."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import CheckedWorker, make_optimizer, worker_config
from toy_envs import TimestampEnv

from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport.control_page import EarlyStopRequest
from polopt.rollouts.workers.call_runner import CallRunner
from polopt.rollouts.workers.early_stop import Stragglers
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_set import WorkerSet


@pytest.mark.parametrize(
    ("fraction", "workers", "when"),
    [
        (1.0, 4, []),
        (0.5, 4, [1, 2]),
        (0.5, 3, [1]),
        (0.01, 4, [1, 2, 3]),
        (0.5, 2, [1]),
        (0.9, 4, []),
        (0.56, 25, list(range(1, 12))),  # in floating point, 0.56 * 25 is larger than 14
    ],
)
def test_workers_after_the_fraction_are_stopped_early(
    fraction: float, workers: int, when: list[int]
) -> None:
    stragglers = Stragglers(fraction, 0.25)
    assert [n for n in range(workers + 1) if stragglers.remain(workers, n)] == when


def test_share_of_a_fragment_that_is_kept() -> None:
    assert [Stragglers(0.5, 0.25).keep_steps(steps) for steps in (1, 4, 5, 100)] == [1, 1, 2, 25]
    assert Stragglers(0.5, 0.0).keep_steps(100) == 1
    assert Stragglers(0.5, 1.0).keep_steps(100) == 100
    assert Stragglers(0.5, 0.07).keep_steps(100) == 7  # in floating point, the product is larger


def test_early_stop_applies_to_one_call() -> None:
    worker = CheckedWorker(worker_config("a2c"), 1)

    def length(number: int) -> int:
        answer = worker.run(number, sample, worker.get_weights() if number == 7 else None)
        assert answer.record.num_early_stopped == (answer.value.shape[0] < 5)
        return int(answer.value.shape[0])

    worker.control.request_stop(EarlyStopRequest(8, 2))  # arrives before its call
    assert [length(7), length(8), length(9)] == [5, 2, 5]
    worker.control.request_stop(EarlyStopRequest(9, 2))  # arrives after its call
    assert length(10) == 5


def test_early_stops_of_all_calls_of_a_worker_are_kept() -> None:
    """`Calls.send` uses two numbers per call, and sends calls to workers in turn. So the numbers of
    the calls of one worker have a constant difference."""
    for num_workers in range(1, 101):
        calls = [1000 + 2 * num_workers * i for i in range(8)]
        runner = CallRunner()
        for call in calls:
            runner.control.request_stop(EarlyStopRequest(call, call))
        found = [runner.run(call, CallRunner.stop_after).value for call in calls]
        assert found == calls, num_workers


def two_fragments(worker: RolloutWorker) -> list[int]:
    return [worker.next_batch().shape[0] for _ in range(2)]


def test_early_stop_shortens_all_further_fragments_of_a_call() -> None:
    worker = RolloutWorker(worker_config("a2c"), 1)
    worker.control.request_stop(EarlyStopRequest(1, 2))
    answer = worker.run(1, two_fragments)
    assert answer.value == [2, 2]
    assert answer.record.num_early_stopped == 2


def test_early_stop_of_an_outer_call_lasts_beyond_an_inner_one() -> None:
    runner = CallRunner()
    during: list[int | None] = []

    def note(runner: CallRunner) -> None:
        during.append(runner.stop_after())

    def outer(runner: CallRunner) -> None:
        runner.control.request_stop(EarlyStopRequest(1, 3))
        note(runner)
        runner.run_here(2, note)
        note(runner)
        runner.control.request_stop(EarlyStopRequest(2, 4))  # call 2 has ended
        note(runner)

    assert runner.run(1, outer).error is None
    assert during == [3, 3, 3, 3]
    runner.run(3, note)
    assert during[4] is None


def test_smaller_request_to_an_inner_call_has_effect() -> None:
    runner = CallRunner()

    def outer(runner: CallRunner) -> list[int | None]:
        runner.control.request_stop(EarlyStopRequest(1, 100))
        runner.control.request_stop(EarlyStopRequest(2, 3))
        inner = runner.run_here(2, CallRunner.stop_after).value
        return [inner, runner.stop_after()]

    assert runner.run(1, outer).value == [3, 100]


@pytest.fixture
def workers(worker_pool: Any) -> WorkerSet:
    """Returns two workers with fragments of 40 steps. The steps of the second worker take 40 ms."""
    options = {
        "num_envs_per_worker": 1,
        "rollout_fragment_length": 40,
        "env_config": {"slow": 2, "slow_s": 0.04},
    }
    made: WorkerSet = worker_pool(
        worker_config("a2c", lambda ctx: TimestampEnv(ctx), rollout=options)
    )
    return made


def test_sync_samples_stops_slow_workers_early(workers: WorkerSet) -> None:
    complete = make_optimizer(SyncSamples, workers)
    assert complete.step().env_steps_trained == 80
    early = make_optimizer(SyncSamples, workers, fraction_workers=0.5, fraction_samples=0.1)
    results = [early.step() for _ in range(3)]
    # The fast worker always samples 40 rows. The slow worker keeps at least 10 percent of 40 rows.
    assert all(44 <= result.env_steps_trained < 80 for result in results)
    assert all(result.env_steps_sampled == result.env_steps_trained for result in results)
    assert early.stats()["num_early_stopped"] == 3
    kept = make_optimizer(SyncSamples, workers, fraction_workers=0.5, fraction_samples=0.75)
    assert kept.step().env_steps_trained == 70  # 40 rows, and 75 percent of 40 rows
    # Each worker has two fragments to sample. The driver drops the second request to the slow
    # worker, which it has not sent yet.
    long = make_optimizer(SyncSamples, workers, fraction_workers=0.5, train_batch_size=160)
    assert 90 <= long.step().env_steps_trained < 160
