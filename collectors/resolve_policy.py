"""`resolve_policy`: converts the argument `policy` of a user to a policy class and its options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.collectors.non_learning import NonLearningConfig, adapter_for
from polopt.common.config import Config, ConfigError, shown
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES


def resolve_policy(policy: Any) -> tuple[Any, Config]:
    """Converts the argument `policy` of a `Collector` to a policy class and its options.

    Raises:
        ConfigError: a name or an option is unknown, the value of an option is wrong, the argument
            is an object that cannot act, or it is a tuple but not a pair `(policy, options)`.
    """
    if isinstance(policy, Policy):
        return type(policy), policy.config
    options: Mapping[str, Any] = {}
    if isinstance(policy, tuple):
        if len(policy) != 2 or not isinstance(policy[1], Mapping):
            raise ConfigError(
                f"policy: got {shown(policy)}. Allowed: a pair (policy, dict of options), or the "
                "policy alone"
            )
        policy, options = policy
    policy = POLICIES.named(policy)
    if isinstance(policy, str) or (isinstance(policy, type) and issubclass(policy, Policy)):
        policy_class = POLICIES.get(policy)
        return policy_class, policy_class.config_class.parse(options, "policy")
    config = NonLearningConfig.parse({"actor": policy, **options}, "policy")
    return adapter_for(policy, config.outputs), config
