"""Environments from ids, names, modules and callables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sampling_helpers import rollout
from toy_envs import (
    AUTORESET,
    Drift,
    sync_clocks,
)

from polopt.common.config import ConfigError
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.envs.creators import EnvContext, call_creator
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import autoreset_mode, make_vector_env, probe_spaces
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig, checked_spaces


def test_gymnasium_id_uses_its_own_vector() -> None:
    source = resolve_env("CartPole-v1")
    env = make_vector_env(source, rollout("CartPole-v1"))
    assert type(env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert env.num_envs == 3
    assert autoreset_mode(env) == AutoresetMode.NEXT_STEP
    # Workers make the same environment.
    observations, actions = probe_spaces(source, rollout("CartPole-v1"))
    assert observations.shape == (4,)
    assert actions == spaces.Discrete(2)


@pytest.mark.parametrize("mode", AUTORESET)
def test_gymnasium_id_in_a_sync_vector(mode: str) -> None:
    config = rollout("CartPole-v1", vectorization_mode="sync", autoreset_mode=mode)
    env = make_vector_env(resolve_env("CartPole-v1"), config)
    assert isinstance(env.unwrapped, SyncVectorEnv)
    assert autoreset_mode(env) == AutoresetMode[mode.upper()]


def test_default_autoreset_mode_is_same_step() -> None:
    for name in ("Acrobot-v1", Drift):
        env = make_vector_env(resolve_env(name), rollout(name))
        assert autoreset_mode(env) == AutoresetMode.SAME_STEP


def test_autoreset_mode_is_of_this_environment() -> None:
    # Gymnasium writes the mode into metadata that instances of the class share.
    envs = [make_vector_env(Drift, rollout(autoreset_mode=mode)) for mode in AUTORESET]
    assert [autoreset_mode(env) for env in envs] == [AutoresetMode[m.upper()] for m in AUTORESET]


def test_env_config_reaches_a_gymnasium_environment() -> None:
    config = rollout("CartPole-v1", env_config={"max_episode_steps": 3})
    env = make_vector_env(resolve_env("CartPole-v1"), config)
    env.reset(seed=0)
    for _ in range(3):
        _, _, _, truncated, _ = env.step(np.zeros(3, np.int64))
    assert truncated.all()


@pytest.fixture
def registered() -> Iterator[str]:
    name = "polopt-tests/Drift-v0"
    gymnasium.register(name, entry_point=Drift, max_episode_steps=4)
    yield name
    del gymnasium.registry[name]


def test_spec_works_where_its_id_is_not_registered(registered: str) -> None:
    source = resolve_env(registered)
    spec = gymnasium.registry.pop(registered)  # as in another process
    try:
        batch = worker_of_source(source).sample()
    finally:
        gymnasium.registry[registered] = spec
    # The time limit of the registration holds.
    assert max(batch.episodes.lengths) == 4


def test_module_of_an_id_is_imported(tmp_path: Path, monkeypatch: Any) -> None:
    name = "polopt-tests/Imported-v0"
    (tmp_path / "registers.py").write_text(
        "import gymnasium\n"
        "entry_point = 'gymnasium.envs.classic_control:CartPoleEnv'\n"
        f"gymnasium.register('{name}', entry_point, max_episode_steps=5)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    source = resolve_env(f"registers:{name}")
    del gymnasium.registry[name]  # as in a worker, which has not imported the module
    assert max(worker_of_source(source).sample().episodes.lengths) == 5


def test_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"'nowhere:X-v0'; its module .*No module named 'nowhere'"
    ):
        resolve_env("nowhere:X-v0")


def test_callable_attribute_of_a_module_is_the_creator() -> None:
    assert resolve_env("toy_envs:Drift") is Drift


def test_name_that_a_module_lacks_is_named() -> None:
    said = r"'toy_envs:Drif'; toy_envs defines no callable 'Drif' and registers no environment of"
    with pytest.raises(ConfigError, match=said):
        resolve_env("toy_envs:Drif")


@pytest.mark.parametrize("name", ["CartPole-v9", "Game"])
def test_module_is_not_imported_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "evilmod.py").write_text("Game = dict\nraise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="imported only if the user names it"):
        resolve_env(f"evilmod:{name}", allow_import=False)


def test_registered_id_needs_no_import_of_its_module() -> None:
    source = resolve_env("evilmod:CartPole-v1", allow_import=False)
    assert source == gymnasium.spec("CartPole-v1")


def test_attribute_of_loaded_module_needs_permission() -> None:
    with pytest.raises(ConfigError, match="imported only if the user names it"):
        resolve_env("os:getcwd", allow_import=False)


def worker_of_source(source: Any) -> RolloutWorker:
    config = rollout("unused", rollout_fragment_length=30)
    policy = A2CPolicy.config_class.parse({})
    made = WorkerConfig(config, source, A2CPolicy, policy, *probe_spaces(source, config), seed=0)
    return RolloutWorker(made, 1)


def test_name_registered_with_tune() -> None:
    from ray.tune.registry import register_env

    register_env("polopt-drift", lambda config: Drift(config))
    source = resolve_env("polopt-drift")
    config = rollout("polopt-drift", env_config={"speed": 3})
    env = make_vector_env(source, config, worker_index=2)
    assert isinstance(env, SyncVectorEnv)
    assert env.envs[1].unwrapped.context == {"speed": 3}
    assert env.envs[1].unwrapped.context.worker_index == 2


@pytest.mark.parametrize(
    ("given", "near"), [("CartPole-v9", "CartPole-v1"), ("Pendulun-v1", "Pendulum-v1")]
)
def test_unknown_id_names_the_nearest(given: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"key 'env': got '{given}'; did you mean '{near}'"):
        resolve_env(given)


def test_atari_id_names_the_module_that_registers_it() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ale_py:ALE/NoSuchGame-v5'"):
        resolve_env("ALE/NoSuchGame-v5")
    with pytest.raises(ConfigError, match="'os:ALE/NoSuchGame-v5'; os defines no"):
        resolve_env("os:ALE/NoSuchGame-v5")  # the module is named


@pytest.mark.parametrize("returned", [None, gymnasium.Env, spaces.Discrete(2)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_callable_that_makes_no_environment_is_one_error(
    returned: Any, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return returned

    with pytest.raises(ConfigError, match=r"^key 'env': .*: TypeError: the callable must return"):
        checked_spaces(make, rollout(make, num_workers=num_workers))
    assert caplog.messages == []  # nothing is closed that cannot be


@pytest.mark.parametrize("given", [None, 3, ["CartPole-v1"]])
def test_value_that_is_no_environment_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"key 'env': got .*allowed: a Gymnasium id"):
        resolve_env(given)


class TakesConfig:
    """Stores what it was called with."""

    def __init__(self, config: Any) -> None:
        self.got = config


class TakesKeywords:
    def __init__(self, size: int = 1, speed: float = 0.0) -> None:
        self.got = (size, speed)


class TakesNothing:
    got = "nothing"


CONTEXT = EnvContext({"size": 4, "speed": 2.0}, 3, 1, 5)


@pytest.mark.parametrize(
    ("creator", "got"),
    [
        (TakesConfig, CONTEXT),
        (lambda config: TakesConfig(config), CONTEXT),
        (lambda anything: TakesConfig(anything), CONTEXT),
        (lambda config=None: TakesConfig(config), CONTEXT),
        (lambda env_config=None, *, more=1: TakesConfig(env_config), CONTEXT),
        (TakesKeywords, (4, 2.0)),
        (lambda size=1, speed=0: TakesKeywords(size, speed), (4, 2.0)),
        (lambda **options: TakesConfig(options), dict(CONTEXT)),
        (lambda *, size, speed: TakesKeywords(size, speed), (4, 2.0)),
    ],
)
def test_creator_is_called_by_its_signature(creator: Callable[..., Any], got: Any) -> None:
    assert call_creator(creator, CONTEXT).got == got


@pytest.mark.parametrize("creator", [TakesNothing, lambda: TakesNothing()])
def test_creator_without_parameters_gets_none(creator: Callable[..., Any]) -> None:
    assert call_creator(creator, EnvContext({}, 0, 0, 0)).got == "nothing"


def test_env_context_has_worker_and_env_index() -> None:
    config = rollout(Drift, env_config={"a": 1}, num_workers=4)
    env = make_vector_env(Drift, config, worker_index=2)
    assert isinstance(env, SyncVectorEnv)
    for index, each in enumerate(env.envs):
        context = each.unwrapped.context
        assert isinstance(context, dict)
        assert context == {"a": 1}
        assert context is not config.env_config
        place = (context.worker_index, context.vector_index, context.num_workers)
        assert place == (2, index, 4)


@pytest.mark.parametrize(
    ("env", "options", "key"),
    [
        (Drift, {"vectorization_mode": "vector_entry_point"}, "vectorization_mode"),
        ("CartPole-v1", {"autoreset_mode": "same_step"}, "autoreset_mode"),
        (lambda: sync_clocks([3, 4], "truncated", "next_step"), {}, "num_envs_per_worker"),
        (
            lambda: sync_clocks([3, 4, 5], "truncated", "next_step"),
            {"autoreset_mode": "disabled"},
            "autoreset_mode",
        ),
    ],
)
def test_unsupported_option_names_its_key(env: Any, options: dict[str, str], key: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{key}': got .*(allowed|agree)"):
        make_vector_env(resolve_env(env), rollout(env, **options))


def test_callable_may_make_a_vector_environment() -> None:
    def make() -> SyncVectorEnv:
        return sync_clocks([3, 4, 5], "truncated", "disabled")

    env = make_vector_env(make, rollout(make))
    assert autoreset_mode(env) == AutoresetMode.DISABLED
    assert probe_spaces(make, rollout(make)) == (spaces.Discrete(6), spaces.Discrete(2))
