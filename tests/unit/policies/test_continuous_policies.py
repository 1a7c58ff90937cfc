"""SAC and TD3 equal closed forms: densities, targets, losses, gradients, delays, temperature."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from replay_helpers import BOX, replay_policy, shaken, transitions
from torch import nn

from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.policies.sac import SACPolicy

every_backend = pytest.mark.parametrize("fast", [True, False])
every_name = pytest.mark.parametrize("name", ["sac", "td3"])
Heads = tuple[np.ndarray, np.ndarray]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits BLAS to one thread, as in a trainer and in workers. Policies learn with closed forms
    only then."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def outputs(network: Any, inputs: np.ndarray) -> Heads:
    """Computes both outputs, `[B, P]` and `[B]`, of an MLP with one hidden layer in NumPy."""
    parts = {name: p.detach().double().numpy() for name, p in network.named_parameters()}
    hidden = inputs @ parts["policy_trunk.0.weight"].T + parts["policy_trunk.0.bias"]
    hidden = np.maximum(hidden, 0.0)
    params = hidden @ parts["policy_head.weight"].T + parts["policy_head.bias"]
    return params, (hidden @ parts["value_head.weight"].T + parts["value_head.bias"])[:, 0]


def critic_values(policy: Any, segment: str, obs: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Returns the Q-values `[K, B]` of K critics."""
    inputs = np.concatenate([obs, actions], axis=1)
    networks = policy.segments[segment].module.networks
    return np.stack([outputs(network, inputs)[1] for network in networks])


def soft_sample(policy: Any, obs: np.ndarray, noise: np.ndarray) -> Heads:
    """Returns actions in [-1, 1] and their log-probabilities, by the change of variables."""
    params, _ = outputs(policy.model, obs)
    mean, log_std = np.split(params.astype(np.float64), 2, axis=1)
    std = np.exp(np.clip(log_std, -20.0, 2.0))
    actions = np.tanh(mean + std * noise)
    gaussian = -0.5 * noise**2 - np.log(std) - 0.5 * math.log(2.0 * math.pi)
    return actions, (gaussian - np.log(1.0 - actions**2)).sum(axis=1)


def noise_of(policy: Any, *shape: int) -> np.ndarray:
    """Returns the noise that the policy will draw next, and leaves the generator unchanged."""
    state = policy.shuffle.bit_generator.state
    noise = policy.shuffle.standard_normal(shape, dtype=np.float32)
    policy.shuffle.bit_generator.state = state
    return noise


def expected_target(policy: Any, rows: Any, noise: np.ndarray) -> np.ndarray:
    if hasattr(policy, "log_alpha"):
        actions, log_prob = soft_sample(policy, rows.next_obs, noise)
        bonus = -policy.log_alpha.exp().item() * log_prob
    else:
        config, bonus = policy.config, 0.0
        mean = np.tanh(outputs(policy.target_actor, rows.next_obs)[0])
        limit = config.target_noise_clip
        actions = mean + np.clip(config.target_noise * noise, -limit, limit)
        actions = np.clip(actions, -1.0, 1.0)
    both = critic_values(policy, "target_critics", rows.next_obs, actions)
    return rows.rewards + rows.discounts * (both.min(axis=0) + bonus)


def stored_actions(policy: Any, rows: Any) -> np.ndarray:
    return np.tanh(rows.actions) if hasattr(policy, "log_alpha") else rows.actions


OPTIONS: dict[str, dict[str, Any]] = {
    "sac": {"initial_alpha": 0.3},
    "td3": {"target_noise": 1.5, "target_noise_clip": 0.9},
}


