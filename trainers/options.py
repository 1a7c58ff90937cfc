"""All options of a preset, as its config classes declare them: for `polopt list`, `help`, the
signatures that editors show, and `docs/options.md`."""

from __future__ import annotations

import inspect
import keyword
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from polopt.common.config import Config
from polopt.common.other_libraries import RLLIB
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.experiment import TrainerConfig, plugin_names

#: The options that choose the classes of all others.
_PLUGINS = {
    "optimizer": "the policy optimizer: a registered name, a class, or a dict of `name` and "
    "options of this optimizer",
    "policy": "the policy: a registered name, a class, or a dict of `name` and options of this "
    "policy",
}
#: Meaning of the key `preset` for `PolicyOptimizerTrainer`.
_PRESET = (
    "a preset whose optimizer, policy and defaults hold; with `tune.grid_search`, presets are "
    "compared in one experiment"
)
_ANY_PRESET = (
    "None; the name, the class or 'module:Class' of a preset; or a dict of `name` and options that "
    "hold with this preset"
)
_SAME_IN_RLLIB = {
    name for row in RLLIB for name in row.names if name in re.findall(r"`(\w+)`", row.here)
}
_RLLIB_NAME = re.compile(r"RLlib(?:\s0\.8)?:\s`(\w+)`")


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        key: with the keys above it for an option of a nested dict: `model.fcnet_hiddens`.
        default: of the preset.
        allowed: in words.
        meaning: from the docstring of its config class.
        aliases: other names of the key that are accepted.
        rllib: names of the option in RLlib. Today's names are accepted.
        annotation: its type, without pydantic's constraints.
        owner: the config class that introduces it.
    """

    key: str
    default: Any
    allowed: str
    meaning: str
    aliases: tuple[str, ...]
    rllib: tuple[str, ...]
    annotation: Any
    owner: type[Config] | None

    @property
    def other_names(self) -> list[str]:
        """Aliases and names in RLlib."""
        return list(dict.fromkeys([*self.aliases, *self.rllib]))

    @property
    def names(self) -> list[str]:
        """Names that a keyword argument may have."""
        return [name for name in (self.key, *self.aliases) if not keyword.iskeyword(name)]


def config_classes(preset: Mapping[str, Any]) -> list[type[Config]]:
    """The classes that own the options of a preset, in the order in which they are listed.

    Raises:
        ConfigError: unknown optimizer or policy.
    """
    optimizer, policy = plugin_names({}, preset)
    return [
        RolloutConfig,
        POLICIES.get(policy).config_class,
        OPTIMIZERS.get(optimizer).config_class,
        TrainerConfig,
    ]


def options_of(preset: Mapping[str, Any]) -> list[Option]:
    """All options of a preset, without options of nested dicts.

    Args:
        preset: options that differ from the defaults of the classes.

    Raises:
        ConfigError: unknown optimizer or policy.
    """
    found = []
    for cls in config_classes(preset):
        found += own_options(cls, preset)
    chosen = dict(zip(_PLUGINS, plugin_names({}, preset), strict=True))
    for key, meaning in _PLUGINS.items():
        fixed = preset.get(key)
        if fixed is None:
            registry = OPTIMIZERS if key == "optimizer" else POLICIES
            allowed = ", ".join(map(repr, registry.names()))
        else:
            allowed = f"{fixed!r}, which the preset fixes"
        found.append(Option(key, chosen[key], allowed, meaning, (), (), Any, None))
    if not preset:
        found.append(Option("preset", None, _ANY_PRESET, _PRESET, (), (), Any, None))
    return found


def own_options(cls: type[Config], preset: Mapping[str, Any] | None = None) -> list[Option]:
    """The options of one config class, inherited ones included."""
    meanings, found = _meanings(cls), []
    for name, field in cls.model_fields.items():
        key = field.alias or name
        meaning = meanings.get(name, meanings.get(key, ""))
        aliases = tuple(alias for alias, target in cls.aliases.items() if target == key)
        same = [key] if key in _SAME_IN_RLLIB else []
        rllib = tuple(dict.fromkeys([*same, *aliases, *_RLLIB_NAME.findall(meaning)]))
        default = field.get_default(call_default_factory=True)
        found.append(
            Option(
                key,
                (preset or {}).get(key, default),
                _allowed(field),
                meaning,
                aliases,
                rllib,
                field.annotation,
                _introduced_by(cls, name),
            )
        )
    return found


def nested_options(options: Sequence[Option]) -> Iterator[Option]:
    """For each option that is a dict: the options in it, with dotted keys."""
    for option in options:
        nested = nested_config(option.annotation)
        if nested is not None:
            for inner in own_options(nested):
                key = f"{option.key}.{inner.key}"
                yield Option(**{**vars(inner), "key": key, "aliases": ()})


def nested_config(annotation: Any) -> type[Config] | None:
    """The config class of an option that is a dict of options. None for others."""
    is_config = isinstance(annotation, type) and issubclass(annotation, Config)
    return annotation if is_config else None


def first_sentence(text: str) -> str:
    """The first sentence of a meaning. A mark between backticks does not end it."""
    match = re.match(r"(?:`[^`]*`|.)*?[.;:](?=\s|$)", text)
    return (match[0] if match else text).rstrip(".;:")


def shown_default(value: Any) -> str:
    """A default as it is written in a config."""
    if isinstance(value, Config):
        return "{}"
    if isinstance(value, tuple):
        return repr(list(value))
    return repr(value)


def _introduced_by(cls: type[Config], name: str) -> type[Config]:
    """The class, `cls` or one above it, that has a field first."""
    owners = [c for c in cls.__mro__ if issubclass(c, Config) and name in c.model_fields]
    return owners[-1]


def _meanings(cls: type[Config]) -> dict[str, str]:
    """What docstrings say of attributes, from the section `Attributes:` of a class and of the
    classes above it."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        _, _, section = (inspect.cleandoc(owner.__doc__ or "")).partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def _allowed(field: FieldInfo) -> str:
    if field.description:
        return field.description
    return _words(field.annotation, field.metadata)


