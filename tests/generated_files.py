"""Generates files from the config classes: `docs/options.md`, and the type stub of the presets.

`python tests/generated_files.py` writes the files. `tests/unit/test_options.py` compares them with
the config classes.
"""

from __future__ import annotations

import keyword
import re
import subprocess
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from polopt.common.add_ons import add_ons
from polopt.common.config import Config
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.experiment import EvaluationConfig, TrainerConfig
from polopt.trainers.options import Option, config_classes, own_options, shown_default
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer

ROOT = Path(__file__).parents[1]
STUB = ROOT / "trainers" / "typed_presets.pyi"
PAGE = ROOT / "docs" / "options.md"
_NESTED = {ModelConfig: "ModelOptions", EvaluationConfig: "EvaluationOptions"}
_HEAD = '''"""The signatures of the presets and of `polopt.train` for type checkers and editors.

`python tests/generated_files.py` makes this file from the config classes. Programs do not import
this file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, overload

from typing_extensions import Self, Unpack

from polopt.command_line.train_function import TrainingResult
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.trainers.trainer import PolicyOptimizerTrainer as _Trainer

_Path = str | os.PathLike[str]
'''
_PLUGIN_KEYS = """
class PluginOptions(TypedDict, total=False):
    optimizer: str | type[PolicyOptimizer] | Mapping[str, Any]
    policy: str | type[Policy] | Mapping[str, Any]
"""


def builtin_configs() -> list[type[Config]]:
    """Returns the config classes of polopt's own optimizers and policies, each once."""
    found: dict[type[Config], None] = {RolloutConfig: None}
    for registry in (POLICIES, OPTIMIZERS):
        for name in registry.names():
            plugin = registry.get(name)
            if plugin.__module__.startswith("polopt."):
                found[plugin.config_class] = None
    return [*found, TrainerConfig, *add_on_configs()]


def add_on_configs() -> list[type[Config]]:
    """Returns the config classes of polopt's own add-ons."""
    return [add_on.config_class for add_on in add_ons() if add_on.config_class is not None]


def stub() -> str:
    """Returns the text of the type stub of the presets."""
    blocks: dict[str, list[Option]] = {}  # by the class that declares them first
    for config in builtin_configs():
        for option in own_options(config):
            assert option.owner is not None
            known = blocks.setdefault(f"_{option.owner.__name__}", [])
            if option.key not in [one.key for one in known]:
                known.append(option)
    parts = [_HEAD]
    for nested, name in _NESTED.items():
        parts.append(_typed_dict(name, own_options(nested)))
    parts.append(_PLUGIN_KEYS)
    parts += [_typed_dict(name, options) for name, options in blocks.items()]
    parts.append(_any_options(blocks.values()))
    parts.append(_base_class())
    for name, preset in PRESETS.items():
        if preset is PolicyOptimizerTrainer:
            continue
        bases = ["PluginOptions", *_bases(config_classes(preset.preset))]
        parts.append(_combined(f"{name}Options", bases))
        parts.append(_preset_class(name))
    parts.append(_train())
    ruff = [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB.name, "-"]
    done = subprocess.run(
        ruff, input="\n\n".join(parts), capture_output=True, text=True, cwd=ROOT, check=True
    )
    return done.stdout


def _bases(configs: Sequence[type[Config]]) -> list[str]:
    owners = dict.fromkeys(option.owner for config in configs for option in own_options(config))
    return [f"_{owner.__name__}" for owner in owners if owner is not None]


def _typed_dict(name: str, options: Sequence[Option]) -> str:
    lines = [f"class {name}(TypedDict, total=False):"]
    for option in options:
        written = [option.key, *option.aliases]
        lines += [
            f"    {key}: {type_text(option.annotation)}"
            for key in written
            if not keyword.iskeyword(key)
        ]
    return "\n".join(lines)


def _any_options(blocks: Iterable[Sequence[Option]]) -> str:
    """Returns the options of all classes. If two classes have the same key with different types,
    both types are allowed. A class that inherits from both classes could not express this."""
    types_of: dict[str, dict[str, None]] = {}
    for options in blocks:
        for option in options:
            for key in (option.key, *option.aliases):
                if not keyword.iskeyword(key):
                    types_of.setdefault(key, {}).update(dict.fromkeys(_parts(option.annotation)))
    lines = ["class AnyOptions(PluginOptions, total=False):"]
    lines.append("    preset: str | type[_Trainer] | Mapping[str, Any]")
    for key, texts in types_of.items():
        none = ["None"] if "None" in texts else []
        lines.append(f"    {key}: {' | '.join([*(t for t in texts if t != 'None'), *none])}")
    return "\n".join(lines)


def _parts(annotation: Any) -> list[str]:
    """Returns the types of a union. For another annotation, returns its only type."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return [type_text(annotation)]
    return ["None" if one is type(None) else type_text(one) for one in get_args(annotation)]


def _combined(name: str, bases: Sequence[str]) -> str:
    listed = "".join(f"    {base},\n" for base in bases)
    return f"class {name}(\n{listed}    total=False,\n): ..."


def _base_class() -> str:
    return """
