"""Attaches dashboards to a run: the description of its tab, Prometheus metrics, and traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from polopt.common.add_ons import AddOn, Advisor, RunListener
from polopt.common.config import Config
from polopt.dashboards.data.chrome_trace import TRACE_FILE
from polopt.dashboards.data.tab import TAB_FILE

#: Rules of the diagnosis whose findings are shown during a run.
_REMARKS = ("no-learning", "no-reward")


class TraceConfig(Config):
    """Options of the trace.

    Attributes:
        trace: whether to record some optimizer steps in the driver and in all workers. The driver
            writes these steps to the file `trace.json` in `Trainable.logdir`. `polopt trace` shows
            this file. With `SyncConfig(sync_artifacts=True)`, Tune copies the file to the trial's
            results.
        trace_first_step: the index of the first optimizer step that `trace` records. The first
            step of a run has the index 1.
        trace_num_steps: the number of optimizer steps that `trace` records.
    """

    trace: bool = False
    trace_first_step: int = pydantic.Field(default=5, ge=1, le=2**62)
    trace_num_steps: int = pydantic.Field(default=3, ge=1, le=100_000)


class Dashboards(AddOn):
    """Writes the files that dashboards read besides the results, and exports metrics."""

    config_class = TraceConfig
    files = (TAB_FILE, TRACE_FILE)

    def follow(self, trainer: Any) -> RunListener:
        return _Run(trainer)

    def advisor(self) -> Advisor:
        return _Diagnosis()

    def tune_callbacks(self) -> list[Any]:
        from polopt.dashboards.tensorboard import TensorBoardLayout

        return [TensorBoardLayout()]

    def commands(self) -> dict[str, Any]:
        from polopt.dashboards.dashboard_commands import dashboard, grafana, report, trace

        return {"dashboard": dashboard, "report": report, "grafana": grafana, "trace": trace}


class _Diagnosis(Advisor):
    """Advises with the rules of `polopt.dashboards.data.diagnosis`."""

    def __init__(self) -> None:
        from polopt.dashboards.data.run_results import History

        self._history = History()
        self._remarked: set[str] = set()  # rules whose findings were shown during the run

    def add(self, result: Mapping[str, Any]) -> None:
        self._history.add(result)

    def remarks(self) -> list[tuple[str, str]]:
        new = [
            finding
            for finding in self._diagnose()
            if finding.rule in _REMARKS and finding.rule not in self._remarked
        ]
        self._remarked.update(finding.rule for finding in new)
        return [(finding.text, finding.change) for finding in new]

    def findings(self) -> list[tuple[str, str]]:
        return [(finding.text, finding.change) for finding in self._diagnose()]

    def _diagnose(self) -> list[Any]:
        from polopt.dashboards.data.diagnosis import diagnose

        return diagnose(self._history.results())


class _Run(RunListener):
    def __init__(self, trainer: Any) -> None:
        from polopt.dashboards.prometheus_exporter import PrometheusExporter

        self._trainer = trainer
        self._exporter = PrometheusExporter()
        self._trace: Any = None

    def begin(self) -> None:
        from polopt.dashboards.tab_file import write_tab
        from polopt.dashboards.trace_file import StepTrace
        from polopt.trainers.numbers import numbers_of

        if self._trace is not None:
            self._trace.close()
        trainer = self._trainer
        optimizer = trainer.optimizer
        self._exporter.restart(numbers_of(type(optimizer), type(optimizer.policy)))
        if trainer.results_folder is not None:
            write_tab(optimizer, *trainer.results_folder)
        options = trainer.experiment.add_on(TraceConfig)
        first_step = options.trace_first_step if options.trace else 0
        self._trace = StepTrace(first_step, options.trace_num_steps, Path(trainer.logdir))

    def before_step(self) -> None:
        self._trace.before_step(self._trainer.optimizer)

    def after_step(self) -> None:
        self._trace.after_step(self._trainer.optimizer)

    def result(self, result: dict[str, Any]) -> None:
        self._exporter.add(result, self._trainer.trial_id)

    def restored(self) -> None:
        self._exporter.restart(restored=True)

    def end(self) -> None:
        self._exporter.record()
        if self._trace is not None:
            self._trace.close()


ADD_ON = Dashboards()
