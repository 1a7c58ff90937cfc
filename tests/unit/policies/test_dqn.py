"""DQN equals closed forms: targets, loss, gradients, target network, exploration and masks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from replay_helpers import BOX, replay_policy, shaken, transitions

from polopt.common.action_mask import MASKED_LOGIT
from polopt.common.config import ConfigError
from polopt.policies.distributions.epsilon_greedy import EpsilonGreedy
from polopt.policies.dqn import DQNConfig, DQNPolicy
from polopt.trainers.experiment import Experiment

every_backend = pytest.mark.parametrize("fast", [True, False])
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": BOX})


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Limits BLAS to one thread, as in a trainer and in workers. Policies learn with closed forms
    only then."""
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def q_values(policy: Any, obs: np.ndarray, segment: str = "network") -> np.ndarray:
    """Computes Q-values `[B, n]` of an MLP with one hidden layer from its weight matrices."""
    q_network: Any = policy.segments[segment].module
    parts = {name: p.detach().numpy() for name, p in q_network.network.named_parameters()}
    hidden = np.maximum(obs @ parts["policy_trunk.0.weight"].T + parts["policy_trunk.0.bias"], 0.0)
    advantages = hidden @ parts["policy_head.weight"].T + parts["policy_head.bias"]
    if not policy.config.dueling:
        return advantages
    values = hidden @ parts["value_head.weight"].T + parts["value_head.bias"]
    return values + advantages - advantages.mean(axis=1, keepdims=True)


def expected_errors(policy: Any, rows: Any) -> np.ndarray:
    following = q_values(policy, rows.next_obs, "target")
    chooser = q_values(policy, rows.next_obs) if policy.config.double_q else following
    best = following[np.arange(len(following)), chooser.argmax(axis=1)]
    taken = q_values(policy, rows.obs)[np.arange(len(following)), rows.actions]
    return taken - (rows.rewards + rows.discounts * best)


@pytest.mark.parametrize("dueling", [True, False])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("loss", ["huber", "mse"])
@every_backend
def test_errors_and_loss_in_closed_form(
    dueling: bool, double_q: bool, loss: str, fast: bool
) -> None:
    options = {"dueling": dueling, "double_q": double_q, "td_error_loss_fn": loss}
    options["fast_cpu"] = fast
    policy = shaken(replay_policy("dqn", **options))
    rows = transitions(policy, 64)
    errors = expected_errors(policy, rows)
    assert (np.abs(errors) > 1.0).any()
    assert (np.abs(errors) < 1.0).any()
    np.testing.assert_allclose(policy.td_errors(rows), np.abs(errors), rtol=1e-4, atol=1e-5)
    each = 0.5 * errors**2
    if loss == "huber":
        each = np.where(np.abs(errors) <= 1.0, each, np.abs(errors) - 0.5)
    stats, priorities = policy.learn_on_transitions(rows)
    assert stats["vf_loss"] == pytest.approx((rows.weights * each).mean(), rel=1e-4)
    np.testing.assert_allclose(priorities, np.abs(errors), rtol=1e-4, atol=1e-5)


@every_backend
def test_next_observation_of_a_terminated_row_is_not_read(fast: bool) -> None:
    policy = shaken(replay_policy("dqn", fast_cpu=fast))
    rows = transitions(policy)
    rows.next_obs[rows.discounts == 0.0] = np.nan
    errors = policy.td_errors(rows)
    over = rows.discounts == 0.0
    taken = q_values(policy, rows.obs)[np.arange(len(errors)), rows.actions]
    np.testing.assert_allclose(errors[over], np.abs(taken - rows.rewards)[over], rtol=1e-4)
    assert policy.learn_on_transitions(rows)[0]["grad_norm"] > 0.0


@pytest.mark.parametrize("dueling", [True, False])
@every_backend
def test_gradient_equals_finite_differences_of_the_weighted_mean(dueling: bool, fast: bool) -> None:
    """The gradient equals finite differences of the loss in closed form. Targets have no
    gradient."""
    options = {"dueling": dueling, "td_error_loss_fn": "mse", "fast_cpu": fast}
    policy = shaken(replay_policy("dqn", **options))
    rows = transitions(policy)
    gradients = policy.compute_gradients(rows)
    assert gradients.rows == gradients.new_rows == 16
    targets = q_values(policy, rows.obs)[np.arange(16), rows.actions] - expected_errors(
        policy, rows
    )
    flat = policy.flat.get_params()
    trained = len(gradients.flat)
    for place in range(0, trained, 3):
        losses = []
        for sign in (1.0, -1.0):
            moved = flat.copy()
            moved[place] += sign * 1e-2
            policy.flat.set_params(moved)
            taken = q_values(policy, rows.obs)[np.arange(16), rows.actions].astype(np.float64)
            losses.append((rows.weights * 0.5 * (taken - targets) ** 2).mean())
        slope = (losses[0] - losses[1]) / 2e-2
        assert gradients.flat[place] == pytest.approx(slope, abs=3e-3)


