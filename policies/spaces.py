"""`ObservationEncoder`: converts observations of a space to rows of batches, and rows to the arrays
that networks read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.transitions import Sequences, Transitions

Batch = TypeVar("Batch", SampleBatch, Transitions, Sequences)

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"


class Leaf(NamedTuple):
    """A Box, Discrete, MultiDiscrete or MultiBinary in an observation space.

    Attributes:
        space: the space of the leaf.
        keys: the keys and indices that lead from an observation to the leaf. Empty if the
            observation space itself is the leaf.
        fields: the names of the fields that lead from a row to the leaf.
        place: the slice of the leaf in an encoded and flattened observation `[D]`.
    """

    space: Space[Any]
    keys: tuple[Any, ...]
    fields: tuple[str, ...]
    place: slice

    def of(self, rows: np.ndarray) -> np.ndarray:
        """The values of the leaf in rows `[..., *row_shape]`, as a view `[..., *space.shape]`."""
        for field in self.fields:
            rows = rows[field]
        return rows


class ObservationEncoder:
    """Converts observations to rows for batches, and rows to encoded observations for networks.

    - **Rows** hold what the space holds, with its dtypes. A row of a Dict or Tuple is an element of
      a structured array, with one field for each part: `rows["position"]`, and `rows["0"]` for the
      first part of a Tuple. A row of any other space has the shape and the dtype of the space. So a
      Discrete takes one integer, and images of a uint8 space are stored and sent as uint8.
    - **Encoded observations** are what policies and networks read. An encoded observation of a Box
      is the same as its row. An encoded observation of any other space is a float32 vector, as with
      `gymnasium.spaces.utils.flatten`.

    Args:
        space: observation space of one environment.

    Attributes:
        space: the argument.
        leaves: the parts of the space that are not a Dict or Tuple, in their order in encoded
            observations.
        shape: shape of one encoded observation.
        dtype: dtype of one encoded observation.
        row_shape: shape of one row. `()` for a Dict or Tuple.
        row_dtype: dtype of one row.
        is_box: whether the space is a Box, so that rows and encoded observations are the same.

    Raises:
        ConfigError: the space is not one of `SUPPORTED_OBSERVATIONS`, or it is empty.
    """

    def __init__(self, space: Space[Any]) -> None:
        self.leaves = tuple(_find_leaves(space, space))
        size = self.leaves[-1].place.stop if self.leaves else 0
        if size == 0:
            raise ConfigError(
                f"observation space {space} is empty. Allowed: {SUPPORTED_OBSERVATIONS} with at "
                "least one element"
            )
        self.space = space
        self.row_shape, self.row_dtype = _row_type(space)
        self.is_box = isinstance(space, spaces.Box)
        if self.is_box:
            self.shape, self.dtype = self.row_shape, self.row_dtype
        else:
            self.shape, self.dtype = (size,), np.dtype(np.float32)

    # ---- rows -----------------------------------------------------------------------------------

    def rows(self, observations: Any) -> np.ndarray:
        """Converts a batch of observations to rows `[N, *row_shape]`.

        Args:
            observations: a batch as a vector environment returns it. This is an array, a dict of
                batches for a Dict, or a tuple of batches for a Tuple. An array of a Box with the
                dtype of the Box is returned without a copy.

        Raises:
            ValueError: a value is outside of its Discrete or MultiDiscrete space.
        """
        is_array = isinstance(observations, np.ndarray)
        if self.is_box and is_array and observations.dtype == self.row_dtype:
            given: np.ndarray = observations
            return given
        with np.errstate(all="ignore"):  # the sampler checks batches for values that are not finite
            if self.is_box:
                return np.asarray(observations, dtype=self.row_dtype)
            return self._filled([_item(observations, leaf.keys) for leaf in self.leaves])

    def row(self, observation: Any) -> np.ndarray:
        """Converts one observation of the space to a row `[*row_shape]`.

        Raises:
            ValueError: the observation does not have the structure and shapes of the space, or a
                value is outside of its Discrete or MultiDiscrete space. Also raised if the integer
                dtype of a Box cannot represent a value.
        """
        is_array = isinstance(observation, np.ndarray) and self.is_box
        if is_array and (observation.shape, observation.dtype) == (self.shape, self.dtype):
            found: np.ndarray = observation
        else:
            found = self._checked(observation, batches=False)[0][0]
        return found

    def some_rows(self, observations: Any) -> tuple[np.ndarray, bool]:
        """Converts one observation or a batch of observations to rows. The shape decides whether
        the argument is a batch.

        Args:
            observations: an observation of the space, or a batch as for `rows`.

        Returns:
            the rows `[N, *row_shape]`, with N = 1 for one observation, and whether the argument was
            a batch.

        Raises:
            ValueError: the errors of `row`, a value is not finite, or the parts of a Dict or Tuple
                have different numbers of rows.
        """
        return self._checked(observations, batches=True)

    def _filled(self, parts: Sequence[Any]) -> np.ndarray:
        """Rows `[N, *row_shape]` with the values of `parts`, one batch for each leaf."""
        arrays = [np.asarray(part) for part in parts]
        rows = np.empty((len(arrays[0]), *self.row_shape), self.row_dtype)
        for leaf, array in zip(self.leaves, arrays, strict=True):
            values = leaf.of(rows)
            array = array.reshape(values.shape)
            if isinstance(leaf.space, spaces.Discrete | spaces.MultiDiscrete):
                _check_range(leaf.space, array)
            values[...] = array
        return rows

    @np.errstate(all="ignore")
    def _checked(self, observations: Any, batches: bool) -> tuple[np.ndarray, bool]:
        arrays: list[np.ndarray] = []
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
            if batches and not _is_finite(space, array):
                raise ValueError(f"{name} must be finite; got {given!r:.100}")
            if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and (array % 1).any():
                raise ValueError(f"{name} must have whole numbers, for {space}; got {given!r:.100}")
            arrays.append(array)
        if len(sizes) > 1:
            parts = ", ".join(
                f"{name}: {'one' if size is None else size}" for size, name in sizes.items()
            )
            raise ValueError(
                f"all parts of an observation must have the same number of rows; got {parts}"
            )
        is_batch = None not in sizes
        if self.is_box:
            return arrays[0].astype(self.row_dtype, copy=False), is_batch
        return self._filled(arrays), is_batch

    # ---- encoding -------------------------------------------------------------------------------

    def encode(self, observations: Any, dtype: Any = np.float32) -> np.ndarray:
        """Encodes observations for a policy.

        Args:
            observations: rows `[..., *row_shape]`, or a batch as for `rows`. Observations that are
                already encoded are returned unchanged, and so are the rows of a Box.
            dtype: dtype of the encoded observations of other spaces than a Box.

        Returns: the encoded observations `[..., *shape]`.

        Raises:
            ValueError: see `rows`.
        """
        rows: np.ndarray
        if isinstance(observations, np.ndarray) and observations.dtype == self.row_dtype:
            rows = observations
        elif not self.is_box and self._is_encoded(observations):
            encoded: np.ndarray = observations
            return encoded
        else:
            rows = self.rows(observations)
        if self.is_box:
            return rows
        leading = rows.shape[: rows.ndim - len(self.row_shape)]
        rows = rows.reshape(math.prod(leading), *self.row_shape)
        encoded = np.empty((len(rows), *self.shape), dtype)
        with np.errstate(all="ignore"):
            for leaf in self.leaves:
                _write(leaf.space, leaf.of(rows), encoded[:, leaf.place])
        return encoded.reshape(*leading, *self.shape)

    def encode_batch(self, batch: Batch, dtype: Any = np.float32) -> Batch:
        """Returns a `SampleBatch`, `Transitions` or `Sequences` with encoded observations. If the
        observations are already encoded, returns the same object. See `encode` for `dtype`."""
        if self.is_box:
            return batch
        if isinstance(batch, Sequences):
            return batch._replace(batch=self.encode_batch(batch.batch, dtype))
        if isinstance(batch, Transitions):
            obs, next_obs = (self.encode(one, dtype) for one in (batch.obs, batch.next_obs))
            return batch._replace(obs=obs, next_obs=next_obs)
        if self._is_encoded(batch.all_obs):
            return batch
        all_obs, successors = (
            self.encode(one, dtype) for one in (batch.all_obs, batch.successor_obs)
        )
        return dataclasses.replace(batch, all_obs=all_obs, successor_obs=successors)

    def _is_encoded(self, observations: Any) -> bool:
        return (
            isinstance(observations, np.ndarray)
            and observations.dtype.kind == "f"
            and observations.ndim > len(self.shape)
            and observations.shape[observations.ndim - len(self.shape) :] == self.shape
        )


def _find_leaves(
    space: Space[Any],
    whole: Space[Any],
    keys: tuple[Any, ...] = (),
    fields: tuple[str, ...] = (),
    start: int = 0,
) -> Iterator[Leaf]:
    """Yields the leaves of a part of the space `whole`. `start` is the place of the first leaf."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        for key, field, part in _parts(space):
            for leaf in _find_leaves(part, whole, (*keys, key), (*fields, field), start):
                yield leaf
                start = leaf.place.stop
    elif isinstance(
        space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary
    ):
        yield Leaf(space, keys, fields, slice(start, start + int(spaces.utils.flatdim(space))))
    else:
        raise ConfigError(
            f"observation space {space} (of {whole}) is not supported. "
            f"Allowed: {SUPPORTED_OBSERVATIONS}"
        )


