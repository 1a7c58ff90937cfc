"""`polopt compare` as a process: killed and continued, and finished runs of Tune."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from waiting import wait_until

import polopt
from polopt.comparison.records import DECISIONS_FILE, PLAN_FILE, SEEDS_FILE

POLOPT = [sys.executable, "-m", "polopt.command_line.cli"]
EXPERIMENT: dict[str, Any] = {
    "run": "A2C",
    "config": {
        "env": "CartPole-v1",
        "num_workers": 0,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 8,
        "min_sample_timesteps_per_iteration": 64,
        "model": {"fcnet_hiddens": [8]},
    },
    # With two seeds, the smallest p-value is 2 / 6.
    "compare": {"vary": {"lr": [0.001, 0.01]}, "budget": 256, "looks": [2], "level": 0.5},
}


def compare(*arguments: object, cwd: Path) -> str:
    """Returns the output of a comparison that ends without an error. It attaches to the Ray of the
    tests."""
    command = [*POLOPT, "compare", *map(str, arguments)]
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


def scores(folder: Path) -> dict[tuple[str, int], float]:
    """Returns the score of each seed of a comparison. Each seed has one record."""
    records = [json.loads(line) for line in (folder / SEEDS_FILE).read_text().splitlines()]
    found = {(one["variant"], one["seed"]): one["score"] for one in records}
    assert len(found) == len(records)
    return found


def decisions(folder: Path) -> Any:
    return json.loads((folder / DECISIONS_FILE).read_text())["pairs"]


@pytest.mark.timeout(400)
def test_killed_and_continued_command_decides_the_same(ray_session: None, tmp_path: Path) -> None:
    """Kills the command while it trains the second seed or a later one, and continues it. Another
    comparison runs without a kill, in Python. Then the finished runs are compared."""
    (tmp_path / "small.yaml").write_text(yaml.dump(EXPERIMENT))
    command = [*POLOPT, "compare", "small.yaml", "--results-dir", "killed"]
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
        try:
            wait_until(lambda: any(tmp_path.glob(f"killed/*/{SEEDS_FILE}")), 200)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)
    (killed,) = (tmp_path / "killed").iterdir()
    plan = (killed / PLAN_FILE).read_text()
    before = scores(killed)
    assert 1 <= len(before) < 4
    assert not (killed / DECISIONS_FILE).exists()
    output_text = compare("--continue", killed, cwd=tmp_path)
    assert scores(killed).items() >= before.items()
    assert (killed / PLAN_FILE).read_text() == plan
    records = [json.loads(line) for line in (killed / SEEDS_FILE).read_text().splitlines()]
    # Tune may not have copied the results of the last seed before the kill.
    trials = {one.parent.name for one in killed.glob("*/params.json")}
    assert trials <= {one["trial"] for one in records}, "incomplete trials are deleted"
    assert len(trials) >= 3
    assert "lr=0.001 and lr=0.01" in output_text
    assert "We compared lr=0.001 and lr=0.01" in " ".join(output_text.split())

    # Without a kill, in Python. Synchronous optimizers repeat each seed.
    result = polopt.compare(
        "A2C", EXPERIMENT["config"], **EXPERIMENT["compare"], log_dir=tmp_path / "whole"
    )
    assert scores(tmp_path / "whole") == scores(killed)
    assert decisions(tmp_path / "whole") == decisions(killed)
    assert "lr=0.001 and lr=0.01" in repr(result)

    # The same runs, read from their directories. Their budget is the shortest run.
    arguments = ("--runs", tmp_path / "whole", "--level", "0.5", "--results-dir", "read")
    compare(*arguments, cwd=tmp_path)
    (read,) = (tmp_path / "read").iterdir()
    assert len(scores(read)) == 4