class PolicyOptimizerTrainer(_Trainer):
    # The second form accepts the options of plugins, which are not known here.
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[AnyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Any,
    ) -> None: ...
"""


def _preset_class(name: str) -> str:
    return f"""
class {name}(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[{name}Options],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[{name}Options]
    ) -> Self: ...
"""


def _train() -> str:
    presets = [(f'Literal["{name}"] | type[{name}]', f"{name}Options") for name in PRESETS]
    forms = [
        (name, options)
        for name, options in presets
        if options != f"{PolicyOptimizerTrainer.__name__}Options"
    ]
    forms += [("str", "AnyOptions"), ("None", "AnyOptions"), ("type[_Trainer]", "")]
    lines = []
    for experiment, options in forms:
        given = f"Unpack[{options}]" if options else "Any"
        lines.append(
            "@overload\n"
            "def train(\n"
            f"    experiment: {experiment}{' = None' * (experiment == 'None')},\n"
            "    config: Mapping[str, Any] | None = None,\n"
            "    *,\n"
            "    stop: Mapping[str, float] | None = None,\n"
            "    log_dir: _Path | None = None,\n"
            "    checkpoint_every: int = 20,\n"
            "    restore: _Path | None = None,\n"
            "    verbose: int = 1,\n"
            f"    **options: {given},\n"
            ") -> TrainingResult: ..."
        )
    return "\n".join(lines)


def type_text(annotation: Any) -> str:
    """Returns the type annotation of the values that users pass. For a tuple, they may pass any
    sequence. For a nested config, they pass a dict of its options."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation is Any:
        return "Any"
    if annotation in _NESTED:
        return _NESTED[annotation]
    if origin is Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return f"Literal[{', '.join(map(_quoted, parts))}]"
    if origin in (Union, types.UnionType):
        texts = [type_text(part) for part in parts if part is not type(None)]
        return " | ".join(dict.fromkeys([*texts, *(["None"] * (type(None) in parts))]))
    if origin in (list, tuple) or annotation in (list, tuple):
        inner = list(dict.fromkeys(type_text(part) for part in parts if part is not Ellipsis))
        return f"Sequence[{' | '.join(inner) or 'Any'}]"
    if isinstance(origin, type) and issubclass(origin, Mapping | dict):
        return f"Mapping[{', '.join(map(type_text, parts))}]"
    if annotation in (int, float, bool, str):
        return str(annotation.__name__)
    return "Any"


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def page() -> str:
    """Returns the text of `docs/options.md`."""
    return "\n".join(_page_lines()) + "\n"


def _page_lines() -> Iterator[str]:
    yield "# Options"
    yield ""
    yield (
        "All keys of a config, with their defaults. `polopt list PRESET` prints the options of one "
        "preset with its own defaults. The last column has aliases of the key, which polopt "
        "accepts, and names of this option in RLlib. If polopt does not accept a name of "
        "RLlib, the error message names the key to use."
    )
    yield ""
    yield "This page is made from the config classes: `python tests/generated_files.py` writes it."
    seen: set[tuple[type[Config] | None, str]] = set()
    for title, config in _sections():
        options = [
            option
            for option in own_options(config)
            if (option.owner, option.key) not in seen or option.default != _default(option)
        ]
        seen |= {(option.owner, option.key) for option in options}
        yield ""
        yield f"## {title}"
        yield ""
        if not options:
            yield "No options of its own."
            continue
        yield "| key | default | allowed | meaning | other names, RLlib's names |"
        yield "|---|---|---|---|---|"
        for option in options:
            names = ", ".join(f"`{name}`" for name in option.other_names)
            cells = (
                f"`{option.key}`",
                f"`{shown_default(option.default)}`",
                option.allowed.replace("'", "`"),
                option.meaning,
                names,
            )
            yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(option: Option) -> Any:
    """Returns the default of the class that declares the option first."""
    assert option.owner is not None
    return next(o.default for o in own_options(option.owner) if o.key == option.key)


def _sections() -> Iterator[tuple[str, type[Config]]]:
    yield "Sampling", RolloutConfig
    yield "Trainer and evaluation", TrainerConfig
    for config in add_on_configs():
        yield config.__name__.removesuffix("Config"), config
    yield "`evaluation_config`", EvaluationConfig
    yield "`model`", ModelConfig
    for kind, registry in (("Optimizer", OPTIMIZERS), ("Policy", POLICIES)):
        for name in registry.names():
            plugin = registry.get(name)
            if re.match(r"polopt\.", plugin.__module__):
                yield f"{kind} `{name}`", plugin.config_class


if __name__ == "__main__":
    STUB.write_text(stub())
    PAGE.write_text(page())
