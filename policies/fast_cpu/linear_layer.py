"""`LinearLayer`: a linear layer with its gradients, in NumPy or in oneDNN.

oneDNN is a library that is part of torch. It uses AVX-512 on every processor that has it. NumPy's
BLAS (OpenBLAS) chooses kernels for AVX2 on some of these processors, such as AMD's, and oneDNN then
takes about half the time for large products. Both round differently. So the choice does not depend
on a measurement, but only on the processor, the libraries and the shapes. If the variable
`ATEN_CPU_CAPABILITY` is `avx2` when torch is imported, NumPy computes everything.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import threadpoolctl
import torch
from torch import nn

from polopt.common.threads import one_torch_thread

#: The smallest numbers of multiplications for which oneDNN is faster than NumPy, with and without
#: bias and ReLU. A call of oneDNN takes 10 us longer. On busy cores, products with less than
#: `_MIN_PRODUCT` do not gain.
_MIN_FUSED, _MIN_PRODUCT = 2**20, 2**23
#: NumPy computes products with fewer rows or columns.
_MIN_SIDE = 16
#: oneDNN compiles code for each new shape, which takes 0.3 ms and 0.7 MiB. So only batches whose
#: size is a multiple of this number use oneDNN.
STEP = 32
#: The names that OpenBLAS has for its kernels for processors with AVX2 but without AVX-512.
_AVX2_KERNELS = ("Haswell", "Zen")
#: The signature of the operation of torch that computes `X W^T + B` in oneDNN, and then the
#: activation `attr`. The operation is not public, so it is used only with this signature.
_SIGNATURE = (
    "mkldnn::_linear_pointwise(Tensor X, Tensor W, Tensor? B, str attr, Scalar?[] scalars, "
    "str? algorithm) -> Tensor Y"
)


class LinearLayer:
    """Computes the outputs and the gradients of an `nn.Linear`.

    Args:
        linear: the layer in torch, on the CPU. Its weights and gradients share their memory with
            this object. If `learn` will be called, the parameters must already have a `.grad`.
        relu: whether ReLU follows.
    """

    def __init__(self, linear: nn.Linear, relu: bool) -> None:
        self.weight: np.ndarray = linear.weight.detach().numpy()  # [out, in]
        self.bias: np.ndarray = linear.bias.detach().numpy()
        #: The number of multiplications of a forward pass for one row.
        self.work = self.weight.size
        #: With fewer rows than these numbers, `affine` and `product` use NumPy.
        self.many = math.ceil(_MIN_FUSED / self.weight.size)
        self._many_of_product = math.ceil(_MIN_PRODUCT / self.weight.size)
        self._transposed = self.weight.T
        #: Zeros `[out]` if ReLU follows. With an array of zeros, NumPy computes a maximum three
        #: times as fast as with the number 0.
        self.zeros = np.zeros(len(self.weight), np.float32) if relu else None
        if linear.weight.grad is not None and linear.bias.grad is not None:
            self.grads = linear.weight.grad.numpy(), linear.bias.grad.numpy()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Computes outputs `[B, out]` from inputs `[B, in]`, as a new array."""
        if len(x) >= self.many:
            return affine(x, self.weight, self.bias, self.zeros)
        x = x.dot(self._transposed)  # as `affine`, with fewer calls
        x += self.bias
        return x if self.zeros is None else np.maximum(x, self.zeros, out=x)

    def by_inputs(self, gradient: np.ndarray) -> np.ndarray:
        """Computes the gradient with respect to the inputs, `[B, in]`.

        Args:
            gradient: gradient of the loss with respect to the outputs of the layer before the
                activation, `[B, out]`.
        """
        if len(gradient) >= self._many_of_product:
            return product(len(gradient), gradient, self.weight)
        return gradient.dot(self.weight)

    def learn(self, gradient: np.ndarray, inputs: np.ndarray) -> None:
        """Adds the gradients of the weights and biases to their `.grad`.

        Args:
            gradient: see `by_inputs`.
            inputs: inputs of the layer, `[B, in]`.
        """
        weight, bias = self.grads
        if len(gradient) >= self._many_of_product:
            weight += product(len(gradient), gradient.T, inputs)
        else:
            weight += gradient.T.dot(inputs)
        bias += column_sums(gradient)


def affine(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray, zeros: np.ndarray | None
) -> np.ndarray:
    """Computes `x @ weight.T + bias`, `[B, out]`, as a new array.

    Args:
        x: `[B, in]`.
        weight: `[out, in]`.
        bias: `[out]`.
        zeros: zeros `[out]`, so that ReLU follows, or None.
    """
    if _fits(len(x), (len(x), *weight.shape), _MIN_FUSED):
        return _in_onednn(x, weight, bias, "none" if zeros is None else "relu")
    x = x.dot(weight.T)
    x += bias
    return x if zeros is None else np.maximum(x, zeros, out=x)


def product(count: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Computes `a @ b` as a new array.

    Args:
        count: B, the size of the batch. It is one of the dimensions of `a` and `b`.
        a: `[M, K]`. Both arrays may be transposed views.
        b: `[K, N]`.
    """
    if _fits(count, (*a.shape, b.shape[1]), _MIN_PRODUCT):
        return _in_onednn(a, b.T)
    return a.dot(b)


def column_sums(array: np.ndarray) -> np.ndarray:
    """The sums `[N]` over the rows of an array `[B, N]`. A product takes less time than `sum`."""
    sums: np.ndarray = _ones(len(array)).dot(array)
    return sums


@functools.lru_cache(maxsize=16)
def _ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def _fits(count: int, sides: tuple[int, ...], least: int) -> bool:
    """Whether oneDNN computes a product.

    Args:
        count: B, the size of the batch.
        sides: the three dimensions of the product.
        least: the smallest number of multiplications.
    """
    if count % STEP or math.prod(sides) < least:
        return False
    return min(sides) >= _MIN_SIDE and has_onednn()


def padded(count: int) -> int:
    """The number of rows to which a batch of `count` rows should be padded for oneDNN, if its size
    is different in every update."""
    return -(-count // STEP) * STEP if has_onednn() else count


def _in_onednn(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, activation: str = "none"
) -> np.ndarray:
    """Computes `x @ weight.T + bias`, and then `none` or `relu`. The arrays may be transposed
    views."""
    if torch.get_num_threads() != 1:
        with one_torch_thread():  # with another number of threads, the last bits might differ
            return _in_onednn(x, weight, bias, activation)
    shift = None if bias is None else _tensor(bias)
    found: np.ndarray = _operation()(_tensor(x), _tensor(weight), shift, activation, [], "").numpy()
    return found


def _tensor(array: np.ndarray) -> torch.Tensor:
    # torch warns of arrays that are read-only, as arrays from Ray's object store are.
    return torch.from_numpy(array if array.flags.writeable else array.copy(order="K"))


@functools.cache
def has_onednn() -> bool:
    """Whether oneDNN computes large products on this machine. It does if it has AVX-512, and if the
    BLAS of NumPy does not use AVX-512."""
    if _operation() is None or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    pools = [p for p in threadpoolctl.threadpool_info() if p["internal_api"] == "openblas"]
    of_numpy = [p for p in pools if "numpy" in p["filepath"]] or pools
    return any(pool["architecture"] in _AVX2_KERNELS for pool in of_numpy)


@functools.cache
def _operation() -> Any:
    """The operation of torch with oneDNN, or None if this version of torch does not have it."""
    try:
        found = torch.ops.mkldnn._linear_pointwise.default
    except AttributeError:
        return None
    return found if str(found._schema) == _SIGNATURE else None