def _words(annotation: Any, metadata: Sequence[Any]) -> str:
    """What a type and its constraints allow, in words."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _words(parts[0], [*_flat(parts[1:]), *metadata])
    if origin in (Union, types.UnionType):
        words = [_words(part, metadata) for part in parts if part is not type(None)]
        none = ["None"] if type(None) in parts else []
        return "; or ".join(dict.fromkeys([*words, *none]))
    if origin is Literal:
        return ", ".join(map(repr, parts))
    if annotation is bool:
        return "True or False"
    if annotation in (int, float):
        noun = "a whole number" if annotation is int else "a number"
        return f"{noun}{_range(metadata)}"
    if annotation is str:
        return "a text"
    if nested_config(annotation) is not None:
        return "a dict of options"
    container = origin or annotation
    if isinstance(container, type) and issubclass(container, Mapping | dict):
        return "a dict"
    if isinstance(container, type) and issubclass(container, list | tuple):
        return "a list"
    return "see its meaning"


def _range(metadata: Sequence[Any]) -> str:
    texts = []
    for bound in _flat(metadata):
        if isinstance(bound, annotated_types.Ge):
            texts.append(f"at least {_number(bound.ge)}")
        elif isinstance(bound, annotated_types.Gt):
            texts.append(f"above {_number(bound.gt)}")
        elif isinstance(bound, annotated_types.Le):
            texts.append(f"at most {_number(bound.le)}")
        elif isinstance(bound, annotated_types.Lt):
            texts.append(f"below {_number(bound.lt)}")
    return f", {', '.join(texts)}" if texts else ""


def _number(value: Any) -> str:
    if isinstance(value, int) and value > 10**9 and value & (value - 1) == 0:
        return f"2**{value.bit_length() - 1}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _flat(metadata: Sequence[Any]) -> list[Any]:
    """Constraints, with those in a `pydantic.Field` of an `Annotated` type."""
    found: list[Any] = []
    for one in metadata:
        found += one.metadata if isinstance(one, FieldInfo) else [one]
    return found
