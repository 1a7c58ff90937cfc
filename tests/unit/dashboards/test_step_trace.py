"""A run with `trace` says if it has written no trace, and the documented commands write one."""

from __future__ import annotations

import logging
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import tune
from source_tree import ROOT

import polopt
from polopt.dashboards.add_on import TraceConfig

CONFIG: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "train_batch_size": 64,
    "rollout_fragment_length": 64,
    "num_sgd_iter": 1,
    "min_sample_timesteps_per_iteration": 0,
    "trace": True,
}


@pytest.mark.parametrize(
    ("steps", "said"),
    [(0, None), (1, "after 1 optimizer step, "), (2, "after 2 optimizer steps, "), (3, None)],
)
def test_run_without_a_trace_says_so(
    steps: int, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {**CONFIG, "trace_first_step": 2, "trace_num_steps": 2}
    trainer = polopt.SyncPPO(**options, log_dir=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "polopt"):
        for _ in range(steps):
            trainer.train()
        trainer.stop()
    warnings = [record.getMessage() for record in caplog.records if "trace" in record.getMessage()]
    assert (tmp_path / "run" / "trace.json").exists() == (steps == 3)
    assert len(warnings) == (said is not None)
    if said is not None:
        assert said in warnings[0]
        assert "records the steps 2 to 3" in warnings[0]


def test_documented_run_is_longer_than_its_trace() -> None:
    page = (ROOT / "docs/dashboards.md").read_text()
    (command,) = re.findall(r"polopt train (\w+ trace=true[^#\n]*)", page)
    name, *changes = command.split()
    planned = pytest.importorskip("polopt.command_line.plan").plan(name, changes)
    config = planned.experiment
    trace = config.add_on(TraceConfig)
    last = trace.trace_first_step + trace.trace_num_steps - 1
    env_steps = config.rollout.rollout_fragment_length * config.rollout.num_envs_per_worker
    recorded = last * config.optimizer.grads_per_step * env_steps
    example = resources.files("polopt.tuned_examples").joinpath(f"{name}.yaml").read_text()
    measured = yaml.safe_load(example)["measured"]
    shortest = re.search(r"steps\s+\(([\d,]+) to", measured)  # of the seeds that reached the goal
    assert shortest is not None
    assert recorded < int(shortest[1].replace(",", ""))


@pytest.mark.skipif(
    not hasattr(tune.Trainable, "_setup_logdir"), reason="this Ray makes a directory itself"
)
def test_trace_makes_the_directory_of_a_run() -> None:
    trainer = polopt.SyncPPO(**CONFIG, trace_first_step=1, trace_num_steps=1)
    trainer.train()
    trainer.stop()
    assert [path.name for path in Path(trainer.logdir).iterdir()] == ["trace.json"]
