"""`ObservationEncoder`: converts observations of a space to arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of those"


class ObservationEncoder:
    """Converts batched observations of a vector environment to one array.

    A Box keeps its shape and dtype (images stay uint8 until the network converts them), whatever
    dtype the environment returns: networks scale uint8 and no other dtype. Other spaces become
    float32 vectors, as with `gymnasium.spaces.utils.flatten`.

    Args:
        space: observation space of one environment.

    Attributes:
        space: that space.
        shape: shape of one encoded observation.
        dtype: its dtype.

    Raises:
        ConfigError: for a space outside `SUPPORTED_OBSERVATIONS`, or an empty one.
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
        """Encoded observations `[N, *shape]` of a vector environment's batch.

        Args:
            observations: an array (a view of it is returned for a Box of its dtype), a dict of
                batches for a Dict, a tuple of batches for a Tuple.

        Raises:
            ValueError: for a value outside a Discrete or MultiDiscrete space.
        """
        is_box = isinstance(self.space, spaces.Box)
        if is_box and isinstance(observations, np.ndarray) and observations.dtype == self.dtype:
            return observations
        with np.errstate(all="ignore"):  # what is not finite is found in batches
            if is_box:
                return np.asarray(observations, dtype=self.dtype)
            return _flatten_batch(self.space, observations)

    def encode_one(self, observation: Any) -> np.ndarray:
        """The encoded observation `[*shape]` of one observation of the space.

        Raises:
            ValueError: if the observation does not have the structure and shapes of the space, or
                has values that the integers of a Box cannot hold.
        """
        encoded = isinstance(observation, np.ndarray) and isinstance(self.space, spaces.Box)
        if encoded and observation.shape == self.shape and observation.dtype == self.dtype:
            return observation
        return self._checked(observation, batches=False)[0][0]

    def encode_some(self, observations: Any) -> tuple[np.ndarray, bool]:
        """Encodes one observation or a batch of them. Their shapes tell which.

        Args:
            observations: an observation of the space, or a batch as for `encode`.

        Returns:
            `[N, *shape]`, N = 1 for one observation. And whether it was a batch.

        Raises:
            ValueError: as `encode_one`, values that are not finite, or parts of different numbers
                of rows.
        """
        return self._checked(observations, batches=True)

    @np.errstate(all="ignore")  # as `encode`
    def _checked(self, observations: Any, batches: bool) -> tuple[np.ndarray, bool]:
        arrays: list[tuple[Space[Any], np.ndarray]] = []
        sizes: dict[int | None, str] = {}  # None: no batch
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
            raise ValueError(f"observation must have the same number of rows everywhere; {parts}")
        is_batch = None not in sizes
        if not isinstance(self.space, spaces.Box):
            return np.concatenate([_flatten_batch(*pair) for pair in arrays], axis=1), is_batch
        return arrays[0][1].astype(self.dtype, copy=False), is_batch

    def _is_finite(self, array: np.ndarray) -> bool:
        """Whether values are finite, also once they have the dtype of encoded observations."""
        if array.dtype.kind != "f":
            return True
        if self.dtype.kind != "f":  # a Box of integers, whose values have been compared
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
    """`[N, D]` float32. Row `i` equals `gymnasium.spaces.utils.flatten(space, batch[i])`."""
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
    """`[N, size]` from values `[N]` counted from 0."""
    if len(values) and (values.min() < 0 or values.max() >= size):
        wrong = values[(values < 0) | (values >= size)][0]
        raise ValueError(
            f"observations of {space} must be in the space; got {wrong}, counted from its start"
        )
    encoded = np.zeros((len(values), size), dtype=np.float32)
    encoded[np.arange(len(values)), values.astype(np.int64)] = 1.0
    return encoded


def _leaves(
    space: Space[Any], observation: Any, name: str
) -> Iterator[tuple[Space[Any], np.ndarray, str, Any]]:
    """Yields each Box, Discrete, MultiDiscrete and MultiBinary of the space with its part of an
    observation or of a batch as an array, the part's name in error messages, and the part as it
    was given.

    Raises:
        ValueError: other keys, another number of parts, or a part that is not of numbers.
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
            f"{name} must have shape {list(space.shape or ())}, for {space}; "
            f"got {observation!r:.100}"
        )
    yield space, array, name, observation


def _shown(observation: Any) -> str:
    """A wrong observation in a message: its keys, or its beginning."""
    if hasattr(observation, "keys"):
        return f"the keys {[*observation.keys()]}"
    return f"{observation!r:.100}"
