"""Experiments in files: tuned examples, YAML and Python configs, and `key=value` changes.

    description: A3C on CartPole      # one line
    run: A3C                          # a preset
    config: {env: CartPole-v1}        # options of the preset
    stop: {env_runners/episode_return_mean: 450, num_env_steps_sampled_lifetime: 500000}
    goal: ...                         # free-form: the return to reach,
    measured: ...                     # and the return that was measured, with the machine

Only `run` and, as a rule, `config` are needed. The first limit of `stop` that is reached ends the
run. A Python file may also define `callbacks`, a list of `ray.tune.Callback`.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from polopt.common.config import Config, ConfigError, nearest
from polopt.trainers.command_line.yaml_reader import read_yaml

_PACKAGE = "polopt.tuned_examples"
#: JSON has neither NaN nor infinity, and no result reaches them; strict: neither a text nor a bool.
_Limit = Annotated[float, pydantic.Strict(), pydantic.AllowInfNan(False)]


class Example(Config):
    """One experiment as a file describes it; the options of its preset are not parsed yet.

    Attributes:
        run: name of a preset.
        config: options of the preset.
        stop: result key to the value at which training ends.
        goal: free-form.
        measured: free-form.
        description: one line.
        callbacks: of Tune, in addition to its loggers.
    """

    run: str
    config: Mapping[str, Any] = pydantic.Field(default_factory=dict)
    stop: Mapping[str, _Limit] = pydantic.Field(default_factory=dict)
    goal: Any = None
    measured: Any = None
    description: str = ""
    callbacks: Sequence[Any] = ()

    aliases: ClassVar[Mapping[str, str]] = {"preset": "run"}


def example_names() -> list[str]:
    """Returns the names of the installed tuned examples, sorted."""
    files = resources.files(_PACKAGE).iterdir()
    return sorted(Path(f.name).stem for f in files if f.name.endswith((".yaml", ".yml")))


def load_example(name_or_path: str, presets: Sequence[str] = ()) -> Example:
    """Reads a tuned example by its name, or a YAML or Python file by its path.

    A Python file is executed. It defines `config`, `run` (or `preset`) and optionally the other
    keys as variables, or a function `experiment()` that returns a dict of them. Its environments
    may be callables.

    Args:
        name_or_path: a name, or the path of a file.
        presets: names of presets, which have an empty config.

    Raises:
        ConfigError: no such example or file, or its content is not an experiment.
    """
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml", ".py") or path.exists():
        if not path.is_file():
            raise ConfigError(f"no such file: {name_or_path}")
        described = _run_python(path) if path.suffix == ".py" else _read(path, str(path))
        return _example(described, str(path))
    names = example_names()
    if name_or_path in names:
        resource = resources.files(_PACKAGE) / f"{name_or_path}.yaml"
        return _example(_read(resource, name_or_path), name_or_path)
    if name_or_path in presets:
        return Example(run=name_or_path)
    raise ConfigError(
        f"{name_or_path!r} is not a tuned example, a preset or a file"
        f"{nearest(name_or_path, [*names, *presets])} Examples: {', '.join(names) or 'none'}; "
        f"presets: {', '.join(presets)}; or the path of a .yaml or .py file"
    )


def apply_changes(example: Example, changes: Sequence[str]) -> tuple[Example, dict[str, Any]]:
    """Parses `key=value` arguments; the values are YAML.

    `run=...` and `stop.KEY=...` change the example (`stop.KEY=null` removes a limit). The other
    keys change its config; a dotted key changes nested dicts.

    Returns:
        the changed example, and the changes to its config as a nested dict.

    Raises:
        ConfigError: an argument has another form.
    """
    config_changes: dict[str, Any] = {}
    parts = {key: getattr(example, key) for key in Example.model_fields}
    parts["stop"] = dict(example.stop)
    for change in changes:
        key, equals, text = change.partition("=")
        if not (equals and key):
            raise ConfigError(f"argument {change!r}. Allowed: key=value, such as lr=0.001")
        value = read_yaml(text, f"argument {change!r}")
        if key == "stop":
            raise ConfigError(f"argument {change!r}. Allowed: stop.KEY=limit, KEY of a result")
        if key == "run":
            parts["run"] = value
        elif key.startswith("stop."):
            parts["stop"][key.removeprefix("stop.")] = value
        else:
            _put(config_changes, key.split("."), value, change)
    parts["stop"] = {key: limit for key, limit in parts["stop"].items() if limit is not None}
    return Example.parse(parts, "arguments"), config_changes


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `base` updated with `changes`, nested dicts included.

    A dict in place of a plugin's name (`optimizer: sync_samples`) becomes options of that plugin.
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merge(old, value)
        elif isinstance(value, Mapping) and isinstance(old, str) and key in ("optimizer", "policy"):
            merged[key] = {"name": old, **value}
        else:
            merged[key] = value
    return merged


def _put(tree: dict[str, Any], path: list[str], value: Any, change: str) -> None:
    *parents, last = path
    for part in parents:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            raise ConfigError(f"argument {change!r}: another argument sets {part!r} itself")
        tree = below
    if not last:
        raise ConfigError(f"argument {change!r}. Allowed: key=value, such as lr=0.001")
    tree[last] = value


def _read(path: Any, where: str) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from None
    return read_yaml(text, where)


def _run_python(path: Path) -> dict[str, Any]:
    # Modules in the same directory can be imported; workers get the directory from `start_ray`.
    sys.path.insert(0, str(path.resolve().parent))
    name = f"polopt_config_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # Other processes cannot import it under that name, so its classes are pickled by value.
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    try:
        spec.loader.exec_module(module)
        described = module.experiment() if hasattr(module, "experiment") else _variables(module)
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    return described


def _variables(module: Any) -> dict[str, Any]:
    keys = (*Example.keys(), *Example.aliases)
    found = {key: getattr(module, key) for key in keys if hasattr(module, key)}
    return {"description": (module.__doc__ or "").strip().partition("\n")[0], **found}


def _example(described: Any, where: str) -> Example:
    if not isinstance(described, Mapping):
        raise ConfigError(f"{where}: got {described!r}. Allowed: a mapping with 'run' and 'config'")
    if not {"run", "preset"} & described.keys():
        raise ConfigError(
            f"{where}: key 'run' is missing. Allowed: the name of a preset, such as 'SyncPPO'; "
            "'config' and 'stop' stand beside it"
        )
    return Example.parse({k: v for k, v in described.items() if v is not None}, where)
