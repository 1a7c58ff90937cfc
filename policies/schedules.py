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
    """A number from 0 on, or `[environment steps, value]` pairs with rising steps."""
    if not isinstance(value, list | tuple | bool):
        return value
    try:
        # bool is refused because Python counts True as 1.
        pairs = [(_finite(step), _finite(number)) for step, number in value]  # type: ignore[union-attr]
    except (TypeError, ValueError, OverflowError):  # 10**400 is no float
        pairs = []
    if not pairs:
        raise ValueError("a finite number, or a list of [environment steps, value] pairs of those")
    steps = [step for step, _ in pairs]
    if steps[-1] > 2**62:
        raise ValueError("environment steps of a schedule up to 2**62")
    if steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError("environment steps of a schedule that rise, from 0 on")
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
#: Likewise; Adam moves each weight by about so much with each update.
LearningRate = Annotated[ScheduleValue, pydantic.AfterValidator(_between_0_and(10.0))]


class Schedule:
    """Value at an environment step: constant, or linear between the points given and constant
    before the first and after the last.

    Args:
        value: a number, or `[[environment steps, value], ...]` with rising steps.
    """

    def __init__(self, value: float | list[tuple[int, float]]) -> None:
        points = [(0, float(value))] if isinstance(value, int | float) else value
        self._steps = [float(step) for step, _ in points]
        self._values = [float(v) for _, v in points]

    def __call__(self, env_steps: int) -> float:
        """The value after `env_steps` environment steps, summed over all workers."""
        if len(self._values) == 1:
            return self._values[0]
        return float(np.interp(env_steps, self._steps, self._values))
