"""`from_rllib`: converts a config of RLlib to a builder of polopt."""

from __future__ import annotations

from typing import Any

from polopt.common.config import ConfigError, shown
from polopt.rllib import builders
from polopt.rllib.algorithm_config import AlgorithmConfig
from polopt.rllib.translation import changes, key_of
from polopt.trainers.presets import PRESETS


def from_rllib(algorithm_config: Any, verbose: bool = True) -> AlgorithmConfig:
    """Converts a config of RLlib, such as `PPOConfig()`, to a builder of polopt.

    The builder gets only the options that differ from RLlib's defaults. All other options have the
    defaults of polopt.

    Args:
        algorithm_config: a config of `ray.rllib` for an algorithm that polopt has.
        verbose: whether to print which options were kept, renamed or dropped. A dropped option is
            printed with the reason.

    Raises:
        ConfigError: polopt does not have the algorithm.
    """
    builder = _builder_for(algorithm_config)
    lines: dict[str, list[str]] = {"kept": [], "renamed": [], "dropped": []}
    for name, value in changes(algorithm_config).items():
        before = builder.given
        try:
            builder.update_from_dict({name: value})
        except (ConfigError, TypeError) as error:
            lines["dropped"].append(f"{name}={shown(value)}: {error}")
            continue
        key = key_of(name, builder.algo_class)
        new = [k for k, v in builder.given.items() if k not in before or before[k] is not v]
        if builder.given == before and key not in before:
            lines["dropped"].append(
                f"{name}={shown(value)}: polopt always does this, or ignores the option"
            )
        elif key == name and new in ([], [name]):
            lines["kept"].append(f"{name}={shown(value)}")
        else:
            lines["renamed"].append(f"{name}={shown(value)}: {', '.join(new) or key}")
    if verbose:
        print(f"Options of RLlib's {type(algorithm_config).__name__} that are not defaults:")
        for what, texts in lines.items():
            for text in texts:
                print(f"  {what:<8} {text}")
    return builder


def _builder_for(algorithm_config: Any) -> AlgorithmConfig:
    for cls in type(algorithm_config).__mro__:
        builder = getattr(builders, cls.__name__, None)
        if isinstance(builder, type) and issubclass(builder, AlgorithmConfig):
            if builder is AlgorithmConfig:
                break
            return builder()
    raise ConfigError(
        f"from_rllib: got {type(algorithm_config).__name__}. Allowed: a config of RLlib for an "
        f"algorithm that polopt has: {', '.join(name for name in PRESETS)}"
    )
