"""Environments from ids, names, modules and callables."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from checkpoint_helpers import trainer
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers.vector import NormalizeObservation
from sampling_helpers import rollout
from toy_envs import (
    AUTORESET,
    Drift,
    sync_clocks,
)

from polopt.common.config import ConfigError
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.envs.env_sources import EnvContext, call_creator, resolve_env
from polopt.rollouts.envs.vector_env import autoreset_mode, make_vector_env, probe_env
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig


def test_gymnasium_id_uses_its_own_vector() -> None:
    source = resolve_env("CartPole-v1")
    env = make_vector_env(source, rollout("CartPole-v1"))
    assert type(env.unwrapped).__name__ == "CartPoleVectorEnv"
    assert env.num_envs == 3
    assert autoreset_mode(env) == AutoresetMode.NEXT_STEP
    # The spaces are the spaces of the environments that workers make.
    observations, actions = probe_env(source, rollout("CartPole-v1"))[:2]
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
    # Gymnasium writes the mode into metadata that all instances of the class share.
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
    spec = gymnasium.registry.pop(registered)  # another process has no registration of the id
    try:
        batch = worker_of_source(source).sample()
    finally:
        gymnasium.registry[registered] = spec
    # The time limit of the registered spec applies.
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
    del gymnasium.registry[name]  # a worker has not imported the module
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
    with pytest.raises(ConfigError, match="does not import a module that only a saved config"):
        resolve_env(f"evilmod:{name}", allow_import=False)


def test_registered_id_needs_no_import_of_its_module() -> None:
    source = resolve_env("evilmod:CartPole-v1", allow_import=False)
    assert source == gymnasium.spec("CartPole-v1")


def test_attribute_of_loaded_module_needs_permission() -> None:
    with pytest.raises(ConfigError, match="does not import a module that only a saved config"):
        resolve_env("os:getcwd", allow_import=False)


def worker_of_source(source: Any) -> RolloutWorker:
    config = rollout("unused", rollout_fragment_length=30)
    policy = A2CPolicy.config_class.parse({})
    made = WorkerConfig(config, source, A2CPolicy, policy, *probe_env(source, config)[:2], seed=0)
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
        resolve_env("os:ALE/NoSuchGame-v5")  # the user names a module, so no module is suggested


@pytest.mark.parametrize("returned", [None, gymnasium.Env, spaces.Discrete(2)])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_callable_that_makes_no_environment_is_one_error(
    returned: Any, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return returned

    with pytest.raises(ConfigError, match=r"^key 'env': .*: TypeError: the callable must return"):
        probe_env(make, rollout(make, num_workers=num_workers))[:2]
    assert caplog.messages == []  # polopt does not try to close an object without `close`


@pytest.mark.parametrize("given", [None, 3, ["CartPole-v1"]])
def test_value_that_is_no_environment_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"key 'env': got .*allowed: a Gymnasium id"):
        resolve_env(given)


class TakesConfig:
    """A creator of environments that stores its argument."""

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
        (lambda size, speed: TakesKeywords(size, speed), (4, 2.0)),
        (lambda size, speed=0.0: TakesKeywords(size, speed), (4, 2.0)),
        (lambda speed, size=0: TakesKeywords(size, speed), (4, 2.0)),
        (lambda size, **others: TakesKeywords(size, others["speed"]), (4, 2.0)),
        (lambda config, speed=0.0: TakesConfig(config), CONTEXT),
        (lambda config, **others: TakesConfig(config), CONTEXT),
        (lambda anything, speed=0.0: TakesConfig(anything), CONTEXT),
        (lambda size: TakesConfig(size), CONTEXT),  # there is no parameter for the key `speed`
        (lambda size, /: TakesConfig(size), CONTEXT),
        (functools.partial(lambda more, anything: TakesConfig(anything), 3), CONTEXT),
    ],
)
def test_creator_is_called_by_its_signature(creator: Callable[..., Any], got: Any) -> None:
    assert call_creator(creator, CONTEXT).got == got


@pytest.mark.parametrize("creator", [TakesNothing, lambda: TakesNothing()])
def test_creator_without_parameters_gets_none(creator: Callable[..., Any]) -> None:
    assert call_creator(creator, EnvContext({}, 0, 0, 0)).got == "nothing"


def annotated(size: EnvContext, speed: float = 0.0) -> TakesConfig:
    return TakesConfig(size)


def annotated_by_others(given: Any = None) -> TakesConfig:
    return TakesConfig(given)


annotated_by_others.__annotations__["given"] = "ray.rllib.env.EnvContext | None"


@pytest.mark.parametrize("creator", [annotated, annotated_by_others])
def test_annotated_parameter_gets_the_context(creator: Callable[..., Any]) -> None:
    assert call_creator(creator, CONTEXT).got is CONTEXT


@pytest.mark.parametrize(
    ("creator", "config", "got"),
    [
        (lambda df: TakesConfig(df), {"df": 1}, 1),
        (lambda df: TakesConfig(df), {"data": 1}, {"data": 1}),
        (lambda config: TakesConfig(config), {"config": 1}, {"config": 1}),
        (lambda config, mode=None: TakesConfig((config, mode)), {"config": 1, "mode": 2}, (1, 2)),
        (lambda config=None, mode=None: TakesConfig(config), {"config": 1}, 1),
        (lambda config, mode=None: TakesConfig(config), {"config": 1, "more": 2}, None),
    ],
)
def test_key_with_the_name_of_the_first_parameter(
    creator: Callable[..., Any], config: dict[str, Any], got: Any
) -> None:
    expected = config if got is None else got
    assert call_creator(creator, EnvContext(config, 0, 0, 0)).got == expected


def test_key_that_does_not_fit_is_named() -> None:
    with pytest.raises(TypeError, match="'widow'"):
        call_creator(lambda df, window=5: None, EnvContext({"df": 1, "widow": 7}, 0, 0, 0))
    with pytest.raises(TypeError, match="'window'"):
        call_creator(lambda df, window: None, EnvContext({"df": 1}, 0, 0, 0))


class Changes(Drift):
    """An environment that changes its config."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        config["names"].append("x")
        config["options"].pop("length")


