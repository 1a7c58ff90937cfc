"""Policies by name."""

from __future__ import annotations

from polopt.common.registry import Registry

POLICIES = Registry(
    "policy",
    "polopt.policies",
    "polopt.policies.policy:Policy",
    {
        "a2c": "polopt.policies.a2c:A2CPolicy",
        "a3c": "polopt.policies.a2c:A2CPolicy",
        "ppo": "polopt.policies.ppo:PPOPolicy",
    },
)


def register_policy(name: str, cls: type, override: bool = False) -> None:
    """Makes a policy class selectable as `config["policy"] = name`.

    Args:
        name: of the policy.
        cls: a subclass of `polopt.Policy`.
        override: replace the class that has this name.

    Raises:
        ConfigError: if `cls` is no such class, or if another class has the name and `override` is
            False.
    """
    POLICIES.register(name, cls, override)
