"""The tabs of the page and sections of the report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views import compare, experiments, fault_tab, learner, optimizer_tab
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.findings import findings_panel


@dataclass(frozen=True)
class Tab:
    """One tab.

    Attributes:
        key: for file names.
        title: shown.
        build: makes its panels.
        optimizer: name of the optimizer whose runs it shows; empty for all runs.
    """

    key: str
    title: str
    build: Callable[[Selection], list[Panel]]
    optimizer: str = ""

    def panels(self, selection: Selection) -> list[Panel]:
        """What is wrong with the runs of its optimizer, and its panels for them."""
        shown = selection.of([self.optimizer]) if self.optimizer else selection
        return [*findings_panel(shown), *self.build(shown)]


_BEFORE = (
    Tab("experiments", "Experiments", experiments.panels),
    Tab("compare", "Compare", compare.panels),
)
_AFTER = (
    Tab("faults", "Faults", fault_tab.panels),
    Tab("learner", "Learner", learner.panels),
)


def tabs_of(runs: Sequence[Run]) -> list[Tab]:
    """All tabs: between those of all runs, one for each optimizer that has runs, by title."""
    titles = {
        run.trial.optimizer: run.trial.optimizer_tab.title for run in runs if run.trial.optimizer
    }
    own = [
        Tab(name.replace("_", "-"), title, _build, name)
        for name, title in sorted(titles.items(), key=lambda item: item[1])
    ]
    return [*_BEFORE, *own, *_AFTER]


def _build(selection: Selection) -> list[Panel]:
    run = selection.focused()
    return optimizer_tab.panels(selection, run.trial.optimizer_tab) if run is not None else []
