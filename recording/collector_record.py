"""`CollectorRecord`: the record of a `Collector`, and its rerun (`record_to` and `rerun_of`)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError
from polopt.recording.arrival_log import (
    ArrivalLog,
    Departure,
    RecordEnded,
    Rerun,
    RerunDifference,
    read_log,
)
from polopt.recording.recorded_transport import RecordedTransport, Recorder
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet


class CollectorRecord:
    """Records what a Collector receives, or repeats a record.

        with record:                  # raises RerunDifference, or StopIteration at the end
            batch = collect()

    Args:
        record_to: the new file of the record, or None.
        rerun_of: the file of a record to repeat, or None.

    Raises:
        ConfigError: `record_to` exists, or `rerun_of` cannot be read.
    """

    def __init__(self, record_to: Path | None, rerun_of: Path | None) -> None:
        if record_to is not None and record_to.expanduser().exists():
            raise ConfigError(
                f"key 'record_to': got {str(record_to)!r}, which exists. Allowed: a new file"
            )
        self._path = None if record_to is None else record_to.expanduser()
        self._recorded = None if rerun_of is None else read_log(rerun_of.expanduser())[1]
        self._log: ArrivalLog | Rerun | None = None

    def adapt(self, config: WorkerConfig) -> WorkerConfig:
        """Returns the config of workers whose messages are recorded or repeated."""
        wrap = Recorder(self._recorded)
        return dataclasses.replace(config, wrap_transport=wrap, repeatable=True)

    def begin(self, workers: WorkerSet) -> None:
        """Opens the file of a new record.

        Raises:
            ConfigError: the file cannot be written. The workers are stopped.
        """
        transport = workers.transport
        assert isinstance(transport, RecordedTransport)
        self._log = transport.log
        if self._path is None or not isinstance(self._log, ArrivalLog):
            return
        try:
            self._log.open(self._path, {"trainer": "Collector"})
        except OSError as error:
            workers.stop()
            raise ConfigError(
                f"key 'record_to': {str(self._path)!r} cannot be written: {error}"
            ) from error

    def end(self) -> None:
        """Ends a rerun. Later calls are not compared any more."""
        if isinstance(self._log, Rerun):
            self._log.finish()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RecordEnded):
            raise StopIteration from None
        if isinstance(error, Departure):
            raise RerunDifference(
                error.event,
                f"at event {error.event}, the rerun differs: {error}; likely because the "
                "program, a library, the processor or an environment has changed",
            ) from None
        if error is None and self._log is not None:
            self._log.flush()