def test_gradient_can_be_applied_elsewhere() -> None:
    one, other = (shaken(replay_policy("dqn")) for _ in range(2))
    rows = transitions(one)
    one.learn_on_transitions(rows)
    other.apply_gradients(other.compute_gradients(rows))
    np.testing.assert_array_equal(one.get_weights().flat, other.get_weights().flat)
    assert one.version == other.version == 1


def forwards(policy: Any) -> list[Any]:
    """Returns a list to which the networks add each output that torch computes."""
    calls: list[Any] = []
    for segment in policy.segments.values():
        segment.module.network.register_forward_hook(lambda _module, _args, out: calls.append(out))
    return calls


class Pessimist(DQNPolicy):
    """Overrides the targets, so that the inherited closed form does not apply."""

    def targets(self, rows: Any) -> torch.Tensor:
        return super().targets(rows) - 1.0


class HalfLoss(DQNPolicy):
    """Overrides the loss, so that the inherited closed form does not apply."""

    def loss(self, rows: Any) -> Any:
        loss, errors, stats = super().loss(rows)
        return 0.5 * loss, errors, stats


@pytest.mark.parametrize("cls", [Pessimist, HalfLoss])
def test_overridden_loss_is_learned(cls: type[DQNPolicy]) -> None:
    config = DQNConfig.parse({"model": {"fcnet_hiddens": [8]}})
    policy, plain = (made(BOX, spaces.Discrete(3), config) for made in (cls, DQNPolicy))
    rows, calls = transitions(policy), forwards(policy)
    gradient = policy.compute_gradients(rows).flat
    assert calls
    assert np.abs(gradient - plain.compute_gradients(rows).flat).max() > 1e-3


@pytest.mark.parametrize(("tau", "freq"), [(1.0, 3), (0.25, 1), (0.5, 2)])
def test_target_network_moves_towards_the_network(tau: float, freq: int) -> None:
    policy = shaken(replay_policy("dqn", tau=tau, target_network_update_freq=freq))
    rows = transitions(policy)
    network, target = (policy.flat.segments[name] for name in ("network", "target"))
    expected = policy.flat.get_params()[target]
    for update in range(1, 7):
        policy.learn_on_transitions(rows)
        if update % freq == 0:
            expected = expected + tau * (policy.flat.get_params()[network] - expected)
        np.testing.assert_allclose(policy.flat.get_params()[target], expected, atol=1e-6)


def moves(policy: Any, env_steps: Iterable[int]) -> list[int]:
    """Makes one update at each number of environment steps. Returns the numbers at which the target
    network moved."""
    rows, found = transitions(policy), []
    target = policy.flat.segments["target"]
    for steps in env_steps:
        policy.env_steps = steps
        before = policy.flat.get_params()[target]
        policy.learn_on_transitions(rows)
        if (policy.flat.get_params()[target] != before).any():
            found.append(steps)
    return found


def test_target_network_follows_environment_steps() -> None:
    """The average of RLlib's `target_network_update_freq`, whatever the updates per step."""
    every = {"target_network_update_timesteps": 10}
    assert moves(shaken(replay_policy("dqn", **every)), range(0, 60, 4)) == [12, 20, 32, 40, 52]
    several = [steps for steps in range(0, 60, 4) for _ in range(3)]  # three updates at each
    assert moves(shaken(replay_policy("dqn", **every)), several) == [12, 20, 32, 40, 52]
    # A sampler's fragment may have more steps than the period, and several arrive at once.
    assert moves(shaken(replay_policy("dqn", **every)), [7, 41, 41, 49, 58, 60]) == [41, 58, 60]


@pytest.mark.parametrize("restored_at", [11, 19, 20])
def test_restored_policy_moves_its_target_at_the_same_steps(restored_at: int) -> None:
    """Environment steps may have been sampled between the last update and the checkpoint."""
    options = {"target_network_update_timesteps": 10}
    policy, other = (shaken(replay_policy("dqn", **options), seed=seed) for seed in (1, 2))
    assert moves(policy, [9, 11]) == [11]
    policy.env_steps = restored_at
    other.set_state(policy.get_state())
    steps, expected = [restored_at, 22, 29, 31], [20 if restored_at == 20 else 22, 31]
    assert moves(other, steps) == moves(policy, steps) == expected
    state = other.get_state()
    for wrong in (-1, True, 32, "3"):
        with pytest.raises(ValueError, match="'updated_at' must be a number of environment steps"):
            other.set_state({**state, "updated_at": wrong})


