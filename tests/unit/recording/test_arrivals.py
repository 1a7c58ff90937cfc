"""Tests of recorded runs and their reruns, with simulated processes or in one process without
Ray."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import logging
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import run_command
from fakes import FakeTransport, make_optimizer, worker_config
from gymnasium.vector import SyncVectorEnv
from plugin_page import PLUGINS, plugin
from ray.tune import Checkpoint
from simulated_channel import (
    Script,
    SimulatedTransport,
    none_ready,
    oldest_first,
    shuffled_by,
)
from toy_envs import NESTED, Drift, Samples, make_policy, make_sampler

import polopt
from polopt.common.config import ConfigError
from polopt.common.sums import SUMS
from polopt.common.tracer import TRACER
from polopt.metrics.record import Record
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.ppo import PPOPolicy
from polopt.recording import arrival_log, run_record
from polopt.recording.arrival_log import (
    PATTERN,
    ArrivalLog,
    Departure,
    RecordEnded,
    Rerun,
    lines_of,
    read_log,
)
from polopt.recording.recorded_transport import (
    RecordedTransport,
    Recorder,
    fingerprint,
    run_as_recorded,
)
from polopt.recording.rerun import find_records
from polopt.recording.run_record import digest_of
from polopt.rollouts.transport.channel import Channel, ChannelError, Message
from polopt.rollouts.transport.collective import AllReducer, GroupBroken, GroupSpec
from polopt.rollouts.workers.call_runner import Answer
from polopt.rollouts.workers.gathering import sample
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.trainer_config import merged_options

STRATEGIES = ("async_gradients", "sync_gradients", "sync_samples", "async_samples", *PLUGINS)
#: The strategies whose results depend on the order of arrival.
ASYNCHRONOUS = ("async_gradients", "async_samples", "elastic_averaging")
STEPS = 8


def run(
    name: str,
    script: Script,
    recorded: dict[str, Any] | None = None,
    dies_at: int | None = None,
    env: Any = Drift,
    leave_at: tuple[int, ...] = (),
) -> tuple[list[str], dict[str, Any], WorkerSet]:
    """Runs some steps of a strategy with three simulated workers, one of which may die, and which
    may leave. Returns the digests of the weights, the record, and the workers."""
    if name in PLUGINS:
        plugin(name)
    fake = FakeTransport()

    def deadly(pending: list[Any]) -> Any:
        mine = [one for one in pending if one.channel.name == "worker 2"]
        number = next(numbers) if mine else -1
        if number == dies_at:
            mine[0].channel.die()
            return mine[0]
        if number in leave_at[:1]:
            mine[0].channel.target.leaves = True  # as after SIGTERM
        elif number in leave_at[1:]:
            fake.ending.add(fake.channels[0])  # of worker 1
        return script(pending)

    fake.script, numbers = deadly, itertools.count()
    rollout = {"num_workers": 3, "worker_timeout_s": 5.0}
    config = worker_config("a2c", env, rollout=rollout)
    config = dataclasses.replace(config, wrap_transport=Recorder(recorded), repeatable=True)
    workers = WorkerSet(config, transport=fake)
    options = {"grads_per_step": 5} if name.endswith("gradients") else {}
    options |= {"train_batch_size": 20} if name.endswith("samples") else {}
    optimizer = make_optimizer(OPTIMIZERS.get(name), workers, **options)
    digests = []
    for _ in range(STEPS):
        optimizer.step()
        digests.append(digest_of(optimizer.policy))
    transport = workers.transport
    assert isinstance(transport, RecordedTransport)
    return digests, transport.log.take(), workers


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_rerun_is_equal_whatever_the_order_of_arrival(name: str) -> None:
    digests, recorded, workers = run(name, shuffled_by(1), dies_at=3)
    assert workers.faults.num_restarts == 1, "one worker died in the run"
    again, nothing, repeated = run(name, oldest_first, json.loads(json.dumps(recorded)))
    assert again == digests
    assert repeated.faults.num_restarts == 1, "the rerun repeats the recorded death"
    assert not nothing["events"]
    assert repeated.restart_counts == workers.restart_counts
    free, *_ = run(name, oldest_first)
    if name in ASYNCHRONOUS:
        assert free[2] != digests[2], "another order of arrival has other weights"


@pytest.mark.parametrize("name", STRATEGIES)
def test_processes_leave_at_the_same_points(name: str) -> None:
    digests, recorded, workers = run(name, shuffled_by(1), leave_at=(1, 3))
    assert workers.faults.counts["preemption"] == 2
    assert sum(event[0] == "leaving" for event in recorded["events"]) == 1
    again, nothing, repeated = run(name, oldest_first, json.loads(json.dumps(recorded)))
    assert again == digests
    assert repeated.faults.counts == workers.faults.counts
    assert not nothing["events"]


def test_a_hang_is_repeated_at_the_same_point() -> None:
    digests, recorded, workers = run("sync_gradients", hangs_after(12))
    assert workers.faults.counts["hang"] == 3
    again, _, repeated = run("sync_gradients", shuffled_by(3), recorded)
    assert again == digests
    assert repeated.faults.counts["hang"] == 3


def hangs_after(count: int) -> Script:
    """Returns a script in which no call ends in two waits after the first `count` waits."""
    numbers = itertools.count()
    return lambda pending: (none_ready if count <= next(numbers) < count + 2 else oldest_first)(
        pending
    )


class Clock(Drift):
    """An environment whose rewards depend on the clock."""

    def step(self, action: Any) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, reward + time.perf_counter_ns() % 1000 / 1000, *rest


def test_error_names_the_first_different_event_and_its_worker() -> None:
    _, recorded, _ = run("async_gradients", shuffled_by(1), env=Clock)
    with pytest.raises(
        Departure, match=r"worker \d \(.*compute_gradient\) answered with different"
    ) as e:
        run("async_gradients", oldest_first, recorded, env=Clock)
    first = next(n for n, event in enumerate(recorded["events"]) if event[0] == "reply")
    assert first <= e.value.event <= first + 8, "the error is soon after the first reply"


def test_another_program_is_a_difference() -> None:
    _, recorded, _ = run("async_gradients", shuffled_by(1))
    with pytest.raises(Departure, match="but the record has"):
        run("sync_samples", oldest_first, recorded)
    with pytest.raises(RecordEnded):
        run("async_gradients", oldest_first, {**recorded, "events": recorded["events"][:50]})
    with pytest.raises(RecordEnded):
        run("async_gradients", oldest_first, {**recorded, "clock": recorded["clock"][:50]})


def test_versions_of_the_weights_are_compared() -> None:
    _, recorded, _ = run("async_gradients", shuffled_by(1))
    events = recorded["events"]
    last = max(n for n, event in enumerate(events) if event[0] == "send")
    events[last] = [*events[last][:2], events[last][2] + 1]
    with pytest.raises(Departure, match="a call to process"):
        run("async_gradients", oldest_first, recorded)


# ---- effects of timing within a call ------------------------------------------------------------


def test_fragments_end_early_as_in_the_recorded_run() -> None:
    worker = RolloutWorker(worker_config(), 1)
    batches = []
    for timing in ({"steps": [3]}, {}):
        answer = worker.run(1, run_as_recorded, sample, timing, worker.policy.get_weights())
        batches.append(answer.value)
        assert answer.record.timing == timing, "the record of a rerun has the same timing"
    assert [batch.shape[0] for batch in batches] == [3, 5]


def test_sums_fail_as_in_the_recorded_run() -> None:
    group = AllReducer(GroupSpec(1, 1, "socket", 5.0, 5.0, key=b"k" * 32), 0)
    worker = RolloutWorker(worker_config(), 1)

    def sums(worker: RolloutWorker, count: int) -> int:
        for done in range(count):
            try:
                group.sum_(torch.ones(2))
            except GroupBroken:
                return done
        return count

    group.join([None])
    assert worker.run(1, sums, 3).value == 3
    answer = worker.run(2, run_as_recorded, sums, {"sums": 2}, 3)
    assert answer.value == 2
    assert worker.run(3, sums, 1).value == 0, "the rank has left the group"
    assert SUMS.broken


class Watching(SimulatedTransport):
    """A transport that notes, when it kills a process, whether the call of the first process has
    ended."""

    had_ended = False

    def kill(self, channel: Channel) -> None:
        self.had_ended = self.channels[0].tickets[-1].done
        super().kill(channel)


def break_a_sum(worker: RolloutWorker) -> None:
    from polopt.common import sums  # a global `SUMS` would be pickled with this function

    sums.SUMS.completed()
    sums.SUMS.broken = True


def test_a_rank_is_killed_when_the_other_ranks_have_made_their_recorded_sums() -> None:
    """In the recorded run, rank 2 dies while rank 1 still sums. In the rerun, rank 2 does not die
    by itself. The transport kills rank 2 only when rank 1 has made its sums."""

    def two_ranks(recorded: dict[str, Any] | None = None) -> tuple[Watching, dict[str, Any]]:
        inner = Watching(oldest_first)
        transport = RecordedTransport(inner, recorded)
        first, second = (
            transport.start(RolloutWorker, (worker_config(), rank), {}, f"worker {rank}")
            for rank in (1, 2)
        )
        sums = first.send(Message(1, "sums", break_a_sum, ()))
        dying = second.send(Message(2, "dying", break_a_sum, ()))
        if recorded is None:
            inner.channels[1].die()
        assert transport.wait([dying], 1.0) == [dying]
        with pytest.raises(ChannelError):
            dying.result(1.0)
        transport.kill(second)
        assert transport.wait([sums], 1.0) == [sums]
        assert sums.result(1.0).record.timing == {"sums": 1}
        return inner, transport.log.take()

    recorded_run, recorded = two_ranks()
    assert not recorded_run.had_ended
    rerun, _ = two_ranks(recorded)
    assert rerun.had_ended


def test_broken_sums_are_recorded() -> None:
    worker = RolloutWorker(worker_config(), 1)

    def breaks(worker: RolloutWorker) -> None:
        SUMS.completed()
        SUMS.broken = True

    assert worker.run(1, breaks).record.timing == {"sums": 1}
    assert worker.run(2, lambda worker: None).record.timing == {}


def test_the_fingerprint_depends_only_on_numbers() -> None:
    worker = RolloutWorker(worker_config(), 1)
    batch = worker.sample()

    def of(value: Any) -> int:
        return fingerprint(worker.run(1, lambda worker, value: value, value))

    changed = dataclasses.replace(batch, columns={**batch.columns})
    changed.columns["rewards"] = batch["rewards"] + 1e-3
    assert of(batch) == of(dataclasses.replace(batch))
    assert of(batch) != of(changed)
    assert of({"w": np.arange(5.0)}) != of({"w": np.arange(1.0, 6.0)})
    assert of("address 1") == of("address 2"), "strings may differ in each run"


# ---- the file -----------------------------------------------------------------------------------


def test_a_file_is_read_up_to_the_last_flush(tmp_path: Path) -> None:
    times = itertools.count(5)
    log = ArrivalLog(lambda: next(times) / 10)
    log.note("start", "worker 1")  # before the file is open
    path = tmp_path / "arrivals_000000.jsonl.gz"
    log.open(path, {"seed": 3})
    assert [log.read_clock() for _ in range(3)] == [0.5, 0.6, 0.7]
    log.result(1, 4, "ab")
    log.note("wait")
    whole = path.read_bytes()
    log.close()
    header, recorded = read_log(path)
    assert header["seed"] == 3
    assert recorded["events"] == [["start", "worker 1"], ["result", 1, 4, "ab"], ["wait"]]
    rerun = Rerun(recorded, lambda: -1.0)
    assert [rerun.read_clock() for _ in range(3)] == [0.5, 0.6, 0.7]
    path.write_bytes(path.read_bytes()[:-5])  # as if the process died while it wrote
    assert read_log(path)[1]["events"][-1] == ["result", 1, 4, "ab"]
    path.write_bytes(whole)
    shown = subprocess.run(["zcat", path], capture_output=True, text=True, check=True).stdout
    assert json.loads(shown.splitlines()[0])["polopt_arrivals"] == 1
    path.write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="is not a record"):
        read_log(path)


def test_damage_in_the_middle_of_a_record_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.gz"
    log = ArrivalLog(itertools.count().__next__)
    log.open(path, {})
    ends = [path.stat().st_size]
    for iteration in range(3):
        log.result(iteration, 4, "ab")
        ends.append(path.stat().st_size)
    log.close()
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[ends[2] - 6] ^= 1  # the checksum of the second result
    without_end = data[: ends[2] - 4] + data[ends[2] :]
    zeros, text = data[: ends[2]] + b"\0" * 50, data[: ends[2]] + b"text"
    endless = data[: ends[1]] + b"".join([data[:10], b"\0\xff\xff\0\0", data[ends[1] :]])
    for content in (bytes(damaged), without_end, zeros, text, endless):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"is damaged at event [12]: "):
            read_log(path)


def test_number_of_events_in_memory_is_bounded_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_log, "MOST_EVENTS", 10)
    log = ArrivalLog(time.monotonic)
    log.open(tmp_path / "a.jsonl.gz", {})
    for number in range(25):
        log.note("wait", number)
    log.close()
    for _ in range(25):
        log.note("wait")
    assert len(log.take()["events"]) == 5
    assert read_log(tmp_path / "a.jsonl.gz")[1]["events"] == [["wait", n] for n in range(25)]
    below = ArrivalLog(time.monotonic)  # without a file
    for number in range(25):
        below.note("wait", number)
    assert below.take()["events"] == [["wait", number] for number in range(25)]
    assert below.num_events == 25


def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    log = ArrivalLog(time.monotonic)
    log.open(tmp_path / "a.jsonl.gz", {})
    log._file = Full()
    with caplog.at_level(logging.WARNING, logger="polopt"):
        log.result(1, 1, "")
        log.result(2, 1, "")
    assert caplog.text.count("Recording ends, and the run continues") == 1
    assert log._file is None


def test_other_threads_read_the_real_clock() -> None:
    log = ArrivalLog(lambda: 1.25)
    thread = threading.Thread(target=log.read_clock)
    thread.start()
    thread.join()
    assert not log.take()["clock"]
    log.read_clock()
    assert log.take()["clock"] == [1_250_000]


def test_events_are_shown_with_names() -> None:
    _, recorded, _ = run("async_gradients", shuffled_by(1), dies_at=3)
    lines = list(lines_of(recorded["events"], 0, len(recorded["events"])))
    assert len(lines) == len(recorded["events"])
    assert any("worker 2, sent with weights" in line for line in lines)
    assert any("kills worker 2" in line for line in lines)


def test_log_and_trace_name_the_events(caplog: pytest.LogCaptureFixture) -> None:
    TRACER.begin()
    with caplog.at_level(logging.WARNING, logger="polopt"):
        _, recorded, _ = run("async_gradients", shuffled_by(1), dies_at=3)
    spans = [event for event in TRACER.take() if event.name == "request"]
    chrome_trace = pytest.importorskip("polopt.dashboards.data.chrome_trace").chrome_trace
    trace = chrome_trace({"driver": spans}, (0.0, 1e12))["traceEvents"]
    named = [span["args"]["event"] for span in trace if span["ph"] == "X"]
    assert len(named) == len(spans) > 10
    assert {recorded["events"][number][0] for number in named} == {"reply"}
    (number,) = re.findall(r"\(death\) and is replaced \(event (\d+) of the record\)", caplog.text)
    assert recorded["events"][int(number)][0] == "fail"


# ---- trainers, in one process -------------------------------------------------------------------

SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "model": {"fcnet_hiddens": [8]},
    "record_arrivals": True,
}


def trained(
    folder: Path, patch: pytest.MonkeyPatch, restore: Any = None, **options: Any
) -> tuple[PolicyOptimizerTrainer, list[str]]:
    """Trains for three iterations, with a checkpoint after the second iteration. Returns the
    trainer, and the digest of its weights after each iteration."""
    patch.setattr("polopt.trainers.trainer.storage_folder", lambda: str(folder))
    trainer = PolicyOptimizerTrainer({**SMALL, **options})
    if restore is not None:
        trainer.restore(restore)
    digests = []
    for iteration in range(3):
        assert trainer.train()["optimizer"]["num_events_recorded"] > 0
        digests.append(digest_of(trainer.get_policy()))
        if iteration == 1:
            trainer.save()
    trainer.stop()
    return trainer, digests


def rerun_digests(trial: Any, **options: Any) -> list[str]:
    return [digest_of(trainer.get_policy()) for trainer in polopt.rerun(trial, **options)]


def test_a_trainer_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, digests = trained(tmp_path, monkeypatch)
    assert rerun_digests(trainer.logdir) == digests
    assert [t.iteration for t in polopt.rerun(tmp_path, until=2)] == [1, 2]
    _, others = trained(tmp_path / "2", monkeypatch)
    assert others != digests, "each run draws a seed"


def test_decisions_that_depend_on_time_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of steps per iteration, and evaluation in the driver, depend on the time."""
    options = {"min_time_s_per_iteration": 0.3, "evaluation_interval": 1, "evaluation_duration": 2}
    trainer, digests = trained(tmp_path, monkeypatch, **options)
    again = list(polopt.rerun(trainer.logdir))
    assert again[-1].optimizer is None
    assert rerun_digests(trainer.logdir) == digests