@every_name
@every_backend
def test_targets_and_critic_loss_in_closed_form(name: str, fast: bool) -> None:
    policy = shaken(replay_policy(name, fast_cpu=fast, **OPTIONS[name]))
    rows = transitions(policy, 64)
    noise = noise_of(policy, 64, 2)
    targets = expected_target(policy, rows, noise)
    values = critic_values(policy, "critics", rows.obs, stored_actions(policy, rows))
    both = critic_values(policy, "target_critics", rows.obs, stored_actions(policy, rows))
    # Each critic has the minimum in some rows.
    assert (both[0] > both[1]).any()
    assert (both[0] < both[1]).any()
    errors = values - targets
    state = policy.shuffle.bit_generator.state
    np.testing.assert_allclose(
        policy.td_errors(rows), np.abs(errors).mean(axis=0), rtol=1e-3, atol=1e-4
    )
    policy.shuffle.bit_generator.state = state
    stats, priorities = policy.learn_on_transitions(rows)
    loss = (rows.weights * 0.5 * (errors**2).sum(axis=0)).mean()
    assert stats["vf_loss"] == pytest.approx(loss, rel=1e-3)
    np.testing.assert_allclose(priorities, np.abs(errors).mean(axis=0), rtol=1e-3, atol=1e-4)


@every_name
@every_backend
def test_next_observation_of_a_terminated_row_is_not_read(name: str, fast: bool) -> None:
    policy = shaken(replay_policy(name, fast_cpu=fast))
    rows = transitions(policy)
    rows.next_obs[rows.discounts == 0.0] = np.nan
    assert np.isfinite(policy.td_errors(rows)).all()
    assert policy.learn_on_transitions(rows)[0]["grad_norm"] > 0.0


def total_loss(policy: Any, rows: Any, targets: np.ndarray, noise: np.ndarray) -> dict[str, float]:
    """Returns the loss of each trained segment of the parameters, with fixed targets: critics,
    actor (`network`), and for SAC the temperature."""
    values = critic_values(policy, "critics", rows.obs, stored_actions(policy, rows))
    losses = {"critics": (rows.weights * 0.5 * ((values - targets) ** 2).sum(axis=0)).mean()}
    if hasattr(policy, "log_alpha"):
        actions, log_prob = soft_sample(policy, rows.obs, noise)
        log_alpha = float(policy.log_alpha.item())
        worst = critic_values(policy, "critics", rows.obs, actions).min(axis=0)
        losses["network"] = (math.exp(log_alpha) * log_prob - worst).mean()
        losses["temperature"] = -(log_alpha * (log_prob - 2.0)).mean()  # the target entropy is -2
    else:
        actions = np.tanh(outputs(policy.model, rows.obs)[0])
        losses["network"] = -critic_values(policy, "critics", rows.obs, actions)[0].mean()
    return losses


@every_name
@every_backend
def test_gradients_equal_finite_differences_of_the_losses(name: str, fast: bool) -> None:
    """The gradients equal finite differences of the losses in NumPy. The gradient of each segment
    comes only from its own loss. The critics get no gradient from the loss of the actor, and the
    temperature gets no gradient from the losses of the actor and the critics."""
    policy = shaken(replay_policy(name, fast_cpu=fast, **OPTIONS[name]))
    policy.version = 1  # the next update of TD3 also updates the actor
    rows = transitions(policy, 32)
    state = policy.shuffle.bit_generator.state
    targets = expected_target(policy, rows, policy.shuffle.standard_normal((32, 2), np.float32))
    noise = policy.shuffle.standard_normal((32, 2), np.float32)
    policy.shuffle.bit_generator.state = state
    gradients = policy.compute_gradients(rows)
    flat, step = policy.flat.get_params(), 3e-3
    for segment, part in policy.flat.trained.items():
        largest = float(np.abs(gradients.flat[part]).max())
        assert largest > 1e-3
        for place in range(part.start, part.stop, 5):
            losses = []
            for sign in (1.0, -1.0):
                moved = flat.copy()
                moved[place] += sign * step
                policy.flat.set_params(moved)
                losses.append(total_loss(policy, rows, targets, noise)[segment])
            slope = (losses[0] - losses[1]) / (2.0 * step)
            assert gradients.flat[place] == pytest.approx(slope, abs=0.02 * largest + 1e-3), segment


