"""`polopt train` as a process: what it leaves on disk, and how it ends."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import tune
from rich.console import Console

from polopt.trainers.checkpoints import read_checkpoint
from polopt.trainers.planning import plan
from polopt.trainers.presets import A2C
from polopt.trainers.progress import Progress
from polopt.trainers.result_files import flatten
from polopt.trainers.running import Outcome, RunOptions, run

POLOPT = [sys.executable, "-m", "polopt.trainers.cli"]
SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}


def trained(
    tmp_path: Path, iterations: int, checkpoint_every: int = 0, restore: Path | None = None
) -> Outcome:
    """A run in this process, without workers and so without Ray."""
    file = tmp_path / "small.yaml"
    file.write_text(yaml.dump({"run": "A2C", "config": SMALL}))
    planned = plan(str(file), [f"stop.training_iteration={iterations}"], restore)
    options = RunOptions(tmp_path / "results", checkpoint_every)
    return run(planned, options, Console(file=io.StringIO()))


def results_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Of TensorBoard's event file: tag to steps and values."""
    from tensorboardX.proto.event_pb2 import Event

    (file,) = folder.glob("events.out.tfevents.*")
    data, at = file.read_bytes(), 0
    curves: dict[str, list[tuple[int, float]]] = {}
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        at += 12 + length + 4  # each with a checksum behind it
        for value in event.summary.value:
            curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


# ---- on disk ----------------------------------------------------------------------------------


def test_results_are_where_users_of_tune_look_for_them(tmp_path: Path) -> None:
    outcome = trained(tmp_path, 3)
    assert outcome.results is not None
    assert not outcome.error
    assert not outcome.interrupted
    assert outcome.results.parents[1] == tmp_path / "results"
    assert outcome.results.parent.name.startswith("small_20")
    assert outcome.results.name.startswith("A2C_")
    results = results_in(outcome.results)
    assert [result["training_iteration"] for result in results] == [1, 2, 3]
    assert [result["done"] for result in results] == [False, False, True]
    assert [result["checkpoint_dir_name"] for result in results] == [
        None,
        None,
        "checkpoint_000000",
    ]
    assert json.loads((outcome.results / "params.json").read_text()) == SMALL
    with (outcome.results / "progress.csv").open() as file:
        rows = list(csv.DictReader(file))
    flat = dict(flatten({k: v for k, v in results[-1].items() if k != "config"}))
    assert set(rows[0]) == set(flat)
    assert [int(row["training_iteration"]) for row in rows] == [1, 2, 3]
    path = "env_runners/episode_return_mean"
    assert float(rows[-1][path]) == pytest.approx(flat[path])
    steps, values = zip(*curves_in(outcome.results)[f"ray/tune/{path}"], strict=True)
    assert steps == tuple(result["timesteps_total"] for result in results[-len(steps) :])
    assert values[-1] == pytest.approx(flat[path])
    # As Tune reads a trial of its own.
    read = tune.Result.from_path(outcome.results)
    assert read.metrics is not None
    assert read.metrics["training_iteration"] == 3
    assert read.checkpoint is not None
    assert Path(read.checkpoint.path) == outcome.checkpoint


@pytest.mark.usefixtures("ray_session")
def test_files_hold_what_those_of_tune_hold(tmp_path: Path) -> None:
    ours = trained(tmp_path, 3).results
    trial = tune.run(
        A2C,
        config=SMALL,
        stop={"training_iteration": 3},
        storage_path=str(tmp_path / "tune"),
        checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        verbose=0,
    ).trials[0]
    theirs = Path(str(trial.path))
    assert ours is not None
    assert {path.name for path in theirs.iterdir() if not path.name.startswith("events")} == {
        path.name for path in ours.iterdir() if not path.name.startswith("events")
    } | {"params.pkl"}
    assert json.loads((ours / "params.json").read_text()) == json.loads(
        (theirs / "params.json").read_text()
    )
    for our, their in zip(results_in(ours), results_in(theirs), strict=True):
        assert set(dict(flatten(our))) - {"checkpoint_dir_name"} == set(dict(flatten(their)))
        same = (
            "env_runners",
            "learners",
            "training_iteration",
            "timesteps_total",
            "done",
            "config",
        )
        assert [our[key] for key in same] == [their[key] for key in same]
    header = (theirs / "progress.csv").read_text().partition("\n")[0].split(",")
    with (ours / "progress.csv").open() as file:
        assert set(next(csv.reader(file))) == {*header, "checkpoint_dir_name"}
    assert set(curves_in(ours)) == set(curves_in(theirs))
    learned = [
        read_checkpoint(folder / "checkpoint_000000")["optimizer"]["policy"]
        for folder in (ours, theirs)
    ]
    assert str(learned[0]) == str(learned[1])


