"""Tests of how the command line ends a run: limits, requests to stop, and signals."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray._private.node
from typer.testing import CliRunner

import polopt
from polopt.command_line import ray_thread
from polopt.command_line.cli import app
from polopt.command_line.ray_thread import ray_running
from polopt.command_line.signals import Stopped, StopSignals
from polopt.common.ray_names import START_CONTROL_SERVICE
from polopt.rollouts.transport.sockets import PrivateListener
from polopt.trainers.results import check_stop_key, result_keys
from polopt.trainers.stop_when import StopWhen

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_first_limit_stops(tmp_path: Path) -> None:
    stop = StopWhen({"env_runners/episode_return_mean": 9, "time_total_s": 5}, tmp_path / "stop")

    def stops(mean: float, seconds: float) -> bool:
        result = {"env_runners": {"episode_return_mean": mean}, "time_total_s": seconds}
        return stop("trial", result)

    assert [stops(8, 4), stops(float("nan"), 4), stops(9.25, 4), stops(8, 5)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("value", "limit", "reason"),
    [
        (12_345_678, 12_000_000, "reached 12,345,678 (stop: 12,000,000)"),
        (451.23456, 450, "reached 451.23 (stop: 450)"),
        (-199.5, -200.0, "reached -199.5 (stop: -200)"),
        (0.0012, 0.001, "reached 0.0012 (stop: 0.001)"),
    ],
)
def test_limit_that_stopped_is_named(
    value: float, limit: float, reason: str, tmp_path: Path
) -> None:
    stop = StopWhen({"time_total_s": 1e9, "optimizer/x": limit}, tmp_path / "stop")
    assert not stop("trial", {"time_total_s": 1.0, "optimizer": {"x": limit - 1}})
    assert stop.reason == ""
    assert stop("trial", {"time_total_s": 1.0, "optimizer": {"x": value}})
    assert stop.reason == f"optimizer/x {reason}"


@pytest.mark.parametrize("result", [{}, {"optimizer": 3}, {"optimizer": {"name": "x"}}])
def test_missing_result_key_stops_with_an_error(tmp_path: Path, result: dict[str, Any]) -> None:
    stop = StopWhen({"optimizer/name": 1}, tmp_path / "stop")
    assert stop("trial", result)
    assert "optimizer/name" in str(stop.error)


def test_request_stops_and_creates_the_stop_file(tmp_path: Path) -> None:
    stop = StopWhen({}, tmp_path / "stop")
    assert not stop("trial", {})
    stop.request()
    assert stop("trial", {})
    assert (tmp_path / "stop").exists()


def test_request_without_space_for_the_file(tmp_path: Path) -> None:
    stop = pickle.loads(pickle.dumps(StopWhen({}, tmp_path / "missing" / "stop")))
    stop.request()
    assert stop("trial", {})


def test_keys_of_results_are_stop_keys() -> None:
    for key in result_keys():
        check_stop_key(key)


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    made = StopSignals()
    with made.installed():
        yield made


def test_handlers_from_before_are_installed_again() -> None:
    numbers = [*SIGNALS, signal.SIGALRM]
    before = [signal.getsignal(number) for number in numbers]
    signals = StopSignals()
    with signals.installed():
        signals.install()  # a second time, as after `ray.init`
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_invocation_in_process_leaves_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    CliRunner().invoke(app, ["train", "no-such-example"])
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_raises_where_that_is_allowed(signals: StopSignals, number: int) -> None:
    with pytest.raises(Stopped), signals.raising():
        signal.raise_signal(number)
    assert signals.number == number


@pytest.mark.parametrize("number", SIGNALS)
def test_second_signal_raises(signals: StopSignals, number: int) -> None:
    requests = []
    with signals.during(lambda: requests.append(1)):
        signal.raise_signal(number)
        assert requests == [1]
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGINT)
    assert signals.number == number


def test_expired_grace_raises_once(signals: StopSignals) -> None:
    with signals.during(lambda: None):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGALRM)
        signal.raise_signal(signal.SIGTERM)


def test_signal_before_a_run_prevents_it(signals: StopSignals) -> None:
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(Stopped), signals.during(lambda: None):
        pytest.fail("the run began")


def test_finished_run_ignores_signals(signals: StopSignals) -> None:
    with signals.raising():
        signals.finish()
        for number in SIGNALS:
            signal.raise_signal(number)


class Idle(polopt.PolicyOptimizer):
    """A strategy that forgets to sample. Stops the run after a while."""

    runs_in_process = True
    trainer: Any = None
    steps = 0

    def step(self) -> polopt.StepResult:
        Idle.steps += 1
        time.sleep(0.002)
        if Idle.steps == 150:
            Idle.trainer.request_stop("the test ends")
        return self.metrics.counts_since(self.metrics.counts())


def test_an_iteration_without_samples_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("polopt.trainers.run._WARN_AFTER_S", 0.05)
    monkeypatch.setattr("polopt.trainers.run._STOP_CHECK_S", 0.0)
    trainer = polopt.PolicyOptimizerTrainer(
        env="CartPole-v1", policy="a2c", optimizer=Idle, num_workers=0
    )
    Idle.trainer = trainer
    with caplog.at_level(logging.WARNING, "polopt"):
        result = trainer.train()
    trainer.stop()
    assert result["num_env_steps_sampled_lifetime"] == 0
    said, *_ = [one.getMessage() for one in caplog.records if "sampled nothing" in one.getMessage()]
    assert said.startswith("optimizer Idle has made 100 steps")


LISTENS = """
import time
from polopt.rollouts.transport.sockets import PrivateListener
listener = PrivateListener(b"key", print)
time.sleep(60.0)
"""


def test_killed_processes_and_a_forced_exit_leave_no_files(
    signals: StopSignals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver of a trial, here a process that listens, is killed. Then this process exits
    without its exit handlers."""
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(ray_thread.ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray_thread, "_LEFT_S", 0.0)
    with tempfile.TemporaryDirectory() as parent:  # `tmp_path` can be too long for a Unix socket
        monkeypatch.setattr(tempfile, "tempdir", parent)
        env = {**os.environ, "TMPDIR": parent}
        children: list[subprocess.Popen[bytes]] = []

        def start() -> None:
            children.append(subprocess.Popen([sys.executable, "-c", LISTENS], env=env))

        with ray_running(start, signals):
            until_s = time.monotonic() + 60.0
            while not list(Path(parent).glob("*/s")) and time.monotonic() < until_s:
                time.sleep(0.01)
            assert list(Path(parent).glob("*/s"))
        children[0].wait(10.0)
        assert not list(Path(parent).iterdir())
        own = PrivateListener(b"key", lambda *_: None)
        signals.number = signal.SIGTERM
        signals.leave()
        assert exits == [128 + signal.SIGTERM]
        assert not list(Path(parent).iterdir())
        own.close()


def test_control_service_lives_while_ray_waits_for_it(signals: StopSignals) -> None:
    """Ray waits for a file of the control service, and no other thread can run meanwhile. If the
    service were suspended before, the process would hang for 30 s."""
    assert hasattr(ray._private.node.Node, START_CONTROL_SERVICE)
    states: list[str] = []

    def start_gcs_server() -> None:
        child = psutil.Process(subprocess.Popen(["sleep", "60"]).pid)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.0)
        states.append(child.status())

    assert start_gcs_server.__name__ == START_CONTROL_SERVICE
    started_s = time.monotonic()
    with pytest.raises(Stopped), ray_running(start_gcs_server, signals):
        raise AssertionError("Ray was stopped while it started")
    assert time.monotonic() - started_s < 10.0
    assert states == ["sleeping"]
    assert not [one for one in psutil.Process().children() if one.name() == "sleep"]
