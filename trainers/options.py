"""Collects all options of a preset from its config classes. `polopt list`, `help`, the signatures
in editors and `docs/options.md` show these options."""

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

from polopt.common.add_ons import add_ons
from polopt.common.config import Config
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.flat_config import plugin_names
from polopt.trainers.trainer_config import TrainerConfig

#: The options that select the optimizer and the policy. These decide which other options exist.
_PLUGINS = {
    "optimizer": "the policy optimizer: a registered name, a class, or a dict of `name` and "
    "options of this optimizer",
    "policy": "the policy: a registered name, a class, or a dict of `name` and options of this "
    "policy",
}
#: Meaning of the option `preset` of `PolicyOptimizerTrainer`.
_PRESET = (
    "a preset that sets the optimizer, the policy and their defaults. With `tune.grid_search`, one "
    "experiment can compare several presets"
)
_ANY_PRESET = (
    "None; the name, the class or 'module:Class' of a preset; or a dict of `name` and options that "
    "apply only to this preset"
)


@dataclass(frozen=True)
class Option:
    """The description of one option.

    Attributes:
        key: key of the option. For an option in a nested dict, this is the dotted path, for example
            `model.fcnet_hiddens`.
        default: default of the option in the preset.
        allowed: the allowed values in words.
        meaning: meaning of the option, from the docstring of the config class.
        aliases: other keys that configs may use for this option.
        annotation: type of the option without pydantic's constraints.
        owner: the class that introduces this option, which is the config class or one of its base
            classes. It is None for `optimizer`, `policy` and `preset`.
    """

    key: str
    default: Any
    allowed: str
    meaning: str
    aliases: tuple[str, ...]
    annotation: Any
    owner: type[Config] | None

    @property
    def names(self) -> list[str]:
        """Names of the option that can be used as keyword arguments."""
        return [name for name in (self.key, *self.aliases) if not keyword.iskeyword(name)]


def config_classes(preset: Mapping[str, Any]) -> list[type[Config]]:
    """Returns the config classes that own the options of a preset, in the order in which the
    options are listed.

    Raises:
        ConfigError: the optimizer or the policy is unknown.
    """
    optimizer, policy = plugin_names({}, preset)
    return [
        RolloutConfig,
        POLICIES.get(policy).config_class,
        OPTIMIZERS.get(optimizer).config_class,
        TrainerConfig,
        *(add_on.config_class for add_on in add_ons() if add_on.config_class is not None),
    ]


def options_of(preset: Mapping[str, Any]) -> list[Option]:
    """Returns all options of a preset, without the options in nested dicts.

    Args:
        preset: options of the preset that differ from the defaults of the config classes.

    Raises:
        ConfigError: the optimizer or the policy is unknown.
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
        found.append(Option(key, chosen[key], allowed, meaning, (), Any, None))
    if not preset:
        found.append(Option("preset", None, _ANY_PRESET, _PRESET, (), Any, None))
    return found


def own_options(cls: type[Config], preset: Mapping[str, Any] | None = None) -> list[Option]:
    """Returns the options of one config class, including inherited options.

    Args:
        cls: the config class.
        preset: options of a preset. They replace the defaults of the config class.
    """
    meanings, other, found = _meanings(cls), cls.other_names(), []
    for name, field in cls.model_fields.items():
        key = field.alias or name
        meaning = meanings.get(name, meanings.get(key, ""))
        aliases = tuple(name for name, target in other.items() if target == key)
        default = field.get_default(call_default_factory=True)
        found.append(
            Option(
                key,
                (preset or {}).get(key, default),
                _allowed(field),
                meaning,
                aliases,
                field.annotation,
                _introduced_by(cls, name),
            )
        )
    return found


def nested_options(options: Sequence[Option]) -> Iterator[Option]:
    """Yields the inner options of each option whose value is a dict of options. The keys of the
    inner options are dotted paths."""
    for option in options:
        nested = nested_config(option.annotation)
        if nested is not None:
            for inner in own_options(nested):
                key = f"{option.key}.{inner.key}"
                yield Option(**{**vars(inner), "key": key, "aliases": ()})


def nested_config(annotation: Any) -> type[Config] | None:
    """Returns the config class of an option that is a dict of options. Returns None for other
    options."""
    is_config = isinstance(annotation, type) and issubclass(annotation, Config)
    return annotation if is_config else None


def first_sentence(text: str) -> str:
    """Returns the text of a meaning before the first period, colon or semicolon. Ignores
    punctuation between backticks."""
    match = re.match(r"(?:`[^`]*`|.)*?[.;:](?=\s|$)", text)
    return (match[0] if match else text).rstrip(".;:")


def shown_default(value: Any) -> str:
    """Returns the text of a default as a user would write it in a config."""
    if isinstance(value, Config):
        return "{}"
    if isinstance(value, tuple):
        return repr(list(value))
    return repr(value)


def _introduced_by(cls: type[Config], name: str) -> type[Config]:
    """Returns the class that introduces a field: `cls` or one of its base classes."""
    owners = [c for c in cls.__mro__ if issubclass(c, Config) and name in c.model_fields]
    return owners[-1]


def _meanings(cls: type[Config]) -> dict[str, str]:
    """Returns the meaning of each attribute, from the sections `Attributes:` in the docstrings of a
    class and of its base classes."""
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
    """Returns a description of the values that a type and its constraints allow."""
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
        return "a string"
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
    """Returns the constraints, including the constraints inside a `pydantic.Field`."""
    found: list[Any] = []
    for one in metadata:
        found += one.metadata if isinstance(one, FieldInfo) else [one]
    return found
