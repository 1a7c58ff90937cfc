"""SAC for discrete actions: losses, target entropy, masks and training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from masked_env import Masked

import polopt
from polopt.common.transitions import Transitions
from polopt.policies.crossq import CrossQPolicy
from polopt.policies.sac import DiscreteSACPolicy, SACConfig, SACPolicy

OBS = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = spaces.Discrete(4)
SMALL = {"fcnet_hiddens": [8]}


def policy_of(action_space: Any = ACTIONS, obs: Any = OBS, **options: Any) -> Any:
    return SACPolicy(obs, action_space, SACConfig.parse({"model": SMALL, **options}), seed=3)


def rows_of(seed: int = 0, count: int = 5) -> Transitions:
    rng = np.random.default_rng(seed)
    obs, next_obs = rng.uniform(-1.0, 1.0, (2, count, 3)).astype(np.float32)
    numbers = rng.uniform(0.5, 1.5, (3, count)).astype(np.float32)
    rewards, discounts, weights = numbers
    discounts[1] = 0.0
    next_obs[1] = np.nan  # its content does not matter after `terminated`
    actions = rng.integers(4, size=count)
    return Transitions(obs, actions, rewards, discounts, next_obs, weights, np.arange(count))


def test_losses_equal_their_formulas() -> None:
    policy, rows = policy_of(initial_alpha=0.3), rows_of()
    with torch.no_grad():  # the targets differ from the critics
        for parameter in policy.target_critics.parameters():
            parameter.add_(0.1)
    alpha = 0.3

    def expectations(obs: np.ndarray, critics: Any) -> tuple[Any, ...]:
        tensor = torch.as_tensor(obs)
        with torch.no_grad():
            logits = policy.model(tensor)[0].numpy().astype(np.float64)
            q = np.stack([one(tensor)[0].numpy() for one in critics.networks])
        probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        return probs, np.log(probs), q

    probs, logs, q_next = expectations(rows.next_obs, policy.target_critics)
    soft = (probs * (q_next.min(0) - alpha * logs)).sum(-1)
    targets = rows.rewards + np.where(rows.discounts > 0.0, rows.discounts * soft, 0.0)
    probs, logs, q = expectations(rows.obs, policy.critics)
    chosen = q[:, np.arange(5), rows.actions]
    critic = 0.5 * (rows.weights * ((chosen - targets) ** 2).sum(0)).mean()
    actor = (probs * (alpha * logs - q.min(0))).sum(-1).mean()
    entropies = -(probs * logs).sum(-1)

    stats, errors = policy.backward(rows)
    assert stats["vf_loss"] == pytest.approx(critic, rel=1e-4)
    assert stats["policy_loss"] == pytest.approx(actor, rel=1e-4)
    assert stats["entropy"] == pytest.approx(entropies.mean(), rel=1e-4)
    np.testing.assert_allclose(errors, np.abs(chosen - targets).mean(0), rtol=1e-4)
    np.testing.assert_allclose(policy.errors_of(rows), errors, rtol=1e-5)
    expected = (entropies - 0.98 * math.log(4)).mean()  # the gradient of log alpha
    assert policy.log_alpha.grad[0] == pytest.approx(expected, rel=1e-4)


def test_gradient_of_the_actor_is_that_of_the_expectation() -> None:
    """A sampled action would give another gradient, and critics get none from the actor."""
    policy, rows = policy_of(), rows_of()
    policy.flat.zero_grads()
    policy.backward(rows)
    weight = policy.model.network.policy_head.weight
    step, base = 1e-2, weight.grad.clone()
    tensors = policy.tensors(rows)
    with torch.no_grad():
        weight[1, 2] += step
        above = policy.actor_loss(tensors)[0]
        weight[1, 2] -= 2.0 * step
        below = policy.actor_loss(tensors)[0]
    assert float(base[1, 2]) == pytest.approx(float(above - below) / (2.0 * step), rel=0.02)


@pytest.mark.parametrize(
    ("given", "expected"), [("auto", 0.98 * math.log(4)), (0.5, 0.5), (None, None)]
)
def test_target_entropy(given: Any, expected: Any) -> None:
    policy = policy_of(target_entropy=given)
    assert policy.target_entropy == pytest.approx(expected)
    policy.learn_on_transitions(rows_of())
    assert (float(policy.log_alpha) == 0.0) == (given is None)


def test_temperature_rises_below_the_target_and_falls_above_it() -> None:
    for target, sign in ((2.0, 1.0), (0.1, -1.0)):  # log 4 is 1.39
        policy = policy_of(target_entropy=target)
        policy.learn_on_transitions(rows_of())
        assert math.copysign(1.0, float(policy.log_alpha)) == sign


def test_actions_that_a_mask_forbids_do_not_count() -> None:
    space = spaces.Dict(action_mask=spaces.MultiBinary(4), x=OBS)
    policy = policy_of(obs=space)
    observed = [{"action_mask": mask, "x": np.full(3, 0.5, np.float32)} for mask in np.eye(4)]
    observed.append({"action_mask": np.zeros(4), "x": np.zeros(3, np.float32)})
    rows = np.stack([policy.encoder.row(one) for one in observed])
    tensor = torch.as_tensor(policy.encoder.encode(rows))
    with torch.no_grad():
        probs, logs = policy.log_probs(tensor)
    np.testing.assert_array_equal(probs.numpy(), np.eye(5, 4))
    np.testing.assert_array_equal(logs.numpy(), np.zeros((5, 4)))
    batch = Transitions(
        rows,
        np.array([0, 1, 2, 3, 0]),
        *np.ones((2, 5), np.float32),
        rows,
        np.ones(5, np.float32),
        np.arange(5),
    )
    with torch.no_grad():
        targets = policy.targets(policy.tensors(policy.normalized(batch)))
        q = policy.target_critics(tensor).amin(0)
    np.testing.assert_allclose(targets[:4], 1.0 + q.diagonal(), rtol=1e-5)
    assert targets[4] == 1.0  # nothing is allowed, so the value is 0


def test_class_follows_the_action_space() -> None:
    assert type(policy_of()) is DiscreteSACPolicy
    assert type(policy_of(spaces.Box(-1.0, 1.0, (2,)))) is SACPolicy
    config = SACConfig.parse({"model": SMALL})
    counted = SACPolicy.count_parameters(OBS, ACTIONS, config)
    trained = [one for name, one in policy_of().segments.items() if name != "target_critics"]
    assert counted == sum(p.numel() for one in trained for p in one.module.parameters())
    for cls, space in ((CrossQPolicy, ACTIONS), (SACPolicy, spaces.MultiDiscrete([2, 2]))):
        with pytest.raises(polopt.ConfigError, match="Allowed: a Box of floats"):
            cls(OBS, space, cls.config_class.parse({"model": SMALL}))


def test_run_with_masks_is_saved_and_loaded(tmp_path: Path) -> None:
    trainer = polopt.SAC(
        env=Masked,
        num_workers=0,
        seed=1,
        model=SMALL,
        learning_starts=20,
        random_timesteps=20,
        train_batch_size=16,
        training_intensity=4.0,
        min_sample_timesteps_per_iteration=60,
        prioritized_replay=True,
    )
    result = trainer.train()
    assert result["learners"]["default_policy"]["entropy"] > 0.0
    observation, _ = Masked().reset(seed=5)
    action, _ = trainer.get_policy().predict(observation)
    trainer.save(str(tmp_path / "saved"))
    trainer.stop()
    policy = polopt.load(tmp_path / "saved")
    assert isinstance(policy, DiscreteSACPolicy)
    assert policy.predict(observation)[0] == action
