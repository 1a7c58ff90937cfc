"""The checkpoint of the policy version with the best evaluation, beside the others of its trial."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import fs

from polopt.trainers.checkpoints import CheckpointError, write_checkpoint
from polopt.trainers.saved_trainer import BEST


class Score(NamedTuple):
    """What the best checkpoint was chosen by.

    Attributes:
        episode_return_mean: of the evaluation.
        policy_version: that was evaluated, and is saved.
        directory: where it is saved, of Tune's storage. A run that continues elsewhere saves its
            own.
    """

    episode_return_mean: float
    policy_version: int
    directory: str


class BestCheckpoint:
    """Saves the state of each policy version whose evaluation is better than all before it.

    Args:
        filesystem: of the run's results, which may be in a cloud.
        folder: directory of the run's results there.

    Attributes:
        score: of the best one. None: none yet.
        directory: of the checkpoint.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str) -> None:
        self._filesystem = filesystem
        self.directory = f"{folder}/{BEST}"
        self.score: Score | None = None

    def offer(self, mean: float, version: int, state: Mapping[str, Any]) -> None:
        """Saves a state if it is the best.

        Args:
            mean: return of the evaluation.
            version: of the policy that was evaluated.
            state: of the trainer with that policy. See `write_checkpoint`.

        Raises:
            CheckpointError: it cannot be written.
        """
        if self.score is not None and not mean > self.score.episode_return_mean:
            return
        score = Score(mean, version, self.directory)
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_checkpoint(Path(folder), {**state, "best": score._asdict()})
                # The one before, or what an interrupted save has left.
                if self._filesystem.get_file_info(self.directory).type != fs.FileType.NotFound:
                    self._filesystem.delete_dir(self.directory)
                self._filesystem.create_dir(self.directory, recursive=True)
                fs.copy_files(folder, self.directory, destination_filesystem=self._filesystem)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CheckpointError(
                f"checkpoint {self.directory} cannot be written: {reason}"
            ) from error
        self.score = score

    def report(self) -> dict[str, float]:
        """For the block `evaluation/` of results."""
        return {
            "best_episode_return_mean": self.score.episode_return_mean if self.score else math.nan,
            "best_policy_version": self.score.policy_version if self.score else 0,
        }

    def get_state(self) -> dict[str, Any] | None:
        """The score, for checkpoints. None before the first evaluation."""
        return None if self.score is None else self.score._asdict()

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Restores what `get_state` returned, if it is of a checkpoint in the same directory."""
        same = state is not None and state["directory"] == self.directory
        self.score = Score(**state) if state is not None and same else None
