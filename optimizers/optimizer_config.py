"""`OptimizerConfig`: base class for the options of strategies."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from polopt.common.config import Config
from polopt.rollouts.workers.worker_config import WorkerConfig


class OptimizerConfig(Config):
    """Base class for the options of policy optimizers. This class itself defines no options.

    `PolicyOptimizer.check` checks the options together with the options of sampling.
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

    def check_spaces(self, worker_config: WorkerConfig) -> None:
        """Checks that the options fit the spaces of the environment.

        Args:
            worker_config: the config of each worker.

        Raises:
            ConfigError: an option does not fit. The error names the option and the reason.
        """
        return

    def check_evaluation(self) -> None:
        """Checks that the driver has the current weights, which evaluation during training needs.

        Raises:
            ConfigError: because of an option, the driver does not have the current weights. The
                error names the option.
        """
        return
