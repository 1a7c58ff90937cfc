"""Tests of sweeps with `polopt train`: grids, distributions, seeds and presets. No test in this
file starts Ray."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from command_helpers import result
from ray import tune
from ray.tune.search.sample import Float
from rich.console import Console

import polopt
from polopt.command_line import tune_run
from polopt.command_line.examples import load_example
from polopt.command_line.plan import plan
from polopt.command_line.progress_table import Progress
from polopt.command_line.sweep import configs_to_check, with_searches, with_seeds
from polopt.common.config import ConfigError
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS
from polopt.trainers.stop_when import StopWhen

SMALL = {"env": "CartPole-v1", "num_workers": 0, "model": {"fcnet_hiddens": [8]}}


def searched(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [found for _, found in configs_to_check(with_searches(config))]


def test_trials_check_a_sweep_if_tune_has_no_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polopt.command_line.sweep.points", lambda space: iter(()))
    assert searched({"lr": tune.uniform(0.0, 1.0), "num_workers": tune.grid_search([0, 1])}) == []


def test_texts_are_objects_of_tune() -> None:
    config = with_searches({"lr": "tune.loguniform(1e-4, upper=1e-2)", "env": "tune.uniform"})
    assert isinstance(config["lr"], Float)
    assert (config["lr"].lower, config["lr"].upper) == (1e-4, 1e-2)
    assert config["env"] == "tune.uniform"
    grid = with_searches({"model": {"fcnet_hiddens": "tune.grid_search([[8], [9]])"}})
    assert grid == {"model": {"fcnet_hiddens": {"grid_search": [[8], [9]]}}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("tune.loguniform(0, 1)", "key 'lr': got 'tune.loguniform(0, 1)': "),
        ("tune.logunifrom(1, 2)", "did you mean 'loguniform'?"),
        ("tune.uniform(1)", "missing 1 required positional argument"),
        ("tune.choice(open('x'))", "Allowed: literals as arguments"),
        ("tune.choice([1]) + tune.choice([2])", "more than one call"),
        ("tune.choice([])", "Allowed: literals as arguments, such as tune.choice([0.001, 0.01])"),
        ({"grid_search": 3}, "got grid_search 3. Allowed: a list of values"),
        ({"grid_search": []}, "Allowed: a list of values"),
        ({"eval": "__import__('os').getcwd()"}, "polopt does not execute code in a config"),
    ],
)
def test_wrong_form_is_one_error(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_searches({"lr": value})
    assert said in str(caught.value)


def test_points_and_extremes_are_checked() -> None:
    config = {
        "a": tune.grid_search([1, 2]),
        "b": {"c": tune.grid_search(["x", "y"])},
        "lr": tune.uniform(0.0, 1.0),
        "n": tune.randint(1, 5),
        "k": tune.choice(["p", "q", "r"]),
    }
    found = searched(config)
    assert {(one["a"], one["b"]["c"]) for one in found} == {(1, "x"), (2, "x"), (1, "y"), (2, "y")}
    assert {one["k"] for one in found} == {"p", "q", "r"}
    assert {one["n"] for one in found} == {1, 4}  # 5 is outside of the distribution
    assert min(one["lr"] for one in found) == 0.0
    assert 0.999 < max(one["lr"] for one in found) < 1.0
    # The grid, the upper ends of `lr` and `n`, and two more values of `k`.
    assert len(found) == 4 + 1 + 1 + 2
    plain = {"env": object()}
    assert searched(plain) == [plain]


def test_seeds_begin_with_the_seed() -> None:
    assert with_seeds({"lr": 1}, None) == {"lr": 1}
    assert with_seeds({}, 3)["seed"] == tune.grid_search([0, 1, 2])
    assert with_seeds({"seed": 7}, 2)["seed"] == tune.grid_search([7, 8])
    with pytest.raises(ConfigError, match="Give only one of them"):
        with_seeds({"seed": tune.choice([1])}, 2)


def test_file_of_rllib(tmp_path: Path) -> None:
    """The file has the format of files for `rllib train file`."""
    path = tmp_path / "cartpole.yaml"
    rllib = {
        "env": "CartPole-v1",
        "run": {"grid_search": ["A2C", "SyncPPO"]},
        "stop": {"training_iteration": 3},
        "num_samples": 2,
        "config": {**SMALL, "framework": "torch", "lr": {"grid_search": [1e-3, 1e-4]}},
    }
    path.write_text(yaml.dump({"cartpole": rllib}))
    planned = plan(str(path), ["gamma=0.9"], num_samples=4, seeds=5)
    assert planned.is_sweep
    assert planned.example.num_samples == 4
    assert planned.config["seed"] == tune.grid_search([0, 1, 2, 3, 4])
    assert len(planned.experiments) == 2 * 2 * 5
    assert {one.policy_name for one in planned.experiments} == {"a2c", "ppo"}
    assert {one.policy.gamma for one in planned.experiments} == {0.9}
    assert load_example(str(path)).num_samples == 2


def small(tmp_path: Path, **config: Any) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.dump({"run": "A2C", "config": {**SMALL, **config}}))
    return str(path)


def test_change_replaces_a_grid_whole(tmp_path: Path) -> None:
    file = small(tmp_path, model={"grid_search": [{"fcnet_hiddens": [8]}]})
    planned = plan(file, ["model={fcnet_hiddens: [9]}", "num_env_runners=0"])
    assert not planned.is_sweep
    assert planned.config["model"] == {"fcnet_hiddens": [9]}
    planned = plan(small(tmp_path), ["model={grid_search: [{}, {fcnet_hiddens: [9]}]}"])
    assert [one.policy.model.fcnet_hiddens for one in planned.experiments][1] == (9,)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lr={grid_search: [0.001, fast]}", "trial with lr='fast', seed=0: config: key 'lr'"),
        ("gamma=tune.uniform(0.9, 1.1)", "key 'gamma': got 1.0999"),
        ("env={grid_search: [CartPole-v1, Cartpole-v1]}", "did you mean 'CartPole-v1'?"),
        ("preset={grid_search: [A2C, A2B]}", "key 'preset': got 'A2B'; did you mean 'A2C'?"),
        ("preset={grid_search: [A2C, DDPPO]}", "trial with preset='DDPPO', seed=0: optimizer"),
        ("seed={grid_search: [1]}", "key 'seed': got "),
        ("run=3", "key 'preset': got 3."),
    ],
)
def test_wrong_trial_is_one_error_before_ray(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    with pytest.raises(ConfigError) as caught:
        plan(small(tmp_path), [change], seeds=2)
    assert said in str(caught.value)


def test_train_in_this_process_refuses_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"polopt\.train runs a single trial"):
        polopt.train("A2C", **SMALL, lr=tune.grid_search([1e-3]))


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "PolicyOptimizerTrainer"])
def test_option_preset_is_the_preset(name: str) -> None:
    config = {"env": "Pendulum-v1" if name in ("SAC", "TD3") else "CartPole-v1"}
    cls = PRESETS[name]
    expected = Experiment.parse(config, cls.preset)
    for chosen in (name, cls, f"polopt:{name}", {"name": name}):
        assert Experiment.parse({**config, "preset": chosen}, {}) == expected


def test_options_of_one_preset_precede_the_others() -> None:
    chosen = {"name": "IMPALA", "num_env_runners": 3, "max_rollout_lag": 9}
    config = {"env": "CartPole-v1", "preset": chosen, "num_workers": 1, "lr": 0.5}
    parsed = Experiment.parse(config, {})
    assert parsed.rollout.num_workers == 3
    assert parsed.policy.lr == 0.5
    assert parsed.rollout.rollout_fragment_length == 32  # the default of the preset
    assert parsed.optimizer.to_dict()["max_rollout_lag"] == 9


@pytest.mark.parametrize(
    ("options", "preset", "said"),
    [
        ({"preset": "A3D"}, {}, "did you mean 'A3C'?"),
        ({"preset": "PPO"}, {}, "PPO is 'SyncPPO' here"),
        ({"preset": {"lr": 1}}, {}, "key 'preset': got {'lr': 1}. Allowed: the name"),
        ({"preset": "polopt:A3D"}, {}, "has no attribute 'A3D'"),
        ({"preset": int}, {}, "Allowed: the name of a preset"),
        ({"preset": "A3C"}, polopt.A2C.preset, "this trainer is a preset already"),
        (
            {"preset": "A3C", "optimizer": "sync_samples"},
            {},
            "this preset always uses 'async_gradients'",
        ),
    ],
)
def test_wrong_preset_is_one_error(options: Any, preset: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"env": "CartPole-v1", **options}, preset)
    assert said in str(caught.value)


def trial(number: int, **values: Any) -> Any:
    return SimpleNamespace(
        trial_id=str(number), evaluated_params=values, local_path=f"/there/t{number}"
    )


def test_progress_of_a_sweep_has_one_row_for_each_trial() -> None:
    out = io.StringIO()
    first = trial(0, **{"model/width": 0.00012345, "seed": 1})
    second = trial(1, preset={"name": "A2C", "lr": 1}, seed=2)
    with Progress(Console(file=out, width=150), "t", {}, Path("none"), True) as progress:
        for one in (first, second):
            progress.on_trial_start(0, [], one)
            progress.on_trial_result(0, [], one, result())
        progress.on_trial_result(0, [], first, result(num_env_steps_sampled_lifetime=99))
        progress.on_trial_complete(0, [], first)
        progress.on_trial_error(0, [], second)
    lines = out.getvalue().splitlines()
    assert "width=0.0001234 seed=1: return 85.0  steps 15,758" in lines[2]
    assert any(line.startswith("preset=A2C seed=2: return 85.0") for line in lines)
    assert lines[-1] == "trials: 0 running, 2 ended; Ctrl-C stops and saves"
    assert [one.group for one in progress.trials.values()] == ["preset=A2C", "width=0.0001234"]
    assert [one.steps for one in progress.trials.values()] == [15_758, 99]
    live = Console(file=io.StringIO(), width=150)
    live.print(progress._view())
    assert live.file.getvalue().count("seed=") == 2


def test_request_ends_a_sweep_once_running_trials_have_saved() -> None:
    progress = Progress(Console(file=io.StringIO()), "t", {}, Path("none"), True)
    stop = StopWhen({})
    stopper = tune_run._SweepStopper(stop, progress)
    running, later = trial(0), trial(1)
    progress.on_trial_start(0, [], running)
    assert not stopper("0", result())
    assert not stopper.stop_all()
    stop.request()
    assert not stopper.stop_all()  # the checkpoint of the trial is not written yet
    assert stopper("0", result())
    progress.on_trial_start(0, [], later)
    progress.on_trial_complete(0, [], running)
    assert stopper.stop_all()  # trials that started after the request have no results to save


def test_end_of_a_sweep_has_means_over_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_run, "find_checkpoint", lambda folder: folder / "checkpoint_000000")
    progress = Progress(Console(file=io.StringIO()), "t", {}, Path("none"), True)
    trials = [("A2C", 10), ("A2C", 45), ("A3C", 40), ("A3C", 38)]
    for number, (preset, mean) in enumerate(trials):
        one = trial(number, preset=preset, seed=number)
        progress.on_trial_start(0, [], one)
        returns = {"env_runners": {"episode_return_mean": float(mean)}}
        progress.on_trial_result(0, [], one, result(**returns))
    tune_run._report_sweep(tmp_path, progress, failed=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "return      preset=A3C: 39.0 (40.0, 38.0)"
    assert lines[1] == "return      preset=A2C: 27.5 (10.0, 45.0)"
    assert lines[2] == f"results     {tmp_path}"
    # The best seed of the best preset. A seed of the other preset has a higher return.
    assert lines[3] == f"best        {tmp_path}/t2/checkpoint_000000 (preset=A3C seed=2)"
    assert lines[-1].endswith(f"dashboard {tmp_path}")


@pytest.mark.parametrize("failed", [True, False])
def test_folder_of_a_failed_sweep_without_results_stays(
    failed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "error.txt").write_text("from Tune")
    progress = Progress(Console(file=io.StringIO()), "t", {}, Path("none"), True)
    tune_run._report_sweep(folder, progress, failed)
    said = capsys.readouterr().out
    assert folder.exists() == failed
    assert (f"results     {folder}" in said) == failed
    assert ("Nothing was saved" in said) != failed
