"""The tabs of the page in their order. They are also the sections of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polopt.common.add_ons import add_ons
from polopt.dashboards.data.diagnosis import RULES, Finding
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views import (
    compare_tab,
    experiments_tab,
    faults_tab,
    learner_tab,
    optimizer_tab,
)
from polopt.dashboards.views.drawing import Panel

_MOST_FINDINGS, _MOST_NAMES = 12, 3


def findings_panel(selection: Selection) -> list[Panel]:
    """Returns a panel with the findings, if there are findings.

    The panel has an entry for each pair of a rule of the diagnosis and a change that may help, up
    to `_MOST_FINDINGS` entries. The entry has the text of the run in focus if this run has the
    finding, and otherwise of the run with the worst finding. It names up to `_MOST_NAMES` groups
    with the finding. The group of the run with the text comes first.
    """
    order = [rule.key for rule in RULES]
    found: dict[tuple[str, str], list[tuple[Run, Finding]]] = {}
    for run in selection.runs:
        for finding in run.trial.findings:
            found.setdefault((finding.rule, finding.change), []).append((run, finding))
    focus = selection.focused() if selection.focus else None
    entries: list[tuple[tuple[bool, int, float], tuple[str, str, str]]] = []
    for (rule, change), members in found.items():
        ranked = sorted(members, key=lambda pair: (pair[0] is not focus, -pair[1].severity))
        groups = Counter(run.group for run, _ in ranked)  # in the order of their first run
        place = (
            focus is None or focus.group not in groups,
            order.index(rule),
            -max(finding.severity for _, finding in members),
        )
        entries.append((place, (ranked[0][1].text, change, _named(groups, selection))))
    if not entries:
        return []
    rows = [row for _, row in sorted(entries)]
    more = len(rows) - _MOST_FINDINGS
    title = (
        "What is wrong"
        if more <= 0
        else f"What is wrong: the first {_MOST_FINDINGS} of {len(rows)}"
    )
    help_ = (
        "The problems that the rules in docs/dashboards.md find in the results, each with a change "
        "that may help. The numbers of an entry come from the run in focus if this run has the "
        "problem, and otherwise from the worst run. The entry names the group of this run first."
    )
    return [Panel("findings", title, help_, findings=rows[:_MOST_FINDINGS], wide=True)]


def _named(groups: Counter[str], selection: Selection) -> str:
    """Returns the names of the first groups, each with its number of runs with the finding."""
    sizes = {name: len(runs) for name, runs in selection.groups.items()}
    first, *others = (
        f"{name} ({count} of {sizes[name]})" if sizes[name] > 1 else name
        for name, count in groups.items()
    )
    if not others:
        return first
    more = len(others) - (_MOST_NAMES - 1)
    listed = "; ".join(others[: _MOST_NAMES - 1])
    return f"{first}; also {listed}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Tab:
    """A tab of the page.

    Attributes:
        key: name of the tab in file names.
        title: title of the tab.
        build: makes the panels of the tab from a selection.
        optimizer: name of the optimizer whose runs the tab shows. Empty for all runs.
    """

    key: str
    title: str
    build: Callable[[Selection], list[Panel]]
    optimizer: str = ""

    def panels(self, selection: Selection) -> list[Panel]:
        """Returns the panel of the findings, and the panels of the tab."""
        shown = selection.of([self.optimizer]) if self.optimizer else selection
        return [*findings_panel(shown), *self.build(shown)]


_BEFORE = (
    Tab("experiments", "Experiments", experiments_tab.panels),
    Tab("compare", "Compare", compare_tab.panels),
)
_AFTER = (
    Tab("faults", "Faults", faults_tab.panels),
    Tab("learner", "Learner", learner_tab.panels),
)


def tabs_of(runs: Sequence[Run]) -> list[Tab]:
    """Returns all tabs. The tabs of add-ons and of optimizers are in the middle. Those of
    optimizers are sorted by title."""
    titles = {
        run.trial.optimizer: run.trial.optimizer_tab.title for run in runs if run.trial.optimizer
    }
    own = [
        Tab(name.replace("_", "-"), title, _build, name)
        for name, title in sorted(titles.items(), key=lambda item: item[1])
    ]
    further = (tab for add_on in add_ons() for tab in add_on.tabs(runs))
    return [*_BEFORE, *further, *own, *_AFTER]


def _build(selection: Selection) -> list[Panel]:
    run = selection.focused()
    return optimizer_tab.panels(selection, run.trial.optimizer_tab) if run is not None else []
