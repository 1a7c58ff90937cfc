"""`polopt.evaluate` plays episodes with a checkpoint or a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import SMALL

import polopt
from polopt.common.config import ConfigError
from polopt.trainers.checkpoints import CheckpointError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes the results and the checkpoint of two iterations."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    polopt.train("SyncPPO", SMALL, stop={"training_iteration": 2}, log_dir=folder, verbose=0)
    return folder


class Odd:
    """A value that checkpoints cannot contain."""


def make(config: Any) -> Any:
    return gymnasium.make("CartPole-v1")


def test_values_that_were_not_saved_have_to_be_given(tmp_path: Path) -> None:
    trainer = polopt.SyncPPO(
        {**SMALL, "env": make, "env_config": {"odd": Odd()}}, callbacks=polopt.Callbacks
    )
    saved = trainer.save(str(tmp_path / "saved"))
    trainer.stop()
    with pytest.raises(CheckpointError, match=r"callbacks=.*, env=.*, env_config=") as caught:
        polopt.SyncPPO.from_checkpoint(saved)
    assert "env_config.odd" in str(caught.value)
    with pytest.raises(ConfigError, match="Give the environment as `env`"):
        polopt.evaluate(saved, env_config={"odd": 1})
    again = polopt.SyncPPO.from_checkpoint(saved, env=make, env_config={"odd": 1}, callbacks=None)
    assert again.experiment.rollout.env_config == {"odd": 1}
    again.stop()


def test_checkpoint_is_evaluated_in_its_environment(run: Path) -> None:
    result = polopt.evaluate(run, episodes=3, seed=4)
    assert len(result.episodes) == 3
    returns = [episode.episode_return for episode in result.episodes]
    assert result.episode_return_mean == np.mean(returns)
    assert result.episode_return_std == np.std(returns)
    assert result.episode_len_mean == result.episode_return_mean  # a reward of 1 for each step
    assert "3 episodes" in repr(result)
    again = polopt.evaluate(run, episodes=3, seed=4)
    assert [episode.episode_return for episode in again.episodes] == returns


@pytest.mark.parametrize("env", ["CartPole-v1", make, "made"])
def test_policy_is_evaluated_in_an_environment(env: Any, run: Path) -> None:
    expected = polopt.evaluate(run, episodes=2, seed=4)
    given = gymnasium.make("CartPole-v1") if env == "made" else env
    for policy in (polopt.load(run), run):
        result = polopt.evaluate(policy, given, episodes=2, seed=4)
        assert result.episode_return_mean == expected.episode_return_mean
        bounded = polopt.evaluate(policy, given, 2, max_frames_per_traj=3)
        assert bounded.episode_len_mean == 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"episodes": 0}, "episodes: got 0"),
        ({"lr": 1}, "'lr' has no effect on evaluation"),
        ({"env": "Pendulum-v1"}, "does not fit"),
        ({"env": "NoSuchEnv-v0"}, "NoSuchEnv"),
        (
            {"env": lambda config: gymnasium.make_vec("CartPole-v1", num_envs=2)},
            "Give a single environment as `env`",
        ),
        (
            {"env": gymnasium.make("CartPole-v1"), "env_config": {"size": 3}},
            "env_config: got .*'size': 3.* with an environment that is already made",
        ),
    ],
)
def test_wrong_evaluation_is_refused(arguments: dict[str, Any], said: str, run: Path) -> None:
    with pytest.raises((ConfigError, CheckpointError), match=said):
        polopt.evaluate(run, **arguments)


def test_policy_needs_an_environment(run: Path) -> None:
    with pytest.raises(ConfigError, match="env: got None"):
        polopt.evaluate(polopt.load(run))
