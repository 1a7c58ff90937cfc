"""Policies by name."""

from __future__ import annotations

from polopt.common.registry import Registry

POLICIES = Registry(
    "policy",
    "polopt.policies",
    "polopt.policies.policy:Policy",
    {
        "a2c": "polopt.policies.a2c:A2C",
        "a3c": "polopt.policies.a2c:A2C",
        "ppo": "polopt.policies.ppo:PPO",
    },
)


def register_policy(name: str, cls: type) -> None:
    """Makes a policy class selectable as `config["policy"] = name`."""
    POLICIES.register(name, cls)
