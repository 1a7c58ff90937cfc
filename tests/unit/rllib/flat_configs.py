"""`flat`: what a builder for RLlib means in polopt."""

from __future__ import annotations

from typing import Any

from polopt.common.config import differ
from polopt.rllib.rllib_options import Options, default_options, flat_config


def flat(config: Any) -> dict[str, Any]:
    """Returns the options of the preset that were given, or that are not RLlib's defaults because
    of what was given.

    Args:
        config: a builder, or the result of its `to_dict`.
    """
    options = config if isinstance(config, Options) else config.to_dict()
    given = {} if options is config else config.given
    plain, found = (
        flat_config(one, options.algorithm, "to_dict()")
        for one in (default_options(options.algorithm), options)
    )
    return {
        key: value
        for key, value in found.items()
        if key in given or key not in plain or differ(value, plain[key])
    }
