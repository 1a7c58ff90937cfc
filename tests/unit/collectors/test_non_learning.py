"""Policies that act and do not learn, with masks of actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from faulty_envs import guarded
from gymnasium import spaces
from masked_env import (
    ACTIONS,
    Masked,
    every_kind,
    is_allowed,
    masked_rows,
    observations,
    sizes,
)
from torch import nn
from toy_envs import AUTORESET, make_sampler

from polopt.collectors.fixed_distributions import PassThroughActions
from polopt.collectors.non_learning import (
    CallablePolicy,
    ModulePolicy,
    NonLearningConfig,
    NonLearningPolicy,
    RandomPolicy,
)
from polopt.metrics.actions import ActionSums
from polopt.policies.acting_policy import ActingPolicy


@every_kind
def test_uniform_actions_of_a_callable_are_allowed(kind: str) -> None:
    """A `Collector` samples uniformly before its callable acts."""
    actions = ACTIONS[kind]
    policy = CallablePolicy(observations(actions), actions, NonLearningConfig(actor=len))
    obs, masks = masked_rows(kind)
    rng = np.random.default_rng(0)
    _, drawn = policy.dist.random_allowed(rng, policy.mask.masked(0.0, obs))
    assert all(is_allowed(actions, mask, a) for mask, a in zip(masks, drawn, strict=True))
    assert all(actions.contains(action) for action in policy.dist.to_env(drawn))


def acting_policies(kind: str) -> dict[str, Any]:
    actions = ACTIONS[kind]
    module = nn.Linear(4 + sum(sizes(actions)), sum(sizes(actions)))
    spaces_ = observations(actions), actions
    return {
        "random": RandomPolicy(*spaces_, NonLearningConfig()),
        "module": ModulePolicy(*spaces_, NonLearningConfig(actor=module)),
    }


@every_kind
@pytest.mark.parametrize("mode", AUTORESET)
@pytest.mark.parametrize("acting", ["random", "module"])
def test_sampled_actions_are_allowed(kind: str, mode: str, acting: str) -> None:
    """The environment `Masked` raises an error for other actions. The last observation of an
    episode allows no action, which is not a fault."""
    vector = guarded([lambda: Masked(kind)] * 4, mode)
    sampler = make_sampler(vector, acting_policies(kind)[acting], 50)
    for options in ({}, {"uniform": True}, {"explore": acting == "random"}):
        batch = sampler.sample(**options)
        assert batch.faults == {}
        assert set(batch.episodes.lengths) == {5}


def test_non_learning_policy_has_the_contract_of_acting() -> None:
    assert issubclass(NonLearningPolicy, ActingPolicy)


def test_clipped_actions_of_a_callable_are_counted() -> None:
    space = spaces.Box(np.array([[-1.0, 0.0]], np.float32), np.array([[1.0, np.inf]], np.float32))
    dist = PassThroughActions(space)
    params = np.array([[1.0, 7.0], [-2.0, -0.5], [0.5, -1.0]], np.float32)
    actions = dist.sample(params, None)
    clipped = np.count_nonzero(dist.to_env(actions) != actions)
    assert clipped == 3
    assert ActionSums.of(actions, dist.sizes, dist.bounds).clipped == clipped
    assert PassThroughActions(spaces.Discrete(3)).bounds is None
