"""Observation spaces: from what an environment gives to one array per batch of observations."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from polopt.common.config import ConfigError

SUPPORTED_OBSERVATIONS = "Box, Discrete, MultiDiscrete, and Dict and Tuple of those"


class ObservationEncoder:
    """Turns batched observations of a vector environment into one array.

    A Box keeps its shape and dtype (an image stays uint8 until the network casts it). Everything
    else becomes the float32 vector that `gymnasium.spaces.utils.flatten` makes of one observation.

    Args:
        space: observation space of one environment.

    Attributes:
        shape: shape of one encoded observation.
        dtype: its dtype.

    Raises:
        ConfigError: for a space outside `SUPPORTED_OBSERVATIONS`; it names the space.
    """

    def __init__(self, space: Space[Any]) -> None:
        _check(space, space)
        self.space = space
        if isinstance(space, spaces.Box):
            self.shape, self.dtype = tuple(space.shape), np.dtype(space.dtype)
        else:
            self.shape = (int(spaces.utils.flatdim(space)),)
            self.dtype = np.dtype(np.float32)

    def encode(self, observations: Any) -> np.ndarray:
        """`[N, *shape]` from observations as a vector environment batches them.

        A Box is passed through without a copy; a Dict is a dict of batches, a Tuple a tuple.
        """
        if isinstance(self.space, spaces.Box):
            return np.asarray(observations)
        return _flatten_batch(self.space, observations)

    def encode_one(self, observation: Any) -> np.ndarray:
        """`[*shape]` from one observation of the space."""
        if isinstance(self.space, spaces.Box):
            return np.asarray(observation)
        flat = spaces.utils.flatten(self.space, observation)
        return np.asarray(flat, dtype=np.float32)


def _check(space: Space[Any], whole: Space[Any]) -> None:
    if isinstance(space, spaces.Dict):
        parts = list(space.spaces.values())
    elif isinstance(space, spaces.Tuple):
        parts = list(space.spaces)
    elif isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiDiscrete):
        return
    else:
        raise ConfigError(
            f"observation space {space} (of {whole}) is not supported; "
            f"allowed: {SUPPORTED_OBSERVATIONS}"
        )
    for part in parts:
        _check(part, whole)


def _flatten_batch(space: Space[Any], batch: Any) -> np.ndarray:
    """`[N, D]` float32; row `i` equals `gymnasium.spaces.utils.flatten(space, batch[i])`."""
    if isinstance(space, spaces.Dict):
        parts = [_flatten_batch(sub, batch[key]) for key, sub in space.spaces.items()]
        return np.concatenate(parts, axis=1)
    if isinstance(space, spaces.Tuple):
        parts = [_flatten_batch(sub, part) for sub, part in zip(space.spaces, batch, strict=True)]
        return np.concatenate(parts, axis=1)
    array = np.asarray(batch)
    if isinstance(space, spaces.Discrete):
        return _one_hot(array.reshape(-1) - space.start, int(space.n))
    if isinstance(space, spaces.MultiDiscrete):
        values = (array - space.start).reshape(len(array), -1)
        sizes = space.nvec.reshape(-1)
        columns = [_one_hot(values[:, i], int(n)) for i, n in enumerate(sizes)]
        return np.concatenate(columns, axis=1)
    return array.reshape(len(array), -1).astype(np.float32)


def _one_hot(values: np.ndarray, size: int) -> np.ndarray:
    encoded = np.zeros((len(values), size), dtype=np.float32)
    encoded[np.arange(len(values)), values.astype(np.int64)] = 1.0
    return encoded
