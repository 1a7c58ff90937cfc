"""Tests the fields of the tuned examples, the showcase, and (slow) that each example reaches its
goal."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import yaml
from ray import tune
from ray.tune.utils import flatten_dict

import polopt

EXAMPLES = sorted(
    path.name.removesuffix(".yaml")
    for path in resources.files("polopt.tuned_examples").iterdir()
    if path.name.endswith(".yaml")
)


def load(name):
    return yaml.safe_load(
        resources.files("polopt.tuned_examples").joinpath(f"{name}.yaml").read_text()
    )


def test_examples_for_presets_and_environments():
    assert set(EXAMPLES) >= {
        "cartpole_a3c",
        "cartpole_a2c",
        "cartpole_ppo",
        "cartpole_ddppo",
        "acrobot_a3c",
        "acrobot_ppo",
        "cartpole_impala",
        "cartpole_appo",
        "cartpole_decoupled_ppo",
        "acrobot_impala",
        "acrobot_appo",
        "pendulum_ppo",
        "pendulum_ddppo",
        "acrobot_dqn",
        "pendulum_sac",
        "halfcheetah_sac",
        "pendulum_td3",
        "cartpole_pqn",
        "acrobot_apex_dqn",
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_has_goal_budget_and_measurement(name):
    example = load(name)
    # An example without a return in its stop conditions uses its whole budget.
    assert example["stop"].get("env_runners/episode_return_mean", math.inf) >= example["goal"]
    assert example["stop"]["num_env_steps_sampled_lifetime"] > 0
    assert example["description"]
    assert "seeds" in example["measured"]


@pytest.mark.timeout(600)
def test_showcase_ends_with_a_table_of_three_strategies(tmp_path):
    code = "from polopt.tuned_examples.showcase import main; main(goal=20)"
    environ = {**os.environ, "HOME": str(tmp_path), "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    for optimizer in ("async_gradients", "sync_samples", "decentralized_allreduce"):
        rows = [line for line in done.stdout.splitlines() if f" {optimizer} " in line]
        assert "solved" in rows[-1], done.stdout
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[-4:])
    folder = Path(lines["results"])
    assert len(list(folder.glob("*/progress.csv"))) == 3, "one file for each strategy"
    assert "AsyncGradients" in Path(lines["report"]).read_text()
    assert lines["dashboard"] == f".venv/bin/polopt dashboard {folder}"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_reaches_its_goal(name, ray_session, tmp_path):
    example = load(name)
    if example["config"]["env"] == "HalfCheetah-v5":
        pytest.importorskip("mujoco")
    if example["config"]["env"].startswith("pettingzoo"):
        pytest.importorskip("pettingzoo")
    polopt.register()
    analysis = tune.run(
        example["run"],
        config={**example["config"], "seed": 3},
        stop=example["stop"],
        storage_path=str(tmp_path),
        verbose=0,
    )
    last = analysis.trials[0].last_result
    # If the example evaluates its policy, compares the return of evaluation with the goal.
    # Self-play stops at another number.
    block = last["evaluation"] if "evaluation_interval" in example["config"] else last
    named = [key for key in example["stop"] if "/custom_metrics/" in key]
    key = named[0] if named else "env_runners/episode_return_mean"
    assert flatten_dict(block)[key] >= example["goal"]
