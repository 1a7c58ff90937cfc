"""A `SampleBatch` as TorchRL's losses want it. Needs `tensordict`, which polopt does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from polopt.common.sample_batch import SampleBatch

#: Columns of ours that TorchRL has a name for, and whether it wants a last dimension of 1.
_NAMES = {
    "actions": ("action", False),
    "action_logp": ("sample_log_prob", False),
    "action_dist_inputs": ("action_dist_inputs", False),
    "values": ("state_value", True),
    "advantages": ("advantage", True),
    "value_targets": ("value_target", True),
}
_OWN = {"rewards", "terminated", "truncated", "valid"}


def to_tensordict(batch: SampleBatch, device: str) -> Any:
    """See `SampleBatch.to_tensordict`."""
    try:
        from tensordict import TensorDict
    except ImportError:
        raise ImportError(
            "SampleBatch.to_tensordict needs tensordict: pip install tensordict"
        ) from None
    steps, envs = batch.shape

    def tensor(column: np.ndarray, with_last: bool = False) -> Tensor:
        # Arrays out of Ray are read-only, which torch can not express: hence the copy.
        rows = torch.from_numpy(np.array(column.swapaxes(0, 1))).to(device)  # [N, T, ...]
        return rows.unsqueeze(-1) if with_last else rows

    following = batch.all_obs[1:].copy()
    if len(batch.successor_index):
        following.reshape(-1, *following.shape[2:])[batch.successor_index] = batch.successor_obs
    terminated, truncated = batch["terminated"], batch["truncated"]
    no = np.zeros((steps, envs), dtype=bool)
    result: dict[Any, Any] = {
        "observation": tensor(batch.obs),
        "done": tensor(no, True),
        "terminated": tensor(no, True),
        "truncated": tensor(no, True),
        "next": {
            "observation": tensor(following),
            "reward": tensor(batch["rewards"], True),
            "done": tensor(terminated | truncated, True),
            "terminated": tensor(terminated, True),
            "truncated": tensor(truncated, True),
        },
        "collector": {
            "mask": tensor(batch["valid"]),
            "traj_ids": tensor(_trajectory_ids(batch)),
        },
    }
    for name, column in batch.columns.items():
        if name not in _OWN:
            theirs, with_last = _NAMES.get(name, (name, False))
            result[theirs] = tensor(column, with_last)
    return TensorDict(result, batch_size=[envs, steps], device=device)


def _trajectory_ids(batch: SampleBatch) -> np.ndarray:
    """`[T, N]`: numbers the trajectories within the batch, environment by environment."""
    steps, envs = batch.shape
    ends = batch["terminated"] | batch["truncated"]
    ids = np.zeros((steps, envs), dtype=np.int64)
    ids[1:] = np.cumsum(ends, axis=0)[:-1]
    first = np.concatenate([[0], np.cumsum(ids[-1] + 1)[:-1]])
    return ids + first