@every_name
def test_targets_move_slowly(name: str) -> None:
    policy = shaken(replay_policy(name, tau=0.25, target_network_update_freq=2))
    rows = transitions(policy)
    network, target = (policy.flat.segments[part] for part in ("critics", "target_critics"))
    expected = policy.flat.get_params()[target]
    for update in range(1, 5):
        policy.learn_on_transitions(rows)
        if update % 2 == 0:
            expected = expected + 0.25 * (policy.flat.get_params()[network] - expected)
        np.testing.assert_allclose(policy.flat.get_params()[target], expected, atol=1e-6)


# ---- SAC --------------------------------------------------------------------------------------


@pytest.mark.parametrize("high", [1.0, 50.0])
def test_density_refers_to_actions_in_the_unit_box(high: float) -> None:
    """The density does not depend on the bounds, so the target entropy means the same for every
    Box."""
    policy = shaken(replay_policy("sac", action_space=spaces.Box(-high, high, (2,))))
    obs = transitions(policy, 32).obs
    actions, log_prob = soft_sample(policy, obs, noise_of(policy, 32, 2))
    found, density = policy.sampled(torch.as_tensor(obs))
    np.testing.assert_allclose(found.detach(), actions, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(density.detach(), log_prob, rtol=1e-3, atol=1e-3)


def test_log_std_is_bounded_wherever_the_policy_acts() -> None:
    policy = replay_policy("sac", model={"fcnet_hiddens": [8], "initial_log_std": 10.0})
    obs = transitions(policy).obs
    assert (policy.action_params(obs)[:, 2:] == 2.0).all()
    exported, _ = policy.act_in_torch(policy.model, torch.as_tensor(obs), torch.zeros(0))
    assert (exported[:, 2:] == 2.0).all()


@pytest.mark.parametrize(("target", "rises"), [(-100.0, False), (100.0, True)])
def test_temperature_is_tuned_to_the_target_entropy(target: float, rises: bool) -> None:
    policy = replay_policy("sac", target_entropy=target, alpha_lr=0.1, lr=0.0)
    others = policy.flat.get_params()
    rows = transitions(policy)
    for _ in range(5):
        policy.learn_on_transitions(rows)
    assert (policy.log_alpha.item() > 0.3) == rises
    assert (policy.log_alpha.item() < -0.3) != rises
    part = policy.flat.segments["network"]  # the learning rate of the actor is 0
    np.testing.assert_array_equal(policy.flat.get_params()[part], others[part])


def test_temperature_can_be_fixed() -> None:
    policy = replay_policy("sac", target_entropy=None, initial_alpha=0.2)
    for _ in range(3):
        stats, _ = policy.learn_on_transitions(transitions(policy))
    assert policy.log_alpha.exp().item() == stats["alpha_value"] == pytest.approx(0.2)
    assert replay_policy("sac").target_entropy == -2.0


def test_segments_have_learning_rates_of_their_own() -> None:
    policy = replay_policy("sac", actor_lr=0.0, critic_lr=[[0, 0.0], [100, 0.1]], lr=0.5)
    rows = transitions(policy)
    for env_steps, moved in ((0, {"temperature"}), (100, {"temperature", "critics"})):
        policy.env_steps = env_steps
        before = policy.flat.get_params()
        policy.learn_on_transitions(rows)
        changed = {
            name
            for name, part in policy.flat.trained.items()
            if (before[part] != policy.flat.get_params()[part]).any()
        }
        assert changed == moved


def forwards(policy: Any) -> list[Any]:
    """Returns a list to which the modules of the critics add each output that torch computes."""
    calls: list[Any] = []
    for module in policy.critics.modules():
        module.register_forward_hook(lambda _module, _args, out: calls.append(out))
    return calls


class Cautious(SACPolicy):
    """Overrides the loss of the actor, so that the inherited closed form does not apply."""

    def actor_loss(self, rows: Any) -> Any:
        loss, log_prob = super().actor_loss(rows)
        return 0.5 * loss, log_prob


def test_overridden_loss_is_learned() -> None:
    plain = replay_policy("sac")
    policy = Cautious(BOX, plain.action_space, plain.config)
    calls, rows = forwards(policy), transitions(plain)
    gradients = [p.compute_gradients(rows).flat[p.flat.trained["network"]] for p in (policy, plain)]
    assert calls
    np.testing.assert_allclose(gradients[0], 0.5 * gradients[1], atol=1e-4)


# ---- TD3 --------------------------------------------------------------------------------------


def test_actor_is_delayed() -> None:
    policy = shaken(replay_policy("td3", policy_delay=3))
    rows = transitions(policy)
    actor = policy.flat.segments["network"]
    before, changes = policy.flat.get_params()[actor], []
    for _ in range(7):
        stats, _ = policy.learn_on_transitions(rows)
        now = policy.flat.get_params()[actor]
        changes.append(bool((now != before).any()))
        assert changes[-1] == ("policy_loss" in stats)
        before = now
    assert changes == [False, False, True, False, False, True, False]
    state = policy.get_state()["adam"]
    assert (int(state["network"]["step"]), int(state["critics"]["step"])) == (2, 7)


@every_backend
def test_update_has_gradients_of_the_weights_before_it_and_targets_of_those_after_it(
    fast: bool,
) -> None:
    """The critics learn first from targets of networks that have not moved. The actor learns with
    the critics from before the update. The target networks move to the weights after the update."""
    options = {"critic_lr": 0.1, "actor_lr": 0.1, "tau": 0.25, "policy_delay": 2}
    policy = shaken(replay_policy("td3", fast_cpu=fast, target_noise=0.0, **options))
    flat, parts = policy.flat, policy.flat.segments
    rows = transitions(policy, 64)

    def losses() -> dict[str, float]:
        targets = expected_target(policy, rows, np.zeros((64, 2)))
        return total_loss(policy, rows, targets, np.zeros((64, 2)))

    def slope(params: np.ndarray, direction: np.ndarray) -> float:
        """Returns the derivative of the actor's loss in a direction of the actor's weights."""
        found = []
        for step in (1e-3, -1e-3):
            moved = params.copy()
            moved[parts["network"]] += step * direction
            flat.set_params(moved)
            found.append(losses()["network"])
        return (found[0] - found[1]) / 2e-3

    for update in range(1, 7):
        before, expected = flat.get_params(), losses()
        stats, _ = policy.learn_on_transitions(rows)
        after, gradient = flat.get_params(), flat.get_grads()[parts["network"]]
        assert stats["vf_loss"] == pytest.approx(expected["critics"], rel=1e-3)
        moved = {name for name, part in parts.items() if (before[part] != after[part]).any()}
        if update % 2:
            assert moved == {"critics"}
            continue
        assert moved == set(parts)
        direction = gradient / np.linalg.norm(gradient)
        mixed = before.copy()
        mixed[parts["critics"]] = after[parts["critics"]]
        size, with_new_critics = np.linalg.norm(gradient), slope(mixed, direction)
        assert slope(before, direction) == pytest.approx(size, rel=0.02)
        assert with_new_critics != pytest.approx(size, rel=0.05), "the order matters here"
        flat.set_params(after)
        for name in ("network", "critics"):
            target = parts["target_network" if name == "network" else "target_critics"]
            new = before[target] + 0.25 * (after[parts[name]] - before[target])
            np.testing.assert_allclose(after[target], new, atol=1e-6)


def test_exploration_noise_is_clipped_and_follows_its_schedule() -> None:
    policy = replay_policy("td3", exploration_noise=[[0, 0.5], [100, 0.1]])
    obs = np.zeros((20_000, 3), np.float32)
    rng = np.random.default_rng(0)
    for env_steps, std in ((0, 0.5), (100, 0.1)):
        policy.env_steps = env_steps
        _, extras = policy.compute_actions(obs, rng=rng)
        mean = np.tanh(outputs(policy.model, obs[:1])[0][0])
        noise = extras["actions"] - mean
        inside = np.abs(extras["actions"]) < 1.0
        expected = np.random.default_rng(1).normal(0.0, std, noise.shape)
        kept = np.abs(mean + expected) < 1.0
        assert noise[inside].std() == pytest.approx(expected[kept].std(), rel=0.05)
        assert np.abs(extras["actions"]).max() <= 1.0
    low, high = policy.action_space.low, policy.action_space.high
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    np.testing.assert_allclose(policy.predict(obs[0])[0], middle + half * mean, rtol=1e-5)


# ---- both -------------------------------------------------------------------------------------


@every_name
def test_state_resumes_bit_for_bit(name: str) -> None:
    one, other = replay_policy(name), replay_policy(name, seed=5)
    rows = transitions(one)
    for _ in range(3):
        one.learn_on_transitions(rows)
    other.set_state(one.get_state())
    for policy in (one, other):
        for _ in range(3):
            policy.learn_on_transitions(rows)
    assert one.version == other.version == 6
    np.testing.assert_array_equal(one.get_weights().flat, other.get_weights().flat)


@every_name
@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiDiscrete([3, 2]),
        spaces.Box(-np.inf, np.inf, (2,)),
        spaces.Box(0, 9, (2,), np.int64),
    ],
)
def test_other_actions_are_refused(name: str, space: Any) -> None:
    with pytest.raises(ConfigError, match=r"Allowed: a Box of floats with finite bounds"):
        replay_policy(name, action_space=space)


