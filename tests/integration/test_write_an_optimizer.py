"""The optimizer of docs/write-an-optimizer.md, as it is printed there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import polopt

PAGE = Path(__file__).parents[2] / "docs" / "write-an-optimizer.md"


@pytest.fixture(scope="module")
def local_sgd() -> dict[str, Any]:
    """What the first code block of the page defines."""
    block = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "local_sgd_of_the_page"}
    exec(compile(block, PAGE.name, "exec"), names)
    return names


@pytest.mark.parametrize("num_workers", [0, 2])
def test_local_sgd_of_the_page_trains(
    local_sgd: dict[str, Any], num_workers: int, ray_session: None
) -> None:
    trainer = polopt.PolicyOptimizerTrainer(
        {
            "env": "CartPole-v1",
            "optimizer": "local_sgd",
            "local_rounds": 2,
            "num_workers": num_workers,
            "num_envs_per_worker": 2,
            "num_cpus_per_worker": 0.1,
            "min_sample_timesteps_per_iteration": 1000,
        }
    )
    try:
        before = trainer.get_policy().get_weights().flat
        block = trainer.train()["optimizer"]
        assert block["name"] == "local_sgd"
        assert block["num_env_steps_trained"] == block["num_env_steps_sampled"] >= 1000
        assert block["num_updates"] > 0
        assert (trainer.get_policy().get_weights().flat != before).any()
    finally:
        trainer.stop()