@pytest.mark.parametrize(
    ("iterations", "every", "kept"), [(5, 1, [2, 3, 4]), (5, 2, [0, 1, 2]), (4, 2, [0, 1])]
)
def test_the_newest_three_checkpoints_stay(
    tmp_path: Path, iterations: int, every: int, kept: list[int]
) -> None:
    outcome = trained(tmp_path, iterations, every)
    assert outcome.results is not None
    names = [f"checkpoint_{number:06d}" for number in kept]
    assert sorted(path.name for path in outcome.results.glob("checkpoint_*")) == names
    assert outcome.checkpoint == outcome.results / names[-1]
    sampled = results_in(outcome.results)[-1]["num_env_steps_sampled_lifetime"]
    assert read_checkpoint(outcome.checkpoint)["optimizer"]["num_env_steps_sampled"] == sampled


def test_restored_counts_go_on(tmp_path: Path) -> None:
    first = trained(tmp_path, 2)
    second = trained(tmp_path, 1, restore=first.checkpoint)
    assert first.results is not None
    assert second.results is not None
    (result,) = results_in(second.results)
    before = results_in(first.results)[-1]["num_env_steps_sampled_lifetime"]
    sampled = result["env_runners"]["num_env_steps_sampled"]
    assert sampled >= 64
    assert result["num_env_steps_sampled_lifetime"] == before + sampled
    assert result["training_iteration"] == 1


# ---- how it ends ------------------------------------------------------------------------------


def test_failure_leaves_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise OSError("no space\nleft on device")

    monkeypatch.setattr("polopt.trainers.training.write_checkpoint", stumble)
    outcome = trained(tmp_path, 1)
    assert outcome.results is not None
    error_file = outcome.results / "error.txt"
    assert outcome.error == f"left on device (traceback: {error_file})"
    assert "OSError: no space" in error_file.read_text()
    assert outcome.checkpoint is None


def test_nothing_is_imported_or_started_that_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.dump({"run": "A2C", "config": SMALL}))
    script = (
        "import sys; from polopt.trainers.cli import app\n"
        "app(['train', 'small.yaml', 'stop.training_iteration=1', '--results-dir', 'results'],"
        " standalone_mode=False)\n"
        "assert not {'pandas', 'pyarrow', 'ray.tune', 'ray.rllib'} & set(sys.modules)\n"
        "import ray; assert not ray.is_initialized()"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def of_session(session: int) -> list[str]:
    """Command lines of the processes of a session that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it has ended meanwhile
        if int(of) == session and state != "Z":
            found.append(command)
    return found


def until(reached: Callable[[], bool], extra_timeout_s: float) -> None:
    deadline_s = time.monotonic() + extra_timeout_s
    while not reached():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_second_ctrl_c_ends_at_once_and_leaves_nothing_running(tmp_path: Path) -> None:
    endless = ["min_sample_timesteps_per_iteration=1000000000", "num_workers=1"]
    command = [*POLOPT, "train", "cartpole_a3c", *endless, "--results-dir", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
    ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            assert any(line.startswith("starting workers") for line in lines)
            until(lambda: any("::RolloutWorker" in line for line in of_session(process.pid)), 60)
            os.killpg(process.pid, signal.SIGINT)
            # Not just the next line: a signal while one is written has it written twice.
            assert any(line.startswith("stopping after this iteration") for line in lines)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert err == ""
    assert out.startswith(f"results     {tmp_path}")
    assert "checkpoint" not in out
    until(lambda: not of_session(process.pid), 20)


@pytest.mark.usefixtures("ray_session")
def test_attaches_to_a_cluster_and_leaves_it(tmp_path: Path) -> None:
    address = ray.get_runtime_context().gcs_address
    changes = ["num_workers=1", "stop.training_iteration=1", "grads_per_step=2"]
    small = ["min_sample_timesteps_per_iteration=64"]
    done = subprocess.run(
        [*POLOPT, "train", "cartpole_a3c", *changes, *small, "--results-dir", str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "iteration 1" in done.stdout
    assert ray.cluster_resources()["CPU"] == 32.0  # its own, and still there


def test_what_is_logged_is_one_line_among_the_results() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=40), "title"):
        logging.getLogger("polopt").warning("worker %d: crash;\n it is replaced", 3)
    logging.getLogger("polopt").debug("not shown")
    assert out.getvalue() == "title\nworker 3: crash; it is replaced\n"
