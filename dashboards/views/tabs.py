"""The tabs of the page and sections of the report, in their order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views import (
    allreduce,
    compare,
    experiments,
    fault_tab,
    gradients,
    learner,
    samples,
)
from polopt.dashboards.views.drawing import Panel


@dataclass(frozen=True)
class Tab:
    """One tab.

    Attributes:
        key: for file names.
        title: shown.
        build: makes its panels.
        optimizers: names of the optimizers whose runs it shows; empty for all runs.
    """

    key: str
    title: str
    build: Callable[[Selection], list[Panel]]
    optimizers: tuple[str, ...] = ()

    def panels(self, selection: Selection) -> list[Panel]:
        """Panels for the runs of its optimizers."""
        return self.build(selection.of(self.optimizers) if self.optimizers else selection)


TABS = (
    Tab("experiments", "Experiments", experiments.panels),
    Tab("compare", "Compare", compare.panels),
    Tab("async-gradients", "AsyncGradients", gradients.panels, ("async_gradients",)),
    Tab("sync-gradients", "SyncGradients", gradients.panels, ("sync_gradients",)),
    Tab("sync-samples", "SyncSamples", samples.panels, ("sync_samples",)),
    Tab("async-samples", "AsyncSamples", samples.panels, ("async_samples",)),
    Tab("allreduce", "DecentralizedAllReduce", allreduce.panels, ("decentralized_allreduce",)),
    Tab("faults", "Faults", fault_tab.panels),
    Tab("learner", "Learner", learner.panels),
)


def tabs_of(runs: list[Run]) -> list[Tab]:
    """Tabs that have runs to show."""
    present = {run.trial.optimizer for run in runs}
    return [tab for tab in TABS if not tab.optimizers or present & set(tab.optimizers)]
