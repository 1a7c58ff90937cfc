"""`ObservationEncoder`: converts observations of a space to arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"


class ObservationEncoder:
    """Converts observations of a vector environment to one array.

    Observations of a Box keep the shape of the space. They also get the dtype of the space, even if
    the environment returns another dtype. So images of a uint8 space are stored and sent as uint8.
    Observations of other spaces become float32 vectors, as with
    `gymnasium.spaces.utils.flatten`.

    Args:
        space: observation space of one environment.

    Attributes:
        space: the argument.
        shape: shape of one encoded observation.
        dtype: dtype of one encoded observation.

    Raises:
        ConfigError: the space is not one of `SUPPORTED_OBSERVATIONS`, or it is empty.
    """

    def __init__(self, space: Space[Any]) -> None:
        _check(space, space)
        if spaces.utils.flatdim(space) == 0:
            raise ConfigError(
                f"observation space {space} is empty. Allowed: {SUPPORTED_OBSERVATIONS} with at "
                "least one element"
            )
        self.space = space
        if isinstance(space, spaces.Box):
            self.shape, self.dtype = tuple(space.shape), np.dtype(space.dtype)
        else:
            self.shape = (int(spaces.utils.flatdim(space)),)
            self.dtype = np.dtype(np.float32)

    def encode(self, observations: Any) -> np.ndarray:
        """Encodes a batch of observations as `[N, *shape]`.

        Args:
            observations: a batch as a vector environment returns it. This is an array, a dict of
                batches for a Dict, or a tuple of batches for a Tuple. An array of a Box with the
                dtype of the Box is returned without a copy.

        Raises:
            ValueError: a value is outside of its Discrete or MultiDiscrete space.
        """
        is_box = isinstance(self.space, spaces.Box)
        if is_box and isinstance(observations, np.ndarray) and observations.dtype == self.dtype:
            return observations
        with np.errstate(all="ignore"):  # the sampler checks batches for values that are not finite
            if is_box:
                return np.asarray(observations, dtype=self.dtype)
            return _flatten_batch(self.space, observations)

    def encode_one(self, observation: Any) -> np.ndarray:
        """Encodes one observation of the space as `[*shape]`.

        Raises:
            ValueError: the observation does not have the structure and shapes of the space, or a
                value is outside of its Discrete or MultiDiscrete space. Also raised if the integer
                dtype of a Box cannot represent a value.
        """
        encoded = isinstance(observation, np.ndarray) and isinstance(self.space, spaces.Box)
        if encoded and observation.shape == self.shape and observation.dtype == self.dtype:
            return observation
        return self._checked(observation, batches=False)[0][0]

    def encode_some(self, observations: Any) -> tuple[np.ndarray, bool]:
        """Encodes one observation or a batch of observations. The shape decides whether the
        argument is a batch.

        Args:
            observations: an observation of the space, or a batch as for `encode`.

        Returns:
            the encoded observations `[N, *shape]`, with N = 1 for one observation, and whether the
            argument was a batch.

        Raises:
            ValueError: the errors of `encode_one`, a value is not finite, or the parts of a Dict or
                Tuple have different numbers of rows.
        """
        return self._checked(observations, batches=True)

    @np.errstate(all="ignore")
    def _checked(self, observations: Any, batches: bool) -> tuple[np.ndarray, bool]:
        arrays: list[tuple[Space[Any], np.ndarray]] = []
        sizes: dict[int | None, str] = {}  # the number of rows, or None for one observation
        for space, array, name, given in _leaves(self.space, observations, "observation"):
            shape = tuple(space.shape or ())
            if array.shape == shape:
                sizes[None], array = name, array[None]
            elif batches and array.ndim > len(shape) and array.shape[1:] == shape:
                sizes[len(array)] = name
            else:
                or_batch = f" or {['N', *shape]}" if batches else ""
                raise ValueError(
                    f"{name} must have shape {list(shape)}{or_batch}, for {space}; "
                    f"got {given!r:.100}"
                )
            if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "iub":
                cast = array.astype(space.dtype, copy=False)
                if not np.array_equal(cast, array):
                    raise ValueError(
                        f"{name} must have values of dtype {space.dtype}, for {space}; "
                        f"got {given!r:.100}"
                    )
            if batches and not self._is_finite(array):
                raise ValueError(f"{name} must be finite; got {given!r:.100}")
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (array % 1).any():
                raise ValueError(f"{name} must have whole numbers, for {space}; got {given!r:.100}")
            arrays.append((space, array))
        if len(sizes) > 1:
            parts = ", ".join(
                f"{name}: {'one' if size is None else size}" for size, name in sizes.items()
            )
            raise ValueError(
                f"all parts of an observation must have the same number of rows; got {parts}"
            )
        is_batch = None not in sizes
        if not isinstance(self.space, spaces.Box):
            return np.concatenate([_flatten_batch(*pair) for pair in arrays], axis=1), is_batch
        return arrays[0][1].astype(self.dtype, copy=False), is_batch

    def _is_finite(self, array: np.ndarray) -> bool:
        """Whether all values are finite, and stay finite in the dtype of encoded observations."""
        if array.dtype.kind != "f":
            return True
        if self.dtype.kind != "f":  # `_checked` has already checked the cast to this dtype
            return bool(np.isfinite(array).all())
        with np.errstate(all="ignore"):
            return bool(np.isfinite(array.astype(self.dtype, copy=False)).all())


def _check(space: Space[Any], whole: Space[Any]) -> None:
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        parts = list(space.spaces)
    elif isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        return
    else:
        raise ConfigError(
            f"observation space {space} (of {whole}) is not supported. "
            f"Allowed: {SUPPORTED_OBSERVATIONS}"
        )
    for part in parts:
        _check(part, whole)


def _flatten_batch(space: Space[Any], batch: Any) -> np.ndarray:
    """Flattens a batch to `[N, D]` float32. Row `i` is observation `i` of the batch, flattened as
    by `gymnasium.spaces.utils.flatten`."""
    if isinstance(space, spaces.Dict):
        parts = [_flatten_batch(sub, batch[key]) for key, sub in space.spaces.items()]
        return np.concatenate(parts, axis=1)
    if isinstance(space, spaces.Tuple):
        parts = [_flatten_batch(sub, part) for sub, part in zip(space.spaces, batch, strict=True)]
        return np.concatenate(parts, axis=1)
    array = np.asarray(batch)
    if isinstance(space, spaces.Discrete):
        return _one_hot(array.reshape(-1) - space.start, int(space.n), space)
    if isinstance(space, spaces.MultiDiscrete):
        values = (array - space.start).reshape(len(array), -1)
        sizes = space.nvec.reshape(-1)
        columns = [_one_hot(values[:, i], int(n), space) for i, n in enumerate(sizes)]
        return np.concatenate(columns, axis=1)
    return array.reshape(len(array), -1).astype(np.float32)


def _one_hot(values: np.ndarray, size: int, space: Space[Any]) -> np.ndarray:
    """One-hot vectors `[N, size]` of values `[N]`, which are counted from 0."""
    if len(values) and (values.min() < 0 or values.max() >= size):
        wrong = values[(values < 0) | (values >= size)][0]
        raise ValueError(
            f"observations of {space} must be in the space; got {wrong} after subtraction of the "
            "start of the space"
        )
    encoded = np.zeros((len(values), size), dtype=np.float32)
    encoded[np.arange(len(values)), values.astype(np.int64)] = 1.0
    return encoded


def _leaves(
    space: Space[Any], observation: Any, name: str
) -> Iterator[tuple[Space[Any], np.ndarray, str, Any]]:
    """Yields `(space, array, name, given)` for each Box, Discrete, MultiDiscrete and MultiBinary of
    the space.

    `array` is the part of the observation or batch that belongs to `space`. `name` is its name in
    error messages, and `given` is the part as the caller passed it.

    Raises:
        ValueError: the keys or the number of parts differ from the space, or a part does not
            consist of numbers.
    """
    if isinstance(space, spaces.Dict):
        if not (hasattr(observation, "keys") and set(observation.keys()) == set(space.spaces)):
            raise ValueError(
                f"{name} must have the keys {[*space.spaces]}; got {_shown(observation)}"
            )
        for key, sub in space.spaces.items():
            yield from _leaves(sub, observation[key], f"{name}[{key!r}]")
        return
    if isinstance(space, spaces.Tuple):
        if not (isinstance(observation, tuple | list) and len(observation) == len(space.spaces)):
            raise ValueError(
                f"{name} must have {len(space.spaces)} parts; got {_shown(observation)}"
            )
        for i, sub in enumerate(space.spaces):
            yield from _leaves(sub, observation[i], f"{name}[{i}]")
        return
    try:
        array = np.asarray(observation)
    except ValueError:  # nested lists of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} must be numbers of shape {list(space.shape or ())}, for {space}; "
            f"got {observation!r:.100}"
        )
    yield space, array, name, observation


def _shown(observation: Any) -> str:
    """How an error message shows a wrong observation: the keys of a dict, or the first characters
    of another value."""
    if hasattr(observation, "keys"):
        return f"the keys {[*observation.keys()]}"
    return f"{observation!r:.100}"
