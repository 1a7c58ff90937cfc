"""Which checkpoint is taken when the newest can not be: the one before it, and nobody is left to
guess that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polopt.trainers.checkpoints import CheckpointError, DamagedCheckpoint, read_trainer_state

logger = logging.getLogger("polopt")

State = dict[str, Any]


def read_or_fall_back(directory: str | Path) -> tuple[Path, State]:
    """Reads the checkpoint of a trainer, or, if it is damaged, incomplete or gone, the newest whole
    one before it in the same folder, with a warning that names both.

    Returns:
        where it was read, and what it holds.

    Raises:
        CheckpointError: there is no such one before it; or it is whole, but not for this version
            of polopt, or not of a trainer: then the one before is named, and nothing is read.
    """
    directory = Path(directory)
    try:
        return directory, read_trainer_state(directory)
    except DamagedCheckpoint as error:
        previous = _previous(directory)
        if previous is None:
            raise
        logger.warning("%s; restoring the one before, %s", error, previous[0])
        return previous
    except CheckpointError as error:
        raise CheckpointError(f"{error}{name_previous(directory)}") from None


def name_previous(directory: str | Path, fits: Callable[[State], bool] | None = None) -> str:
    """`"; the one before, DIRECTORY, can be read"`, or nothing if none can.

    Args:
        directory: of the checkpoint that could not be used.
        fits: whether another one's state could be.
    """
    previous = _previous(Path(directory), fits)
    return "" if previous is None else f"; the one before, {previous[0]}, can be read"


def _previous(
    directory: Path, fits: Callable[[State], bool] | None = None
) -> tuple[Path, State] | None:
    for candidate in _older(directory):
        try:
            state = read_trainer_state(candidate)
        except CheckpointError:
            continue
        if fits is None or fits(state):
            return candidate, state
    return None


def _older(directory: Path) -> Iterator[Path]:
    """Those beside it that were written before, the newest first. Numbers at the end of names, as
    Tune's directories have them, say when that was; where there are none, the manifest's time."""
    stem, number = _numbered(directory.name)
    if not directory.parent.is_dir():
        return
    others = [d for d in directory.parent.iterdir() if d.is_dir() and d.name != directory.name]
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
