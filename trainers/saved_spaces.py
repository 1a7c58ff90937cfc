"""Converts observation and action spaces to plain data for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.plain_data import DecodeError

_MOST_DISCRETE = 2**62


def describe_space(space: Space[Any]) -> dict[str, Any]:
    """Describes a space with arrays, numbers and strings. `space_of` makes the space from this
    description.

    Args:
        space: a Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of these.

    Raises:
        TypeError: the space, or a space in it, has a type that is not in this list.
    """
    if isinstance(space, spaces.Box):
        return {"type": "Box", "low": space.low, "high": space.high}
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return {
            "type": "Discrete",
            "n": int(space.n),
            "start": start,
            "dtype": np.dtype(space.dtype).name,
        }
    if isinstance(space, spaces.MultiDiscrete):
        dtype = np.dtype(space.dtype).name
        return {"type": "MultiDiscrete", "nvec": space.nvec, "start": space.start, "dtype": dtype}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "shape": list(space.shape)}
    if isinstance(space, spaces.Dict):
        # A list keeps the order of the space. Observations are flattened in this order.
        parts = [[key, describe_space(part)] for key, part in space.spaces.items()]
        return {"type": "Dict", "spaces": parts}
    if isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "spaces": [describe_space(part) for part in space.spaces]}
    raise TypeError(f"a checkpoint cannot contain the space {space}")


def space_of(description: Any, field: str) -> Space[Any]:
    """Returns the space that `describe_space` described.

    Args:
        description: a description from a checkpoint. It may come from an untrusted user.
        field: path of the description in the checkpoint, for messages.

    Raises:
        DecodeError: the description is not valid. The message names the field.
    """
    try:
        return _space_of(description, field)
    except RecursionError:
        raise DecodeError(f"field {field!r} is nested too deeply") from None
    except (KeyError, ValueError, TypeError, AssertionError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise DecodeError(
            f"field {field!r} is not a valid description of a space: {reason:.200}"
        ) from None


def _space_of(description: Any, field: str) -> Space[Any]:
    if not isinstance(description, Mapping):
        raise TypeError(f"got {description!r:.80}; allowed: a mapping")
    kind = description["type"]
    if kind == "Box":
        low, high = _array(description["low"]), _array(description["high"])
        if low.shape != high.shape or low.dtype != high.dtype:
            raise ValueError(
                f"the bounds are {low.dtype} {low.shape} and {high.dtype} {high.shape}"
            )
        return spaces.Box(low, high, low.shape, low.dtype.type)
    if kind == "Discrete":
        n, start = _integer(description["n"], 1), _integer(description["start"])
        return _with_dtype(spaces.Discrete, description["dtype"], n, start=start)
    if kind == "MultiDiscrete":
        nvec, starts = _array(description["nvec"]), _array(description["start"])
        if nvec.dtype.kind not in "iu" or starts.dtype.kind not in "iu":
            raise ValueError("the sizes or the starts are not integers")
        return _with_dtype(spaces.MultiDiscrete, description["dtype"], nvec, start=starts)
    if kind == "MultiBinary":
        shape = [_integer(size, 1) for size in description["shape"]]
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    if kind == "Dict":
        parts = {}
        for key, part in description["spaces"]:
            if not isinstance(key, str | int):
                raise TypeError(f"got a key {key!r:.80}")
            parts[key] = space_of(part, f"{field}/{key}")
        # `spaces.Dict` keeps the order of a list, but sorts the keys of a dict.
        return spaces.Dict(list(parts.items()))  # type: ignore[arg-type]
    if kind == "Tuple":
        return spaces.Tuple(
            [space_of(part, f"{field}/{i}") for i, part in enumerate(description["spaces"])]
        )
    raise ValueError(
        f"got type {kind!r:.80}; allowed: Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple"
    )


def _with_dtype(make: Any, name: Any, *args: Any, **options: Any) -> Space[Any]:
    # The argument `dtype` is left out for the default, because `Discrete` does not have this
    # argument in the first versions of Gymnasium 1.
    if name == "int64":
        return make(*args, **options)
    dtype = np.dtype(str(name))
    if dtype.kind not in "iu":
        raise ValueError(f"got dtype {name!r:.80}; allowed: integers")
    return make(*args, **options, dtype=dtype.type)


def _array(value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"got {value!r:.80}; allowed: an array")
    return value


def _integer(value: Any, least: int = -_MOST_DISCRETE) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST_DISCRETE:
        raise ValueError(f"got {value!r:.80}; allowed: an integer from {least} below 2**62")
    return value
