"""NumPy and torch compute the same actions, values and updates."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from policy_helpers import (
    LOSSES,
    MODELS,
    FakeEnv,
    every_model,
    every_policy,
    make_batch,
    moved,
    observations_for,
    policy_of,
)
from ray import cloudpickle
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook
from toy_envs import make_policy

from polopt.common.registry import load_path
from polopt.policies.a2c import A2CPolicy
from polopt.policies.fast_cpu.closed_forms import (
    _BUILT_IN,
    closed_form_of,
    find_closed_form,
    ppo,
)
from polopt.policies.fast_cpu.numpy_network import NumpyNetwork, before_activation
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPOConfig, PPOPolicy


def both(key: str, name: str, **options: Any) -> tuple[Policy, Policy]:
    """Returns two equal policies. The first computes in NumPy, and the second in torch."""
    return (
        policy_of(key, name, fast_cpu=True, **options),
        policy_of(key, name, fast_cpu=False, **options),
    )


def assert_close(one: np.ndarray | Tensor, other: np.ndarray | Tensor) -> None:
    one, other = np.asarray(one), np.asarray(other)
    # NumPy and torch add in different orders. Sums that are small compared with their terms have
    # larger relative errors.
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()))


def assert_same_gradient(fast: Policy, slow: Policy) -> None:
    """Checks that gradients and statistics are equal, for weights that differ from the weights that
    acted."""
    rows = slow.training_rows(slow.prepare_batch(make_batch(slow, steps=16)))
    moved(fast)
    moved(slow)
    stats, expected = fast.backward(rows), slow.backward(rows)
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert np.abs(slow.flat.get_grads()).max() > 1e-3
    assert_close(fast.flat.get_grads(), slow.flat.get_grads())


@every_model
@pytest.mark.parametrize("losses", LOSSES)
def test_gradients_are_equal(key: str, losses: str) -> None:
    name, options = LOSSES[losses]
    assert_same_gradient(*both(key, name, **options))


@every_model
@pytest.mark.parametrize("losses", LOSSES)
def test_updates_are_equal(key: str, losses: str) -> None:
    name, options = LOSSES[losses]
    options = {
        **options,
        "num_sgd_iter": 2,
        "sgd_minibatch_size": 8,
        "lr": 0.01,
        "adam_epsilon": 0.1,
    }
    fast, slow = both(key, name, **options)
    before = slow.get_weights().flat
    batch = make_batch(slow)
    for policy in (fast, slow):
        policy.learn_on_batch(batch)
    assert fast.version == slow.version > 2
    change = slow.get_weights().flat - before
    largest = np.abs(change).max()
    assert largest > 0.01
    # Adam divides by the root mean square, which enlarges differences of small elements. A larger
    # epsilon limits this effect.
    np.testing.assert_allclose(fast.get_weights().flat - before, change, atol=2e-3 * largest)
    assert fast.get_weights()[1:] == slow.get_weights()[1:]


@every_model
def test_acting_is_equal(key: str) -> None:
    fast, slow = (moved(policy) for policy in both(key, "a2c"))
    obs = observations_for(fast, 64)
    params, values = fast.action_params(obs), fast.value(obs)
    assert params.dtype == values.dtype == np.float32
    np.testing.assert_allclose(params, slow.action_params(obs), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(values, slow.value(obs), rtol=1e-4, atol=1e-4)
    for explore in (True, False):
        actions = [
            policy.compute_actions(obs, explore=explore, rng=np.random.default_rng(2))[0]
            for policy in (fast, slow)
        ]
        np.testing.assert_allclose(*actions, rtol=1e-4, atol=1e-3)


@every_policy
@every_model
def test_closed_forms_do_not_use_torch(key: str, name: str) -> None:
    policy, slow = both(key, name)
    calls: list[Tensor] = []
    with register_module_forward_hook(lambda _module, _args, out: calls.append(out)):
        policy.learn_on_batch(make_batch(policy))
        assert calls == []
        slow.learn_on_batch(make_batch(slow))
        assert calls != []


@every_model
def test_acting_does_not_use_torch(key: str) -> None:
    calls: list[Tensor] = []
    for policy, uses in zip(both(key, "a2c"), (False, True), strict=True):
        for module in policy.model.modules():
            module.register_forward_hook(lambda _module, _args, out: calls.append(out))
        obs = observations_for(policy, 5)
        for act in (policy.action_params, policy.value, policy.compute_actions):
            act(obs)
            assert bool(calls) == uses
            calls.clear()


class HalfLossPPO(PPOPolicy):
    """Overrides only `loss`, so that the inherited closed form does not apply."""

    def loss(self, rows: Any) -> Any:
        loss, stats = super().loss(rows)
        return 0.5 * loss, stats


class UnclippedPPO(PPOPolicy):
    """Overrides only a part of the loss."""

    def vf_loss(self, values: Tensor, rows: Any) -> Tensor:
        return 3.0 * (values - rows["value_targets"]).square().mean()


class MoreEntropyPPO(PPOPolicy):
    """Overrides only a coefficient of the loss."""

    @property
    def entropy_coeff(self) -> float:
        return 0.7


class ShiftedPPO(PPOPolicy):
    """Overrides only the outputs from which the loss is computed."""

    def outputs(self, rows: Any) -> tuple[Tensor, Tensor]:
        params, values = super().outputs(rows)
        return params, values + 1.0


class QuietPPO(PPOPolicy):
    """Overrides a method that the loss does not use."""

    def on_epoch(self, stats: Any) -> bool:
        return False


class HalfStepPPO(HalfLossPPO):
    """Registers a closed form of its own loss."""


@closed_form_of(HalfStepPPO)
def half_step(policy: Any, terms: Any, values: Any, rows: Any) -> Any:
    grads, stats = ppo(policy, terms, values, rows)
    by = {name: 0.5 * getattr(grads, name) for name in grads._fields}
    return grads._replace(**by), {**stats, "total_loss": 0.5 * stats["total_loss"]}


class BackToWholePPO(HalfStepPPO):
    """Overrides a loss that has a registered closed form."""

    loss = PPOPolicy.loss


def ppo_of(cls: type[PPOPolicy], **options: Any) -> PPOPolicy:
    env = FakeEnv(*MODELS["default"][:2])
    return cls(env.observation_space, env.action_space, PPOConfig.parse(options))


OVERRIDING = [HalfLossPPO, UnclippedPPO, MoreEntropyPPO, ShiftedPPO, BackToWholePPO]


@pytest.mark.parametrize("cls", [*OVERRIDING, QuietPPO, HalfStepPPO])
def test_overridden_loss_is_learned(cls: type[PPOPolicy]) -> None:
    fast = ppo_of(cls)
    assert uses_torch(fast) == (cls in OVERRIDING)
    assert_same_gradient(fast, ppo_of(cls, fast_cpu=False))


def test_registered_closed_form_travels_with_its_class() -> None:
    """A worker that gets a class by value also gets its closed form, without a registration in the
    process of the worker."""

    class Local(PPOPolicy):
        def loss(self, rows: Any) -> Any:
            return super().loss(rows)

    @closed_form_of(Local)
    def own(*args: Any) -> Any:
        return ppo(*args)

    program = """
