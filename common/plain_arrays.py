"""Converts structured arrays to arrays of bytes, for files and states that hold only numbers."""

from __future__ import annotations

from typing import Any

import numpy as np


def to_plain(array: np.ndarray) -> np.ndarray:
    """Returns a structured array `[...]` as bytes `[..., itemsize]`, and any other array itself."""
    if array.dtype.names is None:
        return array
    shape = (*array.shape, array.dtype.itemsize)
    return np.ascontiguousarray(array).view(np.uint8).reshape(shape)


def from_plain(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Restores an array of dtype `dtype` from a result of `to_plain`, as a copy.

    Raises:
        ValueError: `dtype` has fields, and the array does not have one byte in its last dimension
            for each byte of `dtype`.
    """
    if dtype.names is None:
        return np.array(array, dtype=dtype)
    if array.dtype != np.uint8 or array.shape[-1:] != (dtype.itemsize,):
        raise ValueError(
            f"an array of bytes [..., {dtype.itemsize}] was expected; got {array.dtype} "
            f"{list(array.shape)}"
        )
    return np.array(array).view(dtype).reshape(array.shape[:-1])
