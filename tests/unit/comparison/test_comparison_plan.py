"""The plan of a comparison: its forms, its file, and one clear error for each bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import run_command
from comparison_helpers import SMALL, VARY, small

import polopt
from polopt.common.config import ConfigError
from polopt.comparison import compare_function
from polopt.comparison.compare_function import prepare
from polopt.comparison.comparison_plan import SECONDS, STEPS
from polopt.comparison.records import PLAN_FILE


@pytest.fixture(autouse=True)
def _no_seed_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands end when they would start the first seed."""
    monkeypatch.setattr("polopt.comparison.runs.run_seeds", lambda *args, **options: "")
    monkeypatch.setattr(compare_function, "run_seeds", lambda *args, **options: "")
    monkeypatch.setattr(compare_function, "start_ray", lambda *args: None)


def file_of(folder: Path, **settings: Any) -> Path:
    """Writes an experiment with a comparison."""
    path = folder / "small.yaml"
    path.write_text(yaml.dump({"run": "A2C", "config": SMALL, "compare": settings}))
    return path


def written_plan(folder: Path) -> dict[str, Any]:
    """Returns the only plan below a directory."""
    (path,) = folder.rglob(PLAN_FILE)
    (entry,) = json.loads(path.read_text())["plans"]
    return entry


def test_command_yaml_and_python_make_the_same_plan(tmp_path: Path) -> None:
    settings = {"vary": VARY, "budget": 300, "max_seeds": 10, "equal_within": 2.5}
    path = file_of(tmp_path, **settings)
    by_file = run_command(["compare", str(path), "--results-dir", str(tmp_path / "yaml")])
    assert by_file.exit_code == 0, by_file.output
    arguments = ["--vary", "lr=0.001,0.01", "--budget", "300", "--max-seeds", "10"]
    arguments += ["--equal-within", "2.5", "--results-dir", str(tmp_path / "command")]
    plain = tmp_path / "plain.yaml"
    plain.write_text(yaml.dump({"run": "A2C", "config": SMALL}))
    assert run_command(["compare", str(plain), *arguments]).exit_code == 0
    polopt.compare("A2C", SMALL, **settings, log_dir=tmp_path / "python")
    hashes = {written_plan(tmp_path / name)["hash"] for name in ("yaml", "command", "python")}
    assert len(hashes) == 1
    plan = written_plan(tmp_path / "yaml")["plan"]
    assert plan["variants"].keys() == {"lr=0.001", "lr=0.01"}
    assert plan["variants"]["lr=0.01"]["lr"] == 0.01
    assert plan["looks"] == [5, 10]
    assert plan["budget"] == {STEPS: 300.0}
    assert plan["equal_within"] == 2.5
    assert plan["failed"] == "worst"


def test_command_line_replaces_the_settings_of_the_file(tmp_path: Path) -> None:
    path = file_of(tmp_path, vary=VARY, budget=300, looks=[5, 9])
    arguments = ["compare", str(path), "gamma=0.5", "--max-seeds", "7", "--budget", "2m"]
    found = run_command([*arguments, "--level", "0.1", "--results-dir", str(tmp_path)])
    assert found.exit_code == 0, found.output
    plan = written_plan(tmp_path)["plan"]
    assert (plan["looks"], plan["level"], plan["budget"]) == ([5, 7], 0.1, {SECONDS: 120.0})
    assert plan["variants"]["lr=0.01"]["gamma"] == 0.5


