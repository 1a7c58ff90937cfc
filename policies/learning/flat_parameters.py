"""`FlatParameters`: one tensor with all parameters of a policy, and one with all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Segment(NamedTuple):
    """A named part of a policy's flat tensor: the parameters of one module.

    Attributes:
        module: the module. Its parameters are float32.
        copy_of: name of the original segment, if this segment is a copy, such as a target network.
            A copy has neither a gradient nor a torch optimizer. `None` means that the segment is
            trained.
        lr: name of the config option with the learning rate of the segment. If the value of this
            option is None, the segment uses the option `lr`.
    """

    module: nn.Module
    copy_of: str | None = None
    lr: str = "lr"


class FlatParameters:
    """Moves the parameters of modules into one flat tensor, and their gradients into another one.

        flat = FlatParameters({"network": Segment(actor), "critics": Segment(critics)})
        flat.zero_grads()
        loss.backward()                        # adds to `flat.grads`
        flat.scale(0.5)                        # halves the gradients of all modules
        array = flat.get_params()              # [P], for a message

    Each parameter becomes a view of `params`, and the `.grad` of each trained parameter becomes a
    view of `grads`. So one operation on one tensor is enough to get, set or send the weights, and
    to clip or all-reduce the gradient.

    Float32 buffers of modules also become views of `params` if they are in the `state_dict` of the
    module, as running statistics are. These buffers have neither a gradient nor a torch optimizer.
    Other buffers are constants, or counters of one process. They are neither sent nor saved.

    One all-reduce sums the gradient and other numbers over all learners. For this, `buffer` holds
    the gradient, then `tail` scalars (row counts, learner statistics), then a copy of the buffers
    of the trained modules.

    Args:
        segments: modules on one device, by name.
        tail: number of scalars that are summed together with the gradient.

    Attributes:
        params: `[P]`, an `nn.Parameter`. Holds the trained segments, the copies, the buffers of the
            trained segments, and the buffers of the copies, in this order.
        grads: `[G]`, a view of the first G elements of `buffer`. G is the number of trained
            parameters.
        buffer: `[G + tail + number of buffer elements of trained segments]`.
        segments: the slice of each segment in `params`, by name. The slice of the buffers of a
            segment has the key `NAME.buffers`.
        trained: the slices of the segments that have a gradient.
        lr_options: the config option with the learning rate of each trained segment.
    """

    def __init__(self, segments: Mapping[str, Segment], tail: int = 0) -> None:
        self._copies = {n: s.copy_of for n, s in segments.items() if s.copy_of is not None}
        self.trained = _places(segments, [n for n in segments if n not in self._copies], 0)
        self.lr_options = {name: segments[name].lr for name in self.trained}
        size = max(part.stop for part in self.trained.values())
        self.segments = {**self.trained, **_places(segments, self._copies, size)}
        total = max(part.stop for part in self.segments.values())
        owned = {name: list(_buffers(segments[name].module)) for name in self.segments}
        start = total
        for name in owned:
            if owned[name]:
                end = total + sum(buffer.numel() for _, _, buffer in owned[name])
                self.segments[f"{name}.buffers"] = slice(total, end)
                total = end
        own = sum(buffer.numel() for name in self.trained for _, _, buffer in owned[name])
        self._own_buffers = slice(start, start + own)
        device = next(next(iter(segments.values())).module.parameters()).device
        flat = torch.empty(total, dtype=torch.float32, device=device)
        self.buffer = torch.zeros(size + tail + own, dtype=torch.float32, device=device)
        for name in owned:
            part = self.segments[name]
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
        # The owner of each buffer, its name, and the tensor that becomes a view of `params`.
        self._buffers = [entry for entries in owned.values() for entry in entries]
        offset = start
        for _, _, buffer in self._buffers:
            end = offset + buffer.numel()
            flat[offset:end].copy_(buffer.reshape(-1))
            buffer.data = flat[offset:end].view_as(buffer)
            offset = end
        self.params = nn.Parameter(flat)
        self.grads: Tensor = self.buffer[:size]
        if size == total:
            self.params.grad = self.grads
        # On the CPU, NumPy is faster, because a call of torch costs more than the arithmetic with
        # so few numbers.
        on_cpu = device.type == "cpu"
        self._params: Any = flat.numpy() if on_cpu else flat
        self._all: Any = self.buffer.numpy() if on_cpu else self.buffer
        self._grads: Any = self._all[:size]
        self._tail: Any = self._all[size : size + tail]
        self._reduced_buffers: Any = self._all[size + tail :]

    def get_params(self) -> np.ndarray:
        """A copy of `params`, `[P]`."""
        self._relink_buffers()
        return _copied(self._params)

    def get_buffers(self) -> np.ndarray:
        """A copy of the buffers of trained segments."""
        self._relink_buffers()
        return _copied(self._params[self._own_buffers])

    def pack_buffers(self) -> None:
        """Copies the buffers of trained segments to the end of `buffer`."""
        if self._buffers:
            self._relink_buffers()
            self._reduced_buffers[:] = self._params[self._own_buffers]

    def unpack_buffers(self) -> None:
        """Copies the end of `buffer` back to the buffers of trained segments. Does nothing if a
        value is not finite."""
        if self._buffers and math.isfinite(float(self._reduced_buffers.sum())):
            self._params[self._own_buffers] = self._reduced_buffers

    def _relink_buffers(self, copy: bool = True) -> None:
        """Puts the views of `params` back where a module has replaced a buffer by a new tensor.

        Args:
            copy: whether to copy the values of the new tensors into `params` first.
        """
        for owner, name, buffer in self._buffers:
            current = getattr(owner, name)
            if current is not buffer:
                if copy:
                    buffer.copy_(current.detach())
                setattr(owner, name, buffer)

    def get_grads(self) -> np.ndarray:
        """A copy of the gradient, `[G]`."""
        return _copied(self._grads)

    def set_params(self, array: np.ndarray) -> None:
        """Copies `array`, `[P]`, into `params`.

        Raises:
            ValueError: the array has a wrong shape.
        """
        if array.shape != tuple(self.params.shape):
            raise ValueError(
                f"weights must have shape {list(self.params.shape)}; got {list(array.shape)}: they "
                "belong to another network"
            )
        self._relink_buffers(copy=False)
        _copy_into(self._params, array)

    def refresh_copies(self, tau: float = 1.0) -> None:
        """Moves the parameters of each copy towards its original segment.

        Args:
            tau: fraction of the distance by which the parameters move. 1 makes the copy equal to
                the original. Buffers always become equal.
        """
        self._relink_buffers()
        for name, source in self._copies.items():
            copy, original = (self.params.data[self.segments[part]] for part in (name, source))
            if tau == 1.0:
                copy.copy_(original)
            else:
                copy.lerp_(original, tau)  # in one pass
            if f"{name}.buffers" in self.segments:
                own = self.segments[f"{name}.buffers"]
                self._params[own] = self._params[self.segments[f"{source}.buffers"]]

    def get_state(self) -> dict[str, Any]:
        """Returns the state for checkpoints: `params` on the CPU, and `[start, end]` of each
        segment."""
        self._relink_buffers()
        places = {name: [part.start, part.stop] for name, part in self.segments.items()}
        return {"params": self.params.detach().cpu().clone(), "segments": places}

    def params_of(self, state: Mapping[str, Any]) -> np.ndarray:
        """Returns the parameters `[P]` from a state of `get_state`, in the order of `params`.

        The method ignores segments that only the state has. If the state lacks a copy, the method
        uses the original segment instead.

        Raises:
            ValueError: a segment is missing or has another size.
        """
        saved = state["params"].numpy()
        found = {name: saved[start:end] for name, (start, end) in state["segments"].items()}
        result = np.empty(len(self.params), dtype=np.float32)
        for name, part in self.segments.items():
            module = name.removesuffix(".buffers")
            source = self._copies.get(module, module) + name[len(module) :]
            given = found.get(name, found.get(source))
            if given is None or len(given) != part.stop - part.start:
                raise ValueError(
                    f"the state must have {part.stop - part.start} parameters of segment {name!r}; "
                    f"got {0 if given is None else len(given)}: the state belongs to another "
                    "network"
                )
            result[part] = given
        return result

    def set_grads(self, array: np.ndarray) -> None:
        """Copies `array`, `[G]`, into the gradient."""
        _copy_into(self._grads, array)

    def zero_grads(self) -> None:
        """Sets `buffer` to 0 in place, because `.grad = None` would remove the views."""
        self._all[:] = 0.0

    @np.errstate(all="ignore")
    def norm(self) -> float:
        """Euclidean norm of the gradient. The norm is inf if its square overflows float32."""
        if isinstance(self._grads, Tensor):
            return float(torch.linalg.vector_norm(self._grads))
        return math.sqrt(float(np.dot(self._grads, self._grads)))

    def scale(self, factor: float) -> None:
        """Multiplies the whole `buffer` by `factor`: the gradient, the tail and the buffers."""
        self._all *= factor

    def set_tail(self, values: list[float]) -> None:
        """Copies `values`, `[tail]`, into the tail."""
        self._tail[:] = torch.tensor(values) if isinstance(self._tail, Tensor) else values

    def get_tail(self) -> list[float]:
        """A copy of the tail, `[tail]`."""
        tail: list[float] = self._tail.tolist()
        return tail


def _places(segments: Mapping[str, Segment], names: Iterable[str], offset: int) -> dict[str, slice]:
    """The slices of segments in a flat tensor. The first segment begins at `offset`, and the other
    segments follow without gaps."""
    places = {}
    for name in names:
        end = offset + sum(p.numel() for p in segments[name].module.parameters())
        places[name] = slice(offset, end)
        offset = end
    return places


def _buffers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yields the owner, name and tensor of each float32 buffer in the `state_dict` of `module`."""
    saved, seen = module.state_dict(), set()
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            key = f"{prefix}.{name}" if prefix else name
            if key in saved and buffer.dtype == torch.float32 and id(buffer) not in seen:
                seen.add(id(buffer))
                yield owner, name, buffer


def _copied(numbers: Any) -> np.ndarray:
    copy: np.ndarray = numbers.cpu().numpy() if isinstance(numbers, Tensor) else numbers.copy()
    return copy


def _copy_into(numbers: Any, array: np.ndarray) -> None:
    if isinstance(numbers, Tensor):
        # Arrays from Ray's object store are read-only, which `torch.from_numpy` does not support.
        numbers.copy_(torch.tensor(array))
    else:
        np.copyto(numbers, array)