class ChangesKeywords(Drift):
    def __init__(self, names: list[str], options: dict[str, int], lock: Any = None) -> None:
        super().__init__(names)
        names.append("x")
        options.pop("length")


@pytest.mark.parametrize("mode", [None, "async"])
@pytest.mark.parametrize("env", [Changes, ChangesKeywords, "registered"])
def test_each_environment_has_its_own_config(env: Any, mode: str | None) -> None:
    name = "PoloptChanges-v0"
    gymnasium.register(name, entry_point=ChangesKeywords)
    # It cannot be copied. A process that is not forked (Python 3.14) cannot get it.
    lock = None if mode and sys.version_info >= (3, 14) else threading.Lock()
    given = {"names": ["a"], "options": {"length": 3}, "lock": lock}
    try:
        source = name if env == "registered" else env
        config = rollout(source, env_config=given, vectorization_mode=mode)
        made = make_vector_env(resolve_env(source), config)
        made.close()
        probe_env(resolve_env(source), config)[:2]
    finally:
        del gymnasium.registry[name]
    assert given == {"names": ["a"], "options": {"length": 3}, "lock": lock}
    if isinstance(made, SyncVectorEnv) and env is Changes:
        for each in made.envs:
            assert each.unwrapped.context["names"] == ["a", "x"]
            assert each.unwrapped.context["lock"] is lock


def test_environment_that_is_made_again_has_the_config_as_given() -> None:
    class Fails(Changes):
        def step(self, action: int) -> Any:
            raise RuntimeError

    config = rollout(Fails, env_config={"names": [], "options": {"length": 3}})
    env = make_vector_env(Fails, config)
    assert isinstance(env, SyncVectorEnv)
    env.reset(seed=0)
    for _ in range(3):
        env.step(np.zeros(3, dtype=int))
    assert env.envs[0].unwrapped.context["names"] == ["x"]


def test_trainer_shares_what_cannot_be_copied() -> None:
    lock = threading.Lock()
    made = trainer(env=Changes, env_config={"names": [], "options": {"length": 1}, "lock": lock})
    made.train()
    assert made.workers.local.sampler.env.envs[1].unwrapped.context["lock"] is lock
    made.stop()