def test_fixed_number_of_seeds_has_one_look(tmp_path: Path) -> None:
    path = file_of(tmp_path, vary=VARY, budget=300)
    found = run_command(["compare", str(path), "--fixed", "--results-dir", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert written_plan(tmp_path)["plan"]["looks"] == [20]


def test_plan_is_read_again_to_continue(tmp_path: Path) -> None:
    path = file_of(tmp_path, vary=VARY, budget=300)
    arguments = ["compare", str(path), "--max-seeds", "10", "--results-dir", str(tmp_path)]
    assert run_command(arguments).exit_code == 0
    (plan,) = tmp_path.rglob(PLAN_FILE)
    before = plan.read_text()
    found = run_command(["compare", "--continue", str(plan.parent)])
    assert found.exit_code == 0, found.output
    assert plan.read_text() == before
    assert run_command(["compare", "--continue", str(plan.parent), "--level", "0.1"]).exit_code == 0
    assert [one["plan"]["level"] for one in json.loads(plan.read_text())["plans"]] == [0.05, 0.1]


def test_variants_may_differ_in_preset_and_several_options(tmp_path: Path) -> None:
    variants = {
        "small": {"preset": "A2C", "model": {"fcnet_hiddens": [8]}},
        "large": {"preset": "SyncPPO", "model": {"fcnet_hiddens": [16]}, "lr": 0.003},
    }
    plan, _ = small(tmp_path, vary={}, variants=variants)
    configs = {one.name: one.config for one in plan.variants}
    assert [one["preset"] for one in configs.values()] == ["A2C", "SyncPPO"]
    assert configs["large"]["model"]["fcnet_hiddens"] == [16]
    assert plan.trained is not None
    assert plan.trained.config["env"] == "CartPole-v1"
    assert not {"lr", "model", "preset"} & plan.trained.config.keys(), "these options differ"


def test_several_varied_options_are_combined(tmp_path: Path) -> None:
    plan, _ = small(tmp_path, vary={"preset": ["A2C", "SyncPPO"], "gamma": [0.9, 0.99]})
    assert plan.names == (
        "A2C, gamma=0.9", "A2C, gamma=0.99", "SyncPPO, gamma=0.9", "SyncPPO, gamma=0.99"
    )  # fmt: skip


def test_limit_of_the_experiment_is_the_budget(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    stop = {STEPS: 400, "episode_return_mean": 100}
    path.write_text(yaml.dump({"run": "A2C", "config": SMALL, "stop": stop}))
    plan, _ = prepare(str(path), [], {"vary": VARY}, tmp_path / "out")
    assert plan.trained is not None
    assert dict(plan.trained.example.stop) == {STEPS: 400.0}, "all runs are equally long"


BAD = {
    "nothing to compare": ({"vary": {}}, "nothing to compare. Give 'vary'"),
    "both": ({"variants": {"a": {}, "b": {}}}, "give only one of them"),
    "one variant": ({"vary": {"lr": [0.1]}}, "got 1 variant: lr=0.1"),
    "too many": ({"vary": {"seed_": list(range(9))}}, "Allowed: 2 to 8 different variants"),
    "the same twice": ({"vary": {"lr": [0.1, 0.10]}}, "got 1 variant: lr=0.1"),
    "same options": (
        {"vary": {}, "variants": {"a": {"lr": 0.1}, "b": {"lr": 0.1}}},
        "variants 'a' and 'b' have the same options",
    ),
    "seed": ({"vary": {"seed": [1, 2]}}, "key 'seed' cannot be varied"),
    "option": ({"vary": {"lrr": [1, 2]}}, "variant 'lrr=1': .*unknown key 'lrr'"),
    "value": ({"vary": {"lr": [0.1, "x"]}}, "variant 'lr=x': .*key 'lr'"),
    "preset": ({"vary": {"preset": ["A2C", "A2D"]}}, "variant 'A2D': .*A2C"),
    "budget": ({"budget": None}, "key 'budget' is missing"),
    "budget text": ({"budget": "10 days"}, "key 'budget': got '10 days'"),
    "budget of 0": ({"budget": 0}, "key 'budget': got 0"),
    "metric": ({"metric": "episode_retrun_mean"}, "key 'metric': .*episode_return_mean"),
    "mode": ({"mode": "best"}, "key 'mode'"),
    "level": ({"level": 0.0}, "key 'level'"),
    "looks": ({"looks": [5, 5]}, r"key 'looks': got \[5, 5\]"),
    "both ends": ({"looks": [5, 10], "max_seeds": 12}, "key 'max_seeds': got 12, but the last"),
    "hopeless": ({"max_seeds": 3}, "the smallest possible p-value is 0.1"),
    "margin": ({"equal_within": -1}, "key 'equal_within'"),
    "unknown": ({"max_seed": 10}, "unknown key 'max_seed'; did you mean 'max_seeds'"),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD.keys())
def test_bad_settings(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_bad_experiments(tmp_path: Path) -> None:
    given = {"vary": VARY, "budget": 100}
    with pytest.raises(ConfigError, match="has a grid or a distribution"):
        prepare("A2C", {**SMALL, "gamma": "tune.uniform(0.1, 0.9)"}, given, tmp_path / "a")
    path = tmp_path / "seeds.yaml"
    path.write_text(yaml.dump({"run": "A2C", "config": SMALL, "seeds": 3}))
    with pytest.raises(ConfigError, match="chooses the seeds itself"):
        prepare(str(path), [], given, tmp_path / "b")
    path.write_text(yaml.dump({"run": "A2C", "config": SMALL, "compare": 3}))
    with pytest.raises(ConfigError, match="key 'compare': got 3"):
        prepare(str(path), [], given, tmp_path / "c")
    with pytest.raises(ConfigError, match="holds no comparison"):
        prepare(None, {}, given, tmp_path / "d")
    assert {one.name for one in tmp_path.iterdir()} == {"seeds.yaml"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare"),
        (["A2C", "--vary", "lr"], "--vary lr. Allowed: KEY=V1,V2"),
        (["A2C", "--vary", "lr=1,2", "--vary", "lr=3,4"], "is given twice"),
        (["A2C", "--vary", "lr=1,2", "--looks", "5,x"], "--looks 5,x"),
        (["A2C", "--vary", "lr=1,2", "--looks", "5,9", "--fixed"], "--fixed: there is one look"),
        (["A2C", "--runs", "x"], "already have their options"),
        (["A2C", "--continue", "x"], "the experiment is in the plan"),
        (["--continue", "no_such"], "no_such holds no comparison"),
        (["no_such", "--vary", "lr=1,2", "--budget", "9"], "is not a tuned example"),
    ],
)
def test_bad_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_command(["compare", *arguments, "--results-dir", str(tmp_path)])
    assert found.exit_code == 2
    assert found.stderr.startswith("error: ")
    assert found.stderr.count("\n") == 1
    assert message in found.stderr
    assert not list(tmp_path.iterdir())
