"""Policies for the environment `Masked`, and their observations and fragments."""

from __future__ import annotations

from typing import Any

from faulty_envs import guarded
from masked_env import ACTIONS, Masked, observations
from policy_helpers import FakeEnv
from toy_envs import make_policy, make_sampler

from polopt.common.sample_batch import SampleBatch
from polopt.policies.policy import Policy

#: Options of the networks.
SMALL = {"fcnet_hiddens": [8]}


def masked_policy(kind: str, name: str = "a2c", **options: Any) -> Policy:
    actions = ACTIONS[kind]
    return make_policy(name, FakeEnv(observations(actions), actions), model=SMALL, **options)


def sampled(policy: Policy, kind: str) -> SampleBatch:
    """Returns a fragment with random masks."""
    sampler = make_sampler(guarded([lambda: Masked(kind)] * 3, "same_step"), policy, 16)
    return policy.postprocess(sampler.sample())
