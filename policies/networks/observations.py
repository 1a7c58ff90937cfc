"""Splits encoded observations into the parts of their space, as torch tensors."""

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
        place: the slice of the part in an encoded observation `[D]`. `None` means that the whole
            observation is one Box, which is not flattened.

    Attributes:
        space, place: the arguments.
        scale: the factor by which networks multiply this part. This is one number, or a tensor
            `[*shape]` float32 with one number for each element of an image. The factor is 1 for
            all parts except uint8 images. See `scale_bytes`.
    """

    scale: float | Tensor

    def __init__(self, space: Space[Any], place: slice | None) -> None:
        self.space = space
        self.place = place
        self.scale_bytes(by_high=True)

    def scale_bytes(self, by_high: bool) -> None:
        """Sets the divisor of a uint8 image. Does nothing for other parts.

        Args:
            by_high: True divides each element by its bound `high` in the space, so that the bound
                becomes 1. An element whose bound is 0 is divided by 1. False divides by 255, as
                older versions of polopt did.
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
        """Whether the part is an image, which is a Box of three dimensions with dtype uint8 or
        bool."""
        shape, dtype = self.space.shape or (), self.space.dtype
        return isinstance(self.space, spaces.Box) and len(shape) == 3 and dtype in _KEPT

    @property
    def size(self) -> int:
        """Number of elements of the encoded part."""
        return int(spaces.utils.flatdim(self.space))

    @property
    def is_bytes(self) -> bool:
        """Whether the part is a uint8 image. Networks scale these images."""
        return self.is_image and self.space.dtype == np.uint8

    def scaled(self, obs: Tensor) -> Tensor:
        """Takes this part from encoded observations `[B, ...]`, and scales it. Returns float32,
        `[B, *shape]` for a Box and `[B, d]` for other spaces."""
        part = obs if self.place is None else obs[:, self.place]
        if isinstance(self.space, spaces.Box):
            part = part.reshape(part.shape[0], *self.space.shape)
        if isinstance(self.scale, Tensor):
            return part.float() * self.scale.to(part.device)
        return part.float() if self.scale == 1.0 else part.float() * self.scale


def parts_of(space: Space[Any]) -> list[Part]:
    """The parts of an observation space, in their order in encoded observations."""
    if isinstance(space, spaces.Box):
        return [Part(space, None)]
    found, start = [], 0
    for leaf in _leaves(space):
        size = int(spaces.utils.flatdim(leaf))
        found.append(Part(leaf, slice(start, start + size)))
        start += size
    return found


def split(space: Space[Any], obs: Tensor) -> Any:
    """Splits encoded observations `[B, ...]` into the structure of their space.

    A Dict becomes a dict, and a Tuple becomes a tuple. A Box or a MultiBinary becomes a tensor `[B,
    *shape]`. A Discrete becomes one-hot vectors `[B, n]`, and a MultiDiscrete becomes concatenated
    one-hot vectors. A Box of uint8 or bool keeps its dtype. All other tensors are float32.
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
    """Flattens observations `[B, ...]` to `[B, D]`."""
    # `reshape` with -1 fails for zero rows. `len(obs)` would become a constant in an exported
    # graph, but `obs.shape[0]` stays variable.
    return obs.reshape(obs.shape[0], math.prod(obs.shape[1:]))


#: `split` keeps these dtypes of a Box.
_KEPT: dict[Any, torch.dtype] = {np.dtype(np.uint8): torch.uint8, np.dtype(np.bool_): torch.bool}


def _leaves(space: Space[Any]) -> Iterator[Space[Any]]:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        for part in parts:
            yield from _leaves(part)
    else:
        yield space
