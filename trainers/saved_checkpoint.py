"""`SavedCheckpoint`: what `save` of a trainer returns, and the next directory for one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ray.train import Checkpoint


@dataclasses.dataclass(frozen=True, repr=False)
class SavedCheckpoint:
    """What `save` returns without Tune. `restore` and `polopt.load` take it.

    Attributes:
        checkpoint: Tune's object for the directory, which is its `path`.
        metrics: the last result before it; empty before the first.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]

    def __repr__(self) -> str:
        """One line: a notebook shows it, and the result alone has thousands of characters."""
        iteration = self.metrics.get("training_iteration", 0)
        return f"<checkpoint after iteration {iteration} in {self.checkpoint.path}>"


def following(logdir: str) -> Path:
    """The first directory in `logdir` after all that have Tune's name for a checkpoint."""
    found = Path(logdir).glob(f"checkpoint_{'[0-9]' * 6}")
    last = max((int(path.name[-6:]) for path in found), default=-1)
    return Path(logdir, f"checkpoint_{last + 1:06}")
