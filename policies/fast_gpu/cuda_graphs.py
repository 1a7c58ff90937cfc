"""`CudaGraphs`: records the gradient of a policy as a CUDA graph, and replays the graph.

For a small network, Python needs several times as long to start the kernels of a gradient as the
GPU needs to run them. A CUDA graph starts all kernels of a gradient with one call.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from polopt.common.overrides import Replacement, runs_as_written

_LOG = logging.getLogger("polopt")
#: The largest number of graphs of a policy. Each graph holds its own GPU memory.
_MAX_GRAPHS = 8
#: Gradients before the recording. They let cuBLAS and cuDNN choose and load their kernels.
_WARM_UP = 2
#: The members of `ReplayPolicy` that a graph replaces, in addition to the policy's `graph_members`.
MEMBERS = (
    *("backward", "backward_in_torch", "add_gradient", "tensors", "training", "normal", "drawn"),
)


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
    `policy.graph_key`. A subclass that changes a method of `MEMBERS` or `graph_members` learns
    without graphs, unless the subclass sets `graph_members` itself.

    Args:
        policy: the policy.

    Attributes:
        replacement: the recorded gradients as an implementation of `ReplayPolicy.backward`.
    """

    def __init__(self, policy: Any) -> None:
        owner = next(base for base in type(policy).__mro__ if "graph_members" in vars(base))
        names = (*MEMBERS, *policy.graph_members)
        why_not = why_not_graphs(policy) if policy.config.fast_gpu else "fast_gpu is False"
        self.replacement = Replacement(policy, owner, names, self._backward, why_not, "CUDA graphs")
        self._policy = policy
        self._config = policy.config
        self._graphs: dict[Any, _Graph] = {}
        self._failed = False

    def _backward(self, rows: Any) -> tuple[dict[str, float], np.ndarray] | None:
        """Does the same as `ReplayPolicy.backward`. Returns None if the gradient cannot be
        recorded. In this case, the gradient stays as it was.

        Args:
            rows: `Transitions` with arrays of B rows.
        """
        policy = self._policy
        if policy.config is not self._config:
            self._config = policy.config
            self._graphs.clear()
        key = (policy.graph_key, *((array.shape, array.dtype) for array in rows))
        if key not in self._graphs:
            if self._failed:
                return None
            if len(self._graphs) == _MAX_GRAPHS:
                self._fail(f"it needs more than {_MAX_GRAPHS} graphs")
                return None
            try:
                with torch.cuda.device(policy.device):
                    self._graphs[key] = self._record(rows)
            except RuntimeError as error:
                # The end of a failed recording raises another error. The cause is its context.
                self._fail(str(error.__context__ or error).splitlines()[0])
                return None
        with torch.cuda.device(policy.device):
            return self._replay(self._graphs[key], rows)

    def _fail(self, cause: str) -> None:
        self._failed = True
        name = type(self._policy).__name__
        _LOG.warning("%s learns without further CUDA graphs: %s", name, cause)
        if not self._graphs:
            self.replacement.withdraw(cause)

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
        before = policy.flat.buffer.clone()
        # During the recording, `policy.normal` gets its noise from these tensors.
        policy.drawn = allocate
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    noise.clear()
                    policy.add_gradient(inputs)
            current.wait_stream(stream)
            # The tensors exist before the recording. Otherwise the graph would set them to 0.
            remaining = iter(noise)
            policy.drawn = lambda shape: next(remaining)
            # Other threads of this process may use the GPU at the same time.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                stats, errors = policy.add_gradient(inputs)
                outputs = torch.cat([torch.stack([*stats.values()]).float(), errors.float()])
        finally:
            del policy.drawn
            torch.cuda.set_stream(current)  # a recording that fails does not return to it
            current.wait_stream(stream)
            policy.flat.buffer.copy_(before)
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


def why_not_graphs(policy: Any) -> str:
    """Why a graph cannot repeat the gradient of a policy. Empty if it can.

    All modules of the networks must be modules of torch and polopt
    without hooks, because other Python code may decide in each call what to compute. Networks with
    buffers learn without graphs, because the recording would change the buffers. So do networks
    that scale each element of an image with its own number, because they copy these numbers to the
    GPU in each call.
    """
    if not policy.graph_members:
        return "the class does not set graph_members"
    if any(name.endswith(".buffers") for name in policy.flat.segments):
        return "a network has buffers"
    modules = [m for s in policy.segments.values() for m in s.module.modules()]
    other = [type(module).__name__ for module in modules if not _repeats(module)]
    return f"a graph may not repeat {other[0]}" if other else ""


def _repeats(module: Any) -> bool:
    """Whether each call of the module runs the same kernels and no other code."""
    known = type(module).__module__.partition(".")[0] in ("torch", "polopt")
    scales = [part.scale for part in getattr(module, "parts", ())]
    scaled = any(isinstance(scale, Tensor) for scale in scales)
    return known and runs_as_written(module) and not scaled
