"""Checkpoints of runs with several policies: restore, load, evaluate, and one policy of many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix

import polopt
from polopt.trainers.checkpoints import CheckpointError

SMALL = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "seed": 5,
    "model": {"fcnet_hiddens": [8]},
    "min_sample_timesteps_per_iteration": 200,
    "min_time_s_per_iteration": 0,
    "env": Matrix,
}
TWO: dict[str, Any] = {
    "policies": {"rows": {"lr": 3e-3, "model": {"fcnet_hiddens": [4]}}, "columns": {}},
    "policy_mapping_fn": {"row": "rows", "*": "columns"},
}
PRESETS: dict[str, dict[str, Any]] = {
    "A2C": {"normalize_observations": True},
    "DQN": {"learning_starts": 50, "buffer_size": 1000},
}


def trainer_of(preset: str = "A2C", **options: Any) -> Any:
    return getattr(polopt, preset)({**SMALL, **PRESETS[preset], **TWO, **options})


def weights_of(trainer: Any, name: str | None = None) -> np.ndarray:
    weights: np.ndarray = trainer.get_policy(name).get_weights().flat
    return weights


@pytest.mark.parametrize("preset", PRESETS)
def test_restore_is_exact(preset: str, tmp_path: Path) -> None:
    first = trainer_of(preset)
    for _ in range(2):
        before = first.train()
    first.save(str(tmp_path))
    second = trainer_of(preset, seed=9)
    second.restore(str(tmp_path))
    for name in TWO["policies"]:
        states = [one.get_policy(name).get_state() for one in (first, second)]
        for state in states:
            del state["shuffle"]  # a restored run draws other random numbers
        assert str(states[0]) == str(states[1])
    after = second.train()
    for key in ("num_env_steps_sampled_lifetime", "num_agent_steps_sampled_lifetime"):
        assert after[key] == before[key] + 200 * (2 if "agent" in key else 1)
    assert after["optimizer"]["num_updates"] > before["optimizer"]["num_updates"]
    episodes = after["env_runners"]
    assert episodes["agent_episode_returns_mean"].keys() == {"row", "column"}
    assert episodes["num_episodes_lifetime"] > before["env_runners"]["num_episodes_lifetime"]
    first.stop()
    second.stop()


def test_saved_config_makes_the_run_again(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.train()
    trainer.save(str(tmp_path))
    again = polopt.A2C.from_checkpoint(str(tmp_path), env=Matrix)
    np.testing.assert_array_equal(weights_of(again), weights_of(trainer))
    assert again.get_policy("rows").config.lr == 3e-3
    assert again.get_policy("columns").config.lr == trainer.get_policy("columns").config.lr
    again.train()
    again.stop()
    trainer.stop()


def test_one_policy_is_loaded_by_its_name(tmp_path: Path) -> None:
    trainer = trainer_of()
    trainer.train()
    trainer.save(str(tmp_path))
    for name in ("rows", "columns"):
        loaded = polopt.load(str(tmp_path), policy=name)
        np.testing.assert_array_equal(loaded.get_weights().flat, weights_of(trainer, name))
        observation = np.zeros(1, np.float32)
        assert loaded.predict(observation)[0] == trainer.compute_single_action(
            observation, policy_name=name
        )
    for name, said in ((None, "no name was given"), ("x", "got 'x'")):
        with pytest.raises(CheckpointError, match=f"several policies, and {said}.*policy='rows'"):
            polopt.load(str(tmp_path), policy=name)
    with pytest.raises(ValueError, match=r"has no policy 'x'\. Allowed: 'rows', 'columns'"):
        trainer.get_policy("x")
    with pytest.raises(ValueError, match="Give policy_name: one of"):
        trainer.compute_single_action(np.zeros(1, np.float32))
    trainer.stop()


def test_single_policy_has_no_name(tmp_path: Path) -> None:
    trainer = trainer_of(policies=None, policy_mapping_fn=None)
    trainer.train()
    trainer.save(str(tmp_path))
    polopt.load(str(tmp_path))
    with pytest.raises(CheckpointError, match="one policy without a name"):
        polopt.load(str(tmp_path), policy="rows")
    with pytest.raises(ValueError, match="none, because the run has one policy"):
        trainer.get_policy("rows")
    trainer.stop()


@pytest.mark.parametrize("several", [False, True])
def test_one_policy_is_restored_and_the_others_stay(several: bool, tmp_path: Path) -> None:
    source = trainer_of() if several else trainer_of(policies=None, policy_mapping_fn=None)
    source.train()
    source.save(str(tmp_path))
    trainer = trainer_of(seed=8)
    before = trainer.train()
    rows = weights_of(trainer, "rows")
    trainer.restore_policy("columns", str(tmp_path))
    np.testing.assert_array_equal(
        weights_of(trainer, "columns"), weights_of(source, "columns" if several else None)
    )
    np.testing.assert_array_equal(weights_of(trainer, "rows"), rows)
    after = trainer.train()
    assert after["num_env_steps_sampled_lifetime"] == 2 * before["num_env_steps_sampled_lifetime"]
    with pytest.raises(CheckpointError, match="does not fit policy 'rows'"):
        trainer.restore_policy("rows", str(tmp_path), "columns" if several else None)
    source.stop()
    trainer.stop()


def test_restore_of_another_number_of_policies_says_what_to_do(tmp_path: Path) -> None:
    several, single = trainer_of(), trainer_of(policies=None, policy_mapping_fn=None)
    for trainer, folder in ((several, "several"), (single, "single")):
        trainer.train()
        trainer.save(str(tmp_path / folder))
    with pytest.raises(CheckpointError, match=r"polopt.load\(checkpoint, policy=NAME\)"):
        single.restore(str(tmp_path / "several"))
    with pytest.raises(CheckpointError, match=r"trainer.restore_policy\(NAME, checkpoint\)"):
        several.restore(str(tmp_path / "single"))
    several.stop()
    single.stop()


@pytest.mark.parametrize("two", [False, True])
def test_evaluation_plays_all_agents(two: bool) -> None:
    """With the same action of both players, each gets 3 or 1, so that a return is 20 or 60."""
    options = {} if two else {"policies": None, "policy_mapping_fn": None}
    trainer = trainer_of(
        **options, evaluation_interval=1, evaluation_num_workers=0, evaluation_duration=5
    )
    result = trainer.train()
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] == 5
    assert evaluated["episode_len_mean"] == 10
    for episode in trainer.evaluate(3).episodes:
        assert episode.episode_len == 10
        assert sum(episode.agent_returns.values()) == episode.episode_return
        assert set(episode.agent_returns) == {"row", "column"}
    trainer.stop()