def test_a_restored_run_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained(tmp_path / "1", monkeypatch)
    checkpoint = Path(trainer.logdir) / "checkpoint_000000"
    restored, digests = trained(tmp_path / "2", monkeypatch, restore=checkpoint)
    found = [(t.iteration, digest_of(t.get_policy())) for t in polopt.rerun(restored.logdir)]
    assert found == list(zip([3, 4, 5], digests, strict=True))
    assert rerun_digests(restored.logdir, start=checkpoint) == digests
    with pytest.raises(ConfigError, match="can begin only at a checkpoint"):
        rerun_digests(trainer.logdir, start=checkpoint)


def test_a_rerun_may_begin_at_any_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"record_restarts": True, "evaluation_interval": 1, "evaluation_duration": 1}
    trainer, digests = trained(tmp_path, monkeypatch, **options)
    checkpoint = Path(trainer.logdir) / "checkpoint_000000"
    assert len(find_records(trainer.logdir)) == 2
    assert rerun_digests(trainer.logdir) == digests
    found = [
        (t.iteration, digest_of(t.get_policy())) for t in polopt.rerun(tmp_path, start=checkpoint)
    ]
    assert found == [(3, digests[2])]
    saved = SimpleNamespace(checkpoint=Checkpoint(checkpoint))  # as `save` and Tune return it
    assert rerun_digests(tmp_path, start=saved) == [digests[2]]
    with pytest.raises(ConfigError, match="'record_restarts': got True without record_arrivals"):
        PolicyOptimizerTrainer({**SMALL, "record_restarts": True, "record_arrivals": False})


