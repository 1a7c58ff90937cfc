"""`BestCheckpoint`: saves the policy version with the best evaluation as a separate checkpoint."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import fs

from polopt.metrics.number import declare
from polopt.trainers.checkpoint_fields import is_score
from polopt.trainers.checkpoints import CheckpointError, write_checkpoint
from polopt.trainers.find_checkpoint import BEST

_MANIFEST = "manifest.json"
#: The numbers of `BestCheckpoint.report`.
NUMBERS = declare("""
    best_episode_return_mean (return, metric=): mean return of `best_checkpoint`
    best_policy_version (updates, metric=): version of the weights of `best_checkpoint`
""")


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

    A new checkpoint is first written to `best_checkpoint.new`, and then replaces the old one. So
    one of the two directories always has a complete checkpoint, even if the process is killed.

    Args:
        filesystem: the file system of the run's results. It may be cloud storage.
        folder: directory of the run's results in this file system.

    Attributes:
        score: the best evaluation since the run began in `folder`. It is None before the first
            evaluation whose mean return is not NaN. After `restore`, it is the score of the files.
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
                self._delete(self._new)
                self._copy(folder, fs.LocalFileSystem(), self._new)
            self._put_in_place()
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

    def restore(self) -> None:
        """Sets the score to that of the checkpoint in `directory`, or to None if there is no
        complete checkpoint. If the process was killed before the newest checkpoint was in place,
        first puts it in place.

        Raises:
            OSError: the file system cannot be read or written.
        """
        if not self._is_complete(self.directory) and self._is_complete(self._new):
            self._put_in_place()
        self.score = self._saved_score() if self._is_complete(self.directory) else None

    def _saved_score(self) -> Score | None:
        with self._filesystem.open_input_stream(f"{self.directory}/state.json") as file:
            try:
                saved = json.loads(file.read()).get("best")
            except (ValueError, RecursionError, AttributeError):
                return None
        return Score(**saved) if is_score(saved) else None

    @property
    def _new(self) -> str:
        return f"{self.directory}.new"

    def _exists(self, path: str) -> bool:
        return bool(self._filesystem.get_file_info(path).type != fs.FileType.NotFound)

    def _is_complete(self, directory: str) -> bool:
        return self._exists(f"{directory}/{_MANIFEST}")

    def _delete(self, directory: str) -> None:
        if self._exists(directory):
            self._filesystem.delete_dir(directory)

    def _put_in_place(self) -> None:
        """Replaces the best checkpoint by the new one."""
        self._delete(self.directory)
        if isinstance(self._filesystem, fs.LocalFileSystem):
            self._filesystem.move(self._new, self.directory)
        else:  # cloud storage cannot move directories
            self._copy(self._new, self._filesystem, self.directory)
            self._delete(self._new)

    def _copy(self, source: str, filesystem: fs.FileSystem, target: str) -> None:
        """Copies a checkpoint. The manifest is copied last, so a directory with a manifest is
        complete."""
        self._filesystem.create_dir(target, recursive=True)
        files = filesystem.get_file_info(fs.FileSelector(source))
        for name in sorted((file.base_name for file in files), key=_MANIFEST.__eq__):
            fs.copy_files(
                f"{source}/{name}",
                f"{target}/{name}",
                source_filesystem=filesystem,
                destination_filesystem=self._filesystem,
            )
