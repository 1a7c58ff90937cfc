"""Where Tune stores the checkpoints of a trial. Tune has no public name for that: this file alone
uses `Trainable._storage`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray import tune


def next_checkpoint(trainable: tune.Trainable) -> Path | None:
    """The directory that Tune gives the next checkpoint, in its storage; None without Tune."""
    storage = trainable._storage
    if storage is None:
        return None
    following = copy.copy(storage)
    following.current_checkpoint_index += 1
    return Path(following.checkpoint_fs_path)


def results_folder(storage: Any, logdir: str) -> tuple[fs.FileSystem, str]:
    """The file system of a run's results, and their directory there.

    Args:
        storage: Tune's `StorageContext` of the trial, whose directory may be in a cloud; None:
            without Tune.
        logdir: directory of the trainable, which has the results without Tune.
    """
    if storage is None:
        return fs.LocalFileSystem(), logdir
    return storage.storage_filesystem, storage.trial_fs_path