def test_a_trial_may_have_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, digests = trained(tmp_path / "1", monkeypatch)
    checkpoint = Path(first.logdir) / "checkpoint_000000"
    second, more = trained(tmp_path / "2", monkeypatch, restore=checkpoint)
    (record,) = find_records(second.logdir)
    record.rename(Path(first.logdir) / "arrivals_000001.jsonl.gz")
    assert rerun_digests(first.logdir) == digests + more
    assert rerun_digests(first.logdir, start=checkpoint) == more
    with pytest.raises(ConfigError, match="contains no record of a run"):
        find_records(second.logdir)


def test_error_names_an_environment_that_depends_on_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained(tmp_path, monkeypatch, env=Clock)
    with pytest.raises(ConfigError, match=r"does not contain env .*Give the missing values"):
        rerun_digests(trainer.logdir)
    with pytest.raises(polopt.RerunDifference) as error:
        rerun_digests(trainer.logdir, env=Clock)
    said = str(error.value)
    assert "in iteration 1" in said
    assert "A likely cause: the environment" in said
    assert "is not deterministic: it depends on the clock" in said
    monkeypatch.setattr(
        "polopt.recording.rerun.this_machine",
        lambda: {**run_record.this_machine(), "numpy": "1.0"},
    )
    with pytest.raises(polopt.RerunDifference, match=r"another version .*: numpy 1.0 \(recorded"):
        rerun_digests(trainer.logdir, env=Clock)


