"""`AsyncGradients`: versions of the weights that workers receive, measured lag, and its bound."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from fakes import FakeTransport, FakeWorkerSet, in_order, make_optimizer, pid_of, worker_config
from simulated_channel import SimulatedTicket, none_ready, shuffled_by

from polopt.common.config import ConfigError
from polopt.common.weights import Gradients
from polopt.optimizers.async_gradients import AsyncGradients, AsyncGradientsConfig
from polopt.policies.learning.schedules import Schedule
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

NUM_WORKERS = 3
ROWS = 10  # rows of a fragment of 5 steps of 2 environments


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


def make(
    fake: FakeTransport,
    grads_per_step: int = 10,
    config: dict[str, Any] | None = None,
    cls: type[AsyncGradients] = AsyncGradients,
    up: bool = True,
    **options: Any,
) -> Any:
    own = worker_config(rollout={"num_workers": NUM_WORKERS}, **(config or {}))
    workers = FakeWorkerSet(own, fake, up=up)
    return make_optimizer(cls, workers, grads_per_step=grads_per_step, **options)


def spy_on_updates(optimizer: AsyncGradients) -> list[tuple[Gradients, float]]:
    """Returns a list that receives all gradients that are applied from now on, each with the factor
    on its learning rate."""
    applied: list[tuple[Gradients, float]] = []
    apply = optimizer.policy.apply_gradients

    def spy(gradients: Gradients, lr_scale: float = 1.0) -> dict[str, float]:
        applied.append((gradients, lr_scale))
        return apply(gradients, lr_scale)

    optimizer.policy.apply_gradients = spy  # type: ignore[method-assign]
    return applied


def uneven_order(length: int) -> list[int]:
    """Returns an order of arrival in which worker 3 is slow and worker 1 is fast."""
    rng = random.Random(5)
    return [3 if i % 9 == 8 else rng.choice([1, 1, 2]) for i in range(length)]


def lags_of(order: Iterable[int], bound: int | None = None) -> list[int]:
    """Returns the policy lags by definition: the current version minus the version that the worker
    received."""
    version = 0
    held = dict.fromkeys(range(1, NUM_WORKERS + 1), 0)
    lags = []
    for worker in order:
        lags.append(version - held[worker])
        if bound is None or lags[-1] <= bound:
            version += 1
        held[worker] = version
    return lags


def histogram(lags: list[int]) -> list[int]:
    return [sum(min(lag, 16) == i for lag in lags) for i in range(17)]


def test_without_remote_workers_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"num_workers=0.*'sync_samples'"):
        AsyncGradients.check_options(RolloutConfig(num_workers=0), AsyncGradientsConfig())
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 0}))
    with pytest.raises(ValueError, match="async_gradients"):
        make_optimizer(AsyncGradients, workers)


def test_the_pipeline_stays_full_across_steps(fake: FakeTransport) -> None:
    optimizer = make(fake, grads_per_step=7)
    actors = optimizer.workers.channels
    for step in range(1, 5):
        fake.script = shuffled_by(step)
        optimizer.step()
        assert optimizer.calls.num_pending == NUM_WORKERS
        assert [channel.under_way for channel in actors] == [1] * NUM_WORKERS
        # If a step drained the pipeline, the next step would have to send more calls.
        assert sum(len(channel.calls) for channel in actors) == NUM_WORKERS + 7 * step


def test_only_the_worker_of_an_update_gets_the_new_weights(
    fake: FakeTransport,
) -> None:
    optimizer = make(fake, grads_per_step=1)
    order = uneven_order(20)
    fake.script = in_order(order)
    for version, index in enumerate(order, start=1):
        before = [len(channel.calls) for channel in optimizer.workers.channels]
        optimizer.step()
        for channel, count in zip(optimizer.workers.channels, before, strict=True):
            new = channel.calls[max(count, 1) :]  # the first call has the initial weights
            assert len(new) == (channel.index == index)
            for method, (weights,) in new:
                assert method == "compute_gradient"
                assert weights.version == version


def test_every_gradient_is_applied_exactly_once(fake: FakeTransport) -> None:
    optimizer = make(fake, grads_per_step=5)
    applied = spy_on_updates(optimizer)
    for step in range(8):
        fake.script = shuffled_by(step)
        if step == 4:  # a worker dies before its gradient arrives
            optimizer.workers.channels[1].next_error = LostProcessError("the process died")
        result = optimizer.step()
        assert result == (5 * ROWS, 5 * ROWS, 5)
    optimizer.drain()
    assert optimizer.calls.num_pending == 0
    kept = [reply.value for reply in optimizer.calls.kept]
    assert len(kept) == NUM_WORKERS
    made = [gradients for channel in optimizer.workers.channels for gradients in channel.values]
    used = [gradients for gradients, _ in applied] + kept
    assert sorted(map(id, made)) == sorted(map(id, used)), "nothing is lost"
    assert len(made) == 8 * 5 + NUM_WORKERS
    fake.script = none_ready
    optimizer.config = optimizer.config_class(grads_per_step=NUM_WORKERS)
    assert optimizer.step() == (NUM_WORKERS * ROWS, NUM_WORKERS * ROWS, NUM_WORKERS)
    assert [gradients for gradients, _ in applied[-NUM_WORKERS:]] == kept
    assert optimizer.workers.faults.num_restarts == 1


def test_policy_lag_is_measured_exactly(fake: FakeTransport) -> None:
    order = uneven_order(60)
    optimizer = make(fake, grads_per_step=20)
    fake.script = in_order(order)
    expected = lags_of(order)
    for part in range(3):
        optimizer.step()
        lags = expected[20 * part : 20 * (part + 1)]
        stats = optimizer.stats()
        # Each rollout gives one update, and its gradient uses the weights that acted. So all four
        # lags are equal.
        for name in ("policy_lag", "policy_lag_rollouts", "gradient_lag", "gradient_lag_rollouts"):
            assert stats[name]["histogram"] == histogram(lags)
            assert stats[name]["mean"] == pytest.approx(sum(lags) / len(lags))
            assert stats[name]["max"] == max(lags)
    assert max(expected) > 5, "some gradients must be old"


class StampedLate(AsyncGradients):
    """A wrong variant, in which a gradient gets the version of the weights at its arrival."""

    def apply(self, gradients: Any, *args: Any) -> None:
        super().apply(gradients._replace(version=self.policy.version), *args)


def test_version_stamped_on_arrival_hides_the_lag(fake: FakeTransport) -> None:
    optimizer = make(fake, grads_per_step=20, cls=StampedLate)
    order = uneven_order(20)
    fake.script = in_order(order)
    optimizer.step()
    report = optimizer.stats()["gradient_lag"]
    assert report["max"] == 0
    assert report["histogram"] != histogram(lags_of(order))


def test_stale_gradients_are_dropped(fake: FakeTransport) -> None:
    bound = 2
    order = uneven_order(60)
    optimizer = make(fake, grads_per_step=60, max_policy_lag=bound)
    applied = spy_on_updates(optimizer)
    fake.script = in_order(order)
    result = optimizer.step()
    lags = lags_of(order, bound)
    fresh = sum(lag <= bound for lag in lags)
    assert 0 < fresh < 60
    assert result == (60 * ROWS, fresh * ROWS, fresh)
    assert optimizer.policy.version == fresh == len(applied)
    assert {scale for _, scale in applied} == {1.0}
    stats = optimizer.stats()
    assert stats["num_gradients_stale"] == 60 - fresh
    assert stats["num_gradients_accepted"] == fresh
    assert stats["policy_lag"]["histogram"] == histogram(lags), "dropped gradients count, too"


def test_stale_gradients_are_scaled(fake: FakeTransport) -> None:
    bound = 2
    order = uneven_order(60)
    config = {"lr": 1e-3}
    optimizer = make(fake, 60, config, max_policy_lag=bound, stale_gradients="scale")
    applied = spy_on_updates(optimizer)
    fake.script = in_order(order)
    assert optimizer.step() == (60 * ROWS, 60 * ROWS, 60)
    lags = lags_of(order)
    scales = [1.0 if lag <= bound else (bound + 1) / (lag + 1) for lag in lags]
    assert [scale for _, scale in applied] == pytest.approx(scales)
    assert optimizer.stats()["num_gradients_stale"] == sum(lag > bound for lag in lags)
    reported = optimizer.metrics.learner.report()["default_optimizer_learning_rate"]
    assert reported == pytest.approx(1e-3 * sum(scales) / 60)


def test_schedules_follow_the_environment_steps_of_all_workers(fake: FakeTransport) -> None:
    lr, entropy = [[0, 1e-2], [40 * ROWS, 0.0]], [[0, 0.5], [40 * ROWS, 0.1]]
    optimizer = make(fake, 1, {"lr": lr, "entropy_coeff": entropy})
    rates, coefficients = Schedule(lr), Schedule(entropy)
    fake.script = shuffled_by(0)
    clock = dict.fromkeys(range(1, NUM_WORKERS + 1), 0)
    for count in range(1, 31):
        before = {channel.index: len(channel.calls) for channel in optimizer.workers.channels}
        optimizer.step()
        steps = count * ROWS
        assert optimizer.metrics.num_env_steps_sampled == steps
        used = optimizer.metrics.learner.report()["default_optimizer_learning_rate"]
        assert used == pytest.approx(rates(steps)), "the driver's rate follows the sampled steps"
        for channel in optimizer.workers.channels:
            if len(channel.calls) > max(before[channel.index], 1):
                clock[channel.index] = steps
            assert channel.target.policy.entropy_coeff == pytest.approx(
                coefficients(clock[channel.index])
            ), "a worker uses the step count that came with its weights"


def test_worker_that_hangs_is_replaced(fake: FakeTransport) -> None:
    optimizer = make(fake, grads_per_step=9, config={"seed": 1})
    optimizer.step()
    lost = optimizer.workers.remote[1].channel
    others = shuffled_by(0)
    fake.script = lambda pending: others([ref for ref in pending if ref.channel.index != 2])
    for _ in range(5):  # time passes while the other workers answer
        fake.clock.now_s += 15.0
        optimizer.step()
    stats = optimizer.workers.stats()
    assert stats["num_worker_hangs"] >= 1
    assert stats["last_failed_worker"] == 2
    assert not lost.alive
    assert [worker.index for worker in optimizer.workers.remote] == [1, 2, 3]
    fresh = optimizer.workers.remote[1].channel
    assert fresh.calls[0][1][0] is not None, "the replacement has received weights"
    assert optimizer.calls.num_pending == NUM_WORKERS


def test_first_gradient_of_a_late_replacement_is_as_new_as_others(fake: FakeTransport) -> None:
    optimizer = make(fake, grads_per_step=40, up=False)
    optimizer.workers.remote[1].channel.errors["compute_gradient"] = LostProcessError(
        "the process died"
    )
    others = shuffled_by(0)

    def without_the_replacement(pending: list[SimulatedTicket]) -> SimulatedTicket:
        replaced = optimizer.workers.faults.num_restarts
        return others([ref for ref in pending if not (replaced and ref.channel.index == 2)])

    fake.script = without_the_replacement
    for _ in range(3):
        optimizer.step()
    late = optimizer.workers.remote[1]
    assert (optimizer.workers.faults.num_restarts, late.up) == (1, False)
    late.channel.finish()  # the process of this worker has started
    fake.script = others
    optimizer.config = optimizer.config_class(grads_per_step=1)
    optimizer.step()
    assert optimizer.calls.num_pending == NUM_WORKERS, (
        "one call per worker, also for the late replacement"
    )
    optimizer.config = optimizer.config_class(grads_per_step=40)
    optimizer.stats()
    optimizer.step()
    report = optimizer.stats()["gradient_lag"]
    assert "compute_gradient" in [name for name, _ in late.channel.calls]
    # Weights from the time of the failure would be more than 80 updates old.
    assert 0 < report["max"] < 45, "the weights were sent after the start of the replacement"


class BrokenReplacements(FakeWorkerSet):
    """A worker set whose replacements die in their first call."""

    def replace(self, *args: Any) -> Any:
        replacement = super().replace(*args)
        assert replacement is not None
        replacement.channel.next_error = LostProcessError("the process died")
        return replacement


def test_workers_that_keep_failing_end_the_run(fake: FakeTransport) -> None:
    workers = BrokenReplacements(worker_config(rollout={"num_workers": NUM_WORKERS}), fake)
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=10)
    optimizer.step()
    optimizer.drain()
    for worker in workers.remote:
        worker.channel.next_error = LostProcessError("the process died")
    optimizer.calls.clear()
    with pytest.raises(WorkersFailedError, match="10 calls to workers failed in a row"):
        optimizer.step()


def test_a_killed_process_is_replaced_and_counted(
    worker_pool: Callable[[WorkerConfig], WorkerSet],
) -> None:
    workers = worker_pool(worker_config())
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=30)
    optimizer.step()
    os.kill(pid_of(workers.remote[0]), signal.SIGKILL)
    deadline_s = time.monotonic() + 120.0
    while workers.faults.num_restarts == 0 or not workers.remote[0].up:
        result = optimizer.step()
        assert result == (30 * ROWS, 30 * ROWS, 30)
        assert time.monotonic() < deadline_s
    assert workers.stats()["num_worker_deaths"] == 1
    assert workers.stats()["num_remote_worker_restarts"] == 1
