"""`GradientWorker`: the methods of PyTorchRL, calls from optimizers, and the workers below."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import (
    RandomDelayDrift,
    SlowSecondWorkerDrift,
    inside,
    make_optimizer,
    pid_of,
    worker_config,
)
from slow_env import LIMIT_S, STEPS, Slow
from toy_envs import Drift

from polopt.collectors.gradient_worker import GradientWorker, GradientWorkerSet
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.optimizers.async_gradients import AsyncGradients, compute_gradient
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduce
from polopt.optimizers.sync_gradients import SyncGradients
from polopt.policies.fragment_policy import MinibatchGradients
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.transport.channel import Message
from polopt.rollouts.transport.control_page import EarlyStopRequest
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_set import call_method

ROWS = 10  # the rows of a fragment with 5 steps of 2 environments
#: With these options, each rollout gives four gradients.
PPO = {"num_sgd_iter": 2, "sgd_minibatch_size": 5}


# ---- in this process ---------------------------------------------------------------------


def worker(kind: type[RolloutWorker] = GradientWorker, policy: str = "ppo", **options: Any) -> Any:
    return kind(worker_config(policy, **(PPO if policy == "ppo" else {}), **options), 1)


def same(one: Gradients, other: Gradients) -> bool:
    return one.flat.tobytes() == other.flat.tobytes() and one[1:] == other[1:]


def params_of(worker: RolloutWorker) -> bytes:
    params: bytes = worker.get_weights().flat.tobytes()
    return params


def test_own_environments_equal_a_rollout_worker() -> None:
    gradient_worker, rollout_worker = worker(), worker(RolloutWorker)
    for _ in range(6):
        mine, counts = gradient_worker.step()
        theirs, other_counts, _ = rollout_worker.run_here(1, compute_gradient, None)
        assert same(mine, theirs)
        assert counts.env_steps == other_counts.env_steps
        for each in (gradient_worker, rollout_worker):
            each.policy.apply_gradients(mine)


def test_next_rollout_is_collected_after_the_last_minibatch() -> None:
    gradient_worker = worker()
    gradients, counts = zip(*(gradient_worker.step() for _ in range(8)), strict=True)
    assert [one.env_steps for one in counts] == [ROWS, 0, 0, 0] * 2
    assert [one.new_rows for one in gradients] == [5, 5, 0, 0] * 2
    assert [one.ends_rollout for one in gradients] == [False, False, False, True] * 2


def test_moments_of_own_environments_are_added_once() -> None:
    one = worker(normalize_observations=True)
    for _ in range(2):
        one.get_data()
    assert one.new_moments.rows == 2 * ROWS
    one.share_moments(LocalReducer())
    assert one.policy.get_weights().moments.rows == 2 * ROWS
    assert one.new_moments is None


def test_one_minibatch_gives_the_gradient_of_the_batch() -> None:
    one = worker(policy="a2c")
    batch = one.get_data()
    assert one.get_grads().flat.tobytes() == one.policy.compute_gradients(batch).flat.tobytes()


def test_applied_minibatch_gradients_equal_learn_on_batch() -> None:
    stepwise, learner = worker(), worker()
    batch, other = stepwise.get_data(), learner.get_data()
    assert batch["rewards"].tobytes() == other["rewards"].tobytes()
    minibatches = MinibatchGradients(stepwise.policy, batch)
    # `get_data` has made another MinibatchGradients. That object draws the order of its minibatches
    # only at its first gradient, so it changes nothing here.
    while not minibatches.done:
        stepwise.apply_gradients(minibatches.next_gradients())
    learner.policy.learn_on_batch(other)
    assert params_of(stepwise) == params_of(learner)
    assert stepwise.actor_version() == learner.actor_version() == 4
    with pytest.raises(ValueError, match="all minibatches of the batch are used"):
        minibatches.next_gradients()


def test_gradients_without_data_or_peers_are_refused() -> None:
    gradient_worker = worker()
    with pytest.raises(RuntimeError, match="call get_data first"):
        gradient_worker.get_grads()
    gradient_worker.get_data()
    with pytest.raises(RuntimeError, match="it has not joined a group"):
        gradient_worker.get_grads(distribute_gradients=True)


def test_saved_model_holds_the_complete_learner_state(tmp_path: Path) -> None:
    one, other = worker(), worker(seed=5)
    one.apply_gradients(one.step()[0])
    path = one.save_model(str(tmp_path / "deep" / "model.pt"))
    other.policy.set_state(torch.load(path, weights_only=True))
    assert params_of(other) == params_of(one)
    gradients = one.step()[0]
    assert one.apply_gradients(gradients) == other.apply_gradients(gradients) == 2
    assert params_of(other) == params_of(one), "the state of the torch optimizer is included"


def test_changed_option_reaches_the_torch_optimizer() -> None:
    one = worker(policy="a2c", lr=1e-3)
    gradients = one.step()[0]
    one.update_algorithm_parameter("lr", 0.0)
    before = params_of(one)
    one.apply_gradients(gradients)
    assert params_of(one) == before
    one.update_algorithm_parameter("adam_epsilon", 0.5)
    assert one.policy.config.adam_epsilon == 0.5
    one.update_algorithm_parameter("gamma", 0.5)
    assert one.policy.config.gamma == 0.5
    for name, value in (("gamma", 2.0), ("gama", 0.5), ("model", {})):
        with pytest.raises(ConfigError, match=name):
            one.update_algorithm_parameter(name, value)
    assert one.policy.config.gamma == 0.5


def test_adapted_coefficient_can_be_set() -> None:
    one = worker()
    one.update_algorithm_parameter("kl_coeff", 0.7)
    assert one.policy.coefficients["kl_coeff"] == 0.7


@pytest.mark.parametrize("kind", [GradientWorker, RolloutWorker])
def test_worker_obeys_an_early_stop_of_its_call(kind: type[RolloutWorker]) -> None:
    one = worker(kind, rollout={"rollout_fragment_length": 200})
    one.control.request_stop(EarlyStopRequest(7, 35))
    batch, counts, _ = one.run_here(7, lambda worker: worker.next_batch())
    assert (batch.shape[0], counts.num_early_stopped) == (35, 1)
    batch, counts, _ = one.run_here(8, lambda worker: worker.next_batch())
    assert (batch.shape[0], counts.num_early_stopped) == (200, 0)


def test_calls_of_two_processes_have_different_numbers() -> None:
    """A gradient worker runs numbered calls from the driver, and sends numbered calls to the
    workers below."""
    numbers = [[worker().workers.next_call_number() for _ in range(100)] for _ in range(2)]
    assert len({*numbers[0], *numbers[1]}) == 200


class PPOWithoutDevice(PPOPolicy):
    """PPO that runs on the CPU, whatever device the config names."""

    def __init__(self, *args: Any, device: str = "cpu", **options: Any) -> None:
        super().__init__(*args, **options)


def test_workers_below_do_not_inherit_device_or_gpus() -> None:
    made = worker_config(PPOWithoutDevice, rollout={"num_gpus_per_worker": 0.5})
    below = GradientWorker(dataclasses.replace(made, device="cuda"), 1).workers.config
    assert (below.device, below.rollout.num_gpus_per_worker) == ("cpu", 0.0)


def test_factory_refuses_bad_options_before_actors_start() -> None:
    create = GradientWorkerSet.create_factory
    with pytest.raises(ConfigError, match=r"num_worker_below.*did you mean 'num_workers_below'"):
        create(Drift, "ppo", num_worker_below=2)
    with pytest.raises(ConfigError, match=r"'pbo'.*did you mean 'ppo'"):
        create(Drift, "pbo")
    with pytest.raises(ConfigError, match="lrr"):
        create(Drift, ("ppo", {"lrr": 1.0}))


# ---- with workers below ------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[GradientWorkerSet]:
    """Returns two gradient workers, each with two rollout workers below it."""
    made = GradientWorkerSet(config())
    yield made
    made.stop()


@pytest.fixture
def two(workers: GradientWorkerSet) -> GradientWorkerSet:
    """Reconfigures the workers of the fixture `workers`, and returns them."""
    assert workers.reconfigure(config())
    return workers


def config(env: Any = Drift, policy: str = "ppo", **rollout: Any) -> Any:
    options = {"num_workers": 2, "num_workers_below": 2, "num_cpus_per_worker": 0.1, **rollout}
    return worker_config(policy, env, rollout=options, **(PPO if policy == "ppo" else {}))


def call(worker: Any, method: str, *args: Any) -> Any:
    return value_of(worker, call_method, method, *args)


def value_of(worker: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of `function(worker, *args)` in the process of a worker."""
    return inside(worker, function, *args)()


