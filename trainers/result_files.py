"""`ResultFiles`: writes the files of a Tune trial for a trainer that runs without Tune."""

from __future__ import annotations

import csv
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.tune.logger import CSVLoggerCallback, JsonLoggerCallback, TBXLoggerCallback
from tensorboardX import SummaryWriter
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.writer import FileWriter

from polopt.common.add_ons import add_ons
from polopt.common.config import ConfigError, shown
from polopt.trainers.results import flattened

logger = logging.getLogger("polopt")

_RESULTS = "result.json"
_TABLE = "progress.csv"
#: Patterns of the files and directories that a run writes to its `log_dir`, without those of
#: add-ons (`AddOn.files`).
_OF_A_RUN = (
    _RESULTS,
    _TABLE,
    "params.json",
    "params.pkl",
    "events.out.tfevents.*",
    "checkpoint_[0-9]*",
    "best_checkpoint*",
    "polopt.log",
)


class ResultTable(CSVLoggerCallback):
    """Writes `progress.csv`. Every key of every result has a column.

    Tune's own logger writes no column for a key that the first result does not have. If it
    continues a file, it writes the cells in the order of the new result under the old header. This
    class adds columns to the file when a result has new keys. In rows without a key, the cell of
    this key is empty. In a `tune.RunConfig(callbacks=[ResultTable()])`, this class replaces Tune's
    own logger.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._columns: dict[Any, list[str]] = {}

    def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
        """Appends a result to the file. If a key is new, first writes the whole file again."""
        kept = {key: value for key, value in result.items() if key != "config"}
        row, path = flattened(kept), Path(trial.local_path, _TABLE)
        if trial not in self._columns:
            trial.init_local_path()
            self._restore_from_remote(_TABLE, trial)
            self._columns[trial] = _with_columns(path, ())
        if not row.keys() <= set(self._columns[trial]):
            self._columns[trial] = _with_columns(path, row)
        with path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns[trial]).writerow(row)

    def log_trial_end(self, trial: Any, failed: bool = False) -> None:
        """Ends the file of a trial."""
        self._columns.pop(trial, None)


def _with_columns(path: Path, keys: Iterable[str]) -> list[str]:
    """Adds a column to a table for each new key, and returns all columns. Removes cells without a
    column, and a last row that was not written completely."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    path.touch()
    limit = csv.field_size_limit(max(csv.field_size_limit(), path.stat().st_size))
    try:
        with path.open(newline="") as old, partial.open("w", newline="") as new:
            rows = csv.DictReader(line for line in old if line.endswith("\n"))
            columns = list(dict.fromkeys([*(rows.fieldnames or ()), *keys]))
            table = csv.DictWriter(new, columns, extrasaction="ignore")
            if columns:
                table.writeheader()
            table.writerows(rows)
        partial.replace(path)
    finally:
        csv.field_size_limit(limit)
        partial.unlink(missing_ok=True)
    return columns


