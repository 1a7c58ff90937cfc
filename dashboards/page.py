"""The live page: a Streamlit script that `polopt dashboard` runs.

Streamlit runs this script from the top when the user changes a control of the side bar. For a
refresh, and when the user opens another tab, it runs only the function `_content`. If new
results change what the side bar offers, `_content` makes Streamlit run the whole script. Results
stay in memory in between.

The address of the page contains the user's choices, under the keys of the widgets. So a link shows
the same page again. A link may come from an untrusted person. Therefore, Streamlit ignores values
that a widget does not allow (`bind="query-params"`), and `_focus` ignores names of unknown runs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import streamlit as st

from polopt.dashboards.data.scales import OUTLIER_FACTOR
from polopt.dashboards.data.selection import (
    SEED_KEY,
    TASK_KEY,
    Filters,
    Run,
    Selection,
    differing_keys,
    make_runs,
)
from polopt.dashboards.data.trials import ResultsDirectory
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import Tab, tabs_of

_REFRESH_S = 5.0
_SLOW_OPEN_BYTES = 8_000_000  # if all files together are larger, reading shows its progress
_MOST_VALUES = 40  # a config key with more values is not offered as a filter
_MOST_SMOOTHING = 0.99
_TABS_IN_MEMORY = 10
# A row of the page contains as many plots as fit with at least 430 px each. The scroll bar of a
# wide table is always visible. By default, Streamlit shows it only under the pointer.
_STYLE = """<style>
.st-key-panels > div, .st-key-panels { display: grid !important; gap: 0.75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(430px, 100%), 1fr)); }
.st-key-panels > * { min-width: 0; width: 100%; }
.st-key-panels > :has(> [class*="st-key-wide-"]) { grid-column: 1 / -1; }
[data-testid="stDataFrame"] * { scrollbar-color: rgba(128,128,128,0.6) transparent !important; }
.block-container, [data-testid="stMainBlockContainer"] { padding: 3.5rem 1.5rem 2rem; }
</style>"""


@st.cache_resource(show_spinner=False)
def _directory(folder: str) -> ResultsDirectory:
    return ResultsDirectory(Path(folder))


def _open(directory: ResultsDirectory) -> None:
    """Reads new results. Shows the progress if the result files are large in total."""
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
    """Escapes text from result files for labels, which Streamlit renders as Markdown."""
    for character in r"\`*_{}[]()#+!|<>~$:":
        text = text.replace(character, "\\" + character)
    return text


def _choices(runs: Sequence[Run]) -> Filters:
    """Draws the filters of the side bar, and returns the user's choice."""
    trials = [run.trial for run in runs]
    experiments = sorted({trial.experiment for trial in trials})
    optimizers = sorted({trial.optimizer for trial in trials if trial.optimizer})
    chosen_experiments: list[str] = []
    if len(experiments) > 1:
        chosen_experiments = _several("Experiment", experiments, "experiment")
    chosen_optimizers: list[str] = []
    if len(optimizers) > 1:
        chosen_optimizers = _several("Optimizer", optimizers, "optimizer")
    differing = differing_keys(trials)
    config: dict[str, frozenset[str]] = {}
    for key in (TASK_KEY, SEED_KEY):
        if key in differing:
            label = "Task" if key == TASK_KEY else "Seed"
            config[key] = frozenset(_several(label, differing.pop(key), label.lower()))
    offered = [key for key, values in differing.items() if len(values) <= _MOST_VALUES]
    if offered:
        keys = _several("Filter by config key", offered, "keys", placeholder="keys that differ")
        for key in keys:
            config[key] = frozenset(_several(_plain(key), differing[key], f"config-{key}"))
    hidden = _groups("Hide groups", runs, "hide")
    return Filters(frozenset(chosen_experiments), frozenset(chosen_optimizers), config, hidden)


def _choosable(runs: Sequence[Run]) -> list[object]:
    """Returns everything in `runs` on which the choices of the side bar depend."""
    return [(run.trial.folder, run.trial.optimizer, run.group, run.trial.settings) for run in runs]


