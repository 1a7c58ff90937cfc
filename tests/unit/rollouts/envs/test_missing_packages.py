"""If an environment needs a missing package, one line gives the command that installs it."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.error import DependencyNotInstalled
from hidden_packages import NEEDED, hide, without_swig

import polopt
from polopt.common.config import ConfigError
from polopt.rollouts.envs import env_errors
from polopt.rollouts.envs.env_errors import missing_package
from polopt.rollouts.envs.env_sources import resolve_env

SMALL = {"num_workers": 0, "num_envs_per_worker": 1, "rollout_fragment_length": 8}


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))


@pytest.mark.parametrize(("module", "env", "said"), NEEDED)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_trainer_says_what_to_install(
    module: str, env: str, said: str, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, module)
    with pytest.raises(ConfigError) as caught:
        polopt.SyncPPO(env=env, **{**SMALL, "num_workers": num_workers})
    assert without_swig(caught.value) == said


def test_callable_environment_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_cheetah() -> Any:
        return gymnasium.make("HalfCheetah-v5")

    hide(monkeypatch, "mujoco")
    with pytest.raises(ConfigError) as caught:
        polopt.SyncPPO(env=make_cheetah, **SMALL)
    assert str(caught.value) == 'make_cheetah needs MuJoCo: pip install "gymnasium[mujoco]"'
    with pytest.raises(ConfigError, match=r"^the environment needs MuJoCo: pip install "):
        polopt.SyncPPO(env=lambda: make_cheetah(), **SMALL)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_window_needs_pygame_before_workers_start(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a mode, CartPole's own vector implementation is used, which shows no window.
    hide(monkeypatch, "pygame")
    options = {**SMALL, "env_config": {"render_mode": "human"}, "vectorization_mode": mode}
    for env, extra in (("CartPole-v1", "classic-control"), ("FrozenLake-v1", "toy-text")):
        with pytest.raises(ConfigError) as caught:
            polopt.SyncPPO(env=env, **{**options, "num_workers": 2})
        said = str(caught.value).replace("_", "-")
        assert said == f'{env} needs pygame: pip install "gymnasium[{extra}]"'


@pytest.mark.parametrize(
    "env", ["ALE/Nothing-v5", "NothingNoFrameskip-v4", "NothingDeterministic-v4"]
)
def test_atari_without_its_package(env: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"did you mean 'ale_py:{env}'"):
        resolve_env(env)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for allow_import in (True, False):
        with pytest.raises(ConfigError) as caught:
            resolve_env(env, allow_import)
        assert str(caught.value) == f'{env} needs ale_py: pip install "gymnasium[atari]"'
    hide(monkeypatch, "ale_py")
    with pytest.raises(ConfigError, match=r'v\d needs ale_py: pip install "gymnasium\[atari\]"$'):
        resolve_env(f"ale_py:{env}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            DependencyNotInstalled(
                'opencv-python package not installed, run `pip install "gymnasium[other]"` to get '
                "dependencies for atari"
            ),
            'X-v0 needs opencv-python: pip install "gymnasium[other]"',
        ),
        (
            DependencyNotInstalled(
                "Array API packages are not installed therefore cannot call `array_conversion`, "
                'run `pip install "gymnasium[array-api]"`'
            ),
            'X-v0 needs Array API: pip install "gymnasium[array-api]"',
        ),
        (
            ModuleNotFoundError("No module named 'cv2.dnn'", name="cv2.dnn"),
            'X-v0 needs cv2: pip install "gymnasium[other]"',
        ),
        (
            DependencyNotInstalled("`Pusher-v4` is only supported on `mujoco<3`"),
            "X-v0 cannot be used: `Pusher-v4` is only supported on `mujoco<3`",
        ),
        (
            DependencyNotInstalled(
                "Box2D is not installed, you can install it by run `pip install swig` followed by "
                '`pip install "gymnasium[box2d]"`'
            ),
            'X-v0 needs Box2D: pip install swig && pip install "gymnasium[box2d]"',
        ),
        (ModuleNotFoundError("No module named 'mine'", name="mine"), None),
        (ImportError("cannot import name 'a' from 'mujoco'", name="mujoco"), None),
        (ValueError("run `pip install this`"), None),
        (None, None),
    ],
)
def test_line_of_each_kind_of_error(error: Exception | None, said: str | None) -> None:
    assert missing_package(error, "X-v0") == said


def test_extras_are_those_of_gymnasium() -> None:
    extras = metadata.metadata("gymnasium").get_all("Provides-Extra") or []
    normal = {extra.replace("_", "-") for extra in extras}
    assert set(env_errors._EXTRAS.values()) <= normal


def test_id_that_has_moved_is_one_short_line() -> None:
    with pytest.raises(ConfigError, match=r"ImportError: The mujoco v2 and v3 based") as caught:
        polopt.SyncPPO(env="HalfCheetah-v3", **SMALL)
    assert "Traceback" not in str(caught.value)


class LaterCartPole(CartPoleEnv):
    """An environment that needs a package in its third step."""

    def step(self, action: Any) -> Any:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            raise DependencyNotInstalled('Foo is not installed, run `pip install "foo"`')
        return super().step(np.int64(action))


def test_package_that_a_step_needs_ends_the_run_at_once() -> None:
    trainer = polopt.SyncPPO(env=LaterCartPole, **SMALL)
    try:
        with pytest.raises(RuntimeError, match=r'^LaterCartPole needs Foo: pip install "foo"'):
            trainer.train()
    finally:
        trainer.stop()