def test_classes_that_the_record_does_not_contain_can_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, digests = trained(tmp_path, monkeypatch, policy=OwnPPO)
    assert rerun_digests(trainer.logdir, policy=OwnPPO) == digests


class OwnPPO(PPOPolicy):
    """A policy that is not registered."""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": 0.5}, ["'policy.lr': got 0.5, but the record has 0.001"]),
        ({"gamma": 0.5, "entropy_coeff": 1.0}, ["'policy.gamma'", "'policy.entropy_coeff'"]),
        ({"policy": {"gamma": 0.5}}, ["'policy.gamma': got 0.5, but the record has 0.99"]),
        ({"train_batch_size": 64}, ["'optimizer.train_batch_size': got 64, but the record has"]),
        ({"seed": 3}, ["'seed': got 3, but the record has 5"]),
        ({"policy": "a2c"}, ["'policy.name': got 'a2c', but the record has 'ppo'"]),
        ({"num_rollout_workers": 2}, ["'num_workers': got 2, but the record has 0"]),
        ({"model": {"fcnet_hiddens": [4]}}, ["'policy.model.fcnet_hiddens': got [4]"]),
        ({"env_config": {"sutton_barto_reward": True}}, ["'env_config.sutton_barto_reward'"]),
    ],
)
def test_a_change_of_what_the_record_has_is_refused(
    changes: dict[str, Any], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`polopt.rerun(trial, lr=0.5)` ran with the recorded learning rate."""
    trainer, digests = trained(tmp_path, monkeypatch, seed=5)
    with pytest.raises(ConfigError) as caught:
        rerun_digests(trainer.logdir, **changes)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))
    same = {"seed": 5, "lr": 1e-3, "policy": "ppo", "model": {"fcnet_hiddens": [8]}}
    assert rerun_digests(trainer.logdir, **same) == digests, "the same values are accepted"


def test_difference_names_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained(tmp_path / "1", monkeypatch)
    with pytest.raises(polopt.RerunDifference) as error:
        rerun_digests(trainer.logdir, env="Acrobot-v1")
    said = "A likely cause: env='Acrobot-v1' was given, but the record has 'CartPole-v1'"
    assert str(error.value).endswith(said)
    trainer, _ = trained(tmp_path / "2", monkeypatch, policy=OwnPPO)
    other = type("OwnPPO", (OwnPPO,), {"learn_on_batch": lambda self, batch, reducer=None: {}})
    with pytest.raises(polopt.RerunDifference, match=r"what was given differs .*policy=.*OwnPPO"):
        rerun_digests(trainer.logdir, policy=other)


def test_classes_that_a_record_needs_are_named_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for an optimizer of a module was that the optimizer is unknown."""
    trainer, _ = trained(tmp_path, monkeypatch)
    with_config(
        find_records(trainer.logdir)[0], {"optimizer": {"name": "Gone"}, "policy": {"name": "Lost"}}
    )
    done = run_command(["rerun", trainer.logdir])
    assert done.exit_code == 2
    for text in ("optimizer (the class Gone)", "policy (the class Lost)", "--optimizer"):
        assert text in done.output


def with_config(record: Path, changes: dict[str, Any]) -> None:
    """Changes values of the config in a file of a record."""
    lines = gzip.decompress(record.read_bytes()).splitlines()
    header = json.loads(lines[0])
    header["config"] = merged_options(header["config"], changes)
    lines[0] = json.dumps(header).encode()
    record.write_bytes(b"".join(map(gzip.compress, lines)))  # each line is a gzip member


@pytest.mark.parametrize(
    ("saved", "argument"),
    [
        ({"env": "hostile:Env-v0"}, "env"),
        ({"evaluation_config": {"env": "hostile:Env-v0"}}, "evaluation_config"),
        ({"callbacks": "hostile:Callbacks"}, "callbacks"),
        ({"policy": {"name": "hostile:Policy"}}, "policy"),
        ({"policy": "hostile:Policy"}, "policy"),
        ({"optimizer": {"name": "hostile:Optimizer"}}, "optimizer"),
        ({"policy": {"model": {"custom": "hostile:Network"}}}, "network"),
        ({"policy": {"model": {"custom_model": "hostile:Network"}}}, "network"),
        ({"model": {"custom": "hostile:Network"}}, "network"),
        ({"preset": {"name": "hostile:Trainer"}}, "preset"),
    ],
)
def test_modules_that_only_the_record_names_are_not_imported(
    saved: dict[str, Any], argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = trained(tmp_path, monkeypatch)
    (tmp_path / "hostile.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with_config(find_records(trainer.logdir)[0], saved)
    refused = rf"hostile:.* polopt does not import a module .* To import it, pass {argument}="
    with pytest.raises(ConfigError, match=refused):
        rerun_digests(trainer.logdir)
    done = run_command(["rerun", trainer.logdir])
    assert done.exit_code == 2, done.output
    assert "does not import a module" in done.output


@pytest.mark.parametrize("given", ["own_policy:Own", None])
def test_class_that_the_user_names_replaces_the_name_in_the_record(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, digests = trained(tmp_path, monkeypatch)
    (tmp_path / "own_policy.py").write_text("from polopt.policies.ppo import PPOPolicy as Own")
    monkeypatch.syspath_prepend(tmp_path)
    with_config(find_records(trainer.logdir)[0], {"policy": {"name": "hostile:Policy"}})
    assert rerun_digests(trainer.logdir, policy=given or PPOPolicy) == digests


def test_rerun_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = trained(tmp_path, monkeypatch)

    def command(*arguments: object) -> Any:
        return run_command(["rerun", trainer.logdir, *map(str, arguments)])

    done = command()
    assert done.exit_code == 0, done.output
    assert done.output.count(" equal ") == 3
    assert done.output.endswith("equal       3 iterations\n")
    assert command("--until", 1).output.endswith("equal       1 iterations\n")
    stopped = command("--at", 1)
    assert stopped.exit_code == 0
    assert "stopped     before event 1. The rerun is equal to the record so far" in stopped.output
    assert "the beginning of an iteration" in command("--show", "0:5").output
    assert command("--show", "5").exit_code == 2
    assert command("--pdb").exit_code == 2
    # Writes the record again, with other weights after iteration 1.
    (record,) = find_records(trainer.logdir)
    _, recorded = read_log(record)
    changed = next(event for event in recorded["events"] if event[0] == "result")
    changed[3] = "0" * 64
    header, _ = read_log(record)
    record.unlink()
    log = ArrivalLog(time.monotonic)
    log.open(record, header)
    log._events = recorded["events"]
    log._readings = list(itertools.accumulate(recorded["clock"]))
    log.close()
    differs = command()
    assert differs.exit_code == 1
    assert "the weights of iteration 1 have different bytes" in differs.output
    assert differs.output.count("\n") == 1


def test_without_the_option_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.trainers.trainer.storage_folder", lambda: str(tmp_path))
    trainer = PolicyOptimizerTrainer({**SMALL, "record_arrivals": False})
    assert trainer.train()["optimizer"]["num_events_recorded"] == 0
    trainer.stop()
    assert not list(tmp_path.rglob(PATTERN))


def members(path: Path, *lines: Any) -> Path:
    path.write_bytes(b"".join(gzip.compress(json.dumps(line).encode()) for line in lines))
    return path


def test_small_record_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "arrivals_000000.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps({"polopt_arrivals": 1}).encode()))
    with path.open("ab") as file:
        for _ in range(4):
            file.write(gzip.compress(b"[" + b" " * 3_000_000 + b"]"))
    with pytest.raises(ConfigError, match="unpacks to more than 40 bytes for each"):
        read_log(path)


def test_record_of_many_members_is_read_in_linear_time(tmp_path: Path) -> None:
    line = gzip.compress(b'{"events":[["wait",1]],"clock":[1]}')
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"polopt_arrivals":1}') + line * 20_000)
    began_s = time.process_time()
    assert len(read_log(path)[1]["events"]) == 20_000
    assert time.process_time() - began_s < 10.0


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({}, "key 'trainer'"),
        ({"trainer": "A b", "config": {}, "unsaved": {}, "made_by": {}}, "key 'trainer'"),
        ({"trainer": "A"}, "key 'config'"),
        ({"trainer": "A", "config": []}, "key 'config'"),
        ({"trainer": "A", "config": {}, "unsaved": {"env": 3}, "made_by": {}}, "key 'unsaved'"),
    ],
)
def test_odd_header_is_one_error(tmp_path: Path, header: dict[str, Any], said: str) -> None:
    path = members(tmp_path / "a.jsonl.gz", {"polopt_arrivals": 1, **header})
    with pytest.raises(ConfigError, match=f"is damaged: {said}"):
        next(polopt.rerun(path))


def test_deep_config_of_a_record_is_one_error(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    header = {"trainer": "A", "config": {"env_config": deep}, "unsaved": {}, "made_by": {}}
    path = members(tmp_path / "a.jsonl.gz", {"polopt_arrivals": 1, **header})
    with pytest.raises(ConfigError):
        next(polopt.rerun(path))


@pytest.mark.parametrize("events", [["x"], [[]], [[1]], "ab", 3, [None]])
def test_odd_events_are_one_error(tmp_path: Path, events: Any) -> None:
    line = {"events": events, "clock": []}
    path = members(tmp_path / "a.jsonl.gz", {"polopt_arrivals": 1}, line)
    with pytest.raises(ConfigError, match="is damaged at event 0"):
        read_log(path)


def test_event_of_an_unknown_process_is_one_error() -> None:
    for event in (["reply", 7, 0, 0, None, 0, [], {"below": {}}], ["fail", []]):
        with pytest.raises(ConfigError, match="the record is damaged"):
            Rerun({"events": [event], "clock": []}, time.monotonic)


def test_changed_field_changes_the_fingerprint() -> None:
    """The record of a run has a checksum of each answer."""
    env = SyncVectorEnv([lambda: Samples(NESTED)] * 2)
    batch = make_sampler(env, make_policy("ppo", env), 6).sample()
    before = fingerprint(Answer(batch.all_obs, Record()))
    changed = batch.all_obs.copy()
    assert fingerprint(Answer(changed, Record())) == before
    changed["time"][0, 0] += 1.0
    assert fingerprint(Answer(changed, Record())) != before


def test_missing_checkpoint_of_a_rerun_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "arrivals_000000.jsonl.gz").write_bytes(b"")
    without_checkpoint = SimpleNamespace(checkpoint=None, path="/nowhere")  # a result of Tune
    with pytest.raises(CheckpointError, match="checkpoint_at_end=True"):
        next(polopt.rerun(tmp_path, start=without_checkpoint))
