"""Reads experiments from files: tuned examples, YAML and Python configs. Also parses `key=value`
changes.

    description: A3C on CartPole      # one line
    run: A3C                          # a preset
    config: {env: CartPole-v1}        # options of the preset
    stop: {env_runners/episode_return_mean: 450, num_env_steps_sampled_lifetime: 500000}
    goal: ...                         # any text, for example the return to reach
    measured: ...                     # any text, for example the measured return and the machine

Only `run` is required, and may also be called `preset`. Most experiments also need `config`. The
run ends at the first limit in `stop` that a result reaches. A Python file may also define
`callbacks`, a list of `ray.tune.Callback`. `run` and the options in `config` may be grids and
distributions, which `sweep.py` describes. Files of RLlib's `rllib train` are accepted if they have
one experiment.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
import yaml

from polopt.command_line.names import import_file
from polopt.command_line.sweep import is_grid
from polopt.common.add_ons import hint
from polopt.common.config import Config, ConfigError, Problems, nearest
from polopt.trainers.options import options_of
from polopt.trainers.presets import PRESETS

_PACKAGE = "polopt.tuned_examples"
#: A limit in `stop`. NaN and infinity are not allowed, because JSON cannot represent them. With
#: `Strict`, a string or a bool is not converted to a number.
_Limit = Annotated[float, pydantic.Strict(), pydantic.AllowInfNan(False)]


class Example(Config):
    """The description of one experiment, as it was read from a file. The options of the preset are
    not parsed yet.

    Attributes:
        run: name of a preset, or a grid of presets.
        config: options of the preset.
        stop: maps each result key to the value at which training ends.
        goal: any value. polopt does not use it.
        measured: any value. polopt does not use it.
        description: description of the experiment in one line.
        callbacks: callbacks of Tune, in addition to Tune's loggers.
        num_samples: number of times that each point of the grid is trained. Each time, new values
            are drawn from the distributions.
        seeds: number of seeds with which each trial is trained. `None` means that only the option
            `seed` is used.
    """

    run: Any
    config: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    stop: Mapping[str, _Limit] = pydantic.Field(default_factory=dict)
    goal: Any = None
    measured: Any = None
    description: str = ""
    callbacks: Sequence[Any] = ()
    num_samples: int = pydantic.Field(default=1, ge=1, le=100_000, strict=True)
    seeds: int | None = pydantic.Field(default=None, ge=1, le=100_000, strict=True)

    aliases: ClassVar[Mapping[str, str]] = {"preset": "run"}


def example_names() -> list[str]:
    """Returns the sorted names of the installed tuned examples."""
    files = resources.files(_PACKAGE).iterdir()
    return sorted(Path(f.name).stem for f in files if f.name.endswith((".yaml", ".yml")))


def load_example(name_or_path: str) -> Example:
    """Returns the experiment that `describe` reads.

    Raises:
        ConfigError: see `describe`, or the file does not describe an experiment.
    """
    return example_of(describe(name_or_path), name_or_path)


def describe(name_or_path: str) -> Any:
    """Reads a tuned example by its name, or a YAML or Python file by its path. For the name of a
    preset, returns an experiment with this preset. The keys are not checked yet.

    A Python file is executed. The file defines the keys of an experiment as variables, or a
    function `experiment()` that returns a dict of these keys. Environments in a Python file may be
    callables.

    Raises:
        ConfigError: the example or file does not exist or cannot be read, or a Python file raised
            an error.
    """
    path: Any = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".py") and not path.exists():
        names = example_names()
        if name_or_path in names:
            path = resources.files(_PACKAGE) / f"{name_or_path}.yaml"
        elif name_or_path in PRESETS:
            return {"run": name_or_path}
        else:
            instead = hint("preset", name_or_path)
            meant = f". {instead}." if instead else nearest(name_or_path, [*names, *PRESETS]) or "."
            raise ConfigError(
                f"{name_or_path!r} is not a tuned example, a preset or a file"
                f"{meant} Examples: {', '.join(names)}. Presets: {', '.join(PRESETS)}. "
                "No file has this path. A file of your own should end in .yaml, .yml or .py"
            )
    if not path.is_file():
        raise ConfigError(f"no such file: {name_or_path}")
    if path.suffix == ".py":
        return _run_python(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path}: cannot be read: {error}") from None
    return read_yaml(text, name_or_path)


def apply_changes(example: Example, changes: Sequence[str]) -> tuple[Example, dict[str, Any]]:
    """Parses `key=value` arguments. The values are YAML.

    The keys `run` (or `preset`) and `stop.KEY` change the example. `stop.KEY=null` removes a limit.
    All other keys change the config of the example. A dotted key changes a value in nested dicts.

    Returns:
        the changed example, and the changes to the config as a nested dict.

    Raises:
        ConfigError: an argument does not have the form `key=value`, or its value is not allowed.
    """
    config_changes: dict[str, Any] = {}
    run, stop = example.run, dict(example.stop)
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and all(key.split("."))):
            raise ConfigError(f"argument {change!r}. Allowed: key=value, such as lr=0.001")
        value = read_yaml(text, f"argument {change!r}")
        if key == "stop":
            raise ConfigError(
                f"argument {change!r}. Allowed: stop.KEY=limit, where KEY is a key of results"
            )
        if key.startswith("config."):
            raise ConfigError(
                f"argument {change!r}. Options have no prefix: {change.removeprefix('config.')}"
            )
        if key in ("run", "preset"):
            run = value
        elif key.startswith("stop."):
            stop[key.removeprefix("stop.")] = value
        else:
            for part in reversed(key.split(".")):
                value = {part: value}
            config_changes = merge(config_changes, value)
    limits = {key: limit for key, limit in stop.items() if limit is not None}
    changed = {**vars(example), "run": run, "stop": limits}
    return Example.parse(changed, "arguments"), config_changes


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` updated with `changes`. Nested dicts are updated in the same way. A grid is
    replaced as a whole.

    `base` may name an optimizer or policy, for example `optimizer: sync_samples`. If `changes` has
    a dict under the same key, the dict becomes the options of this optimizer or policy.
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if is_grid(value) or is_grid(old):
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merge(old, value)
        elif isinstance(value, Mapping) and isinstance(old, str) and key in ("optimizer", "policy"):
            merged[key] = {"name": old, **value}
        else:
            merged[key] = value
    return merged


def _run_python(path: Path) -> Any:
    try:
        module = import_file(path)  # `start_ray` adds the file's directory to PYTHONPATH
        if hasattr(module, "experiment"):
            return module.experiment()
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    keys = (*Example.keys(), *Example.aliases)
    found = {key: getattr(module, key) for key in keys if hasattr(module, key)}
    return {"description": (module.__doc__ or "").strip().partition("\n")[0], **found}


def example_of(described: Any, where: str) -> Example:
    """Checks the keys of an experiment.

    Args:
        described: the experiment, as `describe` returns it.
        where: name of the experiment, for error messages.

    Raises:
        ConfigError: `described` is not an experiment, or a key is wrong.
    """
    if not isinstance(described, Mapping):
        raise ConfigError(f"{where}: got {described!r}. Allowed: a mapping with 'run' and 'config'")
    described = _of_rllib(described)
    if not {"run", "preset"} & described.keys():
        raise ConfigError(
            f"{where}: key 'run' is missing. Give the name of a preset, such as 'SyncPPO'. The "
            "keys 'config' and 'stop' are on the same level as 'run'"
        )
    problems = Problems()
    for key in [key for key in described if key in _option_names()]:
        described = {other: value for other, value in described.items() if other != key}
        problems.lines.append(
            f"{where}: key {key!r} is an option of the preset. Write it below 'config'"
        )
    with problems.collected():
        example = Example.parse({k: v for k, v in described.items() if v is not None}, where)
    problems.raise_all()
    return example


def _option_names() -> set[str]:
    """Returns the names of the options of all presets, except the keys of an experiment."""
    options = [option for cls in PRESETS.values() for option in options_of(cls.preset)]
    names = {name for option in options for name in (option.key, *option.aliases)}
    return names - {*Example.keys(), *Example.aliases}


def _of_rllib(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the experiment in a file of `rllib train`. In such a file, the experiment is nested
    under its name, and has `env` on the same level as `config`. Returns other experiments
    unchanged."""
    inner = next(iter(described.values())) if len(described) == 1 else None
    if not (isinstance(inner, Mapping) and "run" in inner):
        return described
    found = dict(inner)
    if "env" in found:
        found["config"] = {"env": found.pop("env"), **(found.get("config") or {})}
    return found


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which in addition raises an error for duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key!r} is given twice", problem_mark=key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


# PyYAML implements YAML 1.1, in which `1e-3` is a string because it has no point.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(text: str, where: str) -> Any:
    """Returns the value of a YAML document. Raises an error for tags that would construct Python
    objects.

    Args:
        text: the YAML document.
        where: name of the document, for error messages.

    Raises:
        ConfigError: the text is not valid YAML, or is nested too deeply.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: {error.problem}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ConfigError(f"{where}: {' '.join(str(error).split())}") from None
