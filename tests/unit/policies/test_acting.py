"""Weights and checkpoints carry the options for the scaling of observations and actions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from checkpoint_helpers import rewrite
from gymnasium import spaces
from policy_helpers import FakeEnv
from toy_envs import make_policy

import polopt
from polopt.common.config import ConfigError
from polopt.common.weights import Acting
from polopt.policies.policy import Policy
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.trainer import PolicyOptimizerTrainer

FAR_BOX = spaces.Box(np.array([300.0, -1.0], np.float32), np.array([500.0, 3.0], np.float32))
HALF_OPEN = spaces.Box(np.array([300.0, 0.0], np.float32), np.array([500.0, np.inf], np.float32))
BOARD = spaces.Box(0, 1, (5, 5, 2), np.uint8)


class Dose(gymnasium.Env[np.ndarray, np.ndarray]):
    """An environment with episodes of one step. An action has two components. The reward is
    `1 - |a - 450| / 200`, where `a` is the first component."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = FAR_BOX
    given: list[np.ndarray] = []  # noqa: RUF012 - shared by all instances

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.given.append(np.array(action))
        return np.zeros(1, np.float32), 1.0 - abs(float(action[0]) - 450.0) / 200.0, True, False, {}


class Board(gymnasium.Env[np.ndarray, int]):
    """The observation is a uint8 board with a single 1, in one of four places. The reward is 1 if
    the action is the number of this place."""

    observation_space = BOARD
    action_space = spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return self._next(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.marked)
        return self._next(), reward, True, False, {}

    def _next(self) -> np.ndarray:
        self.marked = int(self.np_random.integers(4))
        board = np.zeros(BOARD.shape, np.uint8)
        board.reshape(-1)[self.marked * 5 + 1] = 1
        return board


def trainer(env: Any, **options: Any) -> PolicyOptimizerTrainer:
    config = {
        "env": env,
        "num_workers": 0,
        "rollout_fragment_length": 32,
        "min_sample_timesteps_per_iteration": 256,
        "seed": 0,
        **options,
    }
    return PolicyOptimizerTrainer(config)


def shifted(policy: Policy) -> Policy:
    """Sets the parameters of the policy so that its means are 0.5 and 0.25 for all observations."""
    with torch.no_grad():
        policy.flat.params.zero_()
        policy.model.policy_head.bias[:2] = torch.tensor([0.5, 0.25])
    return policy


# ---- actions ------------------------------------------------------------------------------------


def test_predict_training_and_samples_have_the_same_actions() -> None:
    made = trainer(Dose)
    policy = shifted(made.get_policy())
    observation = np.zeros(1, np.float32)
    # The means are mapped to the bounds: 400 + 0.5 * 100 and 1 + 0.25 * 2.
    for action in (policy.predict(observation)[0], made.compute_single_action(observation)):
        np.testing.assert_allclose(action, [450.0, 1.5])
    Dose.given.clear()
    batch = made.workers.local.sample()
    stored = batch.flat("actions")
    np.testing.assert_array_equal(np.stack(Dose.given), policy.dist.to_env(stored))
    assert np.abs(stored - [0.5, 0.25]).max() < 6.0, "stored actions are not mapped"
    # The log-probabilities belong to the stored actions, here with a standard deviation of 1.
    np.testing.assert_allclose(
        batch.flat("action_logp"),
        -0.5 * ((stored - [0.5, 0.25]) ** 2).sum(-1) - np.log(2.0 * np.pi),
        rtol=1e-5,
    )
    made.stop()


def test_a_box_away_from_0_is_learned() -> None:
    """Without the mapping, the mean stays near 0, and the first component is always clipped to its
    lower bound, 300. This component is half of all action elements."""
    options = {"lr": 3e-3, "entropy_coeff": 0.0, "num_envs_per_worker": 8}
    options |= {"min_sample_timesteps_per_iteration": 8000}
    found = {}
    for normalize in (False, True):
        made = trainer(Dose, normalize_actions=normalize, **options)
        result = made.train()
        found[normalize] = float(made.compute_single_action(np.zeros(1, np.float32))[0])
        clipped = result["optimizer"]["actions"]["clipped"]
        assert 0.45 < clipped < 0.7 if not normalize else clipped < 0.4
        made.stop()
    assert found[False] == 300.0
    assert abs(found[True] - 450.0) < 25.0


def test_options_of_acting_cannot_change_while_training() -> None:
    policy = make_policy("ppo", FakeEnv(BOARD, FAR_BOX))
    for key in ("normalize_actions", "clip_actions"):
        with pytest.raises(ConfigError, match=f"{key!r} cannot be changed"):
            policy.set_option(key, False)


@pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([2, 3])], ids=str)
def test_categories_are_not_mapped(space: Any) -> None:
    obs = np.random.default_rng(0).integers(0, 2, (9, *BOARD.shape)).astype(np.uint8)
    given = [
        make_policy("ppo", FakeEnv(BOARD, space), normalize_actions=on).predict(obs)[0]
        for on in (False, True)
    ]
    np.testing.assert_array_equal(*given)


