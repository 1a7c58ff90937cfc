"""`Checks`: the checks of options that a strategy, a policy or an add-on adds to the others."""

from __future__ import annotations

from typing import Any


class Checks:
    """Base class of `PolicyOptimizer`, `Policy` and `AddOn`, which add checks in the same way.

        class Short(polopt.PolicyOptimizer):
            @classmethod
            def check(cls, rollout, config):
                length = rollout.rollout_fragment_length
                if length > 100:
                    raise polopt.ConfigError(
                        f"key 'rollout_fragment_length': got {length}. Allowed: 1 to 100"
                    )

    Each method raises a `ConfigError` that names the key, the value and what is allowed. All checks
    run before any actor of the run starts. `trainers/experiment.py` lists them in order.

    In each method, `config` has the options of the class: an instance of its `config_class`. It is
    None for an add-on without options.
    """

    @classmethod
    def check(cls, rollout: Any, config: Any) -> None:
        """Checks the options of the class together with the options of sampling. Under Tune, this
        check runs in the user's program, and again in the process of the trial.

        Args:
            rollout: the options of sampling, a `RolloutConfig`.
            config: the options of the class.
        """

    @classmethod
    def check_evaluation(cls, config: Any) -> None:
        """Checks that the driver has what evaluation during training needs, such as the current
        weights. Called after `check`, and only if the run has an `evaluation_interval`.

        Args:
            config: the options of the class.
        """

    @classmethod
    def check_spaces(cls, worker_config: Any, config: Any) -> None:
        """Checks that the options fit the spaces of the environment, and the machine of the driver.
        Called in the process in which the run starts.

        Args:
            worker_config: the `WorkerConfig` of the workers. It also has the class and the options
                of the policy.
            config: the options of the class.
        """