def test_update_that_is_not_finite_is_skipped() -> None:
    policy = shaken(replay_policy("dqn", target_network_update_freq=1))
    rows = transitions(policy)
    rows.rewards[3] = np.nan
    before = policy.get_weights().flat
    stats, errors = policy.learn_on_transitions(rows)
    assert "grad_norm" not in stats
    assert (errors[3], policy.version, policy.progress.skipped_updates) == (0.0, 0, 1)
    np.testing.assert_array_equal(policy.get_weights().flat, before)


# ---- exploration ------------------------------------------------------------------------------


def test_epsilon_follows_environment_steps_and_weights() -> None:
    learner, worker = (replay_policy("dqn", epsilon=[[0, 1.0], [100, 0.2]]) for _ in range(2))
    obs = np.zeros((20_000, 3), np.float32)
    rng = np.random.default_rng(0)
    for env_steps, epsilon in ((0, 1.0), (50, 0.6), (1000, 0.2)):
        learner.env_steps = env_steps
        worker.set_weights(learner.get_weights())
        actions, extras = worker.compute_actions(obs, rng=rng)
        best = extras["action_dist_inputs"][0].argmax()
        # With probability epsilon, the action is uniform. Two of three actions are not the best.
        assert (actions == best).mean() == pytest.approx(1.0 - epsilon * 2 / 3, abs=0.02)
        counts = np.bincount(actions, minlength=3) / len(actions)
        assert np.delete(counts, best) == pytest.approx([epsilon / 3] * 2, abs=0.02)
        assert (worker.predict(obs)[0] == best).all()


@pytest.mark.parametrize("name", ["dqn", "pqn"])
@pytest.mark.parametrize("epsilon", [5, [[0, 1.0], [100, 1.5]], -0.1])
def test_epsilon_is_a_probability(name: str, epsilon: Any) -> None:
    with pytest.raises(ConfigError, match=r"'epsilon'.*from 0 to 1"):
        Experiment.parse({"env": "CartPole-v1", "policy": name, "epsilon": epsilon}, {})


def test_environments_of_all_workers_have_epsilons_of_apex() -> None:
    policies = [replay_policy("dqn", per_worker_epsilon=True, epsilon=0.05) for _ in range(3)]
    for index, policy in enumerate(policies, start=1):
        policy.worker_index, policy.num_workers = index, 3
    found = np.concatenate([policy.epsilons(2) for policy in policies])
    np.testing.assert_allclose(found, [0.4 ** (1 + 7 * i / 5) for i in range(6)])
    policies[0].num_workers = 1
    np.testing.assert_allclose(policies[0].epsilons(1), [0.4])
    local = replay_policy("dqn", per_worker_epsilon=True, epsilon=0.05)
    assert local.epsilons(2) == 0.05


def test_noise_of_a_fragment_has_the_epsilon_of_each_environment() -> None:
    dist = EpsilonGreedy(spaces.Discrete(4), lambda envs: np.array([0.0, 0.5, 1.0]))
    noise = dist.draw_noise(np.random.default_rng(0), 4000, 3)
    np.testing.assert_allclose((noise[..., 0] == 1.0).mean(axis=0), [0.0, 0.5, 1.0], atol=0.03)


def test_probabilities_of_a_fragment_have_the_epsilon_of_each_environment() -> None:
    dist = EpsilonGreedy(spaces.Discrete(2), lambda envs: np.linspace(0.0, 1.0, envs))
    params = torch.tensor([1.0, 2.0]).expand(4, 3, 2)  # 4 steps of 3 environments
    found = dist.probabilities(params)
    np.testing.assert_allclose(found[3], [[0.0, 1.0], [0.25, 0.75], [0.5, 0.5]])
    assert dist.log_prob(params, torch.ones(4, 3, dtype=torch.int64)).shape == (4, 3)


