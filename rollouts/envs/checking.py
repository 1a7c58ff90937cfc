"""What Gymnasium's API promises of `reset` and `step`, checked; errors name who broke it."""

from __future__ import annotations

import inspect
import numbers
import os
import traceback
from types import TracebackType
from typing import Any

import numpy as np
from gymnasium import Space, spaces

_ROLLOUTS = os.path.dirname(os.path.dirname(__file__))
_formatted: dict[Any, str] = {}  # tracebacks by what they are made of
_MOST_REMEMBERED = 20
#: The first ones are here because the last one takes long to say so.
_NUMBERS = (float, int, np.floating, numbers.Real)
_BOOLEANS = (bool, np.bool_, int, np.integer)


class EnvironmentFailedError(RuntimeError):
    """An environment failed over and over; the message names it, its worker and its step, and ends
    with the environment's own traceback."""


class EnvironmentAPIError(EnvironmentFailedError):
    """An environment breaks Gymnasium's API over and over; the message says how."""


class BrokenAPI(TypeError):
    """One result of an environment that Gymnasium's API does not allow."""


def check_reset(result: Any, space: Space[Any]) -> None:
    """Refuses what `reset` must not return.

    Raises:
        BrokenAPI: no pair `(observation, info)`, or an observation that is not of `space`.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise BrokenAPI(f"reset() must return a pair (observation, info); got {_described(result)}")
    check_observation(result[0], space, "reset()")
    if not isinstance(result[1], dict):
        raise BrokenAPI(f"reset() must return a dict as info; got {_described(result[1])}")


def check_step(result: Any, space: Space[Any]) -> None:
    """Refuses what `step` must not return.

    Raises:
        BrokenAPI: no five-tuple, an observation that is not of `space`, a reward that is no
            number, or ends that are no booleans.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise BrokenAPI(
            "step() must return five values (observation, reward, terminated, truncated, info); "
            f"got {_described(result)}"
        )
    observation, reward, terminated, truncated, info = result
    check_observation(observation, space, "step()")
    if not _is_number(reward):
        raise BrokenAPI(f"step() must return a number as reward; got {_described(reward)}")
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(value, _BOOLEANS):
            raise BrokenAPI(f"step() must return a boolean as {name}; got {_described(value)}")
    if not isinstance(info, dict):
        raise BrokenAPI(f"step() must return a dict as info; got {_described(info)}")


def check_observation(observation: Any, space: Space[Any], where: str) -> None:
    """Refuses an observation of another shape or kind than the space's. Whether it lies within
    the space's bounds is not asked: many environments leave them by a little.

    Raises:
        BrokenAPI: it says which part of the observation is wrong.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(observation, dict) or observation.keys() != space.spaces.keys():
            raise BrokenAPI(
                f"{where} must return an observation with keys {list(space.spaces)}; "
                f"got {_described(observation)}"
            )
        for key, part in space.spaces.items():
            check_observation(observation[key], part, f"{where}, at {key!r},")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(observation, tuple) or len(observation) != len(space.spaces):
            raise BrokenAPI(
                f"{where} must return an observation of {len(space.spaces)} parts; "
                f"got {_described(observation)}"
            )
        for index, part in enumerate(space.spaces):
            check_observation(observation[index], part, f"{where}, at {index},")
    else:
        _check_array(observation, space, where)


def _check_array(observation: Any, space: Space[Any], where: str) -> None:
    kind = (space.dtype, space.shape)
    if isinstance(observation, np.ndarray) and (observation.dtype, observation.shape) == kind:
        return  # as nearly all are
    try:
        array = np.asarray(observation)
    except ValueError:  # a ragged list
        raise BrokenAPI(
            f"{where} must return an observation of shape {space.shape}; "
            f"got {_described(observation)}"
        ) from None
    if array.shape != space.shape:
        raise BrokenAPI(
            f"{where} must return an observation of shape {space.shape}; got shape {array.shape}"
        )
    # Float64 for float32 is common and harmless; a float for an integer is neither.
    if space.dtype is not None and not np.can_cast(array.dtype, space.dtype, "same_kind"):
        raise BrokenAPI(
            f"{where} must return an observation of dtype {space.dtype}; got dtype {array.dtype}"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, _NUMBERS):
        return True
    return isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf"


def _described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def traceback_of(error: BaseException, env: Any = None, method: str = "step") -> str:
    """The traceback from the environment's own code on; where there is none, because a result is
    wrong that was returned without an exception, the place where `method` is defined.

    Args:
        error: whose frames in this folder, as far as they come first, are left out.
        env: that returned the wrong result.
        method: that returned it.
    """
    if isinstance(error, BrokenAPI):
        return f"{_definition(env, method)}{type(error).__name__}: {error}"
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames):
        frames = frames.tb_next
    if error.__cause__ is not None or error.__context__ is not None:
        return "".join(traceback.format_exception(type(error), error, frames)).strip()
    # An environment that fails often mostly does so in the same way, and this takes long.
    lines = [(frame.f_code, line) for frame, line in traceback.walk_tb(frames)]
    key = (type(error), str(error), *lines)
    if key not in _formatted:
        if len(_formatted) >= _MOST_REMEMBERED:
            _formatted.clear()
        _formatted[key] = "".join(traceback.format_exception(type(error), error, frames)).strip()
    return _formatted[key]


def _is_ours(frames: TracebackType) -> bool:
    return os.path.dirname(os.path.dirname(frames.tb_frame.f_code.co_filename)) == _ROLLOUTS


def _definition(env: Any, method: str) -> str:
    code = getattr(getattr(type(getattr(env, "unwrapped", env)), method, None), "__code__", None)
    if code is None:
        return ""
    where = inspect.getfile(code)
    return f'  File "{where}", line {code.co_firstlineno}, in {code.co_name}\n'
