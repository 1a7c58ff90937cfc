"""Policies that are added to a run and removed from it, as in self-play and leagues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix

import polopt
from polopt.common.config import ConfigError

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
    trainer.train()
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
