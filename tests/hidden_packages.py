"""Makes packages appear as not installed, and lists what environments then ask for."""

from __future__ import annotations

import sys
from typing import Any

import pytest

#: A module, an environment that imports it, and the message if the module is missing.
NEEDED = [
    ("mujoco", "HalfCheetah-v5", 'HalfCheetah-v5 needs MuJoCo: pip install "gymnasium[mujoco]"'),
    ("mujoco", "Ant-v4", 'Ant-v4 needs MuJoCo: pip install "gymnasium[mujoco]"'),
    (
        "Box2D",
        "LunarLander-v3",
        'LunarLander-v3 needs Box2D: pip install "gymnasium[box2d]"',
    ),
    ("jax", "phys2d/CartPole-v1", 'phys2d/CartPole-v1 needs jax: pip install "gymnasium[jax]"'),
    ("jax", "tabular/Blackjack-v0", 'tabular/Blackjack-v0 needs jax: pip install "gymnasium[jax]"'),
    (
        "shimmy",
        "GymV26Environment-v0",
        'GymV26Environment-v0 needs a package: pip install "shimmy[gym-v21]" or '
        'pip install "shimmy[gym-v26]"',
    ),
]


def hide(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Makes a module appear as not installed, and removes imported environments that need it."""
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith(
            ("gymnasium.envs.mujoco", "gymnasium.envs.box2d", "gymnasium.envs.phys2d")
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(module), *sys.meta_path])


class Hidden:
    """A module finder that hides one module."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == self.module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def without_swig(error: Exception) -> str:
    """Returns the message without the tool that some versions of Box2D need first."""
    return str(error).replace("pip install swig && ", "")
