"""Runs commands of polopt in this process, and makes results as a run prints them."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from polopt.command_line.cli import app

SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "model": {"fcnet_hiddens": [8]},
    "seed": 5,
}


def polopt(*arguments: object) -> Result:
    """Runs the command in this process. Ray must not start."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(result: Result, code: int = 2) -> str:
    """Returns the one line that a failed command prints."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def result(**changes: Any) -> dict[str, Any]:
    return {
        "env_runners": {"episode_return_mean": 85.0},
        "num_env_steps_sampled_lifetime": 15_758,
        "num_env_steps_sampled_per_second": 12_345.6,
        "training_iteration": 4,
        "time_this_iter_s": 2.0,
        "time_total_s": 9.0,
        "fault_tolerance": {"num_healthy_workers": 2},
        "config": {"num_workers": 2},
        "optimizer": {
            "policy_lag": {"mean": 0.93},
            "driver": {"share": {"wait": 0.6, "apply": 0.3, "report": 0.05, "other": 0.05}},
        },
        **changes,
    }
