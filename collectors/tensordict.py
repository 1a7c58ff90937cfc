"""Converts the arrays of a batch to a `TensorDict` with TorchRL's names. Requires `tensordict`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from polopt.common.sample_batch import SampleBatch

#: Maps the name of a column in polopt to its name in TorchRL, and to whether TorchRL expects a last
#: dimension of size 1.
_NAMES = {
    "actions": ("action", False),
    "action_logp": ("sample_log_prob", False),
    "action_dist_inputs": ("action_dist_inputs", False),
    "values": ("state_value", True),
    "advantages": ("advantage", True),
    "value_targets": ("value_target", True),
}
_CONVERTED_SEPARATELY = {"rewards", "terminated", "truncated", "valid"}


def to_tensordict(batch: SampleBatch, device: str | None = None) -> Any:
    """Converts a batch to a `tensordict.TensorDict` with the batch size `[N, T]`, for TorchRL's
    losses.

    The names are the names of TorchRL's collectors. Columns that the following list does not
    contain keep their names.

    - `observation`: the observations.
    - `action`: the column `actions`. Discrete actions are category indices, not one-hot vectors.
    - `sample_log_prob`: the column `action_logp`, if `Policy.postprocess` has computed it.
    - `("next", "observation")`: the true next observation, also at the end of an episode.
    - `("next", "reward")`, `("next", "done")`, `("next", "terminated")` and
      `("next", "truncated")`: `[N, T, 1]`.
    - `done`, `terminated` and `truncated`: `[N, T, 1]`, False in all rows.
    - `state_value`, `advantage` and `value_target`: `[N, T, 1]`, if `Policy.postprocess` has
      computed them.
    - `("collector", "mask")`: False in rows without a transition.
    - `("collector", "traj_ids")`: the index of the trajectory of each row.

    Args:
        batch: a batch `[T, N, ...]`.
        device: the device of the tensors. `None` means the batch's `device`.

    Raises:
        ImportError: if `tensordict` is not installed.
    """
    try:
        from tensordict import TensorDict
    except ImportError:
        raise ImportError(
            "polopt.to_tensordict requires tensordict: pip install tensordict"
        ) from None

    columns, place = batch.columns, device or batch.device
    next_obs = batch.all_obs[1:].copy()
    if len(batch.successor_index):
        next_obs.reshape(-1, *next_obs.shape[2:])[batch.successor_index] = batch.successor_obs

    def tensor(column: np.ndarray, with_last: bool = False) -> Tensor:
        return _tensor(column, with_last, place)

    terminated, truncated = columns["terminated"], columns["truncated"]
    ends = terminated | truncated
    false = np.zeros_like(ends)
    result: dict[Any, Any] = {
        "observation": tensor(batch.all_obs[:-1]),
        "done": tensor(false, True),
        "terminated": tensor(false, True),
        "truncated": tensor(false, True),
        "next": {
            "observation": tensor(next_obs),
            "reward": tensor(columns["rewards"], True),
            "done": tensor(ends, True),
            "terminated": tensor(terminated, True),
            "truncated": tensor(truncated, True),
        },
        "collector": {
            "mask": tensor(columns["valid"]),
            "traj_ids": tensor(_trajectory_ids(ends)),
        },
    }
    for name, column in columns.items():
        if name not in _CONVERTED_SEPARATELY:
            torchrl_name, with_last = _NAMES.get(name, (name, False))
            result[torchrl_name] = tensor(column, with_last)
    steps, envs = ends.shape
    return TensorDict(result, batch_size=[envs, steps], device=place)


def _tensor(column: np.ndarray, with_last: bool, device: str) -> Tensor:
    # A copy, because arrays from Ray's object store are read-only, and torch does not support
    # read-only arrays.
    rows = torch.from_numpy(np.array(column.swapaxes(0, 1))).to(device)  # [N, T, ...]
    return rows.unsqueeze(-1) if with_last else rows


def _trajectory_ids(ends: np.ndarray) -> np.ndarray:
    """Returns the index of the trajectory of each row, `[T, N]` int64. The indices begin with 0,
    are ordered by environment and then by time, and are unique in the batch."""
    ids = np.zeros(ends.shape, dtype=np.int64)
    ids[1:] = np.cumsum(ends, axis=0)[:-1]
    first = np.concatenate([[0], np.cumsum(ids[-1] + 1)[:-1]])
    return ids + first