def _parts(space: spaces.Dict | spaces.Tuple) -> list[tuple[Any, str, Space[Any]]]:
    """The key or index of each part, the name of its field in a row, and its space."""
    named: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    keys, parts = zip(*named, strict=True) if len(space.spaces) else ((), ())
    fields = [str(key) for key in keys]
    if "" in fields or len(set(fields)) < len(fields):  # NumPy refuses such names
        fields = [f"{i}.{field}" for i, field in enumerate(fields)]
    return list(zip(keys, fields, parts, strict=True))


def _row_type(space: Space[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype of a row."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = [(field, *reversed(_row_type(part))) for _, field, part in _parts(space)]
        return (), np.dtype(parts)
    return tuple(space.shape or ()), np.dtype(space.dtype)


def _item(observations: Any, keys: tuple[Any, ...]) -> Any:
    for key in keys:
        observations = observations[key]
    return observations


def _write(space: Space[Any], values: np.ndarray, encoded: np.ndarray) -> None:
    """Writes values `[N, *shape]` of a leaf to `encoded` `[N, D]`. Row `i` becomes observation `i`,
    flattened as by `gymnasium.spaces.utils.flatten`."""
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        encoded.reshape(values.shape)[...] = values  # a view
        return
    counted, sizes = _from_zero(space, values)
    encoded[...] = 0.0
    # Padding of a batch may have values that are not in the space. Its vector is 0.
    row, column = ((counted >= 0) & (counted < sizes)).nonzero()
    first = np.cumsum(sizes) - sizes
    encoded[row, (first + counted)[row, column]] = 1.0


def _from_zero(space: Any, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a Discrete or MultiDiscrete, counted from 0, `[N, K]`, and their numbers of
    categories `[K]`."""
    sizes = np.reshape(space.n if isinstance(space, spaces.Discrete) else space.nvec, -1)
    counted = values.astype(np.int64, copy=False) - np.asarray(space.start, np.int64)
    return counted.reshape(len(values), len(sizes)), sizes.astype(np.int64)


def _check_range(space: Space[Any], values: np.ndarray) -> None:
    counted, sizes = _from_zero(space, values)
    wrong = (counted < 0) | (counted >= sizes)
    if wrong.any():
        raise ValueError(
            f"observations of {space} must be in the space; got {counted[wrong][0]} after "
            "subtraction of the start of the space"
        )


def _is_finite(space: Space[Any], array: np.ndarray) -> bool:
    """Whether all values are finite, and stay finite in the dtype of a Box of floats."""
    if array.dtype.kind != "f":
        return True
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f":
        array = array.astype(space.dtype, copy=False)
    return bool(np.isfinite(array).all())


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