def values_below(worker: Any, function: Callable[[Any], Any]) -> list[Any]:
    """Returns the results of `function` in the processes of the workers below a gradient worker."""

    def below(gradient_worker: Any) -> list[Any]:
        return [value_of(each, function) for each in gradient_worker.workers.remote]

    values: list[Any] = value_of(worker, below)
    return values


def pids_below(worker: Any) -> list[int]:
    return values_below(worker, lambda _: os.getpid())


def is_alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_gradient_worker_collects_with_the_weights_it_received(
    two: GradientWorkerSet,
) -> None:
    first, second = two.remote
    batches = [call(each, "get_data") for each in two.remote]
    assert [batch.shape for batch in batches] == [(5, 4), (5, 4)]
    parts = [batch.obs[:, 2 * i : 2 * i + 2] for batch in batches for i in range(2)]
    assert len({part.tobytes() for part in parts}) == 4, "all workers sample different data"
    weights = two.local.get_weights()
    new = weights._replace(flat=weights.flat + 1.0, version=9)
    call(first, "set_weights", new)
    assert call(first, "get_data").version == 9
    assert call(second, "get_data").version == 0
    # In a restored run, different weights may have the same version as earlier weights.
    older = weights._replace(flat=weights.flat - 1.0, version=9)
    call(first, "set_weights", older)
    batch = call(first, "get_data")
    assert batch.version == 9
    seen = values_below(first, lambda worker: worker.get_weights())
    assert {one.flat.tobytes() for one in seen} == {older.flat.tobytes()}


