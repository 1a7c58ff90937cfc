"""`OptimizerConfig`: base class for the options of strategies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from polopt.common.config import Config


class OptimizerConfig(Config):
    """Base class for the options of policy optimizers. This class itself defines no options.

    The methods of `Checks`, which strategies inherit, check the options together with others.
    """

    @classmethod
    def of_checkpoint(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options that a checkpoint contains, with their current names and meanings."""
        return dict(options)

    @classmethod
    def fit_preset(cls, options: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
        """Returns the options with other defaults where the defaults of a preset, or of this class,
        do not fit what the user has chosen.

        Args:
            options: options of this class, from the preset and from the user.
            given: the keys of the options that the user has chosen. Their values stay the same.
        """
        return options
