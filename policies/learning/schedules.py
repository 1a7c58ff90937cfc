"""Piecewise linear schedules over environment steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic

_Points = float | list[tuple[int, float]]


def _check_points(value: Any) -> Any:
    """Checks that a list consists of `[environment steps, value]` pairs whose steps increase.
    Refuses a bool. Returns other values unchanged."""
    if not isinstance(value, list | tuple | bool):
        return value
    try:
        # `_finite` refuses a bool, which Python would otherwise accept as 0 or 1.
        pairs = [(_finite(step), _finite(number)) for step, number in value]  # type: ignore[union-attr]
    except (TypeError, ValueError, OverflowError):  # float(10**400) raises OverflowError
        pairs = []
    if not pairs:
        raise ValueError("a finite number, or a list of finite [environment steps, value] pairs")
    steps = [step for step, _ in pairs]
    if steps[-1] > 2**62:
        raise ValueError("environment steps of a schedule up to 2**62")
    if steps[0] < 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError("environment steps of a schedule that are not negative and increase")
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


def _described(largest: float) -> Any:
    return pydantic.Field(
        description=f"a number from 0 to {largest:,g}, or a schedule [[environment steps, number], "
        "...], whose steps increase"
    )


_POINTS = pydantic.BeforeValidator(_check_points)
#: A config value that is a number, or `[[environment steps, value], ...]`.
ScheduleValue = Annotated[
    float | list[tuple[int, float]],
    _POINTS,
    pydantic.AfterValidator(_between_0_and(1e6)),
    _described(1e6),
]
#: A `ScheduleValue` for a probability.
ProbabilitySchedule = Annotated[
    float | list[tuple[int, float]],
    _POINTS,
    pydantic.AfterValidator(_between_0_and(1.0)),
    _described(1.0),
]
#: A `ScheduleValue` for a learning rate, from 0 to 10. An update of Adam changes a weight by about
#: the learning rate, so larger learning rates are not useful.
LearningRate = Annotated[
    float | list[tuple[int, float]],
    _POINTS,
    pydantic.AfterValidator(_between_0_and(10.0)),
    _described(10.0),
]


class Schedule:
    """A number that depends on the environment steps. The number is a constant, or piecewise linear
    between given points.

    Before the first point and after the last point, the number is constant.

    Args:
        value: a number, or `[[environment steps, value], ...]` with increasing steps.
    """

    def __init__(self, value: float | list[tuple[int, float]]) -> None:
        self._steps: Sequence[float] = (0.0,)
        self._values: Sequence[float]
        if isinstance(value, int | float):  # quick, because a constant is made for each minibatch
            self._values = (float(value),)
        else:
            self._steps = [float(step) for step, _ in value]
            self._values = [float(v) for _, v in value]

    @property
    def is_zero(self) -> bool:
        """Whether the number is always 0."""
        return not any(self._values)

    def __call__(self, env_steps: int) -> float:
        """The value after `env_steps` environment steps of all workers together."""
        if len(self._values) == 1:
            return self._values[0]
        return float(np.interp(env_steps, self._steps, self._values))
