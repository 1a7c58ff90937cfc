"""Which policies learn with CUDA graphs. Needs no GPU: `test_gpu` compares the gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_helpers import small_policy
from replay_helpers import replay_policy, transitions
from torch import Tensor, nn

from polopt.common.transitions import Transitions
from polopt.policies.dqn import DQNPolicy
from polopt.policies.fast_gpu.add_on import ADD_ON
from polopt.policies.fast_gpu.cuda_graphs import MEMBERS
from polopt.policies.policy_registry import POLICIES
from polopt.policies.sac import SACPolicy

WITH_GRAPHS = ["dqn", "sac", "td3"]


def on_fake_gpu(policy: Any) -> Any:
    """Only the device of the policy says that it is on a GPU. Its networks stay on the CPU."""
    policy.device = torch.device("cuda")
    return policy


def supports(policy: Any) -> bool:
    found = ADD_ON.faster(policy, "backward")
    return found is not None and found.described == "CUDA graphs"


def of_class(cls: Any, like: Any) -> Any:
    return cls(like.encoder.space, like.action_space, like.config)


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_replay_policies_learn_with_graphs_on_a_gpu(name: str) -> None:
    policy = replay_policy(name)
    assert not supports(policy)  # on the CPU
    assert supports(on_fake_gpu(policy))


class OwnLoss(DQNPolicy):
    def loss(self, rows: Any) -> Any:
        return super().loss(rows)


class OwnTensors(DQNPolicy):
    def tensors(self, rows: Transitions) -> Any:
        return super().tensors(rows)


class OwnNoise(SACPolicy):
    def normal(self, shape: tuple[int, ...]) -> Tensor:
        return 2.0 * super().normal(shape)


class OwnName(DQNPolicy):
    """Changes nothing that the gradient depends on."""


class SafeLoss(OwnLoss):
    """States that a graph can repeat its methods."""

    graph_members = ("loss", "targets")


def test_subclass_with_its_own_methods_learns_without_graphs() -> None:
    dqn, sac = replay_policy("dqn"), replay_policy("sac")
    assert not supports(on_fake_gpu(of_class(OwnLoss, dqn)))
    assert not supports(on_fake_gpu(of_class(OwnTensors, dqn)))
    assert not supports(on_fake_gpu(of_class(OwnNoise, sac)))
    assert supports(on_fake_gpu(of_class(OwnName, dqn)))
    assert supports(on_fake_gpu(of_class(SafeLoss, dqn)))


class Counting(nn.ReLU):
    """A module from outside of torch and polopt."""


@pytest.mark.parametrize("layer", [Counting(), nn.BatchNorm1d(8)])
def test_networks_with_foreign_modules_or_buffers_learn_without_graphs(layer: nn.Module) -> None:
    class WithLayer(DQNPolicy):
        def make_segments(self) -> Any:
            made = super().make_segments()
            made["network"].module.add_module("more", layer)
            return made

    assert not supports(on_fake_gpu(of_class(WithLayer, replay_policy("dqn"))))


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_networks_with_hooks_learn_without_graphs(kind: str) -> None:
    policy = on_fake_gpu(replay_policy("dqn"))
    hook = getattr(policy.model, kind)(lambda *args: None)
    assert not supports(policy)
    hook.remove()
    assert supports(policy)


def test_images_with_several_bounds_learn_without_graphs() -> None:
    high = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    for space, expected in (
        (spaces.Box(0, high, (2, 2, 3), np.uint8), False),
        (spaces.Box(0, 255, (2, 2, 3), np.uint8), True),
    ):
        policy = replay_policy("dqn", space, model={"conv_filters": []})
        assert supports(on_fake_gpu(policy)) == expected


class Plain(DQNPolicy):
    """A policy of a plugin that defines `backward` itself, as before CUDA graphs existed."""

    def backward(self, rows: Transitions) -> tuple[dict[str, float], np.ndarray]:
        loss, errors, _ = self.loss(self.tensors(rows))
        loss.backward()
        return {"vf_loss": loss.item()}, errors.detach().abs().numpy()


def test_policy_with_its_own_backward_learns_as_before() -> None:
    built_in = replay_policy("dqn", fast_cpu=False)
    own = of_class(Plain, built_in)
    before = own.get_weights().flat
    for policy in (built_in, own):
        policy.learn_on_batch(transitions(policy))
    one, two = (policy.get_weights().flat for policy in (built_in, own))
    np.testing.assert_array_equal(one, two)
    assert (one != before).any()


def test_only_the_gradient_of_replay_policies_is_recorded() -> None:
    assert ADD_ON.faster(on_fake_gpu(small_policy("ppo")), "make_backend") is None
    assert ADD_ON.faster(on_fake_gpu(replay_policy("dqn")), "network_params") is None


def test_option_turns_graphs_off() -> None:
    found = ADD_ON.faster(on_fake_gpu(replay_policy("dqn", fast_gpu=False)), "backward")
    assert found is not None
    assert found.described == "torch (fast_gpu is False)"


@pytest.mark.parametrize("name", WITH_GRAPHS)
def test_each_member_that_a_graph_replaces_is_named(name: str) -> None:
    cls = POLICIES.get(name)
    used: set[str] = set()

    class Traced(cls):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__") and name not in object.__getattribute__(self, "__dict__"):
                used.add(name)
            return super().__getattribute__(name)

    like = replay_policy(name, fast_cpu=False)
    config = like.config.model_copy(update={"policy_delay": 1})  # TD3's actor learns, too
    policy = Traced(like.encoder.space, like.action_space, config)
    rows = policy.tensors(transitions(policy))
    used.clear()
    policy.add_gradient(rows)
    assert used <= {*MEMBERS, *cls.graph_members}
    assert all(hasattr(cls, member) for member in (*MEMBERS, *cls.graph_members))
