"""Finds the directories of a trainer's results and of its next checkpoint, with and without Tune.

Tune has no public name for the storage of a trial. Only this file uses `Trainable._storage`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray import tune


def next_checkpoint(trainable: tune.Trainable) -> Path | None:
    """Returns the directory in Tune's storage to which Tune will copy the next checkpoint. Returns
    None without Tune."""
    storage = trainable._storage
    if storage is None:
        return None
    ahead = copy.copy(storage)
    ahead.current_checkpoint_index += 1
    return Path(ahead.checkpoint_fs_path)


def following(logdir: str) -> Path:
    """Returns the directory in `logdir` for the next checkpoint of a trainer without Tune. Its name
    has the same form as under Tune, with a larger number than the existing checkpoints."""
    found = Path(logdir).glob(f"checkpoint_{'[0-9]' * 6}")
    last = max((int(path.name[-6:]) for path in found), default=-1)
    return Path(logdir, f"checkpoint_{last + 1:06}")


def results_folder(storage: Any, logdir: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a run's results, and the directory of the results in this file
    system.

    Args:
        storage: Tune's `StorageContext` of the trial. Its directory may be in cloud storage. `None`
            means that the trainer runs without Tune.
        logdir: directory of the trainable. Without Tune, this is the directory of the results.
    """
    if storage is None:
        return fs.LocalFileSystem(), logdir
    return storage.storage_filesystem, storage.trial_fs_path