# ---- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ppo", "appo"])
@pytest.mark.parametrize("model", [{}, {"conv_filters": []}])
def test_weights_set_the_acting_options_of_a_policy(name: str, model: dict[str, Any]) -> None:
    """A policy gets weights of three policies in turn: one with the options of older versions, one
    with the default options, and the first one again."""
    former, present = (make_policy(name, FakeEnv(BOARD, FAR_BOX), model=model) for _ in range(2))
    former.act_as(Acting(normalize_actions=False, clip_actions=True, scale_by_high=False))
    obs = np.random.default_rng(0).integers(0, 2, (9, *BOARD.shape)).astype(np.uint8)
    policy = make_policy(name, FakeEnv(BOARD, FAR_BOX), model=model)
    for source in (former, present, former):
        policy.set_weights(source.get_weights())
        assert policy.acting == source.acting
        assert policy.config.normalize_actions == source.acting.normalize_actions
        np.testing.assert_array_equal(policy.predict(obs)[0], source.predict(obs)[0])
        np.testing.assert_array_equal(policy.action_params(obs), source.action_params(obs))
        torch_params = policy.model(torch.from_numpy(obs))[0]
        np.testing.assert_allclose(
            torch_params.detach().numpy(), policy.action_params(obs), rtol=1e-4, atol=1e-6
        )
    assert np.abs(former.action_params(obs) - present.action_params(obs)).max() > 1e-3
    # Without the mapping, outputs near 0 are clipped to the lower bound.
    np.testing.assert_array_equal(former.predict(obs)[0][:, 0], 300.0)


# ---- checkpoints --------------------------------------------------------------------------------


def made_older(tensors: dict[str, Any], tree: dict[str, Any]) -> None:
    """Gives a checkpoint the options of acting of a run that began before version 0.3."""
    former = {"normalize_actions": False, "clip_actions": True, "scale_by_high": False}
    tree["optimizer"]["policy"]["acting"] = former
    tree["config"]["policy"] |= {"normalize_actions": False}


def former_params(policy: Policy, obs: np.ndarray) -> np.ndarray:
    """Computes distribution parameters as in older versions, which divide uint8 images by 255."""
    scaled = obs.astype(np.float32) * np.float32(1.0 / 255.0) if obs.dtype == np.uint8 else obs
    hidden = scaled.reshape(len(obs), -1)
    for layer in [*policy.model.policy_trunk][::2]:
        hidden = np.tanh(hidden @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())
    head = policy.model.policy_head
    return hidden @ head.weight.detach().numpy().T + head.bias.detach().numpy()


def trained(env: Any, directory: Path, **options: Any) -> Path:
    made = trainer(env, lr=0.01, model={"conv_filters": []}, **options)
    made.train()
    made.save(str(directory))
    made.stop()
    return directory


def restored(checkpoint: Path, env: Any, saved_again: Path) -> list[Policy]:
    """Returns the policy of a checkpoint in three ways. The first is loaded from the checkpoint.
    The second is restored in a trainer with the current default options. The third is loaded from a
    checkpoint of this trainer."""
    made = trainer(env, model={"conv_filters": []})
    made.restore(str(checkpoint))
    policy = made.get_policy()
    made.save(str(saved_again))
    made.stop()
    return [polopt.load(checkpoint), policy, polopt.load(saved_again)]


def test_older_checkpoints_act_on_boxes_as_they_were_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = trained(Dose, tmp_path / "c", normalize_actions=False)
    rewrite(checkpoint, made_older)
    obs = np.linspace(-1.0, 1.0, 20, dtype=np.float32)[:, None]
    with caplog.at_level(logging.WARNING, "polopt"):
        policies = restored(checkpoint, Dose, tmp_path / "again")
    warning = (
        "normalize_actions=False and clip_actions=True. The values in the config, True and True"
    )
    assert sum(warning in record.getMessage() for record in caplog.records) == 1, (
        "only restore warns"
    )
    for policy in policies:
        expected = former_params(policy, obs)
        clipped = np.clip(expected, FAR_BOX.low, FAR_BOX.high)
        np.testing.assert_allclose(policy.predict(obs)[0], clipped, rtol=1e-5)
        assert np.ptp(clipped[:, 1]) > 0.0
        assert policy.config.normalize_actions is False


def test_older_checkpoints_scale_bytes_as_they_were_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = trained(Board, tmp_path / "c")
    obs = np.random.default_rng(0).integers(0, 2, (20, *BOARD.shape)).astype(np.uint8)
    present = restored(checkpoint, Board, tmp_path / "present")
    for policy in present:
        expected = former_params(policy, obs.astype(np.float32))
        np.testing.assert_allclose(policy.action_params(obs), expected, rtol=1e-4, atol=1e-6)
    rewrite(checkpoint, made_older)
    with caplog.at_level(logging.WARNING, "polopt"):
        former = restored(checkpoint, Board, tmp_path / "again")
    assert "scales actions" not in caplog.text, "only policies with Box actions warn"
    for policy in former:
        expected = former_params(policy, obs)
        np.testing.assert_allclose(policy.action_params(obs), expected, rtol=1e-4, atol=1e-6)
        assert np.abs(expected - present[0].action_params(obs)).max() > 1e-3


def test_checkpoints_restore_their_acting_options(tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"normalize_actions": False, "clip_actions": True})):
        checkpoint = trained(Dose, tmp_path / f"c{number}", **options)
        policies = restored(checkpoint, Dose, tmp_path / f"again{number}")
        assert {policy.acting for policy in policies} == {Acting(not options, True)}


@pytest.mark.parametrize(
    "change",
    [
        lambda acting: acting.update(clip_actions=1),
        lambda acting: acting.update(more=True),
        lambda acting: acting.pop("scale_by_high"),
    ],
)
def test_malformed_options_of_acting_are_refused(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path
) -> None:
    checkpoint = trained(Dose, tmp_path / "c")
    rewrite(checkpoint, lambda _, tree: change(tree["optimizer"]["policy"]["acting"]))
    with pytest.raises(CheckpointError, match="'acting' must have"):
        polopt.load(checkpoint)
