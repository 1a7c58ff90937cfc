"""`SyncSamples`: results do not depend on the order of arrival, and no sample is dropped."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from fakes import (
    FakeTransport,
    FakeWorkerSet,
    RandomDelayDrift,
    make_optimizer,
    pid_of,
    worker_config,
)
from simulated_channel import Script, oldest_first, shuffled_by

from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.call import Reply
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

ROWS = 10  # rows of a fragment of 5 steps of 2 environments
#: The minibatches are shuffled, so another order of the same rows gives other weights.
PPO = {"num_sgd_iter": 2, "sgd_minibatch_size": 8, "kl_coeff": 0.2, "lr": 1e-2}
THREE = {"num_workers": 3}


def make(
    rollout: dict[str, Any] | None = None,
    seed: int = 0,
    train_batch_size: int = 4 * ROWS,
    up: bool = True,
    script: Script = oldest_first,
) -> Any:
    config = worker_config("ppo", seed=seed, rollout={**THREE, **(rollout or {})}, **PPO)
    fake = FakeTransport()
    fake.script = script
    workers = FakeWorkerSet(config, fake, up=up)
    return make_optimizer(SyncSamples, workers, train_batch_size=train_batch_size)


def weights(optimizer: SyncSamples) -> bytes:
    return optimizer.policy.get_weights().flat.tobytes()


def train(script: Script, **options: Any) -> bytes:
    optimizer = make(script=script, **options)
    for _ in range(4):
        optimizer.step()
    return weights(optimizer)


def spy_on_batches(optimizer: SyncSamples) -> list[SampleBatch]:
    """Returns a list that receives each batch from which the policy learns."""
    batches: list[SampleBatch] = []
    learn: Callable[..., Any] = optimizer.policy.learn_on_batch

    def spy(batch: SampleBatch, *args: Any) -> dict[str, float]:
        batches.append(batch)
        return learn(batch, *args)

    optimizer.policy.learn_on_batch = spy  # type: ignore[method-assign]
    return batches


def test_the_order_of_arrival_changes_no_bit() -> None:
    expected = train(oldest_first)
    for seed in range(5):
        assert train(shuffled_by(seed)) == expected
    assert train(oldest_first, seed=1) != expected


def in_order_of_arrival(calls: Calls, *_: Any, **__: Any) -> list[Reply]:
    """A wrong variant of `Calls.all`, which does not sort the replies."""
    calls.wait()
    return [calls.first() for _ in range(len(calls.kept))]


def test_order_of_arrival_changes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(oldest_first)
    monkeypatch.setattr(Calls, "all", in_order_of_arrival)
    assert any(train(shuffled_by(seed)) != expected for seed in range(5))


@pytest.mark.parametrize(
    ("wanted", "fragments"),
    [(0, [1, 1, 1]), (1, [1, 0, 0]), (30, [1, 1, 1]), (31, [2, 1, 1]), (75, [3, 3, 2])],
)
def test_batch_is_rounded_up_to_fragments_assigned_in_turn(
    wanted: int, fragments: list[int]
) -> None:
    optimizer = make(train_batch_size=wanted, script=shuffled_by(3))
    for steps in (1, 2):
        result = optimizer.step()
        assert result.env_steps_sampled == sum(fragments) * ROWS
        assert [len(channel.calls) for channel in optimizer.workers.channels] == [
            steps * count for count in fragments
        ]


def test_fragments_lie_side_by_side_by_worker_and_then_by_round() -> None:
    optimizer = make(train_batch_size=7 * ROWS, script=shuffled_by(11))
    batches = spy_on_batches(optimizer)
    optimizer.step()
    parts = [part for channel in optimizer.workers.channels for part in channel.values]
    assert [part.worker_index for part in parts] == [1, 1, 1, 2, 2, 3, 3]
    for name in ("obs", "actions", "advantages", "action_logp"):
        for i, part in enumerate(parts):
            mine = batches[0][name][:, 2 * i : 2 * i + 2]
            assert mine.tobytes() == part[name].tobytes()


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_nothing_collected_is_thrown_away(autoreset: str) -> None:
    rollout = {"autoreset_mode": autoreset}
    optimizer = make(rollout, train_batch_size=7 * ROWS, script=shuffled_by(2))
    results = [optimizer.step() for _ in range(5)]
    parts = [part for channel in optimizer.workers.channels for part in channel.values]
    collected = sum(part.env_steps for part in parts)
    assert len(parts) == 5 * 7
    assert (collected < 35 * ROWS) == (autoreset == "next_step"), "resets are no steps"
    metrics = optimizer.metrics
    assert metrics.num_env_steps_sampled == metrics.num_env_steps_trained == collected
    assert sum(r.env_steps_sampled for r in results) == collected
    assert sum(r.env_steps_trained for r in results) == collected
    assert sum(r.updates for r in results) == metrics.num_updates == optimizer.policy.version
    episodes = sum(len(part.episodes.returns) for part in parts)
    assert metrics.episodes.report()["num_episodes"] == episodes > 0


def test_all_samples_are_made_with_the_newest_weights() -> None:
    optimizer = make(train_batch_size=7 * ROWS)
    for _ in range(3):
        version = optimizer.policy.version
        optimizer.step()
        parts = [part for channel in optimizer.workers.channels for part in channel.values[-2:]]
        assert {part.version for part in parts} == {version}
    assert optimizer.stats()["policy_lag"]["max"] == 0


def test_one_process_gives_the_same_result() -> None:
    def run(seed: int) -> tuple[bytes, int]:
        optimizer = make({"num_workers": 0}, seed, train_batch_size=25)
        for _ in range(4):
            assert optimizer.step().env_steps_sampled == 3 * ROWS
        return weights(optimizer), optimizer.metrics.num_env_steps_trained

    assert run(0) == run(0)
    assert run(0)[1] == 4 * 3 * ROWS
    assert run(0)[0] != run(1)[0]


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
def test_restored_run_continues_bit_for_bit(num_workers: int, autoreset: str) -> None:
    rollout = {"num_workers": num_workers, "autoreset_mode": autoreset}

    def go_on(optimizer: SyncSamples) -> tuple[bytes, dict[str, Any], int, tuple[Any, ...]]:
        for _ in range(3):
            optimizer.step()
        counts = optimizer.metrics.counts()
        return (
            weights(optimizer),
            optimizer.metrics.episodes.get_state(),
            optimizer.policy.version,
            counts,
        )

    original = make(rollout)
    for _ in range(3):
        optimizer_result = original.step()
    assert optimizer_result.updates > 0
    state = original.get_state()
    untouched = copy.deepcopy(state)
    expected = go_on(original)

    restored = make(rollout, seed=99)  # the other seed has no effect after `set_state`
    restored.set_state(state)
    assert go_on(restored) == expected
    # Restore the same state again, into an optimizer that has continued since.
    restored.set_state(state)
    assert go_on(restored) == expected
    assert state["policy"]["params"].equal(untouched["policy"]["params"])
    assert state["policy"]["adam"]["network"]["exp_avg"].equal(
        untouched["policy"]["adam"]["network"]["exp_avg"]
    )


def test_incomplete_state_changes_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    original = make()
    original.step()
    state = original.get_state()
    original.step()
    for missing in ("adam", "shuffle", "workers"):
        partial = copy.deepcopy(state)
        if missing == "adam":
            partial["policy"]["adam"] = {}
        elif missing == "shuffle":
            fresh = make(seed=5).policy.shuffle.bit_generator.state
            partial["policy"]["shuffle"] = partial["workers"]["0"]["shuffle"] = fresh
        else:
            partial["workers"] = {}
        restored = make(seed=99)
        restored.set_state(partial)
        restored.step()
        assert weights(restored) != weights(original), missing


@pytest.mark.parametrize("up", [True, False], ids=["replaced at once", "replacement needs time"])
def test_batch_is_complete_when_a_worker_fails(up: bool) -> None:
    optimizer = make(train_batch_size=8 * ROWS, up=up)
    optimizer.step()
    dying = optimizer.workers.remote[1].channel
    dying.next_error = LostProcessError("the process died")
    optimizer.workers.transport.script = shuffled_by(4)
    result = optimizer.step()
    assert result.env_steps_sampled == result.env_steps_trained == 8 * ROWS
    assert not dying.alive
    assert optimizer.workers.faults.num_restarts == 1
    one, two, three = optimizer.workers.remote
    made = [channel.calls for channel in (one.channel, two.channel, three.channel)]
    samples = [sum(method == "sample" for method, _ in calls) for calls in made]
    assert samples[1] == (2 if up else 0), "no wait for a replacement that starts"
    assert sum(samples) == 2 * 8 - 3, "without the first fragments of the lost worker"
    two.channel.finish()
    optimizer.step()
    assert sum(method == "sample" for method, _ in two.channel.calls) > samples[1]


@pytest.mark.parametrize("removed", [[3], [1, 2]])
def test_overlapped_batch_is_complete_after_workers_are_removed(removed: list[int]) -> None:
    # Each worker has one fragment that was requested, and one or two requests that were not sent.
    optimizer = make({"collection": "overlapped"}, train_batch_size=8 * ROWS)
    optimizer.step()
    optimizer.workers.remove_workers(removed)
    for _ in range(3):
        result = optimizer.step()
        assert result.env_steps_sampled == result.env_steps_trained == 8 * ROWS
    assert len(optimizer.workers.remote) == 3 - len(removed)


# ---- with processes ----------------------------------------------------------------------


def set_up(workers: WorkerSet) -> SyncSamples:
    """Returns an optimizer with the same processes after a reconfiguration."""
    assert workers.reconfigure(workers.config)
    optimizer: SyncSamples = make_optimizer(SyncSamples, workers, train_batch_size=7 * ROWS)
    return optimizer


@pytest.fixture
def workers(worker_pool: Callable[[WorkerConfig], WorkerSet]) -> WorkerSet:
    return worker_pool(worker_config("ppo", RandomDelayDrift, rollout=THREE, **PPO))


def test_processes_and_one_process_give_equal_bits(workers: WorkerSet) -> None:
    expected = train(oldest_first, train_batch_size=7 * ROWS)
    for _ in range(2):
        optimizer = set_up(workers)
        for _ in range(4):
            optimizer.step()
        assert weights(optimizer) == expected


def test_restored_processes_continue_bit_for_bit_after_a_kill(workers: WorkerSet) -> None:
    optimizer = set_up(workers)
    optimizer.step()
    state = optimizer.get_state()
    optimizer.step()
    expected = weights(optimizer)
    optimizer.step()
    optimizer.set_state(state)
    optimizer.step()
    assert weights(optimizer) == expected

    os.kill(pid_of(workers.remote[2]), signal.SIGKILL)
    result = optimizer.step()
    assert result.env_steps_sampled == result.env_steps_trained == 7 * ROWS
    assert workers.stats()["num_worker_deaths"] == 1