def test_peers_get_the_gradient_over_all_rows(
    workers: GradientWorkerSet,
) -> None:
    assert workers.reconfigure(config(policy="a2c"))
    optimizer = make_optimizer(DecentralizedAllReduce, workers)
    optimizer.group.ensure()
    batches = [call(each, "get_data") for each in workers.remote]
    calls = [inside(each, call_method, "get_grads", True) for each in workers.remote]
    one, other = [call() for call in calls]
    assert one.flat.tobytes() == other.flat.tobytes()
    policy = workers.local.policy
    expected = policy.compute_gradients(SampleBatch.concat(batches)).flat
    assert one.flat == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert policy.compute_gradients(batches[0]).flat != pytest.approx(expected, rel=1e-4, abs=1e-6)

    steps = [inside(each, call_method, "step", True) for each in workers.remote]
    received = [gradients for gradients, _ in [step() for step in steps]]
    assert received == [None, None], "no gradient leaves the group"
    assert len({call(each, "get_weights").flat.tobytes() for each in workers.remote}) == 1
    assert [call(each, "actor_version") for each in workers.remote] == [1, 1]
    optimizer.stop()


def gamma_of(worker: RolloutWorker) -> float:
    gamma: float = worker.policy.config.gamma
    return gamma


def test_changed_option_reaches_every_policy_below(two: GradientWorkerSet) -> None:
    optimizer = make_optimizer(AsyncGradients, two, grads_per_step=2)
    optimizer.step()
    optimizer.update_algorithm_parameter("gamma", 0.25)
    for each in two.remote:
        assert values_below(each, gamma_of) == [0.25, 0.25]
        assert value_of(each, gamma_of) == 0.25
    assert two.config.policy.gamma == 0.25, "replacements use the new value"
    optimizer.stop()


def test_min_workers_concerns_the_gradient_workers(ray_session: None) -> None:
    made = GradientWorkerSet(config(num_workers=1, min_workers=1))
    try:
        needed = value_of(made.remote[0], lambda worker: worker.workers.num_needed)
        assert needed == 2, "all workers below are in the reservation of their gradient worker"
    finally:
        made.stop()


def test_asynchronous_collection_takes_the_first_fragment(
    workers: GradientWorkerSet,
) -> None:
    assert workers.reconfigure(config(RandomDelayDrift, collection="async"))
    batches = [call(workers.remote[0], "get_data") for _ in range(12)]
    assert {batch.shape for batch in batches} == {(5, 2)}
    assert {batch.worker_index for batch in batches} == {1, 2}


def test_early_stop_reaches_workers_below(workers: GradientWorkerSet) -> None:
    long = config(RandomDelayDrift, rollout_fragment_length=2000)
    assert workers.reconfigure(long)
    channel = workers.up()[0].channel
    ticket = channel.send(Message(7, "rows", lambda worker: worker.next_batch().shape[0], ()))
    channel.stop_early(6, 1)  # a request for an earlier call, which has no effect
    deadline_s = time.monotonic() + 120.0
    while not workers.transport.wait([ticket], 0.2):
        channel.stop_early(7, 1)
        assert time.monotonic() < deadline_s
    answer = ticket.result(120.0)
    assert 1 <= answer.value < 2000
    assert answer.record.num_early_stopped > 0


