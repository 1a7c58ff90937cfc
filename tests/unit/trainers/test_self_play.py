"""Policies that are added to a run and removed from it, as in self-play and leagues."""

from __future__ import annotations

from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from agent_envs import Matrix, Race

import polopt
from polopt.common.config import ConfigError
from polopt.rollouts.envs.agent_vector_env import MappedEpisode
from polopt.tuned_examples import self_play

SMALL = {
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "seed": 5,
    "model": {"fcnet_hiddens": [8]},
    "min_sample_timesteps_per_iteration": 200,
    "min_time_s_per_iteration": 0,
    "env": Matrix,
    "policies": ["main"],
}
PRESETS: dict[str, dict[str, Any]] = {
    "A2C": {"normalize_observations": True},
    "SyncPPO": {"rollout_fragment_length": 50},
    "DQN": {"learning_starts": 50, "buffer_size": 1000},
}


def against_the_past(agent_id: str, rng: np.random.Generator) -> str:
    """The row player is the policy that learns, the column player its past."""
    return "main" if agent_id == "row" or rng.random() < 0.2 else "past"


def trainer_of(preset: str, **options: Any) -> Any:
    return getattr(polopt, preset)({**SMALL, **PRESETS[preset], **options})


def weights_of(trainer: Any, name: str) -> np.ndarray:
    weights: np.ndarray = trainer.get_policy(name).get_weights().flat
    return weights


@pytest.mark.parametrize("preset", PRESETS)
def test_copy_is_exact_and_stays(preset: str, tmp_path: Path) -> None:
    trainer = trainer_of(preset)
    before = trainer.train()
    main = trainer.get_policy("main").get_state()
    trainer.add_policy("past", copy_of="main", policy_mapping_fn=against_the_past)
    for name in ("main", "past"):
        state = trainer.get_policy(name).get_state()
        for key in ("params", "version", "moments"):
            assert str(state[key]) == str(main[key])
        for key in ("adam", "targets"):
            assert str(state.get(key)) == str(main.get(key))
    past = weights_of(trainer, "past")
    after = trainer.train()
    assert after["num_env_steps_sampled_lifetime"] > before["num_env_steps_sampled_lifetime"]
    assert after["num_agent_steps_sampled_lifetime"] > before["num_agent_steps_sampled_lifetime"]
    assert after["training_iteration"] == before["training_iteration"] + 1
    assert set(after["learners"]) == {"main", "__all_modules__"}
    np.testing.assert_array_equal(weights_of(trainer, "past"), past)
    assert not np.array_equal(weights_of(trainer, "main"), past)
    moments = {name: trainer.get_policy(name).get_state()["moments"] for name in ("main", "past")}
    assert str(moments["past"]) == str(main["moments"]), "its normalisation stays, too"
    assert (str(moments["main"]) == str(main["moments"])) == (preset != "A2C")
    # A checkpoint has the policy, and a run continues with it.
    trainer.save(str(tmp_path))
    again = type(trainer).from_checkpoint(
        str(tmp_path), env=Matrix, policy_mapping_fn=against_the_past
    )
    for name in ("main", "past"):
        np.testing.assert_array_equal(weights_of(again, name), weights_of(trainer, name))
    again.train()
    np.testing.assert_array_equal(weights_of(again, "past"), past)
    again.stop()
    # Without it, all goes on.
    trainer.remove_policy("past", policy_mapping_fn={"*": "main"})
    assert list(trainer.get_policy().policies) == ["main"]
    assert set(trainer.train()["env_runners"]["module_episode_returns_mean"]) == {"main"}
    trainer.stop()


def test_added_policy_may_learn() -> None:
    trainer = trainer_of("A2C")
    trainer.train()
    trainer.add_policy(
        "second", "main", trainable=True, policy_mapping_fn={"row": "main", "*": "second"}
    )
    before = weights_of(trainer, "second")
    result = trainer.train()
    assert set(result["learners"]) == {"main", "second", "__all_modules__"}
    assert not np.array_equal(weights_of(trainer, "second"), before)
    trainer.stop()


class League(polopt.Callbacks):
    """Adds a frozen copy after each iteration."""

    def __init__(self) -> None:
        self.added = 0

    def on_train_result(self, *, trainer: Any, result: dict[str, Any]) -> None:
        self.added += 1
        names = [f"v{i}" for i in range(1, self.added + 1)]
        trainer.add_policy(
            names[-1],
            copy_of="main",
            policy_mapping_fn=lambda agent_id, rng: (
                "main" if agent_id == "row" else names[rng.integers(len(names))]
            ),
        )


