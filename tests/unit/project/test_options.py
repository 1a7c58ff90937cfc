"""Tests that help, signatures, type checkers, `docs/options.md` and `docs/api.md` agree with the
config classes and docstrings."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any, ClassVar

import generated_files
import metrics_page
import pydantic
import pytest
import typer
import yaml

import polopt
from polopt.command_line.cli import list_
from polopt.common.add_ons import add_ons
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.policies.ppo import PPOConfig
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.experiment import Experiment
from polopt.trainers.options import nested_options, options_of, own_options
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer_config import TrainerConfig


@pytest.mark.parametrize("name", PRESETS)
def test_options_are_those_that_a_preset_accepts(name: str) -> None:
    preset = PRESETS[name].preset
    options = options_of(preset)
    parsed = Experiment.parse({"env": "CartPole-v1"}, preset)
    accepted = {**parsed.trainer.to_dict(), **parsed.rollout.to_dict()}
    accepted |= {**parsed.policy.to_dict(), **parsed.optimizer.to_dict()}
    for part in parsed.add_ons:
        accepted |= part.to_dict()
    plugins = {"optimizer", "policy"} | ({"preset"} if not preset else set())
    assert {option.key for option in options} == {*accepted, *plugins}
    for option in options:
        if option.key in {"env", "model", "evaluation_config"} | plugins:
            continue
        assert option.default == accepted[option.key], option.key
        # `Experiment.parse` accepts each default, under each name of the key.
        for key in (option.key, *option.aliases):
            Experiment.parse({"env": "CartPole-v1", key: option.default}, preset)


def every_option() -> list[Any]:
    configs = generated_files.builtin_configs()
    options = [option for config in configs for option in own_options(config)]
    return [*options, *nested_options(options)]


def test_each_option_has_a_meaning_and_says_what_is_allowed() -> None:
    nameless = {option.key for option in every_option() if not option.meaning}
    assert nameless == set()
    assert all(option.allowed for option in every_option())


def test_allowed_in_words() -> None:
    words = {option.key: option.allowed for option in options_of(polopt.IMPALA.preset)}
    assert words["num_workers"] == "a whole number, at least 0, at most 100,000"
    assert words["gamma"] == "a number, at least 0, at most 1"
    assert words["seed"] == "a whole number, at least 0, below 2**63; or None"
    assert words["transport"] == "'ray', 'socket', 'auto'"
    assert words["fast_cpu"] == "True or False"
    assert words["optimizer"] == "'async_samples', which the preset fixes"


def test_names_of_rllib() -> None:
    names = {option.key: option.aliases for option in options_of(polopt.SyncPPO.preset)}
    assert names["num_workers"] == ("num_env_runners", "num_rollout_workers")
    assert names["sgd_minibatch_size"] == ("minibatch_size",)
    assert names["gamma"] == ()


def test_generated_files_are_up_to_date() -> None:
    command = "python tests/generated_files.py"
    assert generated_files.STUB.read_text() == generated_files.stub(), command
    assert generated_files.PAGE.read_text() == generated_files.page(), command
    assert generated_files.API_PAGE.read_text() == generated_files.api_page(), command
    assert metrics_page.PAGE.read_text() == metrics_page.metrics_page(), command


def parsed(config: dict[str, Any], preset: dict[str, Any]) -> dict[str, Any]:
    experiment = Experiment.parse({**config, "env": "CartPole-v1"}, preset)
    core = (experiment.trainer, experiment.rollout, experiment.policy, experiment.optimizer)
    classes = [one.config_class for one in add_ons() if one.config_class is not None]
    parts = (*core, *map(experiment.add_on, classes))
    return {key: value for part in parts for key, value in part.model_dump(by_alias=True).items()}


@pytest.mark.parametrize("name", PRESETS)
def test_page_shows_each_preset_whole_with_its_own_defaults(name: str) -> None:
    section = generated_files.PAGE.read_text().partition(f"\n## {name}\n")[2]
    block = section.partition("```yaml\n")[2].partition("```")[0]
    shown, preset = yaml.safe_load(block), PRESETS[name].preset
    assert shown["run"] == name
    real = parsed({}, preset)
    assert {*shown["config"]} == {*real}
    for key in ("model", "evaluation_config"):
        assert {*shown["config"][key]} == {*real[key]}
    # A config with all the values of the page equals the config without any of them.
    assert parsed(shown["config"], preset) == real
    # The plain texts are the same, too: `Experiment.parse` would also accept other forms.
    for key, value in shown["config"].items():
        if key not in ("env", "model", "evaluation_config"):
            assert value == as_plain(real[key]), key
    marked = set(re.findall(r"^  (\w+): .*# \*$", block, re.MULTILINE))
    assert marked == {*preset} - {"optimizer", "policy"}


def as_plain(value: Any) -> Any:
    return [as_plain(one) for one in value] if isinstance(value, list | tuple) else value


def test_names_on_the_page_can_be_looked_up() -> None:
    """A class is public, or another library's."""
    page, api = generated_files.page(), generated_files.api_page()
    others = {"None", "True", "False", "EnvContext", "SyncVectorEnv"}
    classes = set(re.findall(r"`([A-Z]\w+)`", page)) - others
    public = set(re.findall(r"^(?:### |\| )`(?:polopt\.)?(\w+)`", api, re.MULTILINE))
    assert classes - public == set()
    assert re.findall(r"`polopt\.\w+\.[\w.]+`", page) == []


