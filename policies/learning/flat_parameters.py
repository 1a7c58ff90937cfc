"""`FlatParameters`: one tensor of all parameters of a policy, another of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Segment(NamedTuple):
    """A named part of a policy's flat tensor: the parameters of one module.

    Attributes:
        module: its parameters are float32.
        copy_of: name of the segment that this one is a copy of, as a target network is; it has no
            gradient and no torch optimizer. None: it has its own torch optimizer.
    """

    module: nn.Module
    copy_of: str | None = None


class FlatParameters:
    """Moves the parameters of modules into one flat vector, and their gradients into another.

    Each parameter becomes a view of `params`, and its `.grad` a view of `grads`, so that getting,
    setting, sending, clipping, all-reducing and updating each operate on one tensor.

    `buffer` has `tail` more elements than the gradient, for scalars that are summed over all
    learners in the same all-reduce (row counts, learner statistics).

    Args:
        segments: modules on one device, by name.
        tail: number of additional elements.

    Attributes:
        params: `[P]`, an `nn.Parameter`: the segments with a gradient, then the copies.
        grads: `[G]` view of `buffer`, of the first G parameters; P without copies.
        tail: `[tail]` view of `buffer`.
        buffer: `[G + tail]`.
        segments: where each segment is in `params`.
        trained: those of them that have a gradient.
    """

    def __init__(self, segments: Mapping[str, Segment], tail: int = 0) -> None:
        self._copies = {n: s.copy_of for n, s in segments.items() if s.copy_of is not None}
        self.trained = _places(segments, [n for n in segments if n not in self._copies], 0)
        size = max(part.stop for part in self.trained.values())
        self.segments = {**self.trained, **_places(segments, self._copies, size)}
        total = max(part.stop for part in self.segments.values())
        device = next(next(iter(segments.values())).module.parameters()).device
        flat = torch.empty(total, dtype=torch.float32, device=device)
        self.buffer = torch.zeros(size + tail, dtype=torch.float32, device=device)
        for name, part in self.segments.items():
            offset = part.start
            for parameter in segments[name].module.parameters():
                end = offset + parameter.numel()
                flat[offset:end].copy_(parameter.data.reshape(-1))
                parameter.data = flat[offset:end].view_as(parameter)
                if name in self._copies:
                    parameter.requires_grad_(False)
                else:
                    parameter.grad = self.buffer[offset:end].view_as(parameter)
                offset = end
        self.params = nn.Parameter(flat)
        self.grads: Tensor = self.buffer[:size]
        if size == total:
            self.params.grad = self.grads
        # torch's cost per operation would exceed that of the arithmetic on so few numbers.
        on_cpu = device.type == "cpu"
        self._params: Any = flat.numpy() if on_cpu else flat
        self._all: Any = self.buffer.numpy() if on_cpu else self.buffer
        self._grads: Any = self._all[:size]
        self._tail: Any = self._all[size:]

    def get_params(self) -> np.ndarray:
        """A copy of the parameters, `[P]`."""
        return _copied(self._params)

    def get_grads(self) -> np.ndarray:
        """A copy of the gradient, `[G]`."""
        return _copied(self._grads)

    def set_params(self, array: np.ndarray) -> None:
        """Copies `array`, `[P]`, into the parameters.

        Raises:
            ValueError: if it has another shape.
        """
        if array.shape != tuple(self.params.shape):
            raise ValueError(
                f"weights must have shape {list(self.params.shape)}; got {list(array.shape)}: they "
                "belong to another network"
            )
        _copy_into(self._params, array)

    def refresh_copies(self) -> None:
        """Makes each copy equal to the segment that it is a copy of."""
        for name, source in self._copies.items():
            self._params[self.segments[name]] = self._params[self.segments[source]]

    def get_state(self) -> dict[str, Any]:
        """`params` on the CPU and `[start, end]` of each segment, for checkpoints."""
        places = {name: [part.start, part.stop] for name, part in self.segments.items()}
        return {"params": self.params.detach().cpu().clone(), "segments": places}

    def params_of(self, state: Mapping[str, Any]) -> np.ndarray:
        """The parameters `[P]` that a state from `get_state` holds. Segments that only the state
        has are left out; a copy that it lacks is taken from the segment that it is a copy of.

        Raises:
            ValueError: if a segment is missing or has another size.
        """
        saved = state["params"].numpy()
        found = {name: saved[start:end] for name, (start, end) in state["segments"].items()}
        result = np.empty(len(self.params), dtype=np.float32)
        for name, part in self.segments.items():
            given = found.get(name, found.get(self._copies.get(name, name)))
            if given is None or len(given) != part.stop - part.start:
                raise ValueError(
                    f"the state must have {part.stop - part.start} parameters of segment {name!r}; "
                    f"got {0 if given is None else len(given)}: it belongs to another network"
                )
            result[part] = given
        return result

    def set_grads(self, array: np.ndarray) -> None:
        """Copies `array`, `[G]`, into the gradient."""
        _copy_into(self._grads, array)

    def zero_grads(self) -> None:
        """Sets gradient and tail to zero in place (`.grad = None` would remove the views)."""
        self._all[:] = 0.0

    @np.errstate(over="ignore", invalid="ignore")  # the result is then not finite
    def norm(self) -> float:
        """Euclidean norm of the gradient; inf if its square overflows float32."""
        if isinstance(self._grads, Tensor):
            return float(torch.linalg.vector_norm(self._grads))
        return math.sqrt(float(np.dot(self._grads, self._grads)))

    def scale(self, factor: float) -> None:
        """Multiplies gradient and tail by `factor`."""
        self._all *= factor

    def set_tail(self, values: list[float]) -> None:
        """Copies `values`, `[tail]`, into the tail."""
        self._tail[:] = torch.tensor(values) if isinstance(self._tail, Tensor) else values

    def get_tail(self) -> list[float]:
        """A copy of the tail, `[tail]`."""
        tail: list[float] = self._tail.tolist()
        return tail


def _places(segments: Mapping[str, Segment], names: Iterable[str], offset: int) -> dict[str, slice]:
    """Consecutive places in a flat vector, from `offset` on."""
    places = {}
    for name in names:
        end = offset + sum(p.numel() for p in segments[name].module.parameters())
        places[name] = slice(offset, end)
        offset = end
    return places


def _copied(numbers: Any) -> np.ndarray:
    copy: np.ndarray = numbers.cpu().numpy() if isinstance(numbers, Tensor) else numbers.copy()
    return copy


def _copy_into(numbers: Any, array: np.ndarray) -> None:
    if isinstance(numbers, Tensor):
        # Arrays from Ray's object store are read-only, which `torch.from_numpy` does not support.
        numbers.copy_(torch.tensor(array))
    else:
        np.copyto(numbers, array)
