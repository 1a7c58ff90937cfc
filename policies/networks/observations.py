"""Parts of encoded observations as tensors. The inverse of `ObservationEncoder`, in torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor


class Part:
    """One Box, Discrete, MultiDiscrete or MultiBinary of an observation space.

    Args:
        space: the space of this part.
        place: where the part is in an encoded observation `[D]`. None: the part is the whole
            observation space, a Box that is not flattened.

    Attributes:
        space, place: the arguments.
        scale: factor with which networks multiply this part. It is one number, or for a Box one
            number for each element, `[*shape]` float32. 1 except for images of bytes. See
            `scale_bytes`.
    """

    scale: float | Tensor

    def __init__(self, space: Space[Any], place: slice | None) -> None:
        self.space = space
        self.place = place
        self.scale_bytes(by_high=True)

    def scale_bytes(self, by_high: bool) -> None:
        """Chooses the divisor of an image of bytes.

        Args:
            by_high: divide by the bounds `high` of the image's space, so that they become 1. (An
                element with the bound 0 stays 0.) False: divide by 255, like older versions.
        """
        self.scale = 1.0
        if not self.is_bytes:
            return
        assert isinstance(self.space, spaces.Box)
        high = np.maximum(self.space.high, 1).astype(np.float64) if by_high else np.float64(255.0)
        if high.min() == high.max():
            self.scale = float(1.0 / high.max())
        else:
            self.scale = torch.from_numpy((1.0 / high).astype(np.float32))

    @property
    def is_image(self) -> bool:
        """A Box of three dimensions, of bytes or booleans."""
        shape, dtype = self.space.shape or (), self.space.dtype
        return isinstance(self.space, spaces.Box) and len(shape) == 3 and dtype in _KEPT

    @property
    def size(self) -> int:
        """Number of elements once it is encoded."""
        return int(spaces.utils.flatdim(self.space))

    @property
    def is_bytes(self) -> bool:
        """An image of bytes, which networks scale."""
        return self.is_image and self.space.dtype == np.uint8

    def scaled(self, obs: Tensor) -> Tensor:
        """This part of encoded observations `[B, ...]`, scaled. A Box has the shape `[B, *shape]`,
        other spaces have `[B, d]`. Float32."""
        part = obs if self.place is None else obs[:, self.place]
        if isinstance(self.space, spaces.Box):
            part = part.reshape(part.shape[0], *self.space.shape)
        if isinstance(self.scale, Tensor):
            return part.float() * self.scale.to(part.device)
        return part.float() if self.scale == 1.0 else part.float() * self.scale


def parts_of(space: Space[Any]) -> list[Part]:
    """The parts of an observation space, in the order in which they are encoded."""
    if isinstance(space, spaces.Box):
        return [Part(space, None)]
    found, start = [], 0
    for leaf in _leaves(space):
        size = int(spaces.utils.flatdim(leaf))
        found.append(Part(leaf, slice(start, start + size)))
        start += size
    return found


def split(space: Space[Any], obs: Tensor) -> Any:
    """Encoded observations `[B, ...]` in the structure of their space. A Dict becomes a dict, and a
    Tuple becomes a tuple.

    Returns:
        tensors: `[B, *shape]` for a Box and a MultiBinary, one-hot vectors `[B, n]` for a Discrete,
        and concatenated one-hot vectors for a MultiDiscrete. All are float32, except that Boxes of
        uint8 and bool keep their dtype.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        keys, parts = zip(*named, strict=True)
        pieces = obs.split([int(spaces.utils.flatdim(part)) for part in parts], dim=1)
        found = [split(part, piece) for part, piece in zip(parts, pieces, strict=True)]
        is_dict = isinstance(space, spaces.Dict)
        return dict(zip(keys, found, strict=True)) if is_dict else tuple(found)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        obs = obs.reshape(obs.shape[0], *space.shape)
    kept = _KEPT.get(space.dtype) if isinstance(space, spaces.Box) else None
    return obs.to(kept or torch.float32)


def flattened(obs: Tensor) -> Tensor:
    """The observations `[B, ...]`, flattened to `[B, D]`."""
    # `reshape` with -1 fails for zero rows. `len(obs)` would be a constant in an exported graph.
    return obs.reshape(obs.shape[0], math.prod(obs.shape[1:]))


#: Networks get a Box with one of these dtypes unchanged.
_KEPT: dict[Any, torch.dtype] = {np.dtype(np.uint8): torch.uint8, np.dtype(np.bool_): torch.bool}


def _leaves(space: Space[Any]) -> Iterator[Space[Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            yield from _leaves(part)
    else:
        yield space
