"""An add-on of the user follows runs, adds options and result keys, and wraps the transport."""

from __future__ import annotations

from typing import Any

import pytest

import polopt
from polopt.common import add_ons
from polopt.trainers.experiment import Experiment

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 1,
    "train_batch_size": 32,
    "rollout_fragment_length": 32,
    "min_sample_timesteps_per_iteration": 1,
    "num_sgd_iter": 1,
    "model": {"fcnet_hiddens": [8]},
}
PPO = {"optimizer": "sync_samples", "policy": "ppo"}


@pytest.fixture(autouse=True)
def _own_add_ons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_ons, "_registered", [])


class OwnConfig(polopt.Config):
    own_number: int = 3


class Noted(polopt.RunListener):
    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in vars(polopt.RunListener) and not name.startswith("_"):
            object.__getattribute__(self, "events").append(name)
        return found

    def extend(self, result: dict[str, Any]) -> None:
        result["own"] = 1


class Own(polopt.AddOn):
    config_class = OwnConfig

    def __init__(self) -> None:
        self.events: list[str] = []
        self.seen: list[Any] = []

    def follow(self, trainer: Any) -> polopt.RunListener:
        self.seen.append(trainer.experiment.add_on(OwnConfig).own_number)
        return Noted(self.events)


def test_a_listener_hears_of_everything_in_order(tmp_path: Any) -> None:
    own = Own()
    polopt.register_add_on(own)
    trainer = polopt.SyncPPO({**SMALL, "own_number": 5}, log_dir=tmp_path)
    assert own.seen == [5]
    assert own.events == ["adapt", "begin"]
    own.events.clear()
    assert trainer.train()["own"] == 1
    assert own.events == ["begin_iteration", "before_step", "after_step", "extend", "result"]
    own.events.clear()
    saved = trainer.save()
    trainer.restore(saved)
    assert own.events == ["saving", "saved", "restoring", "restored"]
    own.events.clear()
    trainer.stop()
    trainer.stop()
    assert own.events == ["end"]


def test_options_of_an_add_on_are_checked_and_saved() -> None:
    polopt.register_add_on(Own())
    parsed = Experiment.parse({**SMALL, "own_number": 7}, PPO)
    assert parsed.to_dict()["own_number"] == 7
    with pytest.raises(polopt.ConfigError, match="did you mean 'own_number'"):
        Experiment.parse({**SMALL, "own_numbr": 7}, PPO)
    with pytest.raises(polopt.ConfigError, match="key 'own_number': got 'many'"):
        Experiment.parse({**SMALL, "own_number": "many"}, PPO)


def test_without_the_add_on_its_options_are_unknown() -> None:
    with pytest.raises(polopt.ConfigError, match="unknown key 'own_number'"):
        Experiment.parse({**SMALL, "own_number": 7}, PPO)


def test_add_ons_of_polopt_are_found() -> None:
    names = {type(add_on).__module__.split(".")[1] for add_on in add_ons.add_ons()}
    assert {"collectors", "dashboards", "recording"} <= names
