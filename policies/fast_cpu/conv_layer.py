"""`ConvLayer`: a convolution with its gradients, as products of matrices in NumPy or oneDNN.

Images are stored with the rows of the batch as the last dimension, `[F, B]`. So a pixel of all
images is one block of memory, and the pixels under a filter are copied in blocks. The outputs are
in the order in which torch flattens them, so nothing must be transposed before a linear layer.
The methods take and return transposed views `[B, F]` of this memory, as other layers do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from polopt.policies.fast_cpu.linear_layer import LinearLayer, product
from polopt.policies.networks.actor_critics import ImageEncoder

#: The largest sum of `ConvLayer.num_columns` over the convolutions of a network. With more, the
#: copies do not fit into the caches. The gradient of 256 images took 1.3 to 1.7 times as long in
#: torch with up to 16,128, 0.95 to 1.3 times with 17,500 to 18,000, and 0.84 times with 26,400.
MAX_COLUMNS = 16_384
_FLOAT = np.dtype(np.float32)


class ImageShape(NamedTuple):
    """The size of an image. `channels_last` says that its pixels are stored as `[H, W, C]` instead
    of `[C, H, W]`."""

    channels: int
    height: int
    width: int
    channels_last: bool = False

    @property
    def size(self) -> int:
        """F, the number of elements."""
        return self.channels * self.height * self.width

    def view(self, flat: np.ndarray) -> np.ndarray:
        """Images `[F, B]` as `[C, H, W, B]`."""
        channels, height, width, last = self
        if last:
            return flat.reshape(height, width, channels, flat.shape[1]).transpose(2, 0, 1, 3)
        return flat.reshape(channels, height, width, flat.shape[1])


class ConvLayer:
    """Computes the outputs and the gradients of an `nn.Conv2d` and the ReLU that follows it.

    Args:
        conv: the layer in torch, on the CPU, with square filters and a bias. Its weights and
            gradients share their memory with this object. If `learn` will be called, the parameters
            must already have a `.grad`.
        shape: the shape of the inputs.

    Attributes:
        weight: `[out channels, in channels * kernel * kernel]`.
        outputs: the shape of the outputs.
        num_columns: number of elements that `_columns` copies for one image.
        work: number of multiplications of a forward pass for one image.
    """

    def __init__(self, conv: nn.Conv2d, shape: ImageShape) -> None:
        self._kernel, self._stride = conv.kernel_size[0], conv.stride[0]
        padding: Any = conv.padding[0]
        self._inputs = shape
        self._padded = shape
        if padding:
            height, width = shape.height + 2 * padding, shape.width + 2 * padding
            self._padded = ImageShape(shape.channels, height, width)
        self._inside = np.s_[:, padding : padding + shape.height, padding : padding + shape.width]
        self.outputs = ImageShape(
            conv.out_channels,
            (self._padded.height - self._kernel) // self._stride + 1,
            (self._padded.width - self._kernel) // self._stride + 1,
        )
        assert conv.bias is not None
        self.weight = conv.weight.detach().view(conv.out_channels, -1).numpy()
        self._bias = conv.bias.detach().numpy()[:, None]
        if conv.weight.grad is not None and conv.bias.grad is not None:
            by_weight = conv.weight.grad.view(conv.out_channels, -1)
            self._grads = by_weight.numpy(), conv.bias.grad.numpy()
        num_positions = self.outputs.height * self.outputs.width
        self.num_columns = self.weight.shape[1] * num_positions
        self.work = self.weight.size * num_positions

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Computes outputs `[B, out]` from inputs `[B, in]`, as a new array."""
        outputs = product(len(x), self.weight, self._columns(x))
        outputs += self._bias
        # With an array of zeros, NumPy computes a maximum three times as fast as with the number 0.
        np.maximum(outputs, np.zeros(outputs.shape[1], np.float32), out=outputs)
        return outputs.reshape(self.outputs.size, len(x)).T

    def by_inputs(self, gradient: np.ndarray) -> np.ndarray:
        """Computes the gradient with respect to the inputs, `[B, in]`.

        Args:
            gradient: gradient of the loss with respect to the outputs of the layer before ReLU,
                `[B, out]`.
        """
        count, padded = len(gradient), self._padded
        sums = np.zeros((padded.size, count), np.float32)
        windows = self._windows(sums)
        by_windows = product(count, self.weight.T, self._by_channel(gradient))
        by_windows = by_windows.reshape(windows.shape)
        # Windows overlap, so each position within the filter is added on its own.
        for row in range(self._kernel):
            for column in range(self._kernel):
                windows[:, row, column] += by_windows[:, row, column]
        if padded is self._inputs:
            return sums.T
        by_inputs = np.empty((self._inputs.size, count), np.float32)
        self._inputs.view(by_inputs)[...] = padded.view(sums)[self._inside]
        return by_inputs.T

    def learn(self, gradient: np.ndarray, inputs: np.ndarray) -> None:
        """Adds the gradients of the weights and biases to their `.grad`.

        Args:
            gradient: see `by_inputs`.
            inputs: inputs of the layer, `[B, in]`.
        """
        weight, bias = self._grads
        by_channel = self._by_channel(gradient)
        weight += product(len(gradient), by_channel, self._columns(inputs).T)
        bias += by_channel.dot(np.ones(by_channel.shape[1], np.float32))

    def _columns(self, x: np.ndarray) -> np.ndarray:
        """The inputs under the filter at each position, `[in channels * kernel * kernel, height *
        width * B]` (im2col)."""
        flat = np.ascontiguousarray(x.T)
        if self._padded is not self._inputs:
            inner = flat
            flat = np.zeros((self._padded.size, len(x)), np.float32)
            self._padded.view(flat)[self._inside] = self._inputs.view(inner)
        windows = self._windows(flat)
        return windows.reshape(self.weight.shape[1], math.prod(windows.shape[3:]))

    def _windows(self, flat: np.ndarray) -> np.ndarray:
        """Padded inputs `[F, B]` as a view `[in channels, kernel, kernel, height, width, B]`."""
        channel, row, column, each = self._padded.view(flat).strides
        kernel, step = self._kernel, self._stride
        _, height, width, _ = self.outputs
        return np.ndarray(
            (self._padded.channels, kernel, kernel, height, width, flat.shape[1]),
            _FLOAT,
            flat,
            0,
            (channel, row, column, step * row, step * column, each),
        )

    def _by_channel(self, gradient: np.ndarray) -> np.ndarray:
        """A gradient `[B, out]` as `[out channels, height * width * B]`."""
        _, height, width, _ = self.outputs
        count = height * width * len(gradient)
        return np.ascontiguousarray(gradient.T).reshape(self.outputs.channels, count)


