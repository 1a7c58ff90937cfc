"""Tests that population-based training continues with another policy optimizer and the weights of
another trial."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from printed_code import ROOT

EXAMPLE = ROOT / "docs" / "examples" / "pbt_over_optimizers.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("pbt_over_optimizers", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("ray_session")
def test_trial_goes_on_with_another_optimizer(tmp_path: Path) -> None:
    example = load_example()
    explored: list[dict[str, Any]] = []

    def explore(config: dict[str, Any]) -> dict[str, Any]:
        """Changes the optimizer of each trial that copies another trial."""
        explored.append(dict(config))
        return {**config, "optimizer": "sync_gradients"}

    tuner = example.make_tuner(
        num_trials=2,
        iterations=4,
        perturbation_interval=2,
        quantile_fraction=0.5,
        custom_explore_fn=explore,
        synch=True,
    )
    results = tuner.fit()
    assert not results.errors
    assert len(explored) == 1, "one perturbation, of one trial of two"
    by_optimizer = {result.config["optimizer"]: result for result in results}
    changed = by_optimizer.pop("sync_gradients")
    (other,) = by_optimizer.values()
    assert other.config["optimizer"] in example.OPTIMIZERS
    rows = changed.metrics_dataframe
    assert rows is not None
    assert changed.metrics["training_iteration"] == other.metrics["training_iteration"] == 4
    # The counters continue where the copied trial stopped.
    taken = other.metrics_dataframe
    assert taken is not None
    steps = "num_env_steps_sampled_lifetime"
    # After a pause, Tune may copy back an older result file, without the row of iteration 2.
    third = taken.loc[taken["training_iteration"] == 3].iloc[-1]
    before = int(third[steps]) - int(third["timesteps_this_iter"])
    after = int(rows.loc[rows["training_iteration"] == 3, steps].iloc[-1])
    sampled = int(rows.loc[rows["training_iteration"] == 3, "timesteps_this_iter"].iloc[-1])
    assert after == before + sampled