import sys
from ray import cloudpickle
from polopt.policies.fast_cpu.closed_forms import find_closed_form
policy = object.__new__(cloudpickle.load(sys.stdin.buffer))
print(find_closed_form(policy).active().__name__)
"""
    given = cloudpickle.dumps(Local)
    done = subprocess.run(
        [sys.executable, "-c", program], input=given, capture_output=True, timeout=120
    )
    assert done.stdout.decode().strip() == "own", done.stderr.decode()


def test_closed_forms_of_polopt_are_of_classes_that_exist() -> None:
    """Closed forms are registered by the names of classes. With a wrong name, all policies of the
    class would learn in torch."""
    for path, registered in _BUILT_IN.items():
        policy_class = load_path(path)
        policy = object.__new__(policy_class)
        assert find_closed_form(policy).active() is registered.compute
        assert all(hasattr(policy_class, member) for member in registered.members)


@pytest.mark.parametrize("name", ["a2c", "ppo"])
@pytest.mark.parametrize("column", ["advantages", "value_targets", "obs"])
def test_nan_makes_the_gradient_non_finite(name: str, column: str) -> None:
    policy = policy_of("relu", name)
    rows = policy.training_rows(make_batch(policy))
    rows[column][0] = float("nan")
    policy.backward(rows)
    assert not policy.flat.grads.isfinite().all()


WRONG: dict[str, Any] = {
    "entropy": lambda g: g._replace(entropy=-g.entropy),
    "kl": lambda g: g._replace(kl=1.1 * g.kl),
    "values": lambda g: g._replace(values=1.1 * g.values),
    "log_prob": lambda g: g._replace(log_prob=1.1 * g.log_prob),
}


@pytest.mark.parametrize("term", WRONG)
def test_wrong_loss_gradients_are_detected(term: str) -> None:
    class WrongPPO(PPOPolicy):
        pass

    @closed_form_of(WrongPPO)
    def wrong(*args: Any) -> Any:
        grads, stats = ppo(*args)
        return WRONG[term](grads), stats

    options = {"entropy_coeff": 0.05, "kl_coeff": 0.3}
    slow = ppo_of(PPOPolicy, fast_cpu=False, **options)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_gradient(ppo_of(WrongPPO, **options), slow)


@every_model
def test_backward_has_a_gradient_for_each_weight(key: str) -> None:
    """The loss has a different coefficient for each output."""
    policy = moved(policy_of(key))
    obs = observations_for(policy, 32) / np.float32(16.0)
    rng = np.random.default_rng(0)
    by_params = rng.normal(size=(32, policy.dist.num_params)).astype(np.float32)
    by_values = rng.normal(size=32).astype(np.float32)
    network = NumpyNetwork(policy.model)
    policy.flat.zero_grads()
    for _ in range(2):  # `backward` adds to the gradients
        network.backward(network.forward(obs)[2], by_params, by_values)
    fast = policy.flat.get_grads()
    policy.flat.zero_grads()
    params, values = policy.model(torch.as_tensor(obs))
    torch.autograd.backward([params, values], [torch.tensor(by_params), torch.tensor(by_values)])
    slow = policy.flat.get_grads()
    assert (slow != 0.0).mean() > 0.5, "except for inactive ReLU units"
    assert_close(fast, 2.0 * slow)


def uses_torch(policy: Policy) -> bool:
    calls: list[Tensor] = []
    policy.model.register_forward_hook(lambda _module, _args, out: calls.append(out))
    policy.backward(policy.training_rows(make_batch(policy)))
    assert policy.flat.grads.abs().max() > 0.0
    return bool(calls)


def test_several_blas_threads_learn_through_torch() -> None:
    assert not uses_torch(policy_of("default"))
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        policy = policy_of("default")
    assert uses_torch(policy)


def test_threads_of_another_library_do_not_count() -> None:
    """If an environment imports SciPy after polopt has limited the threads, SciPy's BLAS has no
    limit. This happens in the driver, which makes an environment to read its spaces before it makes
    the policy."""
    pytest.importorskip("scipy.linalg")

    of_scipy = threadpoolctl.ThreadpoolController().select(user_api="blas")
    paths = [pool.filepath for pool in of_scipy.lib_controllers if "scipy.libs" in pool.filepath]
    if not paths:
        pytest.skip("SciPy uses NumPy's BLAS here")
    with threadpoolctl.ThreadpoolController().select(filepath=paths).limit(limits=2):
        assert not uses_torch(policy_of("default"))


def test_large_networks_learn_through_torch() -> None:
    env = FakeEnv(*MODELS["default"][:2])
    assert uses_torch(make_policy("a2c", env, model={"fcnet_hiddens": [1024, 1024]}))


def test_own_network_acts_and_learns_through_torch() -> None:
    """A subclass of MLPNetwork may compute something else."""

    class DoubledPolicy(A2CPolicy):
        def make_network(self) -> Any:
            network = super().make_network()

            class Doubled(type(network)):  # type: ignore[misc]
                def prepare(self, obs: Tensor) -> Tensor:
                    return 2.0 * super().prepare(obs)

            network.__class__ = Doubled
            return network

    env = FakeEnv(*MODELS["default"][:2])
    policy = DoubledPolicy(env.observation_space, env.action_space, A2CPolicy.config_class())
    obs = observations_for(policy, 5)
    plain = policy_of("default")
    plain.set_weights(policy.get_weights())
    np.testing.assert_allclose(policy.value(obs), plain.value(2.0 * obs), rtol=1e-4, atol=1e-5)
    assert uses_torch(policy)


def test_closed_forms_make_no_tensors_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of("default")
    batch = make_batch(policy)
    made: list[Any] = []
    monkeypatch.setattr(torch, "as_tensor", lambda *args, **kwargs: made.append(args))
    policy.learn_on_batch(batch)
    assert policy.version > 0
    assert not made


@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("relu", [True, False])
def test_gradient_before_an_activation_equals_autograd(rows: int, relu: bool) -> None:
    """Arrays of 300 x 128 numbers are large enough for torch."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((rows, 128), dtype=np.float32)).requires_grad_()
    with torch.no_grad():
        x[0] = 0.0
    gradient = rng.standard_normal((rows, 128), dtype=np.float32)
    out = torch.relu(x) if relu else torch.tanh(x)
    out.backward(torch.from_numpy(gradient.copy()))
    found = before_activation(gradient, out.detach().numpy(), relu)
    np.testing.assert_allclose(found, x.grad, rtol=1e-6, atol=1e-7)
