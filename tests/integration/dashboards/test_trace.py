"""Tests of `trace: true` and `polopt trace` with real runs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from commands import run_command

from polopt.dashboards.data.chrome_trace import self_times_s
from polopt.rollouts.workers.call_workers import foreach_worker
from polopt.trainers.presets import A2C, A3C, DDPPO

CONFIG: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 2,
    "num_cpus_per_worker": 0.25,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 200,
    "seed": 0,
    "min_sample_timesteps_per_iteration": 0,
    "trace": True,
    "trace_first_step": 2,
    "trace_num_steps": 4,
}
#: A preset, its options, and the phases that fill the time of its workers.
RUNS = [
    (A3C, {"grads_per_step": 10}, {"sample", "gradient"}),
    (A2C, {}, {"sample"}),
    (A2C, {"num_workers": 0}, {"sample"}),
    (DDPPO, {}, {"sample", "learn", "allreduce", "skew"}),
]


Run = tuple[dict[str, Any], set[str], Path]


@pytest.fixture(scope="module", params=RUNS, ids=lambda run: f"{run[0].__name__}-{len(run[1])}")
def run(request: pytest.FixtureRequest, ray_session: None) -> Iterator[Run]:
    """Returns the trace, the names of the workers' spans, and the trial's directory."""
    preset, options, names = request.param
    trainer = preset(config={**CONFIG, **options})
    folder = Path(trainer.logdir)
    try:
        # On a busy machine, the first call to a worker can take longer than the recorded steps.
        foreach_worker(trainer.workers, lambda worker: len(worker.sample()))
        while not (folder / "trace.json").exists():
            assert trainer.train()["training_iteration"] <= 5
        yield json.loads((folder / "trace.json").read_text()), names, folder
    finally:
        trainer.stop()
        shutil.rmtree(folder)


def tracks_of(trace: dict[str, Any]) -> dict[tuple[str, str], list[tuple[float, float, str]]]:
    """Returns start, end and name of the spans by process and track. Outer spans come first."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    tracks: dict[tuple[str, str], list[tuple[float, float, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            pid, tid = event["pid"], event["tid"]
            track = (names["process_name", pid, 0], names["thread_name", pid, tid])
            span = (event["ts"], event["ts"] + event["dur"], event["name"])
            tracks.setdefault(track, []).append(span)
    return {key: sorted(spans, key=lambda s: (s[0], -s[1])) for key, spans in tracks.items()}


def test_trace_has_a_track_for_each_process(run: Run) -> None:
    trace, names, _ = run
    tracks = tracks_of(trace)
    workers = [process for process, track in tracks if track == "worker"]
    assert workers in (["worker 1", "worker 2"], ["worker 0"])
    assert {process for process, _ in tracks} == {"driver", *workers}
    for worker in workers:
        assert {name for _, _, name in tracks[worker, "worker"]} - {"idle"} == names
    assert any(track.startswith("request 1") for _, track in tracks) == (len(workers) == 2)


def test_spans_of_a_track_nest(run: Run) -> None:
    trace, _, _ = run
    for spans in tracks_of(trace).values():
        outer: list[float] = []
        for begin, end, _ in spans:
            while outer and outer[-1] <= begin + 1e-3:
                outer.pop()
            assert not outer or end <= outer[-1] + 1e-3
            outer.append(end)


def test_workers_overlap(run: Run) -> None:
    trace, _, _ = run
    tracks = tracks_of(trace)
    if ("worker 2", "worker") not in tracks:
        pytest.skip("one worker")
    first, second = (
        [span for span in tracks[f"worker {index}", "worker"] if span[2] != "idle"]
        for index in (1, 2)
    )
    overlap = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)
    assert overlap > 0.0


def test_sums_of_spans_equal_the_timers(run: Run) -> None:
    trace, _, _ = run
    driver = self_times_s(trace)["driver"]
    timers_s = trace["otherData"]["timers_s"]
    for phase, time_s in timers_s.items():
        assert driver.get(phase, 0.0) == pytest.approx(time_s, rel=0.05, abs=1e-4)


def test_shares_of_a_worker_sum_to_one(run: Run) -> None:
    trace, _, _ = run
    times = self_times_s(trace)
    duration_s = trace["otherData"]["duration_s"]
    for process in times.keys() - {"driver"}:
        assert sum(times[process].values()) == pytest.approx(duration_s, rel=0.01)


def test_command_shows_shares_of_each_process(run: Run) -> None:
    _, names, folder = run
    done = run_command(["trace", str(folder)])
    assert done.exit_code == 0, done.output
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    workers = [name for name in lines if name.startswith("worker")]
    assert list(lines) == ["trace", "steps", "driver", *workers, "open"]
    assert all(f" {name} " in lines[workers[0]] for name in names)


def test_polopt_train_keeps_the_trace_with_the_results(ray_session: None, tmp_path: Path) -> None:
    keys = {**CONFIG, "num_workers": 0}
    changes = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    command = [sys.executable, "-m", "polopt.command_line.cli", "train", "A2C", *changes]
    command += ["stop.training_iteration=6", "--results-dir", str(tmp_path)]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("trace.json")
    assert (file.parent / "result.json").exists()


def test_unwritable_trace_warns(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    trainer = A2C(config={**CONFIG, "num_workers": 0})
    try:
        for _ in range(5):
            trainer.train()
    finally:
        trainer.stop()
        shutil.rmtree(trainer.logdir)
    assert "disk full" in caplog.text


def test_command_without_a_trace_says_how_to_make_one(tmp_path: Path) -> None:
    done = run_command(["trace", str(tmp_path)])
    assert done.exit_code == 2
    assert "trace=true" in done.stderr
