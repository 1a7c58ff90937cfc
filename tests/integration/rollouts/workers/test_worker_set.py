"""`WorkerSet`: the weights that workers receive, replacements, and cleanup."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import threadpoolctl
import torch
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, pid_of, worker_config
from policy_helpers import fixed_gradient
from toy_envs import Clock

from polopt.common.faults import Fault
from polopt.optimizers.sync_samples import SyncSamples
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.rollouts.workers.errors import WorkersFailedError
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.snapshots import INLINE_BYTES
from polopt.rollouts.workers.worker_set import WorkerSet

LARGE = {"fcnet_hiddens": (256, 256)}
FAILURE = Fault("death", "gone")


@pytest.fixture
def fake() -> FakeTransport:
    return FakeTransport()


def update(workers: WorkerSet) -> None:
    """Makes an update of the local weights, which increases their version by one."""
    policy = workers.local.policy
    policy.flat.grads.fill_(0.1)
    policy.apply_flat()


def test_each_version_is_stored_once_and_sent_once(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(), fake)
    one, two = workers.remote
    sent = workers.weights.for_call(one)
    assert sent.version == 0
    assert workers.weights.for_call(two) is sent
    assert workers.weights.for_call(one) is None
    update(workers)
    newer = workers.weights.for_call(one)
    assert newer.version == 1
    np.testing.assert_array_equal(newer.flat, workers.local.policy.flat.params.detach().numpy())
    assert (newer.flat != sent.flat).any(), "an update does not change weights that were sent"
    assert workers.weights.for_call(one) is None
    assert workers.weights.for_call(two) is newer
    assert fake.num_puts == 0, "calls carry small weights directly"


def test_large_weights_are_put_into_the_store_once_for_all(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(model=LARGE), fake)
    one, two = workers.remote
    assert workers.local.get_weights().flat.nbytes > INLINE_BYTES
    sent = workers.weights.for_call(one)
    assert workers.weights.for_call(two) is sent
    assert fake.num_puts == 1
    assert sent.value.version == 0
    workers.weights.for_call(one)
    assert fake.num_puts == 1
    update(workers)
    workers.weights.for_call(two)
    assert fake.num_puts == 2


def test_weights_changed_without_new_version_are_sent_again(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(), fake)
    sent = [workers.weights.for_call(worker) for worker in workers.remote]
    workers.weights.take(force=True)
    again = [workers.weights.for_call(worker) for worker in workers.remote]
    assert again[0] is again[1] is not sent[0]


def test_older_weights_are_sent_to_a_worker_with_newer_weights(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(), fake)
    one, two = workers.remote
    policy = workers.local.policy
    for _ in range(5):
        update(workers)
    fifth = workers.weights.for_call(one)
    update(workers)
    workers.weights.for_call(two)
    policy.set_weights(fifth._replace(flat=fifth.flat + 1.0))
    for worker in (one, two):
        sent = workers.weights.for_call(worker)
        assert sent.version == 5
        np.testing.assert_array_equal(sent.flat, fifth.flat + 1.0)
        assert workers.weights.for_call(worker) is None


def test_replacement_has_new_seeds_and_receives_weights(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(), fake)
    one, two = workers.remote
    sent = workers.weights.for_call(one)
    workers.weights.for_call(two)
    first_obs = one.channel.target.sampler._obs
    fresh = workers.replace(one, FAILURE)
    assert not one.channel.alive
    assert workers.remote == [fresh, two]
    assert fresh.index == 1
    assert workers.weights.for_call(fresh) is sent
    assert workers.weights.for_call(two) is None
    obs = fresh.channel.target.sampler._obs
    assert (obs != first_obs).all(), "the replacement repeats the episodes of the lost worker"
    again = workers.replace(fresh, FAILURE)
    assert (again.channel.target.sampler._obs != obs).all()
    assert workers.stats()["num_remote_worker_restarts"] == 2
    assert workers.stats()["num_worker_deaths"] == 2
    assert workers.stats()["num_healthy_workers"] == 2


def test_replacements_that_keep_failing_end_the_run(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(rollout={"max_consecutive_failures": 4}), fake)
    for _ in range(3):
        workers.replace(workers.remote[0], FAILURE)
    with pytest.raises(WorkersFailedError, match="max_consecutive_failures=4"):
        workers.replace(workers.remote[0], FAILURE)


def test_function_of_the_user_runs_in_every_worker(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(rollout={"num_workers": 3}), fake)
    workers.remote[1].channel.next_error = LostProcessError("the process died")
    seen = foreach_worker(workers, lambda worker, factor: factor * worker.index, 10)
    assert list(seen.items()) == [(1, 10), (3, 30)]
    assert workers.faults.num_restarts == 1
    local_only = FakeWorkerSet(worker_config(rollout={"num_workers": 0}), fake)
    assert foreach_worker(local_only, lambda worker: worker.index) == {0: 0}
    assert foreach_worker(workers, lambda worker: worker.index, only=3) == {3: 3}


def test_constructor_arguments_are_small_for_a_large_network() -> None:
    config = worker_config("ppo", model={"fcnet_hiddens": (1024, 1024)})
    assert len(ray.cloudpickle.dumps((config, 1))) < 100_000


# ---- with processes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[WorkerSet]:
    resources = {"custom_resources_per_worker": {"seat": 0.25}, "memory_per_worker": 50_000_000}
    made = WorkerSet(worker_config(rollout={**resources, "num_cpus_per_worker": 0.25}))
    yield made
    made.stop()


def test_resources_of_the_config_reach_ray(workers: WorkerSet) -> None:
    found = foreach_worker(workers, lambda _: ray.get_runtime_context().get_assigned_resources())
    assert list(found) == [1, 2]
    for assigned in found.values():
        assert assigned["CPU"] == 0.25
        assert assigned["seat"] == 0.25
        assert assigned["memory"] == 50_000_000


def test_reconfigure_keeps_processes_if_resources_are_the_same(workers: WorkerSet) -> None:
    pids = [pid_of(worker) for worker in workers.up()]
    old = workers.config
    assert not workers.reconfigure(worker_config(rollout={"num_workers": 3}))
    assert workers.config is old
    rollout = dict(old.rollout.to_dict(), num_envs_per_worker=3)
    rollout.pop("env")
    clocks = worker_config("ppo", lambda: Clock(4), seed=7, rollout=rollout)
    assert workers.reconfigure(clocks)
    assert [pid_of(worker) for worker in workers.up()] == pids
    batch = foreach_worker(workers, sample, workers.local.get_weights(), only=1)[1]
    assert batch.shape == (5, 3)
    assert "action_logp" in batch, "the worker has the PPO policy now"
    assert workers.reconfigure(old)


def test_stop_ends_all_processes(workers: WorkerSet) -> None:
    pids = [pid_of(worker) for worker in workers.up()]
    assert all(alive(pid) for pid in pids)
    workers.stop()
    deadline_s = time.monotonic() + 60.0
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)
    workers.stop()  # a second call has no effect


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_compute_with_one_thread(worker_pool: Any) -> None:
    def count(_worker: Any) -> list[int]:
        pools = threadpoolctl.threadpool_info()
        blas = [pool["num_threads"] for pool in pools if pool["user_api"] == "blas"]
        return [torch.get_num_threads(), *blas]

    # Ray sets two threads for a worker with two CPUs.
    rollout = {"num_workers": 1, "num_cpus_per_worker": 2.0}
    workers = worker_pool(worker_config("a2c", rollout=rollout))
    (counts,) = foreach_worker(workers, count).values()
    assert len(counts) >= 2
    assert set(counts) == {1}


SILENT_CONTROL_SERVICE = """
import contextlib, os, signal, threading, time
from pathlib import Path
import ray
import polopt
from polopt.rollouts.transport import ray_channel
from polopt.rollouts.workers import process_group
from polopt.rollouts.workers.call_workers import foreach_worker