def test_slow_workers_below_stop_early(workers: GradientWorkerSet) -> None:
    options = {"rollout_fragment_length": 200, "fraction_samples_below": 0.01}
    assert workers.reconfigure(config(SlowSecondWorkerDrift, fraction_workers_below=0.5, **options))
    deadline_s = time.monotonic() + 120.0
    columns = 0
    while columns < 4:  # a batch does not wait for a worker below that is still starting
        assert time.monotonic() < deadline_s
        batch = call(workers.remote[0], "get_data")
        columns = batch.shape[1]
    # In the first batch with both workers, the slow worker may have begun long before the other
    # worker was up.
    batch = call(workers.remote[0], "get_data")
    assert batch["valid"][:, :2].all()
    assert 2 <= batch["valid"][:, 2].sum() < 200


@pytest.mark.parametrize("codec", ["fp16", "lz4"])
def test_workers_below_compress_fragments(two: GradientWorkerSet, codec: str) -> None:
    plain = call(two.remote[0], "get_data")
    assert two.reconfigure(config(compress_data=codec))
    packed = call(two.remote[0], "get_data")
    assert np.array_equal(packed["actions"], plain["actions"])
    errors = np.abs(packed.all_obs - plain.all_obs).max()
    assert (errors == 0.0) == (codec == "lz4")
    assert errors < 2.0**-11 * np.abs(plain.all_obs).max()


def test_dead_workers_below_are_replaced_and_counted(two: GradientWorkerSet) -> None:
    optimizer = make_optimizer(SyncGradients, two, grads_per_step=8)
    optimizer.step()
    victim = pids_below(two.remote[0])[0]
    os.kill(victim, signal.SIGKILL)
    deadline_s = time.monotonic() + 120.0
    while two.faults.num_restarts_below == 0:
        result = optimizer.step()
        assert result.updates == 4  # each update is the mean of two of the eight gradients
        assert time.monotonic() < deadline_s
    assert two.stats()["num_restarts_below"] == 1
    assert two.stats()["num_remote_worker_restarts"] == 0
    assert victim not in pids_below(two.remote[0])
    optimizer.stop()


def test_workers_below_end_with_a_killed_gradient_worker(two: GradientWorkerSet) -> None:
    optimizer = make_optimizer(AsyncGradients, two, grads_per_step=4)
    optimizer.step()
    orphans = pids_below(two.remote[1])
    os.kill(pid_of(two.remote[1]), signal.SIGKILL)
    deadline_s = time.monotonic() + 120.0
    while any(map(is_alive, orphans)) or two.faults.num_restarts == 0:
        optimizer.step()
        assert time.monotonic() < deadline_s
    assert two.stats()["num_worker_deaths"] == 1
    optimizer.stop()


def test_workers_below_end_with_the_set(two: GradientWorkerSet) -> None:
    pids = [pid for each in two.remote for pid in pids_below(each)]
    two.stop()
    deadline_s = time.monotonic() + 120.0
    while any(map(is_alive, pids)):
        time.sleep(0.05)
        assert time.monotonic() < deadline_s


def test_late_request_to_stop_does_not_end_the_next_call_early() -> None:
    """The thread that passes on requests may read a request, and pass it on one call later."""
    one = worker(env=RandomDelayDrift, rollout={"rollout_fragment_length": 200})
    read, main = one.stop_after, threading.current_thread()
    has_read, may_pass = threading.Event(), threading.Event()

    def stop_after() -> Any:
        steps = read()
        if threading.current_thread() is not main:
            if steps is not None and not has_read.is_set():
                has_read.set()
                may_pass.wait(5.0)
        elif 8 in one._running:
            threading.Timer(0.3, may_pass.set).start()  # while call 8 samples
        return steps

    one.stop_after = stop_after
    one.control.request_stop(EarlyStopRequest(7, 35))
    one.run_here(7, lambda worker: has_read.wait(10.0) and worker.next_batch())
    batch, counts, _ = one.run_here(8, lambda worker: worker.next_batch())
    one.stop()
    assert (batch.shape[0], counts.num_early_stopped) == (200, 0)


def test_slow_steps_below_a_gradient_worker_are_no_hang(ray_session: None) -> None:
    rollout = {
        "num_workers": 1,
        "num_workers_below": 1,
        "num_envs_per_worker": 1,
        "rollout_fragment_length": STEPS,
        "num_cpus_per_worker": 0.1,
        "worker_timeout_s": LIMIT_S,
    }
    workers = GradientWorkerSet(worker_config(env=Slow, rollout=rollout))
    try:
        optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=1)
        result = optimizer.step()
        assert (result.updates, result.env_steps_sampled) == (1, STEPS)
        stats = workers.stats()
        assert stats["num_remote_worker_restarts"] == stats["num_restarts_below"] == 0
    finally:
        workers.stop()
