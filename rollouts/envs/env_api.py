"""Checks that the results of `reset` and `step` conform to Gymnasium's API."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.rollouts.envs.env_errors import APIViolation

#: The concrete types come first, because `isinstance` with an abstract class is slow.
_NUMBERS = (float, int, np.floating, numbers.Real)
_BOOLEANS = (bool, np.bool_, int, np.integer)
#: Types of rewards that need no check.
PLAIN_NUMBERS = frozenset({float, int, bool, np.float32, np.float64, np.int64})
#: For these spaces, a batch of observations or actions is an array with one row for each of them.
ARRAY_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_reset(result: Any, space: Space[Any]) -> None:
    """Checks the result of `reset`.

    Raises:
        APIViolation: if the result is not a pair `(observation, info)`, the observation does not
            match `space` (see `check_observation`), or `info` is not a dict.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise APIViolation(
            f"reset() must return a pair (observation, info); got {described_value(result)}"
        )
    check_observation(result[0], space, "reset()")
    if not isinstance(result[1], dict):
        raise APIViolation(f"reset() must return a dict as info; got {described_value(result[1])}")


def check_step(result: Any, space: Space[Any]) -> None:
    """Checks the result of `step`.

    Raises:
        APIViolation: if the result is not a tuple of five values, the observation does not match
            `space` (see `check_observation`), the reward is not one number, `terminated` or
            `truncated` is neither a boolean nor an integer, or `info` is not a dict.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise APIViolation(
            "step() must return five values (observation, reward, terminated, truncated, info); "
            f"got {described_value(result)}"
        )
    observation, reward, terminated, truncated, info = result
    check_observation(observation, space, "step()")
    reward_of(reward)
    check_flag("terminated", terminated)
    check_flag("truncated", truncated)
    if not isinstance(info, dict):
        raise APIViolation(f"step() must return a dict as info; got {described_value(info)}")


def check_flag(name: str, value: Any) -> None:
    """Checks that a flag of a step is a boolean or an integer.

    Raises:
        APIViolation: if it is neither. The message contains `name`.
    """
    if not isinstance(value, _BOOLEANS):
        raise APIViolation(f"step() must return a boolean as {name}; got {described_value(value)}")


def reward_of(reward: Any) -> float:
    """Returns the reward of a step as a float. The reward may be a NumPy array of one number,
    because many environments compute rewards with NumPy.

    Raises:
        APIViolation: if the reward is not one number.
    """
    if isinstance(reward, _NUMBERS):
        return float(reward)
    if isinstance(reward, np.ndarray) and reward.size == 1 and reward.dtype.kind in "biuf":
        return float(reward.item())
    raise APIViolation(f"step() must return a number as reward; got {described_value(reward)}")


def check_observation(observation: Any, space: Space[Any], where: str) -> None:
    """Checks the shape and dtype of an observation, and the range of integers that encode
    categories. The bounds of a Box are not checked, because many environments exceed these bounds
    slightly.

    Args:
        observation: the observation of one environment, or a batch of observations.
        space: the space of the observation. For a batch, the batched space.
        where: the start of the error message.

    Raises:
        APIViolation: if the observation does not match the space. The message names the part of the
            observation that is wrong.
    """
    if isinstance(space, spaces.Box):  # checked first: `isinstance` is slow for some other types
        _check_array(observation, space, where)
    elif isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or observation.keys() != space.spaces.keys():
            raise APIViolation(
                f"{where} must return an observation with keys {list(space.spaces)}; "
                f"got {described_value(observation)}"
            )
        for key, part in space.spaces.items():
            check_observation(observation[key], part, f"{where}, at {key!r},")
    elif isinstance(space, spaces.Tuple):
        # Gymnasium also accepts a list or an array in place of a tuple.
        sequence = isinstance(observation, tuple | list | np.ndarray)
        if not sequence or len(observation) != len(space.spaces):
            raise APIViolation(
                f"{where} must return an observation of {len(space.spaces)} parts; "
                f"got {described_value(observation)}"
            )
        for index, part in enumerate(space.spaces):
            check_observation(observation[index], part, f"{where}, at {index},")
    else:
        _check_array(observation, space, where)


def range_check(space: Space[Any]) -> Callable[[Any], bool] | None:
    """Makes a fast function that checks whether the integers in an observation are in their space.

    Returns:
        a function that takes an observation of the right type and returns a boolean. `None` if the
        space contains no Discrete or MultiDiscrete space. If a Dict or Tuple space contains one,
        the function always returns False, and the caller must use `check_observation` instead.
    """
    if isinstance(space, spaces.Box):
        return None
    if isinstance(space, spaces.Discrete):
        low, end = int(space.start), int(space.start + space.n)
        return lambda observation: low <= observation < end
    if isinstance(space, spaces.MultiDiscrete):
        start, stop = space.start, space.start + space.nvec
        return lambda values: bool(((start <= values) & (values < stop)).all())
    parts: list[Space[Any]] = []
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        parts = list(space.spaces)
    return (lambda _: False) if any(map(range_check, parts)) else None


def same_encoding(space: Space[Any], other: Space[Any]) -> bool:
    """Returns whether a policy that was made for `other` works with `space`. The bounds of a Box
    may differ."""
    if isinstance(space, spaces.Box) and isinstance(other, spaces.Box):
        return (space.shape, space.dtype) == (other.shape, other.dtype)
    if isinstance(space, spaces.Dict) and isinstance(other, spaces.Dict):
        return list(space.spaces) == list(other.spaces) and all(
            same_encoding(space.spaces[key], other.spaces[key]) for key in space.spaces
        )
    if isinstance(space, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(space.spaces) == len(other.spaces) and all(
            map(same_encoding, space.spaces, other.spaces)
        )
    return bool(space == other)


def space_that_differs(
    found: tuple[Space[Any], Space[Any]],
    expected: tuple[Space[Any], Space[Any]],
    action_bounds: bool = True,
) -> str:
    """Returns which space of an environment does not fit a policy: `observation` or `action`.
    Returns an empty string if both fit. The bounds of observations may differ.

    Args:
        found: the observation space and the action space of one environment.
        expected: the spaces for which the policy was made.
        action_bounds: whether the bounds of actions must be equal.
    """
    if not same_encoding(found[0], expected[0]):
        return "observation"
    fits = found[1] == expected[1] if action_bounds else same_encoding(found[1], expected[1])
    return "" if fits else "action"


def _check_array(observation: Any, space: Space[Any], where: str) -> None:
    kind = (space.dtype, space.shape)
    if not isinstance(observation, np.ndarray) or (observation.dtype, observation.shape) != kind:
        _check_kind(observation, space, where)
    in_range = range_check(space)
    if in_range is not None and not in_range(np.asarray(observation)):
        raise APIViolation(
            f"{where} must return an observation of {space}; got {described_value(observation)}"
        )


def _check_kind(observation: Any, space: Space[Any], where: str) -> None:
    try:
        array = np.asarray(observation)
    except ValueError:  # a ragged list
        raise APIViolation(
            f"{where} must return an observation of shape {space.shape}; "
            f"got {described_value(observation)}"
        ) from None
    if array.shape != space.shape:
        raise APIViolation(
            f"{where} must return an observation of shape {space.shape}; got shape {array.shape}"
        )
    # Float64 instead of float32 is common and harmless. A float instead of an integer is an error.
    if space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise APIViolation(
            f"{where} must return an observation of dtype {space.dtype}; got dtype {array.dtype}"
        )


def described_value(value: Any) -> str:
    """Returns a value and its type for an error message."""
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
