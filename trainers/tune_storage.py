"""Where the next checkpoint of a trainer and its results go, with Tune and without.

Tune has no public name for the storage of a trial: this file alone uses `Trainable._storage`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from pyarrow import fs
from ray import tune


def next_checkpoint(trainable: tune.Trainable) -> Path | None:
    """The directory that Tune gives the next checkpoint, in its storage. None without Tune."""
    storage = trainable._storage
    if storage is None:
        return None
    ahead = copy.copy(storage)
    ahead.current_checkpoint_index += 1
    return Path(ahead.checkpoint_fs_path)


def following(logdir: str) -> Path:
    """The first directory in `logdir` after all that have Tune's name for a checkpoint."""
    found = Path(logdir).glob(f"checkpoint_{'[0-9]' * 6}")
    last = max((int(path.name[-6:]) for path in found), default=-1)
    return Path(logdir, f"checkpoint_{last + 1:06}")


def results_folder(storage: Any, logdir: str) -> tuple[fs.FileSystem, str]:
    """The file system of a run's results, and their directory there.

    Args:
        storage: Tune's `StorageContext` of the trial, whose directory may be in a cloud. None:
            without Tune.
        logdir: directory of the trainable, which has the results without Tune.
    """
    if storage is None:
        return fs.LocalFileSystem(), logdir
    return storage.storage_filesystem, storage.trial_fs_path
