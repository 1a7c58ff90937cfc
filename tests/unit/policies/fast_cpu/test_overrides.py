"""A faster implementation of a loss steps aside for whoever changes what it replaces."""

from __future__ import annotations

from inspect import getattr_static
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policy_helpers import make_batch, small_policy
from replay_helpers import replay_policy, transitions
from torch import nn

from polopt.common.registry import load_path
from polopt.policies.fast_cpu.closed_forms import _BUILT_IN, find_closed_form
from polopt.policies.policy_registry import POLICIES
from polopt.policies.replay_policy import ReplayPolicy

#: The classes with faster implementations, or with a base class that has one.
CLASSES = {
    name: cls
    for name in POLICIES.names()
    if name not in ("a3c", "pqn") and (cls := POLICIES.get(name)).__module__.startswith("polopt.")
}


def policy_of(name: str, cls: Any = None, **options: Any) -> Any:
    """A small policy. `cls` is the class itself, or a subclass of the class with this name."""
    cls = cls or CLASSES[name]
    like = replay_policy(name) if issubclass(cls, ReplayPolicy) else small_policy(name)
    # So each update is one in which the actor learns.
    delays = {"policy_delay": 1} if "policy_delay" in type(like.config).model_fields else {}
    config = like.config.model_copy(update={**delays, **options})
    return cls(like.encoder.space, like.action_space, config)


def learn(policy: Any) -> None:
    version = policy.version
    replays = isinstance(policy, ReplayPolicy)
    policy.learn_on_batch(transitions(policy) if replays else make_batch(policy))
    assert policy.version > version


def members_of(cls: Any) -> set[str]:
    """The members that the closed form of a class replaces."""
    for base in cls.__mro__:
        if found := _BUILT_IN.get(f"{base.__module__}:{base.__qualname__}"):
            return set(found.members)
    return set()


WITH_CLOSED_FORM = [name for name in CLASSES if policy_of(name).learns_with == "NumPy"]


def traced(name: str, **options: Any) -> tuple[Any, set[str]]:
    """A policy, and the names of the members of its class that the next update uses."""
    used: set[str] = set()

    class Traced(CLASSES[name]):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__") and name not in object.__getattribute__(self, "__dict__"):
                used.add(name)
            return super().__getattribute__(name)

    policy = policy_of(name, Traced, **options)
    used.clear()
    return policy, used


def changes_of(cls: Any, name: str, calls: list[str]) -> type:
    """A subclass that overrides one member and computes the same."""
    member = getattr_static(cls, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return getattr(super(own, self), name)(*args, **kwargs)

    def read(self: Any) -> Any:
        calls.append(name)
        return getattr(super(own, self), name)

    own: Any = type("Own", (cls,), {name: noted if callable(member) else property(read)})
    return own


@pytest.mark.parametrize("name", WITH_CLOSED_FORM)
def test_each_member_that_only_torch_uses_is_named(name: str) -> None:
    cls = CLASSES[name]
    slow, by_torch = traced(name, fast_cpu=False)
    fast, by_numpy = traced(name)
    learn(slow)
    learn(fast)
    assert by_torch - by_numpy <= members_of(cls)
    assert "loss" in by_torch or "critic_loss" in by_torch  # the trace sees the parts of a loss


@pytest.mark.parametrize(
    ("name", "member"),
    [(name, part) for name in WITH_CLOSED_FORM for part in sorted(members_of(CLASSES[name]))],
)
@pytest.mark.parametrize("how", ["class", "object"])
def test_changed_member_is_used(name: str, member: str, how: str) -> None:
    cls = CLASSES[name]
    calls: list[str] = []
    if how == "class":
        policy = policy_of(name, changes_of(cls, member, calls))
    elif isinstance(getattr_static(cls, member), property):
        pytest.skip("an object cannot change a property of its class")
    else:
        policy = policy_of(name)
        inherited = getattr(policy, member)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(member)
            return inherited(*args, **kwargs)

        setattr(policy, member, noted)
    assert policy.learns_with.startswith("torch (")
    assert policy.learns_with.endswith(f" changes {member})")
    assert f"learns with {policy.learns_with}" in repr(policy)
    learn(policy)
    assert calls


def test_members_that_closed_forms_name_exist() -> None:
    for path, registered in _BUILT_IN.items():
        assert all(hasattr(load_path(path), member) for member in registered.members)


def test_repr_says_why_a_policy_learns_with_torch() -> None:
    assert small_policy("ppo").learns_with == replay_policy("sac").learns_with == "NumPy"
    for made in (small_policy("ppo", fast_cpu=False), replay_policy("dqn", fast_cpu=False)):
        assert made.learns_with == "torch (fast_cpu is False)"
    discrete = replay_policy("sac", action_space=spaces.Discrete(3))
    assert discrete.learns_with.startswith("torch (DiscreteSACPolicy changes ")
    assert replay_policy("crossq").learns_with == replay_policy("td3").learns_with == "NumPy"
    large = small_policy("ppo", model={"fcnet_hiddens": [1024, 1024]})
    assert large.learns_with == "torch (the network has more than 2,000,000 parameters)"
    normed = small_policy("ppo", model={"layer_norm": True})
    assert normed.learns_with == "torch (NumPy does not support the network)"


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(input)


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
@pytest.mark.parametrize("change", ["layer", "forward", "hook"])
def test_changed_network_acts_as_changed(name: str, change: str) -> None:
    """NumPy does not call the modules of a network, so it must not be used for a changed one."""
    cls = CLASSES[name]

    class Changed(cls):
        def make_segments(self) -> Any:
            segments = super().make_segments()
            network: Any = segments["network"].module
            head = getattr(network, "network", network).policy_head
            if change == "layer":
                head.__class__ = Doubled
            elif change == "forward":
                head.forward = lambda x: 2.0 * nn.Linear.forward(head, x)
            else:
                head.register_forward_hook(lambda _module, _args, out: 2.0 * out)
            return segments

    plain, changed = policy_of(name), policy_of(name, Changed)
    obs = np.linspace(-1.0, 1.0, 3 * int(np.prod(plain.encoder.shape)), dtype=np.float32)
    obs = obs.reshape(3, *plain.encoder.shape)
    assert changed.learns_with == "torch (NumPy does not support the network)"
    with torch.inference_mode():
        expected = changed.model.action_params(torch.as_tensor(obs)).numpy()
    found = changed.action_params(obs)
    half = slice(None, 1 if name == "sac" else None)
    np.testing.assert_allclose(found[:, half], expected[:, half], rtol=1e-4, atol=1e-5)
    assert np.abs(found - plain.action_params(obs)).max() > 1e-4


def test_closed_form_is_chosen_for_the_object() -> None:
    policy = small_policy("ppo")
    assert find_closed_form(policy).active() is not None
    policy.loss = policy.loss
    assert find_closed_form(policy).active() is None
    del policy.loss
    assert find_closed_form(policy).active() is not None
