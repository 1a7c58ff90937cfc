"""Attaches the record of a run and its rerun."""

from __future__ import annotations

import dataclasses
from typing import Any

import pydantic

from polopt.common.add_ons import AddOn, RunListener
from polopt.common.config import Config
from polopt.recording.arrival_log import PATTERN


class RecordingConfig(Config):
    """Options of the record of a run.

    Attributes:
        record_arrivals: whether to record all events whose order depends on timing, so that
            `polopt rerun` can repeat the run bit for bit. The file `arrivals_000000.jsonl.gz`
            beside the results holds the record, with about 40 bytes for each gradient or fragment.
        record_restarts: whether the trainer restarts all worker processes and episodes after each
            checkpoint, as if the run had been restored from this checkpoint. `polopt rerun` can
            then begin at any checkpoint. This option requires `record_arrivals`.
    """

    record_arrivals: bool = False
    record_restarts: bool = False

    @pydantic.model_validator(mode="after")
    def _check_restarts(self) -> RecordingConfig:
        if self.record_restarts and not self.record_arrivals:
            raise ValueError(
                "key 'record_restarts': got True without record_arrivals. Allowed: False, or "
                "record_arrivals=True"
            )
        return self


class Recording(AddOn):
    """Records the events of a run whose order depends on timing, and repeats runs."""

    config_class = RecordingConfig
    files = (PATTERN,)

    def follow(self, trainer: Any) -> RunListener:
        return _Run(trainer)

    def commands(self) -> dict[str, Any]:
        from polopt.recording.rerun_command import rerun

        return {"rerun": rerun}


class _Run(RunListener):
    """Wraps the transport of a recorded run, and adds the actions of the trainer to the record. In
    a rerun, compares these actions with the record. In other runs, does neither."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._recorded = getattr(trainer, "recorded", None)
        self._record: Any = None

    @property
    def _options(self) -> RecordingConfig:
        options: RecordingConfig = self._trainer.experiment.add_on(RecordingConfig)
        return options

    def adapt(self, config: Any) -> Any:
        if not self._options.record_arrivals:
            return config
        from polopt.recording.recorded_transport import Recorder

        return dataclasses.replace(config, wrap_transport=Recorder(self._recorded), repeatable=True)

    def begin(self) -> None:
        self._record = None
        if self._options.record_arrivals:
            from polopt.recording.run_record import RunRecord

            self._record = RunRecord(self._trainer)

    def _mark(self, kind: str, *values: Any) -> None:
        if self._record is not None:
            self._record.log.mark(kind, *values)

    def begin_iteration(self) -> None:
        self._mark("train")

    def result(self, result: dict[str, Any]) -> None:
        if self._record is not None:
            self._record.result(result["training_iteration"])

    def saving(self) -> None:
        self._mark("save")

    def saved(self, checkpoint: str) -> None:
        if self._options.record_restarts and self._recorded is None:
            self._trainer.restart(checkpoint)

    def restoring(self, checkpoint: str) -> None:
        self._mark("restore", checkpoint)


ADD_ON = Recording()
