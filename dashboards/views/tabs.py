"""The tabs of the page and sections of the report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views import compare, experiments, fault_tab, learner, optimizer_tab
from polopt.dashboards.views.drawing import Panel
from polopt.metrics.diagnosis import RULES, Finding

_MOST_FINDINGS = 12


def findings_panel(selection: Selection) -> list[Panel]:
    """The findings as one list, an entry for each rule and group; nothing if there are none.

    The text is that of the run in focus where it has the finding, else that of the first run.
    """
    order = [rule.key for rule in RULES]
    found: dict[tuple[str, str], list[tuple[Run, Finding]]] = {}
    for run in selection.runs:
        for finding in run.trial.findings:
            found.setdefault((run.group, finding.rule), []).append((run, finding))
    focus = selection.focused()
    focused = focus.group if focus is not None and selection.focus else ""
    sizes = {name: len(runs) for name, runs in selection.groups.items()}
    rows: list[tuple[str, str, str]] = []
    for (group, _), members in sorted(
        found.items(), key=lambda item: (item[0][0] != focused, item[0][0], order.index(item[0][1]))
    ):
        chosen = [finding for run, finding in members if run is focus] or [members[0][1]]
        count = f"{group} ({len(members)} of {sizes[group]})" if sizes[group] > 1 else group
        rows.append((chosen[0].text, chosen[0].change, count))
    if not rows:
        return []
    more = len(rows) - _MOST_FINDINGS
    title = (
        "What is wrong"
        if more <= 0
        else f"What is wrong: the first {_MOST_FINDINGS} of {len(rows)}"
    )
    help_ = "What the rules in docs/dashboards.md find in the results, with a change that may help."
    return [Panel("findings", title, help_, findings=rows[:_MOST_FINDINGS], wide=True)]


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
