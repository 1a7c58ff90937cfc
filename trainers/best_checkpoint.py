"""`BestCheckpoint`: saves the policy version with the best evaluation as a separate checkpoint."""

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
    """The evaluation for which the best checkpoint was saved.

    Attributes:
        episode_return_mean: mean return of the evaluation.
        policy_version: version of the policy that was evaluated and saved.
        directory: directory of the best checkpoint, in the file system of the run's results. A run
            that continues in another directory saves its own best checkpoint.
    """

    episode_return_mean: float
    policy_version: int
    directory: str


class BestCheckpoint:
    """Saves the trainer's state for a policy version if the evaluation of this version has a higher
    mean return than all earlier evaluations.

    Args:
        filesystem: the file system of the run's results. It may be cloud storage.
        folder: directory of the run's results in this file system.

    Attributes:
        score: the best evaluation since the run began in `folder`. It is None before the first
            evaluation whose mean return is not NaN.
        directory: directory of the best checkpoint.
    """

    def __init__(self, filesystem: fs.FileSystem, folder: str) -> None:
        self._filesystem = filesystem
        self.directory = f"{folder}/{BEST}"
        self.score: Score | None = None

    def offer(self, mean: float, version: int, state: Mapping[str, Any]) -> None:
        """Saves the state as the best checkpoint if the evaluation is the best one so far.

        Args:
            mean: mean return of the evaluation. With NaN, this method saves nothing.
            version: version of the policy that was evaluated.
            state: state of the trainer with this policy. See `write_checkpoint`.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        best = -math.inf if self.score is None else self.score.episode_return_mean
        if not mean > best:
            return
        score = Score(mean, version, self.directory)
        try:
            with tempfile.TemporaryDirectory() as folder:
                write_checkpoint(Path(folder), {**state, "best": score._asdict()})
                # The directory holds the previous best checkpoint, or files of an interrupted save.
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
        """Returns the metrics of the best evaluation for the block `evaluation/` of a result. The
        values are NaN and 0 if `score` is None."""
        return {
            "best_episode_return_mean": self.score.episode_return_mean if self.score else math.nan,
            "best_policy_version": self.score.policy_version if self.score else 0,
        }

    def get_state(self) -> dict[str, Any] | None:
        """Returns the score as a dict for a checkpoint. Returns None if `score` is None."""
        return None if self.score is None else self.score._asdict()

    def set_state(self, state: Mapping[str, Any] | None) -> None:
        """Restores the score that `get_state` returned. Ignores the score if its best checkpoint is
        in another directory."""
        same = state is not None and state["directory"] == self.directory
        self.score = Score(**state) if state is not None and same else None
