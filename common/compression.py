"""Compression of what travels: flat gradients and the columns of batches.

- `none`: as it is.
- `fp16`: half precision of the array over its largest magnitude, so that nothing overflows; the
  relative error is at most 2^-11 down to 2^-14 of the largest. Half the bytes.
- `bf16`: the upper half of each float32, rounded to nearest even; relative error at most 2^-8 at
  any magnitude. Half the bytes.
- `lz4`: lossless; the bytes of equal weight are laid side by side first (as Blosc does), because
  those of sign and exponent repeat and those of the mantissa do not. PyArrow, which Ray's data and
  RLlib need anyway, brings the codec.
- `topk`: the largest magnitudes alone, with error feedback (Stich et al., 2018): see
  `GradientPacker`. For gradients only.

Everything packed is a NumPy array, which Ray carries out of band (pickle 5) without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from polopt.common.weights import Gradients

if TYPE_CHECKING:
    from polopt.common.sample_batch import SampleBatch

DataCodec = Literal["none", "fp16", "bf16", "lz4"]
GradientCodec = Literal["none", "fp16", "bf16", "lz4", "topk"]


class Packed(NamedTuple):
    """One array, packed.

    Attributes:
        codec: how.
        shape: of the array.
        dtype: of the array.
        arrays: what there is of it.
        scale: what the values were divided by (`fp16`).
    """

    codec: str
    shape: tuple[int, ...]
    dtype: str
    arrays: tuple[np.ndarray, ...]
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays)


def pack(array: np.ndarray, codec: str) -> Packed:
    """Packs one array. Lossy codecs leave alone what is not float32."""
    if codec in ("fp16", "bf16") and array.dtype != np.float32:
        codec = "none"
    array = np.ascontiguousarray(array)
    scale = 1.0
    if codec == "fp16":
        largest = float(np.abs(array).max(initial=0.0))
        # Not finite stays not finite: whoever takes it has to see that.
        scale = largest if 0.0 < largest < np.inf else 1.0
        # By torch, which uses the processor's instruction; NumPy takes 100 times as long where most
        # values are far below the largest.
        packed = torch.tensor(array / np.float32(scale)).to(torch.float16).numpy()
    elif codec == "bf16":
        packed = torch.tensor(array).to(torch.bfloat16).view(torch.int16).numpy()
    elif codec == "lz4":
        packed = _lz4(array)
    else:
        packed = array
    return Packed(codec, array.shape, array.dtype.str, (packed,), scale)


def unpack(packed: Packed) -> np.ndarray:
    """The array again, `[shape]` of its own dtype; writeable unless it came as it is.

    Raises:
        ValueError: for an unknown codec.
    """
    data, dtype = packed.arrays[0], np.dtype(packed.dtype)
    if packed.codec == "none":
        return data
    if packed.codec == "fp16":
        return torch.tensor(data).to(torch.float32).numpy() * np.float32(packed.scale)
    if packed.codec == "bf16":
        return torch.tensor(data).view(torch.bfloat16).to(torch.float32).numpy()
    if packed.codec == "lz4":
        return _unlz4(data, packed.shape, dtype)
    if packed.codec == "topk":
        array = np.zeros(packed.shape, dtype)
        array[data] = packed.arrays[1]
        return array
    raise ValueError(f"codec must be one that `pack` knows; got {packed.codec!r}")


def _lz4(array: np.ndarray) -> np.ndarray:
    import pyarrow

    planes = array.reshape(-1).view(np.uint8).reshape(-1, max(1, array.dtype.itemsize))
    shuffled = np.ascontiguousarray(planes.T)
    return np.frombuffer(pyarrow.compress(shuffled, codec="lz4_raw"), np.uint8)


def _unlz4(data: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    import pyarrow

    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    plain = pyarrow.decompress(data, decompressed_size=size, codec="lz4_raw")
    planes = np.frombuffer(plain, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)


class PackedGradients(NamedTuple):
    """`Gradients` whose vector is packed."""

    packed: Packed
    version: int
    rows: int
    stats: dict[str, float]


class GradientPacker:
    """The sender's side of gradient compression.

    With `topk`, what is not sent is kept here and added to the next gradient, so that all of it
    arrives in the end: the sum of what was sent, plus the residual, is the sum of the gradients.

    Args:
        codec: see above.
        share: of the elements that `topk` sends; one at least.

    Attributes:
        residual: `[P]` float32 of `topk`; None before the first gradient.
    """

    def __init__(self, codec: GradientCodec, share: float = 0.1) -> None:
        self.codec = codec
        self.share = share
        self.residual: np.ndarray | None = None

    def pack(self, gradients: Gradients) -> Gradients | PackedGradients:
        """Packs a gradient. One of no rows is not worth it, and one that is not finite must not
        get into the residual, where it would stay for ever: both go as they are."""
        flat = gradients.flat
        topk = self.codec == "topk"
        if self.codec == "none" or gradients.rows == 0 or (topk and not np.isfinite(flat).all()):
            return gradients
        packed = self._largest(flat) if topk else pack(flat, self.codec)
        return PackedGradients(packed, *gradients[1:])

    def _largest(self, flat: np.ndarray) -> Packed:
        if self.residual is None:
            self.residual = np.zeros_like(flat)
        self.residual += flat
        count = min(len(flat), max(1, round(self.share * len(flat))))
        magnitudes = np.abs(self.residual)
        chosen = np.argpartition(magnitudes, len(flat) - count)[len(flat) - count :]
        chosen = chosen.astype(np.int32)
        values = self.residual[chosen]
        self.residual[chosen] = 0.0
        return Packed("topk", flat.shape, flat.dtype.str, (chosen, values))


def unpack_gradients(gradients: Gradients | PackedGradients) -> Gradients:
    """What `GradientPacker.pack` was given, as far as its codec keeps it."""
    if isinstance(gradients, Gradients):
        return gradients
    return Gradients(unpack(gradients.packed), *gradients[1:])


def pack_batch(batch: SampleBatch) -> tuple[dict[str, Packed], dict[str, Packed], dict[str, Any]]:
    """A batch for the way, by the codec in its `compress`: observations, columns, and the rest.
    `SampleBatch` pickles itself so."""
    codec = batch.compress
    observations = {n: pack(getattr(batch, n), codec) for n in ("all_obs", "successor_obs")}
    columns = {name: pack(column, codec) for name, column in batch.columns.items()}
    names = ("successor_index", "version", "worker_index", "episodes", "device", "faults")
    return observations, columns, {name: getattr(batch, name) for name in names}


def unpack_batch(
    observations: dict[str, Packed], columns: dict[str, Packed], rest: dict[str, Any]
) -> SampleBatch:
    """The batch again, as far as the codec keeps it; it is not packed a second time."""
    from polopt.common.sample_batch import SampleBatch

    return SampleBatch(
        all_obs=unpack(observations["all_obs"]),
        successor_obs=unpack(observations["successor_obs"]),
        columns={name: unpack(column) for name, column in columns.items()},
        **rest,
    )
