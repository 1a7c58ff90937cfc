"""The dashboards show real sweeps with trials that fail, are pruned, or change their config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from ray import tune
from ray.tune.registry import register_env
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

import polopt

pytest.importorskip("orjson", reason="the extra polopt[dashboard] is not installed")

from polopt.dashboards.data.trials import ResultsDirectory, Trial

RETURN = "env_runners/episode_return_mean"
ITERATIONS = 4


class Toy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole. With `boom`, the environment raises when it is made."""

    def __init__(self, context: Any) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        if context.get("boom"):
            raise RuntimeError("boom in __init__")


def trials_of(tmp_path: Path, space: dict[str, Any], scheduler: Any) -> list[Trial]:
    # The config names a registered environment, because two pickles of a class in a test may
    # differ. Then the page would show different hashes.
    register_env("toy_of_sweeps", Toy)
    config = {
        "env": "toy_of_sweeps",
        "num_workers": 0,
        "num_cpus_for_driver": 1,
        "rollout_fragment_length": 32,
        "min_sample_timesteps_per_iteration": 64,
        "model": {"fcnet_hiddens": [8]},
        "seed": 0,
    }
    tune.Tuner(
        polopt.A2C,
        param_space={**config, **space},
        tune_config=tune.TuneConfig(scheduler=scheduler),
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(tmp_path / "results"),
            stop={"training_iteration": ITERATIONS},
            verbose=0,
        ),
    ).fit()
    directory = ResultsDirectory(tmp_path / "results", tmp_path / "cache")
    directory.refresh()
    return directory.trials


@pytest.mark.usefixtures("ray_session")
def test_failed_and_pruned_trials_of_a_sweep_are_shown(tmp_path: Path) -> None:
    scheduler = ASHAScheduler(
        metric="fault_tolerance/num_env_faults",  # equal in all trials, so the later one is pruned
        mode="max",
        max_t=ITERATIONS,
        grace_period=1,
        reduction_factor=2,
    )
    grid = {"env_config": {"boom": tune.grid_search([False, True, False])}}
    trials = trials_of(tmp_path, grid, scheduler)
    boom = {str(trial.config["env_config"]["boom"]): trial for trial in trials}
    assert len(trials) == 3
    assert boom["True"].state == "failed"
    assert boom["True"].error.splitlines()[-1].endswith("RuntimeError: boom in __init__")
    assert boom["True"].settings["env"] == boom["False"].settings["env"] != "not set"
    rows = {len(trial.values("done")): trial.state for trial in trials if trial.rows.num_rows}  # type: ignore[arg-type]
    assert rows[ITERATIONS] == "finished"
    for trial in trials:
        # The tab's file is there, although no `sync_config` lets Tune copy files of the trial.
        if trial.rows.num_rows:
            assert trial.declared is not None
            assert trial.declared.title == "SyncSamples"
    assert all(state == "pruned by ASHA" for count, state in rows.items() if count < ITERATIONS)


@pytest.mark.usefixtures("ray_session")
def test_changes_of_population_based_training_are_known(tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="learners/default_policy/default_optimizer_learning_rate",
        mode="max",  # the config of the trial with the smaller learning rate changes
        perturbation_interval=2,
        quantile_fraction=0.5,
        custom_explore_fn=lambda config: {**config, "lr": 5e-3},
        synch=True,
    )
    trials = trials_of(tmp_path, {"lr": tune.grid_search([1e-3, 1e-4])}, scheduler)
    changed = {trial.config["lr"]: trial for trial in trials}[1e-4]
    assert changed.state == "finished"
    assert changed.rows.config_changes[0]["lr"] == ["0.0001", "0.005"]
    assert changed.settings["lr"].startswith("0.0001, then 0.005")
