"""`OptimizerConfig`: base class of the options of strategies, and what they refuse."""

from __future__ import annotations

from polopt.common.config import Config
from polopt.rollouts.workers.worker_config import WorkerConfig


class OptimizerConfig(Config):
    """Base class of the options of policy optimizers. It has no options itself.

    What a strategy refuses because of the options of sampling is in `PolicyOptimizer.check`.
    """

    def check_spaces(self, worker_config: WorkerConfig) -> None:
        """Refuses options that do not fit the spaces of the environment, before any actor starts.

        Args:
            worker_config: the config that each worker is made with.

        Raises:
            ConfigError: names the option and the reason.
        """
        return

    def check_evaluation(self) -> None:
        """Refuses options with which the driver does not have the weights to evaluate during
        training.

        Raises:
            ConfigError: names the option and the reason.
        """
        return
