"""An add-on of the user follows runs, adds options and result keys, and knows further names."""

from __future__ import annotations

import logging
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
from policy_helpers import small_policy
from replay_helpers import replay_policy, transitions

import polopt
from polopt.common import add_ons
from polopt.common.overrides import Replacement
from polopt.policies.dqn import DQNPolicy
from polopt.policies.networks.backend import Backend
from polopt.trainers import presets
from polopt.trainers.experiment import Experiment
from polopt.trainers.results import check_stop_key, check_stop_keys
from polopt.trainers.tune_callbacks import Checks

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
    monkeypatch.setattr(presets, "_warned", set())


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


# ---- names of another library -----------------------------------------------------------------


class Elsewhere(polopt.AddOn):
    """Knows one name of each kind."""

    KNOWN: ClassVar[dict[str, str]] = {
        "option": "speed",
        "policy": "FastPolicy",
        "preset": "Fast",
        "result key": "reward",
        "tune name": "A3C",
        "trainable": "elsewhere.Fast",
    }

    def hint(self, kind: str, name: str) -> str:
        known = name.endswith(self.KNOWN[kind]) if kind in self.KNOWN else False
        return f"the {kind} of Elsewhere" if known else ""

    def other_names(self, owner: type[Any]) -> dict[str, str]:
        return {"discount": "gamma"} if "gamma" in owner.keys() else {}  # noqa: SIM118

    def fixed_options(self, where: str) -> dict[str, tuple[Any, ...]]:
        return {"config": {"speed": (1, "one")}, "model": {"depth": (2,)}}[where]


def error_of(config: dict[str, Any]) -> str:
    with pytest.raises(polopt.ConfigError) as caught:
        Experiment.parse({**SMALL, **config}, {})
    return str(caught.value)


def test_names_of_an_add_on_are_accepted() -> None:
    plain = Experiment.parse(SMALL, PPO)
    given = {**SMALL, "discount": 0.5, "speed": "one", "model": {"fcnet_hiddens": [8], "depth": 2}}
    polopt.register_add_on(Elsewhere())
    parsed = Experiment.parse(given, PPO)
    assert parsed.policy.gamma == 0.5
    assert parsed.policy.model == plain.policy.model
    nested = Experiment.parse({**SMALL, "policy": {"name": "ppo", "discount": 0.5}}, {})
    assert nested.policy.gamma == 0.5
    assert polopt.ActorCriticConfig.parse({"discount": 0.5}).gamma == 0.5
    assert "did you mean 'discount'" in error_of({"discont": 0.5})
    assert "'discount' and 'gamma' are two names" in error_of({"discount": 0.5, "gamma": 0.4})


def test_hints_of_an_add_on_are_in_errors() -> None:
    polopt.register_add_on(Elsewhere())
    assert "key 'speed': got 2. Allowed: 1 or 'one'. the option of Else" in error_of({"speed": 2})
    assert "model: key 'depth': got 3. Allowed: 2" in error_of({"model": {"depth": 3}})
    assert "unknown key 'airspeed'. the option of Elsewhere" in error_of({"airspeed": 2})
    assert error_of({"policy": "FastPolicy"}).endswith("got 'FastPolicy'. the policy of Elsewhere")
    assert "got 'Fast'. the preset of Elsewhere." in error_of({"preset": "Fast"})
    with pytest.raises(AttributeError, match=r"no attribute 'Fast'\. the preset of Elsewhere"):
        _ = polopt.Fast  # type: ignore[attr-defined]
    with pytest.raises(polopt.ConfigError, match="'reward' is now 'the result key of Elsewhere'"):
        check_stop_key("reward")
    with pytest.raises(polopt.ConfigError, match="It is now 'the result key of Elsewhere'"):
        check_stop_keys(["reward"], {"env_runners": {}})


def test_hints_of_an_add_on_are_in_warnings(caplog: pytest.LogCaptureFixture) -> None:
    polopt.register_add_on(Elsewhere())
    trial = mock.Mock(trainable_name="Fast")
    trial.get_trainable_cls.return_value = type("Fast", (), {"__module__": "elsewhere"})
    with caplog.at_level(logging.WARNING, "polopt"):
        Checks().on_trial_start(iteration=1, trials=[trial], trial=trial)
        polopt.register()
    of_trainable, of_name = (text for text in caplog.messages if "Elsewhere" in text)
    assert of_trainable == "the trainable of Elsewhere"
    assert of_name.startswith("the tune name of Elsewhere. 'polopt/A3C' always names")


def test_without_the_add_on_its_names_are_unknown() -> None:
    for config in ({"discount": 0.5}, {"speed": 1}, {"model": {"depth": 2}}):
        assert "unknown key" in error_of(config)
        assert "Elsewhere" not in error_of(config)


# ---- a faster implementation of a method ------------------------------------------------------


class Faster(polopt.AddOn):
    """Replaces the gradient and the outputs of DQN, and the backend of PPO. It notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.found: Any = None

    def faster(self, policy: Any, method: str) -> Replacement | None:
        def noted(argument: Any) -> Any:
            self.calls.append(method)
            return Backend(argument, policy) if method == "make_backend" else self.found

        members = ("loss", "add_gradient") if method == "backward" else ()
        return Replacement(policy, policy_class(policy), members, noted, "", "Faster")


def policy_class(policy: Any) -> type:
    return next(cls for cls in type(policy).__mro__ if cls.__module__.startswith("polopt."))


def test_faster_gradient_of_an_add_on_is_used() -> None:
    slow = replay_policy("dqn", fast_cpu=False)
    own = Faster()
    polopt.register_add_on(own)
    fast = replay_policy("dqn")
    assert fast.learns_with == "Faster"
    assert "learns with Faster" in repr(fast)
    for policy in (slow, fast):  # the add-on returns None, so the gradient is of torch
        policy.learn_on_batch(transitions(policy))
    assert own.calls == ["backward"]
    np.testing.assert_array_equal(fast.get_weights().flat, slow.get_weights().flat)
    own.found = {"vf_loss": 3.0}, np.ones(32, np.float32)
    stats, errors = fast.learn_on_transitions(transitions(fast, 32))
    assert stats["vf_loss"] == 3.0
    assert errors.tolist() == [1.0] * 32
    own.found = np.full((2, 3), 7.0)
    assert fast.network_params(np.zeros((2, 4), np.float32)) is own.found


def test_faster_gradient_of_an_add_on_steps_aside_for_a_changed_loss() -> None:
    class Changed(DQNPolicy):
        def loss(self, rows: Any) -> Any:
            return super().loss(rows)

    own = Faster()
    polopt.register_add_on(own)
    made = replay_policy("dqn")
    changed = Changed(made.encoder.space, made.action_space, made.config)
    assert changed.learns_with == "torch (Changed changes loss)"
    changed.learn_on_batch(transitions(changed))
    assert own.calls == []


def test_backend_of_an_add_on_is_used() -> None:
    own = Faster()
    polopt.register_add_on(own)
    assert type(small_policy("ppo").backend) is Backend
    assert own.calls == ["make_backend"]


def test_without_faster_code_torch_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_ons, "_found", tuple)
    assert small_policy("ppo").learns_with == replay_policy("sac").learns_with == "torch"
