"""All checks of options run in one order, before any actor starts. Plugins add their own."""

from __future__ import annotations

from typing import Any

import pytest

import polopt
from polopt.common import add_ons
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.workers.worker_set import WorkerSet
from polopt.trainers.experiment import CONFIG_CHECKS, START_CHECKS, Experiment, checked_plan

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 1,
    "rollout_fragment_length": 32,
    "min_sample_timesteps_per_iteration": 1,
    "num_sgd_iter": 1,
    "evaluation_interval": 1,
    "evaluation_duration": 1,
    "model": {"fcnet_hiddens": [8]},
}
#: What has run, in order: the name of the plugin and of the check, and the class of the options.
events: list[tuple[str, str, str]] = []
#: The plugin and the check that fail.
failing: list[tuple[str, str]] = []


def note(cls: type[Any], check: str, config: Any) -> None:
    events.append((cls.__name__, check, type(config).__name__))
    if (cls.__name__, check) in failing:
        raise polopt.ConfigError(f"{check} of {cls.__name__}")


class Noted:
    """The checks of a plugin."""

    @classmethod
    def check(cls, rollout: polopt.RolloutConfig, config: Any) -> None:
        assert rollout.rollout_fragment_length == 32
        note(cls, "check", config)

    @classmethod
    def check_evaluation(cls, config: Any) -> None:
        note(cls, "check_evaluation", config)

    @classmethod
    def check_spaces(cls, worker_config: Any, config: Any) -> None:
        assert worker_config.observation_space.shape == (4,)
        note(cls, "check_spaces", config)


class Strategy(Noted, SyncSamples):
    pass


class OwnPolicy(Noted, PPOPolicy):
    pass


class OwnConfig(polopt.Config):
    own: int = 3


class Own(Noted, polopt.AddOn):
    config_class = OwnConfig


class WithoutOptions(Noted, polopt.AddOn):
    pass


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_ons, "_registered", [Own(), WithoutOptions()])
    events.clear()
    failing.clear()


OWN = {**SMALL, "optimizer": Strategy, "policy": OwnPolicy}
PLUGINS = [
    ("Strategy", "SyncSamplesConfig"),
    ("OwnPolicy", "PPOConfig"),
    ("Own", "OwnConfig"),
    ("WithoutOptions", "NoneType"),
]
CHECKS = ("check", "check_evaluation", "check_spaces")


def test_checks_of_plugins_run_in_order_and_before_workers_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = WorkerSet.__init__

    def starts(self: Any, *args: Any, **options: Any) -> None:
        events.append(("workers", "start", ""))
        start(self, *args, **options)

    monkeypatch.setattr(WorkerSet, "__init__", starts)
    trainer = polopt.PolicyOptimizerTrainer(OWN)
    trainer.train()
    trainer.stop()
    assert events == [
        *((plugin, check, options) for check in CHECKS for plugin, options in PLUGINS),
        ("workers", "start", ""),
        ("workers", "start", ""),  # of evaluation
    ]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("plugin", [name for name, _ in PLUGINS])
def test_a_failed_check_of_a_plugin_ends_the_run_before_it_starts(
    plugin: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerSet, "__init__", lambda *_, **__: pytest.fail("workers start"))
    failing.append((plugin, check))
    with pytest.raises(polopt.ConfigError, match=f"^{check} of {plugin}$"):
        polopt.PolicyOptimizerTrainer(OWN)


def test_evaluation_is_only_checked_if_there_is_one() -> None:
    Experiment.parse({**OWN, "evaluation_interval": None}, {})
    assert [check for _, check, _ in events] == ["check"] * len(PLUGINS)


#: Wrong options, in the order in which they are reported, with the check that finds them.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("", {"gama": 1, "num_envs_per_worker": "two"}, r"(?s)gama.*num_envs_per_worker"),
    ("env_is_given", {"env": None}, "'env' is missing"),
    ("policy_fits_optimizer", {"optimizer": "sync_replay"}, "learns from SampleBatch"),
    ("optimizer_has_workers", {"optimizer": "async_samples"}, "needs remote workers"),
    ("plugins_accept_options", {"collection": "async"}, "key 'collection'"),
    ("gpu_exists", {"num_gpus": 1}, "torch finds no GPU"),
    ("workers_can_sample", {"callbacks": "no_such:Module"}, "no_such"),
    ("evaluation_can_play", {"evaluation_config": {"env": "Pendulum-v1"}}, "Pendulum-v1"),
]


@pytest.mark.parametrize("first", range(len(WRONG)))
def test_the_first_wrong_option_is_reported(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    options = dict(SMALL)
    for _, wrong, _ in reversed(WRONG[first:]):
        options |= wrong
    with pytest.raises(polopt.ConfigError, match=WRONG[first][2]):
        checked_plan(Experiment.parse(options, {}))


def test_the_table_has_the_order_of_the_list() -> None:
    listed = [check.__name__ for check in (*CONFIG_CHECKS, *START_CHECKS)]
    found = [check for check, _, _ in WRONG if check]
    assert found == [name for name in listed if name in found]
