"""The live page: a Streamlit script that `polopt dashboard` runs.

Streamlit runs it from the top for each interaction; results stay in memory between the runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import streamlit as st

from polopt.dashboards.data.results import ResultsDirectory
from polopt.dashboards.data.selection import (
    SEED_KEY,
    TASK_KEY,
    Filters,
    Run,
    Selection,
    differing_keys,
    make_runs,
)
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import Tab, tabs_of

_REFRESH_S = 5.0
_SLOW_OPEN_BYTES = 8_000_000  # above it, progress is shown
_MOST_VALUES = 40  # of a config key that is offered as a filter
# Plots stand side by side where both get 430 px, below each other otherwise.
_STYLE = """<style>
.st-key-panels > div, .st-key-panels { display: grid !important; gap: 0.75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); }
.st-key-panels > * { min-width: 0; width: 100%; }
.st-key-panels > :has(> [class*="st-key-wide-"]) { grid-column: 1 / -1; }
.block-container, [data-testid="stMainBlockContainer"] { padding: 3.5rem 1.5rem 2rem; }
</style>"""


@st.cache_resource(show_spinner=False)
def _directory(folder: str) -> ResultsDirectory:
    return ResultsDirectory(Path(folder))


def _open(directory: ResultsDirectory) -> None:
    """Reads what is new; shows progress while that is much."""
    bar = None

    def progress(done: int, total: int, name: str) -> None:
        nonlocal bar
        if total < _SLOW_OPEN_BYTES:
            return
        bar = bar or st.progress(0.0)
        text = f"Reading results: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {_plain(name)}"
        bar.progress(min(1.0, done / max(1, total)), text=text)

    directory.refresh(progress)
    if bar is not None:
        bar.empty()


def _plain(text: str) -> str:
    """Text of result files for labels that Streamlit renders as Markdown."""
    for character in r"\`*_{}[]()#+!|<>~$:":
        text = text.replace(character, "\\" + character)
    return text


def _choices(runs: Sequence[Run]) -> Filters:
    """The filters of the side bar."""
    trials = [run.trial for run in runs]
    experiments = sorted({trial.experiment for trial in trials})
    optimizers = sorted({trial.optimizer for trial in trials if trial.optimizer})
    chosen_experiments: list[str] = []
    if len(experiments) > 1:
        chosen_experiments = st.multiselect("Experiment", experiments, placeholder="all")
    chosen_optimizers: list[str] = []
    if len(optimizers) > 1:
        chosen_optimizers = st.multiselect("Optimizer", optimizers, placeholder="all")
    differing = differing_keys(trials)
    config: dict[str, frozenset[str]] = {}
    for key in (TASK_KEY, SEED_KEY):
        if key in differing:
            label = "Task" if key == TASK_KEY else "Seed"
            config[key] = frozenset(st.multiselect(label, differing.pop(key), placeholder="all"))
    offered = [key for key, values in differing.items() if len(values) <= _MOST_VALUES]
    if offered:
        keys = st.multiselect("Filter by config key", offered, placeholder="keys that differ")
        for key in keys:
            picked = st.multiselect(_plain(key), differing[key], placeholder="all", key=f"c-{key}")
            config[key] = frozenset(picked)
    return Filters(frozenset(chosen_experiments), frozenset(chosen_optimizers), config)


def _show(panel: Panel, tab: str) -> None:
    title = f"**{_plain(panel.title)}**"
    st.markdown(title, help=_plain(panel.help) or None)
    if panel.figure is not None:
        st.plotly_chart(
            panel.figure,
            key=f"{tab}-{panel.key}",
            config={"displayModeBar": False},  # dragging zooms, a double click goes back
        )
    elif panel.findings:
        entries = (
            f"- **{_plain(text)}**  \n  {_plain(change)} :small[({_plain(runs)})]"
            for text, change, runs in panel.findings
        )
        st.warning("\n".join(entries), icon=":material/troubleshoot:")
    elif panel.columns:
        names = _unique(panel.columns)
        table = {name: [row[i] for row in panel.rows] for i, name in enumerate(names)}
        st.dataframe(table, hide_index=True, key=f"{tab}-{panel.key}")
    else:
        st.info(_plain(panel.missing), icon=":material/info:")


def _unique(names: Sequence[str]) -> list[str]:
    return [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]


def _panels(tab: Tab, selection: Selection) -> None:
    if tab.optimizer:
        runs = selection.of([tab.optimizer]).runs
        by_folder = {str(run.trial.folder): run for run in runs}
        focus = st.selectbox(
            "Run whose shares and histograms are shown",
            list(by_folder),
            format_func=lambda folder: (
                f"{by_folder[folder].label} ({by_folder[folder].trial.name})"
            ),
            key=f"focus-{tab.key}",
        )
        selection = replace(selection, focus=focus or "")
    with st.container(key="panels"):
        for panel in _built(tab, selection):
            kind = "wide" if panel.wide else "panel"
            with st.container(key=f"{kind}-{tab.key}-{panel.key}"):
                _show(panel, tab.key)


def _built(tab: Tab, selection: Selection) -> list[Panel]:
    """Panels of a tab; those of the last run of the script if nothing changed since."""
    trials = [run.trial for run in selection.runs]
    version = tuple((t.folder, t.rows.version, t.state, t.error) for t in trials)
    labels = tuple(run.label for run in selection.runs)
    key = (tab.key, replace(selection, runs=()), version, labels)
    last_key, panels = st.session_state.get("panels_of", (None, []))
    if key != last_key:
        panels = tab.panels(selection)
        st.session_state["panels_of"] = (key, panels)
    return list(panels)


def _content(directory: ResultsDirectory, filters: Filters, options: Selection) -> None:
    begun = time.perf_counter()
    _open(directory)
    runs = [run for run in make_runs(directory.trials) if filters.passes(run.trial)]
    if not runs:
        st.info("No trials are selected. Clear a filter in the side bar.")
        return
    tabs = tabs_of(runs)
    shown = st.tabs([tab.title for tab in tabs], key="tabs", on_change="rerun")
    for place, tab in zip(shown, tabs, strict=True):
        if place.open:
            with place:
                _panels(tab, replace(options, runs=runs))
    took = time.perf_counter() - begun
    running = sum(run.trial.state == "running" for run in runs)
    st.caption(
        f"{len(runs)} trials, {running} running. {time.strftime('%H:%M:%S')}, drawn in {took:.1f} s"
    )


def _options(runs: Sequence[Run]) -> Selection:
    """The axis of curves, and what is compared."""
    axis = st.segmented_control(
        "Axis of curves", ["seconds", "steps"], default="seconds", required=True
    )
    startup = st.toggle(
        "Count start-up",
        help="Whether seconds, rates and shares contain the time before the first result of a "
        "worker: starting processes, importing libraries, making environments.",
    )
    budget = st.number_input(
        "Rank groups after so many steps", value=None, min_value=0.0, step=10_000.0,
        placeholder="automatic",
        help="Without a number: what at least half of the runs of each group have reached.",
    )  # fmt: skip
    tasks = sorted({run.task for run in runs})
    targets = {}
    for task in tasks:
        label = "Return to reach" if len(tasks) == 1 else f"Return to reach: {_plain(task)}"
        target = st.number_input(
            label, value=None, step=10.0, placeholder="automatic",
            help="Without a number: what at least half of the runs of each group have reached.",
            key=f"target-{task}",
        )  # fmt: skip
        if target is not None:
            targets[task] = float(target)
    return Selection((), str(axis), startup, targets, budget)


def main(folder: str) -> None:
    """Draws the page over the results in `folder`."""
    st.set_page_config(page_title="polopt dashboard", layout="wide")
    st.html(_STYLE)
    directory = _directory(folder)
    _open(directory)
    with st.sidebar:
        st.markdown("### polopt")
        st.text(folder)
        automatic = st.toggle("Refresh automatically", value=True)
        runs = make_runs(directory.trials)
        filters = _choices(runs)
        options = _options([run for run in runs if filters.passes(run.trial)])
    if not directory.trials:
        st.info("No results here yet. This page shows them as soon as a run writes some.")
    run_every = _REFRESH_S if automatic else None
    st.fragment(_content, run_every=run_every)(directory, filters, options)


if __name__ == "__main__":
    main(sys.argv[1])
