"""Piecewise linear schedules over environment steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pydantic

_Points = float | list[tuple[int, float]]


def _check_points(value: Any) -> Any:
    """Checks a list of `[environment steps, value]` pairs. Their steps must increase. Returns other
    types as they are."""
    if not isinstance(value, list | tuple | bool):
        return value
    try:
        # bool is refused: in Python, True equals 1.
        pairs = [(_finite(step), _finite(number)) for step, number in value]  # type: ignore[union-attr]
    except (TypeError, ValueError, OverflowError):  # 10**400 does not fit a float
        pairs = []
    if not pairs:
        raise ValueError("a finite number, or a list of finite [environment steps, value] pairs")
    steps = [step for step, _ in pairs]
    if steps[-1] > 2**62:
        raise ValueError("environment steps of a schedule up to 2**62")
    if steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError("environment steps of a schedule that increase, from 0 on")
    return [(int(step), number) for step, number in pairs]


def _finite(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _between_0_and(largest: float) -> Callable[[_Points], _Points]:
    def check(value: _Points) -> _Points:
        values = [v for _, v in value] if isinstance(value, list) else [value]
        if min(values) < 0.0 or max(values) > largest:
            raise ValueError(f"numbers from 0 to {largest:g}")
        return value

    return check


#: A config value that is a number, or `[[environment steps, value], ...]`.
ScheduleValue = Annotated[
    float | list[tuple[int, float]],
    pydantic.BeforeValidator(_check_points),
    pydantic.AfterValidator(_between_0_and(1e6)),
]
#: A `ScheduleValue` for a learning rate. It is at most 10, because an update of Adam changes a
#: weight by about the learning rate.
LearningRate = Annotated[ScheduleValue, pydantic.AfterValidator(_between_0_and(10.0))]


class Schedule:
    """A value that depends on environment steps: constant, or linear between given points.

    It is constant before the first point and after the last one.

    Args:
        value: a number, or `[[environment steps, value], ...]` with increasing steps.
    """

    def __init__(self, value: float | list[tuple[int, float]]) -> None:
        points = [(0, float(value))] if isinstance(value, int | float) else value
        self._steps = [float(step) for step, _ in points]
        self._values = [float(v) for _, v in points]

    def __call__(self, env_steps: int) -> float:
        """The value after `env_steps` environment steps of all workers together."""
        if len(self._values) == 1:
            return self._values[0]
        return float(np.interp(env_steps, self._steps, self._values))
