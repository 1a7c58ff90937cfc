"""What a subclass overrides runs: faster code steps aside, and the policy says why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from policy_helpers import TwoNumbers, make_batch
from replay_helpers import replay_policy, transitions

import polopt
from polopt.common.registry import load_path
from polopt.policies.fast_cpu.closed_forms import _BUILT_IN, find_closed_form
from polopt.policies.policy_registry import POLICIES

NAMES = ["a2c", "ppo", "impala", "appo", "decoupled_ppo", "pqn", "dqn", "sac"]
#: Members that a closed form replaces and that the plain path reads as values.
VALUES = {"entropy_coeff", "params_in_torch"}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import threadpoolctl

    with threadpoolctl.threadpool_limits(1):
        yield


def made(cls: type, **options: Any) -> Any:
    name = next(name for name in POLICIES.names() if issubclass(cls, POLICIES.get(name)))
    if POLICIES.get(name).learns_from is polopt.Transitions:
        like = replay_policy(name)
        spaces = like.encoder.space, like.action_space
    else:
        env = TwoNumbers()
        spaces = env.observation_space, env.action_space
    config = cls.config_class.parse({"model": {"fcnet_hiddens": [8]}, **options})
    return cls(*spaces, config, seed=0)


def learn(policy: Any) -> None:
    if policy.learns_from is polopt.Transitions:
        policy.learn_on_transitions(transitions(policy))
    else:
        policy.learn_on_batch(make_batch(policy))


def called_members(policy: Any) -> set[str]:
    """Returns the names of the policy's own methods and properties that run while it learns."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_locals.get("self") is policy:
            seen.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        learn(policy)
    finally:
        sys.setprofile(None)
    return {name for name in seen if hasattr(type(policy), name)}


@pytest.mark.parametrize("name", NAMES)
def test_closed_forms_name_every_member_that_they_replace(name: str) -> None:
    cls = POLICIES.get(name)
    fast, slow = made(cls, fast_cpu=True), made(cls, fast_cpu=False)
    found = find_closed_form(cls)
    if found.compute is None:
        assert "closed form" not in fast.implementation.partition("(")[0]
        return
    assert fast.implementation == "closed form in NumPy"
    assert slow.implementation == "torch (fast_cpu=False)"
    base, replaces = next(
        (base, registered.replaces)
        for path, registered in _BUILT_IN.items()
        if issubclass(cls, base := load_path(path)) and registered.compute is found.compute
    )
    assert called_members(slow) - called_members(fast) <= set(replaces)
    assert all(hasattr(base, member) for member in replaces)


def overrides() -> Iterator[tuple[str, str]]:
    for name in NAMES:
        cls = POLICIES.get(name)
        for path, registered in _BUILT_IN.items():
            if find_closed_form(cls).compute is registered.compute and load_path(path) is cls:
                yield from ((name, member) for member in registered.replaces)


@pytest.mark.parametrize(("name", "member"), list(overrides()))
def test_overridden_member_of_a_loss_runs(name: str, member: str) -> None:
    base: Any = POLICIES.get(name)
    calls: list[str] = []
    original: Any = getattr(base, member)

    def own(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(member)
        if isinstance(original, property):
            return original.__get__(self)
        return original(self, *args, **options)

    replaced: Callable[..., Any] | property = own
    if isinstance(original, property):
        replaced = property(own)
    cls = type("Own", (base,), {member: replaced})
    policy = made(cls)
    learn(policy)
    assert calls, f"{member} of a subclass of {base.__name__} is ignored"
    assert policy.implementation == f"torch (Own overrides {member})"
    assert f"gradients: torch (Own overrides {member})" in repr(policy)


def test_results_say_which_code_learns() -> None:
    class Own(POLICIES.get("dqn")):  # type: ignore[misc]
        def add_gradient(self, rows: Any) -> Any:
            return super().add_gradient(rows)

    options: dict[str, Any] = {
        "env": "CartPole-v1",
        "optimizer": {"name": "sync_replay", "learning_starts": 100, "buffer_size": 1000},
        "num_workers": 0,
        "min_sample_timesteps_per_iteration": 200,
        "model": {"fcnet_hiddens": [8]},
    }
    for policy, text in ((Own, "torch (Own overrides add_gradient)"), ("dqn", "closed form")):
        trainer = polopt.PolicyOptimizerTrainer(policy=policy, **options)
        result = trainer.train()
        trainer.stop()
        assert text in result["optimizer"]["implementation"]