def test_api_page_has_every_public_name_and_field() -> None:
    page = generated_files.api_page()
    for name in polopt.__all__:
        heading, row = f"\n### `{name}`\n", f"\n| `polopt.{name}` | "
        assert heading in page or row in page or name in {*PRESETS, "__version__", "WEIGHTS"}, name
    for cls in (polopt.SampleBatch, polopt.Transitions, polopt.Weights, polopt.Gradients):
        section = page.partition(f"\n### `{cls.__name__}`\n")[2].partition("\n### ")[0]
        fields = getattr(cls, "_fields", None) or cls.__dataclass_fields__
        assert len(fields) >= 6
        for field in fields:
            assert f"\n- `{field}`: " in section, field
    for name in ("train", "evaluate", "load", "rerun"):
        section = page.partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]
        for parameter in inspect.signature(getattr(polopt, name)).parameters:
            assert f"- `{parameter}`: " in section, parameter
    assert "\nforeach_worker" not in page  # functions are shown with their module
    assert "    *args: Any,\n    only: int | None = None,\n" in page


def test_page_has_every_option() -> None:
    page = generated_files.page()
    for option in every_option():
        assert f"| `{option.key.rpartition('.')[2]}` |" in page
    assert "| `env_config` |" in page
    assert "| `max_frames_per_traj` |" in page


class PlanetConfig(polopt.OptimizerConfig):
    """Options of Planet.

    Attributes:
        orbits: turns of each worker.
    """

    orbits: int = pydantic.Field(default=4, ge=1)


class Planet(OPTIMIZERS.get("sync_gradients")):  # type: ignore[misc]
    """A strategy."""

    config_class = PlanetConfig


def test_options_of_plugins_are_there_without_a_list() -> None:
    class Orbit(polopt.PolicyOptimizerTrainer):
        """Trains in orbits."""

        preset: ClassVar[dict[str, Any]] = {"optimizer": Planet, "policy": "ppo", "orbits": 7}

    (option,) = [one for one in options_of(Orbit.preset) if one.key == "orbits"]
    assert (option.default, option.meaning) == (7, "turns of each worker.")
    assert option.allowed == "a whole number, at least 1"
    assert "orbits=7: turns of each worker" in pydoc.render_doc(Orbit)
    assert inspect.signature(Orbit).parameters["orbits"].default == 7


def test_help_has_the_preset_and_each_option_with_its_meaning() -> None:
    text = pydoc.plain(pydoc.render_doc(polopt.A3C))
    assert "StorageContext" not in text.partition("Methods")[0]
    for plugin in ("optimizer", "policy"):
        assert f"{plugin.capitalize()}: {polopt.A3C.preset[plugin]}." in text
    assert "polopt.A3C(env=" in text
    for preset in (polopt.A3C, polopt.SyncPPO):
        lines = [line.strip() for line in (preset.__doc__ or "").splitlines()]
        shown = {line.partition("=")[0]: line.partition(": ")[2] for line in lines if "=" in line}
        for option in options_of(preset.preset):
            if option.key not in preset.preset:
                assert shown[option.key]
                assert option.meaning.startswith(shown[option.key]), option.key
    assert "rollout_fragment_length=128:" in (polopt.SyncPPO.__doc__ or "")
    assert "Annotated" not in str(inspect.signature(polopt.SyncPPO))


def test_help_of_a_preset_whose_plugin_is_not_installed() -> None:
    class Lost(polopt.PolicyOptimizerTrainer):
        """Lost."""

        preset: ClassVar[dict[str, Any]] = {"optimizer": "not_installed"}

    assert Lost.__doc__ == "Lost."
    assert list(inspect.signature(Lost).parameters) == ["config", "log_dir", "options"]


def test_signature_has_options_under_all_names() -> None:
    parameters = inspect.signature(polopt.SyncPPO).parameters
    assert parameters["rollout_fragment_length"].default == 128
    assert {"config", "log_dir", "num_workers", "num_env_runners", "lambda_"} <= set(parameters)
    assert parameters["options"].kind is inspect.Parameter.VAR_KEYWORD


def test_defaults_are_named_in_pydantic_fields() -> None:
    """Type checkers treat `Field(3)` as a field without a default."""
    for path in [*generated_files.ROOT.glob("*/**/*.py")]:
        if path.parts[len(generated_files.ROOT.parts)] in ("src", "tests", ".venv", "build"):
            continue
        text = " ".join(path.read_text().split())
        assert " = pydantic.Field( None" not in text, path
        for call in text.split(" = pydantic.Field(")[1:]:
            assert call.strip().startswith(("default", "ge=", "gt=", "alias")), path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("SyncPPO", "rollout_fragment_length = 128"),
        ("SyncPPO", "Other names: num_env_runners, num_rollout_workers."),
        ("SyncPPO", "model.use_lstm = False"),
        ("async_samples", "max_rollout_lag = None"),
        ("appo", "target_network_update_freq = 2"),
    ],
)
def test_command_lists_options(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    list_(name)
    out = capsys.readouterr().out
    assert said in out
    assert "    Allowed: " in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(("name", "said"), [("SyncPP0", "SyncPPO"), ("SACK", "SAC")])
def test_command_refuses_other_names(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit):
        list_(name)
    assert said in capsys.readouterr().err


def test_config_classes_of_every_plugin_are_listed() -> None:
    listed = generated_files.builtin_configs()
    assert {RolloutConfig, TrainerConfig, PPOConfig} <= set(listed)
    for registry in (OPTIMIZERS, POLICIES):
        for name in registry.names():
            plugin = registry.get(name)
            if plugin.__module__.startswith("polopt."):
                assert plugin.config_class in listed