#: A script that makes a source in one process and uses it in another process.
_SCRIPT = """
import subprocess, sys
import gymnasium
import numpy as np
from gymnasium import spaces
from ray import cloudpickle

from polopt.rollouts.envs.env_sources import env_name, resolve_env

class Env(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)
    def __init__(self, length): self.length = length
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}

class Wrapper(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    def __init__(self, env, size=1):
        gymnasium.utils.RecordConstructorArgs.__init__(self, size=size)
        super().__init__(env)
        self.size = size

gymnasium.register("Main-v0", entry_point="__main__:Env")
wrapped = gymnasium.envs.registration.WrapperSpec("Wrapper", "__main__:Wrapper", {"size": 7})
gymnasium.register("Wrapped-v0", entry_point="__main__:Env", additional_wrappers=(wrapped,))
sources = [resolve_env(name) for name in ("Main-v0", "Wrapped-v0", "__main__:Env")]
sources.append(resolve_env(gymnasium.spec("Main-v0")))
assert [env_name(source) for source in sources] == ["Main-v0", "Wrapped-v0", "Env", "Main-v0"]
loads = '''
import sys
from ray import cloudpickle
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig
sources = cloudpickle.load(sys.stdin.buffer)
for source in sources:
    config = RolloutConfig.parse({"env_config": {"length": 4}, "num_envs_per_worker": 2})
    env = make_vector_env(source, config)
    env.reset(seed=1)
    one = env.envs[0]
    size = one.get_wrapper_attr("size") if one.has_wrapper_attr("size") else 0
    print(one.unwrapped.length, size)
'''
subprocess.run([sys.executable, "-c", loads], input=cloudpickle.dumps(sources), check=True)
"""


def test_entry_points_of_main_reach_other_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 0", "4 7", "4 0", "4 0"]


def test_entry_point_that_main_lacks_is_left_as_it_is() -> None:
    source = resolve_env(EnvSpec("Lacks-v0", entry_point="__main__:NoSuchName"))
    assert isinstance(source, EnvSpec)
    assert source.entry_point == "__main__:NoSuchName"


@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lambda: gymnasium.make("CartPole-v1"), r"gymnasium.make\('CartPole-v1'\)$"),
        (
            lambda: gymnasium.make_vec("CartPole-v1", 2),
            r"gymnasium.make_vec\('CartPole-v1', num_envs=2\) with 'num_envs_per_worker': 2$",
        ),
        (lambda: gymnasium.make_vec("Pendulum-v1", 2), r"make_vec\('Pendulum-v1', num_envs=2\)"),
        (lambda: SyncVectorEnv([Drift] * 3), r"with 'num_envs_per_worker': 3$"),
        (Drift, r"its class, or a function, as in 'env': lambda config: Drift\(...\)$"),
    ],
)
def test_environment_that_is_made_already_is_refused(make: Any, instead: str) -> None:
    env = make()
    for refuse in (resolve_env, lambda given: trainer(env=given)):
        with pytest.raises(ConfigError, match=f"^key 'env': got an environment .*{instead}"):
            refuse(env)
    env.close()


def test_environment_that_is_refused_is_not_copied() -> None:
    """A copy of an `AsyncVectorEnv` closes the pipes of the original."""

    env = gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="async")
    with pytest.raises(ConfigError, match="made already"):
        trainer(env=env)
    gc.collect()
    env.reset(seed=1)
    env.close()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_wrapper_that_refuses_the_mode_of_its_vector_is_named(mode: AutoresetMode) -> None:
    def make(config: Any) -> Any:
        return NormalizeObservation(SyncVectorEnv([Drift] * 2, autoreset_mode=mode))

    said = rf"NormalizeObservation cannot wrap a vector in autoreset mode '{mode.value}'"
    with pytest.raises(ConfigError, match=said):
        probe_env(make, rollout(make))[:2]


def test_error_without_a_text_has_its_line() -> None:
    def make() -> None:
        raise NotImplementedError

    with pytest.raises(ConfigError, match=r": NotImplementedError in .*: raise NotImplement"):
        probe_env(make, rollout(make))[:2]


def test_error_shortens_the_values_of_env_config() -> None:
    config = {"table": np.arange(500).reshape(-1, 2), "text": "a" * 500, "list": [1] * 500, "n": 7}
    with pytest.raises(ConfigError, match=r"'n': 7\}: KeyError: 'missing'$") as raised:
        probe_env(lambda c: c["missing"], rollout(lambda c: None, env_config=config))[:2]
    assert len(str(raised.value)) < 500
    assert "\n" not in str(raised.value)


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
    assert probe_env(make, rollout(make))[:2] == (spaces.Discrete(6), spaces.Discrete(2))