ray_channel.ANSWER_TIMEOUT_S = process_group.CHECK_INTERVAL_S = 0.5

if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    make = polopt.GradientWorkerSet.create_factory("CartPole-v1", "a2c", num_workers=1)
    workers = make()
    assert foreach_worker(workers, lambda worker: worker.index) == {1: 1}
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            stat = path.read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            found += [path.parent.name] * ("(gcs_server)" in stat and parent == os.getpid())
    gcs = int(*found)
    adding = threading.Thread(target=workers.add_workers, args=(1,), daemon=True)
    os.kill(gcs, signal.SIGSTOP)
    try:
        adding.start()
        adding.join(20.0)
        print("blocked" if adding.is_alive() else "not blocked", flush=True)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            assert foreach_worker(workers, lambda worker: worker.index) == {1: 1}
            time.sleep(0.05)
    finally:
        os.kill(gcs, signal.SIGCONT)
    adding.join(60.0)
    until_s = time.monotonic() + 60.0
    while len(workers.up()) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    workers.stop()
"""


def test_run_does_not_wait_for_the_control_service(tmp_path: Path) -> None:
    """The control service is silent when a worker is added. The other worker answers calls."""
    # Ray exports an actor class to its control service, and waits for the export without a time
    # limit.
    program = tmp_path / "program.py"
    program.write_text(SILENT_CONTROL_SERVICE)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300.0, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "not blocked"
    assert "Ray's control service does not answer (no answer within 0.5 s)" in done.stderr


def test_changed_option_is_used_by_updates_in_workers(fake: FakeTransport) -> None:
    workers = FakeWorkerSet(worker_config(adam_epsilon=1e-8), fake)
    optimizer = make_optimizer(SyncSamples, workers)
    optimizer.update_algorithm_parameter("adam_epsilon", 0.5)
    workers.replace(workers.remote[1], FAILURE)
    expected = RolloutWorker(worker_config(adam_epsilon=0.5), 0)
    unchanged = RolloutWorker(worker_config(adam_epsilon=1e-8), 0)
    weights, updated = workers.local.get_weights(), []
    remote = [channel.target for channel in workers.channels]
    for worker in (expected, unchanged, workers.local, *remote):
        worker.policy.set_weights(weights)
        worker.policy.apply_gradients(fixed_gradient(worker.policy))
        updated.append(worker.get_weights().flat)
    assert len(updated) == 6
    for flat in updated[2:]:
        np.testing.assert_array_equal(flat, updated[0])
    assert not np.allclose(updated[0], updated[1])
