"""Where Tune stores the checkpoints of a trial. Tune has no public name for that: this file alone
uses `Trainable._storage`."""

from __future__ import annotations

import copy
from pathlib import Path

from ray import tune


def next_checkpoint(trainable: tune.Trainable) -> Path | None:
    """The directory that Tune gives the next checkpoint, in its storage; None without Tune."""
    storage = trainable._storage
    if storage is None:
        return None
    following = copy.copy(storage)
    following.current_checkpoint_index += 1
    return Path(following.checkpoint_fs_path)
