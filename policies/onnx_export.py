"""`write_onnx`: exports a policy to ONNX, as a model from observations to actions."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.common.config import ConfigError
from polopt.policies.acting_policy import ActingPolicy

#: The packages that `torch.onnx.export` imports. The extra `onnx` installs these packages.
_NEEDED = ("onnx", "onnxscript")
#: Rows of the example batch. A size of 0 or 1 would become a constant of the graph.
_ROWS = 2


def write_onnx(
    path: str | Path,
    policy: ActingPolicy,
    network: nn.Module,
) -> None:
    """Writes an ONNX model of a policy that acts deterministically. See `Policy.export_onnx`.

    Args:
        path: path of the file. After an error, the file either does not exist or is unchanged.
        policy: a policy that defines `act_in_torch`.
        network: the network that acts. The function does not change the network.

    Raises:
        ConfigError: packages are not installed, the policy or torch does not support the export, or
            the file cannot be written.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"export to ONNX needs packages that are not installed: {', '.join(missing)}. "
            "Install them: pip install 'polopt[onnx]'"
        )
    network = copy.deepcopy(network).cpu()
    parts = list(_parts(policy.encoder.space, "observations"))
    names = [name for name, _ in parts]
    if len(set(names)) < len(names):  # two keys differ only in characters that became `_`
        names = [f"{name}.{i}" for i, name in enumerate(names)]
    model = _Acting([space for _, space in parts], policy, network).eval()
    examples = tuple(_example(space) for _, space in parts)
    outputs = ["actions", "action_dist_inputs"]
    if policy.state_size:
        examples += (torch.zeros(_ROWS, policy.state_size),)
        names.append("state")
        outputs.append("next_state")
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        model(*examples)  # the user gets an error of the policy without a torch wrapper around it
    try:
        with _quiet():
            program = torch.onnx.export(
                model,
                examples,
                input_names=names,
                output_names=outputs,
                dynamic_shapes={"inputs": tuple({0: batch} for _ in examples)},
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ConfigError(f"torch cannot export {type(network).__name__}: {error}") from error
    assert program is not None
    target = Path(path).expanduser()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        program.save(str(temporary), external_data=False)
        temporary.replace(target)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{target} cannot be written: {reason}") from error
    finally:
        with suppress(
            FileNotFoundError, NotADirectoryError
        ):  # for example if the parent of `path` is a file
            temporary.unlink()


@contextmanager
def _quiet() -> Iterator[None]:
    """A context that hides warnings of the exporter. These are about packages that a policy does
    not need, and about deprecated functions that torch itself calls."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings("ignore", category=UserWarning, module="torch")
            # The exporter sets and restores the list of weights in nn.LSTM, and warns about this.
            warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
            yield
    finally:
        log.setLevel(level)


class _Acting(nn.Module):
    """The module that is exported. Its inputs are observations, and its outputs are actions and
    distribution parameters. For a policy with memory, the state is another input, and the next
    state is another output."""

    def __init__(
        self,
        parts: list[Space[Any]],
        policy: ActingPolicy,
        network: nn.Module,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._is_box = policy.encoder.is_box
        normalizer = policy.normalizer
        dtype = np.float32 if normalizer is None else normalizer.dtype
        self._dtype = torch.from_numpy(np.zeros(0, dtype)).dtype
        self._dist = policy.dist
        self._act = policy.act_in_torch
        self._state_size = policy.state_size
        self.network = network  # as a submodule, so that the model has its parameters

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        observations = inputs[: len(self._parts)]
        state = inputs[-1] if self._state_size else observations[0].new_zeros(0)
        params, after = self._act(self.network, self._encoded(observations), state)
        outputs = (self._dist.mode_for_env(params), params)
        return (*outputs, after) if self._state_size else outputs

    def _encoded(self, observations: tuple[Tensor, ...]) -> Tensor:
        """Does the same as `ObservationEncoder.encode`, in torch. If the policy normalises, the
        result has the dtype of its normaliser."""
        if self._is_box:
            return observations[0]
        pairs = zip(self._parts, observations, strict=True)
        return torch.cat([_flat(space, part).to(self._dtype) for space, part in pairs], dim=1)


def _parts(space: Space[Any], name: str) -> Iterator[tuple[str, Space[Any]]]:
    """Yields the name and space of each input, in the order of the flattened observation."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        named = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in named:
            yield from _parts(part, f"{name}.{re.sub('[^A-Za-z0-9_]', '_', str(key))}")
    else:
        yield name, space


def _example(space: Space[Any]) -> Tensor:
    if isinstance(space, spaces.Box):
        return torch.from_numpy(np.zeros((_ROWS, *space.shape), space.dtype))
    if isinstance(space, spaces.MultiBinary):
        return torch.zeros(_ROWS, *space.shape, dtype=torch.int8)
    start = np.broadcast_to(np.asarray(space.start), space.shape or ())  # type: ignore[attr-defined]
    return torch.from_numpy(np.stack([start] * _ROWS).astype(np.int64))


def _flat(space: Space[Any], values: Tensor) -> Tensor:
    """Flattens a batch of one space to `[N, D]`."""
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return values.flatten(1) if space.shape else values[:, None]
    if isinstance(space, spaces.Discrete):
        return _one_hot(values - int(space.start), int(space.n))
    assert isinstance(space, spaces.MultiDiscrete)
    columns = (values - torch.from_numpy(np.asarray(space.start, np.int64))).flatten(1)
    sizes = space.nvec.reshape(-1).tolist()
    return torch.cat([_one_hot(columns[:, i], n) for i, n in enumerate(sizes)], dim=1)


def _one_hot(values: Tensor, size: int) -> Tensor:
    return (values[:, None] == torch.arange(size)).float()
