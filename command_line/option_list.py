"""`polopt list NAME`: prints the options of a preset, an optimizer or a policy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from polopt.command_line.names import named
from polopt.common.config import ConfigError, instead_of
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.options import (
    Option,
    nested_options,
    options_of,
    own_options,
    shown_default,
)
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer

_WIDTH = 100


def lines(name: str) -> Iterator[str]:
    """Yields lines that describe the options of a preset, an optimizer or a policy. The lines of an
    option give its default, its meaning and the allowed values.

    Raises:
        ConfigError: no preset, optimizer or policy has this name, or `module:Class` or
            `FILE.py:Class` is not such a class.
    """
    options = _options(name)
    for option in [*options, *nested_options(options)]:
        yield f"{option.key} = {shown_default(option.default)}"
        yield from _wrapped(option.meaning)
        yield from _wrapped(f"Allowed: {option.allowed}.")
        if option.aliases:
            yield from _wrapped(f"Other names: {', '.join(option.aliases)}.")


def _options(name: str) -> list[Option]:
    if name in PRESETS:
        return options_of(PRESETS[name].preset)
    for registry in (OPTIMIZERS, POLICIES):
        if name in registry.names():
            return own_options(registry.get(name).config_class)
    if ":" in name:
        return _options_of(named(name, "argument"), name)
    known = [*PRESETS, *OPTIMIZERS.names(), *POLICIES.names()]
    instead = instead_of("preset", name, known)
    raise ConfigError(f"{name!r} is not a preset, an optimizer or a policy{instead}")


def _options_of(found: Any, name: str) -> list[Option]:
    if isinstance(found, type) and issubclass(found, PolicyOptimizerTrainer):
        return options_of(found.preset)
    if isinstance(found, type) and issubclass(found, Policy | PolicyOptimizer):
        return own_options(found.config_class)
    raise ConfigError(f"{name!r} is {found!r:.100}, and not a preset, an optimizer or a policy")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
