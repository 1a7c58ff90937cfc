"""`POLICIES`: the policy classes by name."""

from __future__ import annotations

from polopt.common.registry import Registry

POLICIES = Registry(
    "policy",
    "polopt.policies",
    "polopt.policies.policy:Policy",
    {
        "a2c": "polopt.policies.a2c:A2CPolicy",
        "a3c": "polopt.policies.a2c:A2CPolicy",
        "appo": "polopt.policies.appo:AppoPolicy",
        "crossq": "polopt.policies.crossq:CrossQPolicy",
        "decoupled_ppo": "polopt.policies.decoupled_ppo:DecoupledPPOPolicy",
        "dqn": "polopt.policies.dqn:DQNPolicy",
        "impala": "polopt.policies.impala:ImpalaPolicy",
        "ppo": "polopt.policies.ppo:PPOPolicy",
        "pqn": "polopt.policies.pqn:PQNPolicy",
        "sac": "polopt.policies.sac:SACPolicy",
        "td3": "polopt.policies.td3:TD3Policy",
    },
)

#: Makes a class selectable as `config["policy"] = name`. See `Registry.register`.
register_policy = POLICIES.register