def _groups(label: str, runs: Sequence[Run], key: str) -> frozenset[str]:
    """Draws a choice of groups, if there are several groups. Returns the chosen groups."""
    names = list(dict.fromkeys(run.group for run in runs))
    if len(names) < 2:
        return frozenset()
    return frozenset(_several(label, names, key, placeholder="none"))


def _several(label: str, options: Sequence[str], key: str, placeholder: str = "all") -> list[str]:
    """Draws a choice of several options, and returns the chosen options."""
    return st.multiselect(label, options, key=key, placeholder=placeholder, bind="query-params")


def _number(label: str, key: str, step: float, lowest: float | None = None) -> float | None:
    """Draws a field for a number. Returns None if the field is empty, so that the page chooses the
    number."""
    value = st.number_input(
        label, value=None, min_value=lowest, step=step, placeholder="automatic",
        help="If empty, the page uses the highest number that at least half of the runs of each "
        "group have reached.",
        key=key, bind="query-params",
    )  # fmt: skip
    return float(value) if value is not None else None


def _show(panel: Panel, tab: str) -> None:
    title = f"**{_plain(panel.title)}**"
    st.markdown(title, help=_plain(panel.help) or None)
    if panel.note:
        st.caption(_plain(panel.note))
    if panel.figure is not None:
        st.plotly_chart(
            panel.figure,
            key=f"{tab}-{panel.key}",
            config={"displayModeBar": False},  # dragging zooms, and a double click resets the zoom
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
    elif panel.missing:
        st.info(_plain(panel.missing), icon=":material/info:")


def _unique(names: Sequence[str]) -> list[str]:
    return [f"{name} ({i})" if name in names[:i] else name for i, name in enumerate(names)]


def _focus(tab: Tab, runs: Sequence[Run], root: Path) -> str:
    """Draws the choice of the run in focus, and returns the directory of this run.

    The address identifies the run by its path below `root`, because the label of a run can change
    when other runs arrive.
    """
    by_name = {_path_below(root, run.trial.folder): run for run in runs}
    names, key = list(by_name), f"focus-{tab.key}"
    before = st.query_params.get(key)
    selected = st.selectbox(
        "Run whose shares and histograms are shown",
        names,
        index=names.index(before) if before in by_name else 0,
        format_func=lambda name: f"{by_name[name].label} ({name})",
        key=f"select-{key}",
    )
    chosen = selected or names[0]
    if chosen != before:
        st.query_params[key] = chosen
    return str(by_name[chosen].trial.folder)


def _path_below(root: Path, folder: Path) -> str:
    """Returns a trial's directory relative to `root`, or only the name of the directory if it is
    not below `root`."""
    is_below = folder != root and folder.is_relative_to(root)
    return str(folder.relative_to(root)) if is_below else folder.name


def _panels(tab: Tab, selection: Selection, root: Path) -> None:
    if tab.optimizer:
        runs = selection.of([tab.optimizer]).runs
        selection = replace(selection, focus=_focus(tab, runs, root))
    with st.container(key="panels"):
        for panel in _built(tab, selection, _key(tab, selection)):
            kind = "wide" if panel.wide else "panel"
            with st.container(key=f"{kind}-{tab.key}-{panel.key}"):
                _show(panel, tab.key)


@st.cache_resource(show_spinner=False, max_entries=_TABS_IN_MEMORY)
def _built(_tab: Tab, _selection: Selection, key: str) -> list[Panel]:
    """Returns the panels of a tab. They are cached by `key`, for all browsers."""
    return _tab.panels(_selection)


def _key(tab: Tab, selection: Selection) -> str:
    """Returns a key that contains everything on which the panels of a tab depend."""
    trials = [(run.label, run.trial) for run in selection.runs]
    shown = [(label, t.folder, t.rows.version, t.state, t.error) for label, t in trials]
    options = replace(selection, runs=(), pinned=frozenset())
    return repr((tab.key, options, sorted(selection.pinned), shown))


def _content(
    directory: ResultsDirectory, offered: list[object], filters: Filters, options: Selection
) -> None:
    """Draws the tabs.

    Args:
        directory: the results.
        offered: the return value of `_choosable` for the runs that the side bar offers.
        filters: the user's choice of runs.
        options: the user's options.
    """
    begun = time.perf_counter()
    _open(directory)
    every = make_runs(directory.trials)
    if _choosable(every) != offered:
        st.rerun()  # the side bar also has to offer the new runs
    if not every:
        st.info("There are no results yet. The page shows results as soon as a run writes them.")
        return
    options = options.with_runs(filters.shown(every))
    runs = options.runs
    if not runs:
        st.info("No trials are selected. Clear a filter, or show a hidden group, in the side bar.")
        return
    tabs = tabs_of(runs)
    titles = [tab.title for tab in tabs]
    shown = st.tabs(titles, key="tab", on_change="rerun", bind="query-params")
    for place, tab in zip(shown, tabs, strict=True):
        if place.open:
            with place:
                _panels(tab, options, directory.folder)
    took = time.perf_counter() - begun
    running = sum(run.trial.state == "running" for run in runs)
    left_out = len(directory.trials) - len(runs)
    hidden = f", {left_out} not shown" if left_out else ""
    counts = f"{len(runs)} trials, {running} running{hidden}"
    st.caption(f"{counts}. Updated at {time.strftime('%H:%M:%S')}, drawn in {took:.1f} s")


def _options(runs: Sequence[Run], shown: Sequence[Run]) -> Selection:
    """Draws the options of the side bar, and returns a selection with these options.

    Args:
        runs: all runs, so that filters do not change which groups can be pinned.
        shown: the runs that pass the filters.
    """
    pinned = _groups("Pin groups", runs, "pin")
    axis = st.segmented_control(
        "Axis of curves", ["seconds", "steps"], default="seconds", required=True,
        key="axis", bind="query-params",
    )  # fmt: skip
    startup = st.toggle(
        "Count start-up",
        help="Includes start-up in seconds, rates and shares of time. Start-up is the time before "
        "the first worker begins to work. During start-up, processes start, libraries are imported "
        "and environments are made.",
        key="startup",
        bind="query-params",
    )
    log = st.toggle(
        "Logarithmic y axis",
        help="Applies to plots of curves without values below 0. Counts and distributions of "
        "episodes keep a linear axis.",
        key="log",
        bind="query-params",
    )
    robust = st.toggle(
        "Robust range",
        value=True,
        help="Outliers do not affect the range of the axis of curves and interquartile means. "
        f"Outliers are values more than {OUTLIER_FACTOR:.0f} times as large as the values of three "
        "quarters of the groups. The plot says how many runs or groups leave its range.",
        key="robust",
        bind="query-params",
    )
    smoothing = st.slider(
        "Smoothing",
        0.0,
        _MOST_SMOOTHING,
        help="Smooths the curves of single runs by an exponential moving average. Each result has "
        "this weight relative to the next result. 0 means no smoothing. Faint lines show the "
        "measured values. Counts, evaluations, means over runs, shares of time and distributions "
        "of episodes are not smoothed.",
        key="smoothing",
        bind="query-params",
    )
    budget = _number("Rank groups after this many steps", "budget", 10_000.0, 0.0)
    tasks = sorted({run.task for run in shown})
    targets = {}
    for task in tasks:
        label = "Return to reach" if len(tasks) == 1 else f"Return to reach: {_plain(task)}"
        target = _number(label, f"target-{task}", 10.0)
        if target is not None:
            targets[task] = target
    return Selection(
        (), str(axis), startup, targets, budget,
        pinned=pinned, smoothing=smoothing, log=log, robust=robust,
    )  # fmt: skip


def main(folder: str) -> None:
    """Draws the page of the results in `folder`."""
    st.set_page_config(page_title="polopt dashboard", layout="wide")
    st.html(_STYLE)
    directory = _directory(folder)
    _open(directory)
    with st.sidebar:
        st.markdown("### polopt")
        st.text(folder)
        automatic = st.toggle(
            "Refresh automatically", value=True, key="refresh", bind="query-params"
        )
        runs = make_runs(directory.trials)
        filters = _choices(runs)
        options = _options(runs, filters.shown(runs))
    run_every = _REFRESH_S if automatic else None
    st.fragment(_content, run_every=run_every)(directory, _choosable(runs), filters, options)


if __name__ == "__main__":
    main(sys.argv[1])