class FeaturesLayer(LinearLayer):
    """The linear layer after convolutions. Its inputs, and the gradient with respect to them, are
    transposed views like the outputs of a `ConvLayer`."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        outputs = product(len(x), self.weight, x.T)
        outputs += self.bias[:, None]
        if self.zeros is not None:
            np.maximum(outputs, np.zeros(len(x), np.float32), out=outputs)
        return np.ascontiguousarray(outputs.T)

    def by_inputs(self, gradient: np.ndarray) -> np.ndarray:
        return product(len(gradient), self.weight.T, gradient.T).T


def image_shape(encoder: ImageEncoder) -> ImageShape:
    """The shape of the images that an encoder gets."""
    shape, last = encoder.part.space.shape, encoder.channels_last
    assert shape is not None
    height, width = encoder.image_size
    return ImageShape(shape[2] if last else shape[0], height, width, last)


def are_supported(convs: Iterable[nn.Conv2d], shape: ImageShape) -> bool:
    """Whether `ConvLayer` supports convolutions that follow each other, and is faster than torch.

    Filters must be square, with the same stride and padding in both directions, zeros as padding, a
    bias, and neither groups nor dilation.

    Args:
        convs: the convolutions, on the CPU.
        shape: the shape of the inputs of the first one.
    """
    num_columns = 0
    for conv in convs:
        sizes = (conv.kernel_size, conv.stride, conv.padding)
        is_square = all(isinstance(size, tuple) and len({*size}) == 1 for size in sizes)
        usual = conv.padding_mode == "zeros" and conv.groups == 1 and conv.dilation == (1, 1)
        if not (is_square and usual and conv.bias is not None):
            return False
        layer = ConvLayer(conv, shape)
        shape = layer.outputs
        num_columns += layer.num_columns
    return num_columns <= MAX_COLUMNS
