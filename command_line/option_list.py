"""`polopt list NAME`: prints the options of a preset, an optimizer or a policy."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from polopt.common.config import ConfigError, nearest_of
from polopt.common.other_libraries import instead_of_algorithm
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.options import (
    Option,
    nested_options,
    options_of,
    own_options,
    shown_default,
)
from polopt.trainers.presets import PRESETS

_WIDTH = 100


def lines(name: str) -> Iterator[str]:
    """Yields lines that describe the options of a preset, an optimizer or a policy. The lines of an
    option give its default, its meaning and the allowed values.

    Raises:
        ConfigError: no preset, optimizer or policy has this name.
    """
    options = _options(name)
    for option in [*options, *nested_options(options)]:
        yield f"{option.key} = {shown_default(option.default)}"
        yield from _wrapped(option.meaning)
        yield from _wrapped(f"Allowed: {option.allowed}.")
        names = [name for name in option.other_names if name != option.key]
        if names:
            yield from _wrapped(f"Other names, including names in RLlib: {', '.join(names)}.")


def _options(name: str) -> list[Option]:
    if name in PRESETS:
        return options_of(PRESETS[name].preset)
    for registry in (OPTIMIZERS, POLICIES):
        if name in registry.names():
            return own_options(registry.get(name).config_class)
    known = [*PRESETS, *OPTIMIZERS.names(), *POLICIES.names()]
    instead = instead_of_algorithm(name)
    meant = f". {instead}" if instead else nearest_of(name, known)
    raise ConfigError(f"{name!r} is not a preset, an optimizer or a policy{meant}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")