class TensorBoardEvents(TBXLoggerCallback):
    """Writes TensorBoard events in the calling thread.

    Tune's own logger passes events to a thread of tensorboardX through a queue of limited size. If
    the disk is full, this thread ends, and the logger waits for a free place in the queue for ever.
    This class raises an OSError instead.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._summary_writer_cls = _Summaries


class _Summaries(SummaryWriter):  # type: ignore[misc]
    file_writer: FileWriter | None

    def _get_file_writer(self) -> FileWriter:
        if self.file_writer is None:
            self.file_writer = _EventFile(self.logdir)
            self.all_writers = {self.logdir: self.file_writer}
        return self.file_writer


class _EventFile(FileWriter):  # type: ignore[misc]
    """Replaces the thread and the queue of `FileWriter` by a file. The constructor of `FileWriter`
    would start the thread, so it is not called."""

    def __init__(self, logdir: str) -> None:
        self._default_metadata: dict[str, Any] = {}
        self.event_writer = EventsWriter(os.path.join(logdir, "events"))
        self.event_writer.add_event = self.event_writer.write_event


class ResultFiles:
    """Writes `result.json`, `progress.csv`, `params.json`, `params.pkl` and TensorBoard events with
    Tune's own loggers.

    Args:
        folder: directory of the files. It is created if it does not exist.
        continues: whether the trainer was restored from a run whose results are in `folder`. New
            results are then appended to the files. If False, `folder` must not contain
            `result.json`.
        overwrite: whether to delete the results and checkpoints of another run in `folder`. Other
            files are kept.

    Attributes:
        folder: absolute path of the directory.

    Raises:
        ConfigError: `folder` is not a path, cannot be created or cannot be written, or contains the
            results of another run.
    """

    def __init__(self, folder: Any, continues: bool = False, overwrite: bool = False) -> None:
        try:
            self.folder = Path(folder).expanduser().absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(b" ")
        except (OSError, TypeError) as error:
            raise ConfigError(f"log_dir: got {shown(folder)}: {error}. Allowed: a path") from None
        if continues and overwrite:
            raise ConfigError(
                f"overwrite: got True, but log_dir {str(folder)!r} holds the checkpoint to "
                "restore. Without overwrite, the run continues in this directory"
            )
        if continues:
            _remove_torn_line(self.folder / _RESULTS)
        elif (self.folder / _RESULTS).exists():
            if not overwrite:
                raise ConfigError(
                    f"log_dir: got {str(folder)!r}, which contains the results of another run. "
                    "Give another directory, or delete those results with overwrite=True. To "
                    f"continue that run, call from_checkpoint({str(folder)!r}, "
                    f"log_dir={str(folder)!r}), or polopt.train with restore and log_dir"
                )
            _delete_run(self.folder)
        self._loggers = [JsonLoggerCallback(), ResultTable(), TensorBoardEvents()]
        self._trial: Any = None  # a `_Trial`. The annotations of Tune's loggers do not allow it

    @classmethod
    def after_restore(
        cls, folder: Any, checkpoint: str | Path | None, overwrite: bool = False
    ) -> ResultFiles:
        """Returns the files of a run that starts from a checkpoint. The run continues the files in
        `folder` if the checkpoint is in `folder`.

        Raises:
            ConfigError: see the constructor.
        """
        continues = (
            checkpoint is not None
            and isinstance(folder, str | os.PathLike)
            and Path(folder).expanduser().resolve() in Path(checkpoint).resolve().parents
        )
        return cls(folder, continues, overwrite)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Writes the config. Dashboards can then show the run before its first result.

        Raises:
            OSError: a file cannot be written. The message names the directory.
        """
        self._trial = _Trial(self.folder, config)
        self._call(lambda one: one.on_trial_start(0, [self._trial], self._trial))

    def add(self, result: dict[str, Any]) -> None:
        """Writes one result. Call `begin` first.

        Raises:
            OSError: a file cannot be written. The message names the directory.
        """
        assert self._trial is not None
        result = {**result, "config": self._trial.config}
        self._call(lambda one: one.on_trial_result(0, [self._trial], self._trial, result))

    def _call(self, write: Callable[[Any], None]) -> None:
        try:
            for one in self._loggers:
                write(one)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                error.errno, f"results cannot be written: {reason}", str(self.folder)
            ) from error

    def close(self) -> None:
        """Closes the files. Warns if the end of a file cannot be written. A second call does
        nothing."""
        trial, self._trial = self._trial, None
        if trial is None:
            return
        for one in self._loggers:
            try:
                one.on_trial_complete(0, [trial], trial)
            except OSError as error:
                logger.warning("The results in %s are not complete: %s", self.folder, error)


def _delete_run(folder: Path) -> None:
    """Deletes the results and checkpoints of a run. Keeps files that a run does not write."""
    patterns = [*_OF_A_RUN, *(pattern for add_on in add_ons() for pattern in add_on.files)]
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_torn_line(path: Path) -> None:
    """Removes the end of a file after its last newline. A process that was killed, or whose disk
    was full, may have written a part of a line, and the next result would continue this line."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        kept = 0
        for line in file:
            kept += len(line) * line.endswith(b"\n")
        file.truncate(kept)


class _Trial:
    """Replaces Tune's `Trial`. It has only the attributes that Tune's loggers read.

    Attributes:
        local_path: directory of the files.
        config: the config, which the loggers write to `params.json`, and with cloudpickle to
            `params.pkl`. Values that cannot be pickled are replaced by text.
        evaluated_params: options that a search algorithm has chosen. This dict is always empty.
        checkpoint: always None. With a checkpoint, the loggers would try to fetch files from the
            trial's storage.
    """

    checkpoint = None

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.local_path = str(folder)
        self.config = {key: _picklable(value) for key, value in config.items()}
        self.evaluated_params: dict[str, Any] = {}

    def init_local_path(self) -> None:
        """Does nothing, because the directory exists. Tune's loggers call this method."""


def _picklable(value: Any) -> Any:
    try:
        cloudpickle.dumps(value)
    except Exception:  # a user's `__reduce__` may raise any exception
        return shown(value)
    return value
