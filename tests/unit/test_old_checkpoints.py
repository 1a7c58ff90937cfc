"""Policy states of earlier versions are restored.

`data/policy_states_81a3eaa.json` was written by commit 81a3eaa: states of an A2C and a PPO policy
after two updates, and the parameters after a third update.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_helpers import FakeEnv, fixed_gradient
from toy_envs import make_policy

STATES = json.loads((Path(__file__).parents[1] / "data/policy_states_81a3eaa.json").read_text())


def restored(name: str, **options: Any) -> Any:
    env = FakeEnv(spaces.Box(-9.0, 9.0, (2,)), spaces.Discrete(3))
    policy = make_policy(name, env, model={"fcnet_hiddens": [4]}, lr=0.01, **options)
    state = dict(STATES[name]["state"])
    state["params"] = torch.tensor(state["params"])
    state["adam"] = {key: torch.tensor(value) for key, value in state["adam"].items()}
    policy.set_state(state)
    return policy


@pytest.mark.parametrize("name", ["a2c", "ppo"])
def test_state_of_81a3eaa_resumes(name: str) -> None:
    policy = restored(name)
    assert (policy.version, policy.env_steps) == (2, 320)
    assert STATES[name]["state"]["network"].startswith("MLPActorCritic(")
    policy.apply_gradients(fixed_gradient(policy, 2))
    expected = np.array(STATES[name]["params_after_next_update"], np.float32)
    # Not bit for bit: the file is from another processor, which may round otherwise.
    np.testing.assert_allclose(policy.get_weights().flat, expected, rtol=1e-5, atol=1e-7)


def test_state_without_moments_continues_differently() -> None:
    policy = restored("a2c")
    policy.set_state({**policy.get_state(), "adam": {}})
    policy.apply_gradients(fixed_gradient(policy, 2))
    expected = np.array(STATES["a2c"]["params_after_next_update"], np.float32)
    assert np.abs(policy.get_weights().flat - expected).max() > 1e-4
