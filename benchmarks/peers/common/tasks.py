"""Environments that several systems share, and for which Gymnasium has no id."""

from __future__ import annotations

from typing import Any

import gymnasium

BREAKOUT = "MinAtar/Breakout-v1"


def make_breakout(**options: Any) -> gymnasium.Env[Any, Any]:
    """Makes MinAtar's Breakout (Young and Tian, 2019) with its minimal set of actions.
    Observations are images `[10, 10, 4]` of bool.

    Args:
        options: options of `gymnasium.make`.
    """
    from minatar.gym import register_envs

    if BREAKOUT not in gymnasium.registry:
        register_envs()
    return gymnasium.make(BREAKOUT, **options)
