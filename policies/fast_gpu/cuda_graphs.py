"""`CudaGraphs`: records the gradient of a policy as a CUDA graph, and replays the graph.

For a small network, Python needs several times as long to start the kernels of a gradient as the
GPU needs to run them. A CUDA graph starts all kernels of a gradient with one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_LOG = logging.getLogger("polopt")
#: The largest number of graphs of a policy. Each graph holds its own GPU memory.
_MAX_GRAPHS = 8
#: Gradients before the recording. They let cuBLAS and cuDNN choose and load their kernels.
_WARM_UP = 2


class _Graph(NamedTuple):
    """A recorded gradient.

    Attributes:
        graph: the recording. A replay adds the gradient to `flat.grads`.
        rows: the tensors from which the graph reads the rows, by column.
        noise: the tensors from which the graph reads normal noise, in the order of their use.
        names: names of the statistics.
        outputs: `[number of statistics + B]`, to which the graph writes the statistics and the
            absolute TD errors.
    """

    graph: Any
    rows: tuple[Tensor, ...]
    noise: list[Tensor]
    names: tuple[str, ...]
    outputs: Tensor


class CudaGraphs:
    """The recorded gradients of a `ReplayPolicy` on a GPU.

    A graph repeats the kernels, and not the Python code that started them. So a recorded gradient
    may depend only on the rows, the weights, noise from `policy.normal`, `policy.config`, and
    `policy.graph_key`. `supports` says whether this is known of a policy.

    Args:
        policy: a policy that `supports` accepts.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._config = policy.config
        self._graphs: dict[Any, _Graph] = {}
        self._failed = False
        #: While a gradient is recorded, a function that returns the next tensor of noise.
        self._next_noise: Callable[[tuple[int, ...]], Tensor] | None = None

    def normal(self, shape: tuple[int, ...]) -> Tensor | None:
        """While a gradient is recorded, returns the tensor `[*shape]` from which the graph reads
        noise. At other times, returns None."""
        return None if self._next_noise is None else self._next_noise(shape)

    def backward(self, rows: Any) -> tuple[dict[str, float], np.ndarray] | None:
        """Does the same as `ReplayPolicy.backward_in_torch`. Returns None if the gradient cannot be
        recorded. In this case, it adds nothing to the gradient.

        Args:
            rows: `Transitions` with arrays of B rows.
        """
        policy = self._policy
        if policy.config is not self._config:
            self._config = policy.config
            self._graphs.clear()
        key = (policy.graph_key, *((array.shape, array.dtype) for array in rows))
        if key not in self._graphs:
            if self._failed or len(self._graphs) == _MAX_GRAPHS:
                return None
            try:
                self._graphs[key] = self._record(rows)
            except RuntimeError as error:
                self._failed = True
                _LOG.warning(
                    "%s cannot record its gradient as a CUDA graph, and learns without graphs: %s",
                    type(policy).__name__,
                    str(error).splitlines()[0],
                )
                return None
        return self._replay(self._graphs[key], rows)

    def _record(self, rows: Any) -> _Graph:
        policy = self._policy
        inputs = type(rows)._make(
            torch.zeros(array.shape, dtype=_torch_dtype(array), device=policy.device)
            for array in rows
        )
        noise: list[Tensor] = []

        def allocate(shape: tuple[int, ...]) -> Tensor:
            noise.append(torch.zeros(shape, device=policy.device))
            return noise[-1]

        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    noise.clear()
                    self._next_noise = allocate
                    policy.add_gradient(inputs)
            torch.cuda.current_stream().wait_stream(stream)
            # The tensors exist before the recording. Otherwise the graph would set them to 0.
            remaining = iter(noise)
            self._next_noise = lambda shape: next(remaining)
            # The threads of other programs in this process may use the GPU at the same time.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                stats, errors = policy.add_gradient(inputs)
                outputs = torch.cat([torch.stack([*stats.values()]).float(), errors.float()])
        finally:
            self._next_noise = None
            policy.flat.zero_grads()
        return _Graph(graph, tuple(inputs), noise, tuple(stats), outputs.detach())

    def _replay(self, graph: _Graph, rows: Any) -> tuple[dict[str, float], np.ndarray]:
        for tensor, array in zip(graph.rows, rows, strict=True):
            tensor.copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))
        for tensor in graph.noise:
            tensor.copy_(self._policy.drawn(tuple(tensor.shape)))
        graph.graph.replay()
        outputs = graph.outputs.cpu().numpy()
        count = len(graph.names)
        return dict(zip(graph.names, outputs[:count].tolist(), strict=True)), outputs[count:]


def _torch_dtype(array: np.ndarray) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


def supports(policy: Any) -> bool:
    """Whether a graph can repeat the gradient of a policy.

    The policy must be on a GPU. The class that names the members of its gradient in `graph_members`
    must define all of them, so a subclass that overrides one of them learns without graphs. All
    networks must consist of modules of torch and polopt, and have no buffers, because Python code
    of other modules may decide in each call what to compute.
    """
    if policy.device.type != "cuda" or not policy.graph_members:
        return False
    cls = type(policy)
    owner = next(base for base in cls.__mro__ if "graph_members" in vars(base))
    members = ("add_gradient", "normal", *policy.graph_members)
    if any(getattr(cls, name) is not getattr(owner, name) for name in members):
        return False
    modules = [m for s in policy.segments.values() for m in s.module.modules()]
    return not any(name.endswith(".buffers") for name in policy.flat.segments) and all(
        type(module).__module__.partition(".")[0] in ("torch", "polopt") for module in modules
    )
