"""Tests experiments in files, and changes to them by `key=value`."""

from __future__ import annotations

from pathlib import Path

import pytest

from polopt.command_line.examples import (
    apply_changes,
    example_names,
    load_example,
    merge,
    read_yaml,
)
from polopt.command_line.plan import plan
from polopt.common.config import ConfigError

#: Maps the first part of an example's name to a package that the example needs beyond polopt's
#: dependencies.
NEEDED = {"halfcheetah": "mujoco"}


@pytest.mark.parametrize("name", example_names())
def test_every_installed_example_passes_all_checks(name: str) -> None:
    package = NEEDED.get(name.partition("_")[0])
    if package is not None:
        pytest.importorskip(package)
    planned = plan(name, [])
    assert planned.example.description
    assert planned.example.stop


def test_yaml_reads_1e_3_as_a_number() -> None:
    assert read_yaml("[1e-3, 1e6, -2E+3, 1.5, 3, 1_000]", "x") == [0.001, 1e6, -2e3, 1.5, 3, 1000]
    assert read_yaml("{lr: 1e-3, id: e5, date: 1-2}", "x") == {
        "lr": 0.001,
        "id": "e5",
        "date": "1-2",
    }
    with pytest.raises(ConfigError, match=r"x, line 2: key 'a' is given twice"):
        read_yaml("a: 1\na: 2", "x")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        read_yaml("!!python/object/apply:os.getcwd []", "x")


def test_dotted_keys_change_nested_dicts() -> None:
    example, changes = apply_changes(
        load_example("cartpole_a3c"),
        [
            "lr=1e-4",
            "model.fcnet_hiddens=[32,32]",
            "env_config.x={y: 1}",
            "run=A2C",
            "stop.env_runners/episode_return_mean=100",
            "stop.num_env_steps_sampled_lifetime=null",
        ],
    )
    assert example.run == "A2C"
    assert example.stop == {"env_runners/episode_return_mean": 100}
    assert changes == {
        "lr": 0.0001,
        "model": {"fcnet_hiddens": [32, 32]},
        "env_config": {"x": {"y": 1}},
    }
    base = {"model": {"fcnet_activation": "relu"}, "optimizer": "sync_samples", "lr": 1}
    assert merge(base, {**changes, "optimizer": {"train_batch_size": 5}}) == {
        "model": {"fcnet_activation": "relu", "fcnet_hiddens": [32, 32]},
        "optimizer": {"name": "sync_samples", "train_batch_size": 5},
        "env_config": {"x": {"y": 1}},
        "lr": 0.0001,
    }


def test_options_of_a_plugin_that_another_argument_names() -> None:
    changes = ["optimizer=sync_samples", "optimizer.train_batch_size=5"]
    _, changed = apply_changes(load_example("cartpole_a3c"), changes)
    assert changed == {"optimizer": {"name": "sync_samples", "train_batch_size": 5}}


def test_change_by_an_alias_overrides_the_key() -> None:
    assert plan("cartpole_a3c", ["num_env_runners=1"]).experiment.rollout.num_workers == 1


def test_python_file_with_variables_or_a_function(tmp_path: Path) -> None:
    (tmp_path / "variables.py").write_text(
        '"""What it is.\n\nMore."""\nimport gymnasium\n'
        "def make(): return gymnasium.make('CartPole-v1')\n"
        "preset = 'SyncPPO'\nconfig = {'env': make}\nstop = {'training_iteration': 1}\n"
    )
    example = load_example(str(tmp_path / "variables.py"))
    assert (example.run, example.description) == ("SyncPPO", "What it is.")
    assert callable(example.config["env"])
    (tmp_path / "function.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass D:\n    x: int = 1\n"
        "def experiment(): return {'run': 'A2C', 'config': {'num_workers': D().x}}\n"
    )
    assert load_example(str(tmp_path / "function.py")).config == {"num_workers": 1}


@pytest.mark.parametrize(
    "text", ["[" * 50_000 + "]" * 50_000, "{a: " * 50_000 + "1" + "}" * 50_000]
)
def test_deeply_nested_yaml_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^deep\.yaml: nested too deeply$"):
        read_yaml(text, "deep.yaml")


def test_options_beside_config_are_refused_with_their_place(tmp_path: Path) -> None:
    """The error for `seed` asked for `seeds`, which trains several trials."""
    path = tmp_path / "mine.yaml"
    path.write_text("run: SyncPPO\nseed: 3\nclip_param: 0.3\nsed: 1\nconfig: {env: CartPole-v1}\n")
    with pytest.raises(ConfigError) as caught:
        load_example(str(path))
    *placed, unknown = str(caught.value).splitlines()
    assert [
        f"key {key!r} is an option of the preset. Write it below 'config'" in line
        for key, line in zip(("seed", "clip_param"), placed, strict=True)
    ] == [True, True]
    assert "unknown key 'sed'" in unknown


def test_argument_with_the_prefix_config_is_refused_with_the_right_form() -> None:
    with pytest.raises(ConfigError, match=r"'config.lr=1e-3'. Options have no prefix: lr=1e-3$"):
        apply_changes(load_example("cartpole_a3c"), ["config.lr=1e-3"])