@every_name
def test_memory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="network without memory"):
        replay_policy(name, model={"use_lstm": True})


@every_name
def test_images_and_dicts_are_supported(name: str) -> None:
    image = spaces.Box(0, 255, (10, 10, 4), np.uint8)
    for space in (image, spaces.Dict({"image": image, "x": BOX})):
        policy = replay_policy(name, space)
        rows = transitions(policy, 4)
        assert policy.learn_on_transitions(rows)[0]["grad_norm"] > 0.0
        filters = [p for p in policy.critics.parameters() if p.ndim == 4]
        assert len(filters) == 2


@every_name
def test_actions_are_uniform_at_the_beginning(name: str) -> None:
    policy = replay_policy(name, random_timesteps=10)
    assert policy.samples_uniformly
    policy.env_steps = 10
    assert not policy.samples_uniformly


class Pair(nn.Module):
    """Reads all parts of an observation. The observation of an actor is a dict. A critic also gets
    the action."""

    def __init__(self, observation_space: Any, action_space: Any, num_params: int) -> None:
        super().__init__()
        self.layers = nn.Linear(int(spaces.utils.flatdim(observation_space)), num_params + 1)

    def forward(self, obs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [*obs[0].values(), obs[1]] if isinstance(obs, tuple) else [*obs.values()]
        outputs = self.layers(torch.cat([part.flatten(1) for part in parts], dim=1))
        return outputs[:, 1:], outputs[:, 0]


@every_name
def test_own_networks_are_actor_and_critics(name: str) -> None:
    space = spaces.Dict({"x": BOX, "kind": spaces.Discrete(4)})
    policy = replay_policy(name, space, model={"custom": Pair})
    rows = transitions(policy)
    before = policy.flat.get_params()
    for _ in range(2):
        policy.learn_on_transitions(rows)
    for part in policy.flat.trained.values():
        assert (policy.flat.get_params()[part] != before[part]).any()
    assert [network.module.layers.in_features for network in policy.critics.networks] == [9, 9]


@every_name
def test_observations_are_normalised_in_acting_and_learning(name: str) -> None:
    policy = shaken(replay_policy(name, normalize_observations=True))
    plain = shaken(replay_policy(name))
    rows = transitions(policy)
    shifted = rows._replace(obs=3.0 * rows.obs + 5.0, next_obs=3.0 * rows.next_obs + 5.0)
    policy.add_moments(Moments(1000, np.full(3, 5.0), np.full(3, 9000.0)))
    np.testing.assert_allclose(
        policy.action_params(shifted.obs), plain.action_params(rows.obs), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(
        policy.td_errors(shifted), plain.td_errors(rows), rtol=1e-3, atol=1e-3
    )
    np.testing.assert_allclose(
        policy.compute_gradients(shifted).flat, plain.compute_gradients(rows).flat, atol=2e-3
    )
