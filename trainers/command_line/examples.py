"""Experiments in files: tuned examples, YAML and Python configs, and `key=value` changes.

    description: A3C on CartPole      # one line
    run: A3C                          # a preset
    config: {env: CartPole-v1}        # options of the preset
    stop: {env_runners/episode_return_mean: 450, num_env_steps_sampled_lifetime: 500000}
    goal: ...                         # free-form: the return to reach,
    measured: ...                     # and the return that was measured, with the machine

Only `run` and, as a rule, `config` are needed. The first limit of `stop` that is reached ends the
run. A Python file may also define `callbacks`, a list of `ray.tune.Callback`. `run` and options of
`config` may be grids and distributions. See `sweep.py`. Files of RLlib's `rllib train`, with one
experiment below its name, are accepted, too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic
import yaml

from polopt.common.config import Config, ConfigError, nearest
from polopt.common.other_libraries import instead_of_algorithm
from polopt.trainers.command_line.names import import_file
from polopt.trainers.command_line.sweep import is_grid
from polopt.trainers.presets import PRESETS

_PACKAGE = "polopt.tuned_examples"
#: JSON has neither NaN nor infinity, and no result reaches them. Strict: neither a text nor a bool.
_Limit = Annotated[float, pydantic.Strict(), pydantic.AllowInfNan(False)]


class Example(Config):
    """One experiment as a file describes it. The options of its preset are not parsed yet.

    Attributes:
        run: name of a preset, or a grid of presets.
        config: options of the preset.
        stop: for result keys, the value at which training ends.
        goal: free-form.
        measured: free-form.
        description: one line.
        callbacks: callbacks of Tune, in addition to its loggers.
        num_samples: how often each point of the grid is trained, each time with other values of the
            distributions.
        seeds: number of seeds for each trial.
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
    """Returns the names of the installed tuned examples, sorted."""
    files = resources.files(_PACKAGE).iterdir()
    return sorted(Path(f.name).stem for f in files if f.name.endswith((".yaml", ".yml")))


def load_example(name_or_path: str) -> Example:
    """Reads a tuned example by its name, or a YAML or Python file by its path. The name of a preset
    gives one with an empty config.

    A Python file is executed. It defines `config`, `run` (or `preset`) and optionally the other
    keys as variables, or a function `experiment()` that returns a dict of them. Its environments
    may be callables.

    Raises:
        ConfigError: no such example or file, or its content is not an experiment.
    """
    path: Any = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".py") and not path.exists():
        names = example_names()
        if name_or_path in names:
            path = resources.files(_PACKAGE) / f"{name_or_path}.yaml"
        elif name_or_path in PRESETS:
            return Example(run=name_or_path)
        else:
            instead = instead_of_algorithm(name_or_path)
            meant = f". {instead}." if instead else nearest(name_or_path, [*names, *PRESETS]) or "."
            raise ConfigError(
                f"{name_or_path!r} is not a tuned example, a preset or a file"
                f"{meant} Examples: {', '.join(names)}; "
                f"presets: {', '.join(PRESETS)}; or the path of a .yaml or .py file"
            )
    if not path.is_file():
        raise ConfigError(f"no such file: {name_or_path}")
    if path.suffix == ".py":
        return _example(_run_python(path), name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path}: cannot be read: {error}") from None
    return _example(read_yaml(text, name_or_path), name_or_path)


def apply_changes(example: Example, changes: Sequence[str]) -> tuple[Example, dict[str, Any]]:
    """Parses `key=value` arguments. The values are YAML.

    `run=...` (or `preset=...`) and `stop.KEY=...` change the example (`stop.KEY=null` removes a
    limit). The other keys change its config. A dotted key changes nested dicts.

    Returns:
        the changed example, and the changes to its config as a nested dict.

    Raises:
        ConfigError: an argument has another form.
    """
    config_changes: dict[str, Any] = {}
    run, stop = example.run, dict(example.stop)
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and all(key.split("."))):
            raise ConfigError(f"argument {change!r}. Allowed: key=value, such as lr=0.001")
        value = read_yaml(text, f"argument {change!r}")
        if key == "stop":
            raise ConfigError(f"argument {change!r}. Allowed: stop.KEY=limit, KEY of a result")
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
    """Returns `base` updated with `changes`, nested dicts included.

    A dict in place of a plugin's name (`optimizer: sync_samples`) becomes options of that plugin.
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
        module = import_file(path)  # workers get its directory from `start_ray`
        if hasattr(module, "experiment"):
            return module.experiment()
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    keys = (*Example.keys(), *Example.aliases)
    found = {key: getattr(module, key) for key in keys if hasattr(module, key)}
    return {"description": (module.__doc__ or "").strip().partition("\n")[0], **found}


def _example(described: Any, where: str) -> Example:
    if not isinstance(described, Mapping):
        raise ConfigError(f"{where}: got {described!r}. Allowed: a mapping with 'run' and 'config'")
    described = _of_rllib(described)
    if not {"run", "preset"} & described.keys():
        raise ConfigError(
            f"{where}: key 'run' is missing. Allowed: the name of a preset, such as 'SyncPPO'; "
            "'config' and 'stop' stand beside it"
        )
    return Example.parse({k: v for k, v in described.items() if v is not None}, where)


def _of_rllib(described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The experiment in a file of `rllib train`: it stands below its name, and has `env` beside
    `config`. Others as they are."""
    inner = next(iter(described.values())) if len(described) == 1 else None
    if not (isinstance(inner, Mapping) and "run" in inner):
        return described
    found = dict(inner)
    if "env" in found:
        found["config"] = {"env": found.pop("env"), **(found.get("config") or {})}
    return found


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys."""

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
    """Returns the value of a YAML document. Tags that would construct objects are refused.

    Args:
        text: YAML.
        where: name of the document in errors.

    Raises:
        ConfigError: not YAML, or nested too deeply.
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