def test_callback_builds_a_league() -> None:
    trainer = trainer_of("A2C", callbacks=League)
    for _ in range(3):
        trainer.train()
    assert list(trainer.get_policy().policies) == ["main", "v1", "v2", "v3"]
    versions = [one.version for one in trainer.get_policy().policies.values()]
    assert versions[1] < versions[2] < versions[3] == versions[0]
    trainer.stop()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.add_policy("main", "main"), "a policy 'main' already"),
        (lambda t: t.add_policy("v1", "v0"), "no policy 'v0'. Allowed: 'main'"),
        (lambda t: t.add_policy("v1", "main", policy_mapping_fn={"row": "v1"}), "no pattern fits"),
        (lambda t: t.remove_policy("x"), "no policy 'x'"),
        (lambda t: t.remove_policy("main"), "no policy learns"),
    ],
)
def test_wrong_call_leaves_the_run_as_it_was(call: Any, message: str) -> None:
    trainer = trainer_of("A2C")
    trainer.train()
    before = weights_of(trainer, "main")
    with pytest.raises(ConfigError, match=message):
        call(trainer)
    np.testing.assert_array_equal(weights_of(trainer, "main"), before)
    trainer.train()
    trainer.stop()


def test_run_without_named_policies() -> None:
    trainer = trainer_of("A2C", policies=None)
    with pytest.raises(ConfigError, match="no named policies"):
        trainer.add_policy("v1", "main")
    trainer.stop()


# ---- the example ------------------------------------------------------------------------------


@pytest.mark.slow
def test_example_keeps_the_first_and_the_newest_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the options of the tuned example, and less work."""
    pytest.importorskip("pettingzoo")
    monkeypatch.setattr(self_play, "EVERY", 2)
    monkeypatch.setattr(self_play, "MOST", 2)
    monkeypatch.setattr(self_play, "GAMES", 4)
    small = {"num_envs_per_worker": 2, "rollout_fragment_length": 40, "num_sgd_iter": 1}
    small |= {"sgd_minibatch_size": 80, "min_time_s_per_iteration": 0}
    file = resources.files("polopt.tuned_examples").joinpath("connect_four_self_play.yaml")
    trainer = polopt.SyncPPO({**yaml.safe_load(file.read_text())["config"], **small, "seed": 0})
    before = weights_of(trainer, "main")
    for iteration in range(1, 6):
        result = trainer.train()
        reported = result["env_runners"].get("custom_metrics", {})
        assert (self_play.SCORE in reported) == (iteration in (1, 2, 4))
    assert list(trainer.get_policy().policies) == ["main", "main_1", "main_4"]
    assert trainer.get_policy().trained == ["main"]
    assert set(result["env_runners"]["module_episode_returns_mean"]) <= {"main", "main_1", "main_4"}
    past = weights_of(trainer, "main_4")
    assert not np.array_equal(past, before)
    assert not np.array_equal(past, weights_of(trainer, "main"))
    trainer.stop()


def test_learning_policy_has_both_seats_in_turn() -> None:
    choose, rng = self_play.Opponents(["old", "new"]), np.random.default_rng(0)
    found = Counter[tuple[str, str]]()
    for number in range(400):
        episode = MappedEpisode(number, 0)
        pair = choose("player_0", episode, rng), choose("player_1", episode, rng)
        assert pair[number % 2] == "main"
        found[pair[number % 2], pair[1 - number % 2]] += 1
    assert 160 < found["main", "main"] < 240
    assert min(found["main", "old"], found["main", "new"]) > 60


def test_score_counts_wins_of_both_seats() -> None:
    """The first player of a race over 4 fields wins if it moves 1 and then to the end."""

    class Best:
        def predict(self, observation: Any, deterministic: bool) -> Any:
            left = int(np.argmax(observation))
            return (left % 3 - 1 if left % 3 else 0), None

    class Notes(Best):
        def __init__(self) -> None:
            self.deterministic = set[bool]()

        def predict(self, observation: Any, deterministic: bool) -> Any:
            self.deterministic.add(deterministic)
            return super().predict(observation, deterministic)

    env, rng = Race(4), np.random.default_rng(0)
    for sampled in (True, False):
        notes = Notes()
        self_play.play(env, {"first": notes, "second": None}, rng, sampled=sampled)
        assert notes.deterministic == {not sampled}
    for _ in range(20):
        assert self_play.play(env, {"first": Best(), "second": None}, rng)["first"] == 1.0
    returns = [self_play.play(env, {"first": None, "second": None}, rng) for _ in range(50)]
    assert all(one["first"] == -one["second"] for one in returns)
    assert {one["first"] for one in returns} == {1.0, -1.0}
    pytest.importorskip("pettingzoo")
    assert self_play.score(None, None, 10, seed=3) == self_play.score(None, None, 10, seed=3)
    assert 0.2 < self_play.score(None, None, 40, seed=3) < 0.8
