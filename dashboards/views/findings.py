"""What the diagnosis finds in the selected runs, at the top of each tab."""

from __future__ import annotations

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.drawing import Panel
from polopt.metrics.diagnosis import RULES, Finding

_MOST_ROWS = 12


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
    more = len(rows) - _MOST_ROWS
    title = (
        "What is wrong" if more <= 0 else f"What is wrong: the first {_MOST_ROWS} of {len(rows)}"
    )
    help_ = "What the rules in docs/dashboards.md find in the results, with a change that may help."
    return [Panel("findings", title, help_, findings=rows[:_MOST_ROWS], wide=True)]
