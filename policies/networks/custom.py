"""`CustomNetwork`: uses the user's own `torch.nn.Module` as the network of a policy."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polopt.common.config import ConfigError, shown
from polopt.policies.networks.network import Network, States
from polopt.policies.networks.observations import split

#: Rows of the example batch.
_ROWS = 2
#: Number of stack frames of the user's code that an error quotes.
_FRAMES = 3


class CustomNetwork(Network):
    """Wraps a module of the user, and passes observations to it in the structure of their space.

        class MyNetwork(nn.Module):
            def __init__(self, observation_space, action_space, num_params, **options): ...

            def forward(self, obs):
                return params, values                  # [B, num_params], [B]

    `split` describes the structure of `obs`. A module with memory has an attribute `state_size`,
    S. The method `forward(obs, state)` of such a module also gets the memory `[B, S]`, and returns
    the new memory as a third output.

    Args:
        module: the module.
        observation_space: observation space of one environment, without an action mask.
    """

    def __init__(self, module: nn.Module, observation_space: Space[Any]) -> None:
        super().__init__()
        self.module = module
        self.observation_space = observation_space
        self.state_size = _state_size(module)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        params, values = self.module(split(self.observation_space, obs))
        return params, values

    def unroll(
        self, obs: Tensor, state: Tensor, starts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, States]:
        outputs, states = [], {}
        for t, part in enumerate(obs.unbind()):
            if starts is not None:
                state = state.masked_fill(starts[t, :, None], 0.0)
            params, values, state = self.module(split(self.observation_space, part), state)
            outputs.append((params, values))
            states[t] = state
        all_params, all_values = zip(*outputs, strict=True)
        return torch.stack(all_params), torch.stack(all_values), states

    def __repr__(self) -> str:
        """Names and shapes of the parameters and buffers. `Policy.check_network` compares this text
        with the text in a checkpoint. The code of the module may change if this text does not."""
        state = self.module.state_dict().items()
        shapes = [f"{name} {list(t.shape)}" for name, t in state if isinstance(t, Tensor)]
        return f"{type(self).__name__}({', '.join(shapes)})"


def make_custom(
    module_class: type[nn.Module],
    options: Mapping[str, Any],
    observation_space: Space[Any],
    action_space: Space[Any],
    num_params: int,
) -> CustomNetwork:
    """Makes the user's module. Checks its parameters and buffers, and its outputs for an example
    batch.

    Args:
        module_class: the user's class. See `CustomNetwork`.
        options: keyword arguments of the constructor of `module_class`.
        observation_space: observation space of one environment, without an action mask.
        action_space: action space of one environment.
        num_params: P, number of distribution parameters for one observation.

    Raises:
        ConfigError: the module raises an error, or its parameters, buffers, `state_size` or outputs
            are not allowed. The message says why.
        NotImplementedError: the current device is torch's meta device, on which the module cannot
            be made.
    """
    name = module_class.__name__
    on_meta = torch.empty(0).device.type == "meta"
    try:
        module = module_class(observation_space, action_space, num_params, **options)
    except Exception as error:  # the user's code may raise anything
        if on_meta:
            raise NotImplementedError(f"{name} needs real numbers") from error
        raise ConfigError(_raised(f"{name}(...)", error)) from error
    if on_meta:
        if any(is_lazy(parameter) for parameter in module.parameters()):
            raise NotImplementedError(f"{name} is lazy")
        return CustomNetwork(module, observation_space)
    _check_tensors(module, name)
    network = CustomNetwork(module, observation_space).eval()
    example = [split(observation_space, _example(observation_space))]
    if network.state_size:
        example.append(torch.zeros(_ROWS, network.state_size))
    try:
        outputs = module(*example)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(_raised(f"{name}.forward", error)) from error
    _check_tensors(module, name)  # lazy modules have their tensors now
    _check_outputs(outputs, name, num_params, network.state_size)
    return network


def _example(space: Space[Any]) -> Tensor:
    """An example batch of encoded observations. All numbers are 0."""
    if isinstance(space, spaces.Box):
        return torch.from_numpy(np.zeros((_ROWS, *space.shape), space.dtype))
    return torch.zeros(_ROWS, int(spaces.utils.flatdim(space)))


def _check_tensors(module: nn.Module, name: str) -> None:
    owner_of: dict[int, str] = {}
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            continue
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        is_constant = kind == "buffer" and not tensor.is_floating_point()
        if tensor.device.type != "cpu" or not (is_constant or tensor.dtype == torch.float32):
            raise ConfigError(
                f"key 'model.custom': {kind} {key!r} of {name} is {tensor.dtype} on "
                f"{tensor.device}. Allowed: float32 on cpu, and for buffers also integers and "
                "bools on cpu; polopt moves the module to the device"
            )
        other = owner_of.setdefault(tensor.untyped_storage().data_ptr(), key)
        if other != key and tensor.numel():
            raise ConfigError(
                f"key 'model.custom': {other!r} and {key!r} of {name} share memory. Allowed: one "
                "parameter that is used twice, or tensors that do not share memory"
            )


def _state_size(module: nn.Module) -> int:
    size = getattr(module, "state_size", 0)
    if type(size) is not int or size < 0:
        raise ConfigError(
            f"key 'model.custom': state_size of {type(module).__name__} is {shown(size)}. Allowed: "
            "a whole number, the size of the memory of one environment, or 0 without memory"
        )
    return size


def _check_outputs(outputs: Any, name: str, num_params: int, state_size: int) -> None:
    wanted = f"action_dist_inputs [B, {num_params}] and values [B], two float32 tensors"
    shapes: list[tuple[int, ...]] = [(_ROWS, num_params), (_ROWS,)]
    if state_size:
        wanted = (
            f"action_dist_inputs [B, {num_params}], values [B] and the memory [B, {state_size}]"
        )
        shapes.append((_ROWS, state_size))
    is_tuple = isinstance(outputs, tuple) and len(outputs) == len(shapes)
    if not is_tuple or not all(isinstance(output, Tensor) for output in outputs):
        raise ConfigError(
            f"key 'model.custom': {name}.forward returned {_described(outputs)}. Allowed: {wanted}"
        )
    params, values = outputs[:2]
    right = all(
        tuple(output.shape) == shape and output.dtype == torch.float32
        for output, shape in zip(outputs, shapes, strict=True)
    )
    if not right:
        got = ", ".join(map(_described, outputs))
        raise ConfigError(
            f"key 'model.custom': {name}.forward returned {got} for {_ROWS} observations. Allowed: "
            f"{wanted}"
        )
    if not (params.requires_grad or values.requires_grad):
        raise ConfigError(
            f"key 'model.custom': the outputs of {name}.forward do not depend on a parameter of "
            "the module, so it cannot learn. Allowed: outputs that depend on a parameter"
        )


def _described(value: Any) -> str:
    """How an error message shows `value`. For a tensor, this is its dtype and its shape."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_described, value)) or 'nothing'}"
    return shown(value)


def _raised(where: str, error: Exception) -> str:
    frames = "".join(traceback.format_exception(type(error), error, error.__traceback__, -_FRAMES))
    return f"key 'model.custom': {where} raised {type(error).__name__}: {error}\n{frames.strip()}"
