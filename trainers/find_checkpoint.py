"""Finds a checkpoint that can be read. If the newest one is damaged, finds an older one of the same
run."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polopt.common.files import printable
from polopt.trainers.checkpoint_fields import read_trainer_state, runs_of
from polopt.trainers.checkpoints import (
    FILES,
    CheckpointError,
    DamagedCheckpoint,
    check_further_files,
    read_checkpoint,
    read_state_file,
)

if TYPE_CHECKING:
    from ray.tune import Checkpoint

logger = logging.getLogger("polopt")

State = dict[str, Any]

#: Name of the directory, in the trial's directory, for the checkpoint with the best evaluation.
BEST = "best_checkpoint"
_PICKLE = "_dict_checkpoint.pkl"
#: Tune's names for checkpoint directories. Directories with such names in one folder are from the
#: same trial.
_TUNE_NAME = re.compile(r"checkpoint_\d{6,}")


@dataclass(frozen=True, repr=False)
class SavedCheckpoint:
    """A saved checkpoint: the return value of a trainer's `save` without Tune. `restore` and
    `polopt.load` accept this object.

    Attributes:
        checkpoint: Tune's object for the checkpoint. Its attribute `path` is the directory.
        metrics: the trainer's last result before the checkpoint. It is empty before this
            trainer's first result, even if a checkpoint was restored.
        iteration: number of iterations of the run, including those before a restored checkpoint.
    """

    checkpoint: Checkpoint
    metrics: dict[str, Any]
    iteration: int

    def __repr__(self) -> str:
        """Returns one line without the metrics. Notebooks show this text, and the metrics would
        have thousands of characters."""
        return f"<checkpoint after iteration {self.iteration} in {self.checkpoint.path}>"


def checkpoint_path(checkpoint: Any) -> Path:
    """Returns the path of a checkpoint. The argument is a path, a checkpoint or a result of Tune,
    or the return value of a trainer's `save`.

    Raises:
        CheckpointError: the argument is None, or a result without a checkpoint.
    """
    checkpoint = _checkpoint_in(checkpoint)
    return Path(getattr(checkpoint, "path", checkpoint)).expanduser()


def _checkpoint_in(given: Any) -> Any:
    found = getattr(given, "checkpoint", given)
    if found is None:
        what = "got None" if given is None else "the result has no checkpoint"
        raise CheckpointError(
            f"{what}. Tune saves the checkpoint of a trial at its end with "
            "RunConfig(checkpoint_config=CheckpointConfig(checkpoint_at_end=True))"
        )
    return found


def check_directory(checkpoint: Any) -> None:
    """Checks the directory of a checkpoint before Tune opens it.

    If the directory contains a file `_dict_checkpoint.pkl`, Tune unpickles this file and only then
    calls `load_checkpoint`. Unpickling executes code, and polopt never writes this file.

    Args:
        checkpoint: a path, a Tune checkpoint, or the return value of `Trainable.save`.

    Raises:
        CheckpointError: the argument is None, a result without a checkpoint, or a path that does
            not exist. Also raised if the directory contains a file that Tune would unpickle.
    """
    checkpoint = _checkpoint_in(checkpoint)
    if isinstance(checkpoint, str | Path):
        _check_exists(Path(checkpoint))
        found = Path(checkpoint, _PICKLE).exists()
    else:
        info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/{_PICKLE}")
        found = info.type.name != "NotFound"
    if found:
        raise CheckpointError(
            f"checkpoint {getattr(checkpoint, 'path', checkpoint)} contains the pickle {_PICKLE}. "
            "This file is not loaded, because unpickling executes code, and polopt did not write "
            "the file. If the other files are a checkpoint of polopt, delete this file"
        )


def find_checkpoint(path: Path) -> Path:
    """Returns `path` if it is a checkpoint. If `path` is the directory of a trial or an experiment,
    returns the newest checkpoint below this directory.

    If the newest checkpoint cannot be read, this function returns the newest readable checkpoint of
    the same run. It logs a warning for each newer checkpoint that cannot be read. The checkpoint of
    the best evaluation is tried last.

    Raises:
        CheckpointError: `path` does not exist, or no such checkpoint was found below it.
    """
    if os.path.lexists(path / "manifest.json"):
        return path
    _check_exists(path)
    # An interrupted save leaves no manifest, so directories without a manifest are skipped. Other
    # programs also write files with the name manifest.json, so another file of a checkpoint is
    # required, too.
    found = [
        (
            not manifest.parent.name.startswith(BEST),
            manifest.stat().st_mtime_ns,
            str(manifest.parent),
            manifest.parent,
        )
        for manifest in path.glob("**/manifest.json")
        if manifest.is_file() and any(manifest.with_name(name).exists() for name in FILES)
    ]
    unusable: Path | None = None
    for *_, directory in sorted(found, reverse=True):
        try:
            state = read_checkpoint(directory)
        except CheckpointError as error:
            logger.warning("%s. Looking for an older checkpoint of the same run", error)
            unusable = unusable or directory
        else:
            if unusable is None or _is_of_run(unusable, directory, state):
                return directory
    raise CheckpointError(f"no complete checkpoint in or below {path}")


def read_whole(directory: Path) -> dict[str, Any]:
    """Reads a checkpoint that a trainer wrote.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or damaged, or was not written by a
            trainer. The message also names the previous checkpoint if there is one.
    """
    try:
        return read_trainer_state(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def read_or_fall_back(directory: str | Path) -> tuple[Path, State]:
    """Reads a trainer's checkpoint, and checks the files of its replay buffer.

    If the checkpoint is damaged or incomplete, this function reads an older checkpoint of the same
    run in the same folder instead. It chooses the newest one that can be read. A warning then names
    both checkpoints.

    Returns:
        the directory of the checkpoint that was read, and its state.

    Raises:
        CheckpointError: in one of three cases:
            - The directory does not exist.
            - The checkpoint is damaged, and no older checkpoint can be read.
            - The checkpoint is complete, but cannot be read, has another format or a wrong value,
              or was not written by a trainer.
            The message names an older checkpoint that can be read, if there is one.
    """
    directory = Path(directory)
    _check_exists(directory)
    try:
        state = read_trainer_state(directory)
        check_further_files(directory)
        return directory, state
    except DamagedCheckpoint as error:
        previous = _previous(directory)
        if previous is None:
            raise
        logger.warning(
            "%s. Restoring the previous checkpoint %s instead", error, printable(str(previous[0]))
        )
        return previous
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def _check_exists(directory: Path) -> None:
    if directory.is_file():
        raise CheckpointError(
            f"{directory} is a file, but a checkpoint of polopt is a directory. polopt cannot read "
            "models of other libraries"
        )
    if not directory.is_dir():
        raise CheckpointError(f"no such directory: {directory}{name_previous(directory)}")


def name_previous(directory: str | Path) -> str:
    """Returns a sentence for the end of an error message. The sentence names the newest older
    checkpoint of the same run that can be read. Returns an empty string if no older checkpoint can
    be read.

    Args:
        directory: directory of the checkpoint that cannot be used.
    """
    previous = _previous(Path(directory))
    return "" if previous is None else f". The previous checkpoint {previous[0]} can be read"


def _previous(directory: Path) -> tuple[Path, State] | None:
    for candidate in _older(directory):
        try:
            state = read_trainer_state(candidate)
            check_further_files(candidate)
        except CheckpointError:
            continue
        if _is_of_run(directory, candidate, state):
            return candidate, state
    return None


def _is_of_run(directory: Path, candidate: Path, state: State) -> bool:
    """Returns whether `candidate` is a checkpoint of the run that wrote `directory`, or of an
    earlier run from which that run was restored.

    Args:
        directory: directory of a checkpoint, which may be damaged or missing.
        candidate: directory of another checkpoint.
        state: the state of `candidate`.
    """
    try:
        runs = runs_of(read_state_file(directory))
    except CheckpointError:
        runs = []
    theirs = runs_of(state)
    if runs and theirs:
        return theirs[-1] in runs
    # If a checkpoint does not name its runs, the names of the directories decide. Two checkpoints
    # with Tune's names in one folder are from the same trial.
    alike = all(_TUNE_NAME.fullmatch(path.name) for path in (directory, candidate))
    return alike and directory.parent == candidate.parent


def _older(directory: Path) -> Iterator[Path]:
    """Yields the checkpoints in the same folder that are older than `directory`, beginning with the
    newest. Tune writes a number at the end of each name, and these numbers decide the order. If the
    name of `directory` has no number, the modification times decide."""
    stem, number = _numbered(directory.name)
    try:
        others = [d for d in directory.parent.iterdir() if d.is_dir() and d.name != directory.name]
    except OSError:  # the folder is missing or cannot be read
        return
    if number is not None:
        named = [(_numbered(d.name), d) for d in others]
        alike = [(n, d) for (s, n), d in named if s == stem and n is not None and n < number]
        yield from (d for _, d in sorted(alike, reverse=True))
        return
    manifests = [d / "manifest.json" for d in others if (d / "manifest.json").is_file()]
    written_ns = directory.stat().st_mtime_ns if directory.is_dir() else None
    times = [(m.stat().st_mtime_ns, m.parent) for m in manifests]
    yield from (d for t, d in sorted(times, reverse=True) if written_ns is None or t <= written_ns)


def _numbered(name: str) -> tuple[str, int | None]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :]) if len(stem) < len(name) else None
