"""The policies and the strategies that the documentation prints learn from clipped rewards, and
without a critic."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from fakes import FakeWorkerSet, make_optimizer, worker_config
from plugin_page import PLUGINS, plugin
from source_tree import ROOT
from toy_envs import Drift

from polopt.common.config import ConfigError
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.experiment import Experiment

PAGE = ROOT / "docs" / "write-a-policy.md"
REPLAY = {"learning_starts": 5, "train_batch_size": 8}
LIMIT = 0.5
ACTOR_CRITICS = [("behaviour_a2c", "sync_samples"), *(("a2c", name) for name in PLUGINS)]


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    """Registers the policies and the strategies of the pages."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for block in blocks:
        if "polopt.register_policy(" in block:
            code = compile(block, PAGE.name, "exec", dont_inherit=True)
            exec(code, {"__name__": "plugin_of_the_page"})
    for name in PLUGINS:
        plugin(name)


class Clipped(Drift):
    """A `Drift` that clips its rewards itself."""

    def step(self, action: int) -> Any:
        obs, reward, *rest = super().step(action)
        return obs, min(max(reward, -LIMIT), LIMIT), *rest


def learned(policy: str, optimizer: str, env: Any = Drift, clip: Any = None, **options: Any) -> Any:
    """Returns the policy after a few steps with two workers, and its first weights."""
    rollout = {"num_workers": 2, "clip_raw_rewards": clip}
    cls = POLICIES.get(policy)
    workers = FakeWorkerSet(worker_config(cls, env, rollout=rollout, **options))
    before = workers.local.policy.get_weights().flat
    own = REPLAY if optimizer == "sync_replay" else {}
    made = make_optimizer(OPTIMIZERS.get(optimizer), workers, **own)
    for _ in range(4):
        made.step()
    return made.policy, before


@pytest.mark.parametrize(
    ("policy", "optimizer"), [*ACTOR_CRITICS, ("munchausen_dqn", "sync_replay")]
)
def test_rewards_are_clipped_before_a_plugin_learns(policy: str, optimizer: str) -> None:
    given, by_env, not_clipped = (
        learned(policy, optimizer, env, clip)[0].get_weights().flat
        for env, clip in ((Drift, LIMIT), (Clipped, None), (Drift, None))
    )
    np.testing.assert_array_equal(given, by_env)
    assert (given != not_clipped).any()


@pytest.mark.parametrize(("policy", "optimizer"), ACTOR_CRITICS)
def test_values_are_not_learned_without_a_critic(policy: str, optimizer: str) -> None:
    for use_critic in (False, True):
        made, before = learned(policy, optimizer, use_critic=use_critic)
        after = made.get_weights().flat
        changed = set()
        for name, parameter in made.model.named_parameters():
            now = parameter.detach().numpy().copy()
            made.flat.set_params(before)
            if (now != parameter.detach().numpy()).any():
                changed.add(name.partition("_")[0])
            made.flat.set_params(after)
        assert changed == ({"policy", "value"} if use_critic else {"policy"})


def test_policy_without_a_critic_refuses_the_option() -> None:
    with pytest.raises(ConfigError, match="'use_critic' is an option of policy"):
        Experiment.parse(
            {"env": "CartPole-v1", "policy": "munchausen_dqn", "use_critic": False}, {}
        )
