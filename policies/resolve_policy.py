"""`resolve_policy`: the policy class and the options that a user's argument `policy` means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.config import Config
from polopt.policies.non_learning import NonLearningConfig, adapter_for
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES


def resolve_policy(policy: Any) -> tuple[Any, Config]:
    """Policy class and options from the argument `policy` of a `Collector`.

    Raises:
        ConfigError: unknown name or option, or an object that cannot act.
    """
    if isinstance(policy, Policy):
        return type(policy), policy.config
    options: Mapping[str, Any] = {}
    if isinstance(policy, tuple):
        policy, options = policy
    policy = POLICIES.named(policy)
    if isinstance(policy, str) or (isinstance(policy, type) and issubclass(policy, Policy)):
        policy_class = POLICIES.get(policy)
        return policy_class, policy_class.config_class.parse(options, "policy")
    config = NonLearningConfig.parse({"actor": policy, **options}, "policy")
    return adapter_for(policy, config.outputs), config