def test_log_probabilities_are_frequencies() -> None:
    dist = EpsilonGreedy(spaces.Discrete(4), lambda envs: 0.3)
    params = torch.tensor([[1.0, 3.0, MASKED_LOGIT, 2.0]])
    p = dist.probabilities(params)[0]
    np.testing.assert_allclose(p, [0.1, 0.8, 0.0, 0.1], atol=1e-6)
    rows = np.repeat(params.numpy(), 20_000, axis=0)
    actions = dist.sample(rows, dist.draw_noise(np.random.default_rng(0), 20_000))
    np.testing.assert_allclose(np.bincount(actions, minlength=4) / 20_000, p, atol=0.02)
    assert dist.log_prob(params, torch.tensor([1])) == pytest.approx(np.log(0.8))
    assert dist.entropy(params) == pytest.approx(-(0.2 * np.log(0.1) + 0.8 * np.log(0.8)))
    assert dist.kl(params, params) == pytest.approx(0.0)


# ---- masks ------------------------------------------------------------------------------------


def masked_rows(policy: Any, masks: np.ndarray, next_masks: np.ndarray) -> Any:
    rows = transitions(policy, len(masks), discounts=np.full(len(masks), 0.9, np.float32))
    rows.obs[:, :3], rows.next_obs[:, :3] = masks, next_masks
    return rows


def test_masked_actions_are_neither_chosen_nor_bootstrapped_from() -> None:
    policy = shaken(replay_policy("dqn", MASKED, double_q=False, epsilon=1.0))
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 2, (600, 3))
    masks[np.arange(600), rng.integers(3, size=600)] = 1
    rows = masked_rows(policy, masks, masks[::-1])
    every = np.arange(600)
    for explore in (True, False):
        actions, _ = policy.compute_actions(rows.obs, explore, rng=rng)
        assert masks[every, actions].all()
    uniform = policy.dist.random_allowed(rng, policy.mask.masked(0.0, rows.obs))[1]
    assert masks[every, uniform].all()
    rows = rows._replace(actions=actions)
    q = policy.segments["target"].module.network.action_params(
        torch.as_tensor(rows.next_obs[:, 3:])
    )
    best = np.where(masks[::-1] == 1, q.detach().numpy(), -np.inf).max(axis=1)
    taken = policy.action_params(rows.obs)[every, actions]
    np.testing.assert_allclose(
        policy.td_errors(rows), np.abs(taken - rows.rewards - 0.9 * best), rtol=1e-4, atol=1e-5
    )


def test_random_allowed_actions_are_uniform_whatever_epsilon_is() -> None:
    policy = replay_policy("dqn", MASKED, epsilon=0.0)
    masks = np.repeat([[1.0, 0.0, 1.0]], 9000, axis=0)
    obs = np.concatenate([masks, np.zeros_like(masks)], axis=1).astype(np.float32)
    drawn = policy.dist.random_allowed(np.random.default_rng(0), policy.mask.masked(0.0, obs))[1]
    np.testing.assert_allclose(np.bincount(drawn) / 9000, [0.5, 0.0, 0.5], atol=0.03)


def test_observation_that_allows_no_action_has_no_value() -> None:
    policy = shaken(replay_policy("dqn", MASKED))
    ones, zeros = np.ones((5, 3)), np.zeros((5, 3))
    rows = masked_rows(policy, ones, zeros)
    taken = policy.action_params(rows.obs)[np.arange(5), rows.actions]
    np.testing.assert_allclose(policy.td_errors(rows), np.abs(taken - rows.rewards), rtol=1e-4)


# ---- spaces, networks, combinations -----------------------------------------------------------


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([2, 3]), spaces.Box(-1.0, 1.0, (2,))])
def test_other_actions_are_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"by policy DQNPolicy. Allowed: Discrete"):
        replay_policy("dqn", action_space=space)


def test_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="network without memory"):
        replay_policy("dqn", model={"use_lstm": True})


@pytest.mark.parametrize("optimizer", ["sync_samples", "async_gradients"])
def test_optimizer_of_rollouts_is_refused(optimizer: str) -> None:
    options = {"env": "CartPole-v1", "optimizer": optimizer, "policy": "dqn", "num_workers": 1}
    with pytest.raises(ConfigError, match="learns from Transitions, but the optimizer gives it"):
        Experiment.parse(options, {})


def test_images_are_supported() -> None:
    image = spaces.Box(0, 255, (10, 10, 4), np.uint8)
    policy = replay_policy("dqn", image, model={})
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 255, (8, 10, 10, 4), dtype=np.uint8)
    rows = transitions(policy, 8, obs=obs, next_obs=obs[::-1].copy())
    assert policy.learn_on_transitions(rows)[0]["grad_norm"] > 0.0
    assert policy.compute_actions(obs)[0].shape == (8,)
