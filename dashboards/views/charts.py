"""Charts that several views use: a curve for each run, and several lines of one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polopt.dashboards.data.colors import PALETTE, phase_color
from polopt.dashboards.data.downsample import Array
from polopt.dashboards.data.scales import Scale, scale_of
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.tab import Plot
from polopt.dashboards.views.drawing import (
    MOST_BANDS,
    Panel,
    add_curve,
    new_figure,
    not_in_results,
    pixel_columns,
    set_scale,
)
from polopt.dashboards.views.fault_marks import add_fault_marks


def scale_of_runs(selection: Selection, curves: Iterable[tuple[Run, Array]]) -> Scale:
    """Returns the y axis for curves of runs. Each curve is a run with its values of shape `[R]`."""
    groups: dict[str, list[Array]] = {}
    for run, values in curves:
        groups.setdefault(run.group, []).append(values)
    return scale_of(groups, selection.log, selection.robust)


def smoothing_note(selection: Selection, which: str = "Smoothed") -> str:
    """Returns a sentence about the smoothing of curves, or "" without smoothing."""
    if selection.smoothing <= 0.0:
        return ""
    return f"{which} with weight {selection.smoothing:g}. Faint lines show the measured values."


def is_count(name: str) -> bool:
    """Returns whether a column contains counts. Counts are drawn on a linear axis, unsmoothed."""
    return name.rsplit("/", 1)[-1].startswith("num_")


@dataclass(frozen=True)
class Line:
    """A curve in a plot over time.

    Attributes:
        x: increasing positions, shape `[R]`.
        y: values, shape `[R]`.
        name: name of the curve in the hover text.
        group: name of the entry in the legend. Several curves may share an entry.
        color: color as a hex string.
        dash: dash of the line.
    """

    x: Array
    y: Array
    name: str
    group: str
    color: str
    dash: str = "solid"


def line_plot(
    panel: tuple[str, str, str],
    selection: Selection,
    runs: Sequence[Run],
    lines: Sequence[Line],
    y_title: str,
    scale: Scale,
    *,
    bands: bool = True,
    from_zero: bool = False,
    shape: str = "linear",
    run: str = "",
) -> Panel:
    """Draws lines over time, with marks of faults.

    Args:
        panel: key, title and help of the panel.
        selection: gives the x axis and the smoothing.
        runs: the runs whose faults are marked.
        lines: the lines, at least one.
        y_title: title of the y axis with its unit.
        scale: type and range of the y axis.
        bands: whether each line has a band, which shows the minimum and maximum of the values in
            each column of pixels.
        from_zero: whether a linear y axis includes 0.
        shape: Plotly's shape of the lines between results.
        run: label of the run that the plot shows. Empty for several runs.
    """
    figure = new_figure(selection.x_title, y_title)
    set_scale(figure, scale, from_zero=from_zero)
    columns = pixel_columns(len(lines) * (2 if selection.smoothing > 0.0 else 1))
    seen: set[str] = set()
    for line in lines:
        add_curve(
            figure, line.x, line.y, name=line.name, group=line.group, color=line.color,
            columns=columns, legend=line.group not in seen, band=bands, shape=shape,
            dash=line.dash, smoothing=selection.smoothing, log=scale.log,
        )  # fmt: skip
        seen.add(line.group)
    add_fault_marks(figure, selection, runs)
    note = f"{smoothing_note(selection)} {scale.note}".strip()
    return Panel(*panel, figure=figure, note=note, run=run)


def run_lines(
    panel: tuple[str, str, str],
    selection: Selection,
    name: str,
    y_title: str,
    *,
    transform: Callable[[Run, Array], Array] | None = None,
    from_zero: bool = False,
    shape: str = "linear",
) -> Panel:
    """Draws a column of the results, with a curve for each run.

    Args:
        panel: key, title and help of the panel.
        selection: the runs and the x axis.
        name: name of the column.
        y_title: title of the y axis with its unit.
        transform: computes the values to draw from a run and its column. `None` draws the column.
        from_zero: whether a linear y axis includes 0.
        shape: Plotly's shape of the lines between results.
    """
    drawn = []
    for run in selection.runs:
        x, y = selection.x_of(run), run.trial.values(name)
        if x is not None and y is not None and np.isfinite(y).any():
            drawn.append((run, x, y if transform is None else transform(run, y)))
    if not drawn:
        return not_in_results(*panel, name)
    if is_count(name) and transform is None:
        selection = replace(selection, smoothing=0.0, log=False, robust=False)
    return line_plot(
        panel,
        selection,
        [run for run, _, _ in drawn],
        [Line(x, y, run.label, run.group, run.color, run.look.dash) for run, x, y in drawn],
        y_title,
        scale_of_runs(selection, [(run, y) for run, _, y in drawn]),
        bands=len(drawn) <= MOST_BANDS,
        from_zero=from_zero,
        shape=shape,
    )


def part_lines(selection: Selection, run: Run, plot: Plot, keys: Mapping[str, str]) -> Panel:
    """Draws a line for each part of a run, such as its agents. If there are more parts than colors,
    only the first ones have a line.

    Args:
        selection: gives the x axis.
        run: the run.
        plot: the plot, without `keys`.
        keys: the name and the column of each part.
    """
    most = len(PALETTE)
    more = f" The first {most} of {len(keys)}." if len(keys) > most else ""
    # Short names come first, so the names that end in 2 come before those that end in 10.
    shown = {name: keys[name] for name in sorted(keys, key=lambda name: (len(name), name))[:most]}
    return plot_lines(selection, run, replace(plot, help=plot.help + more, keys=shown))


def plot_lines(selection: Selection, run: Run, plot: Plot) -> Panel:
    """Draws several columns of one run in one plot. A line that is named after a phase has the
    color of this phase.

    Args:
        selection: gives the x axis.
        run: the run.
        plot: a plot of the kind `lines`.
    """
    plot = run.trial.optimizer_tab.described(plot)
    panel = (plot.key, plot.title, plot.help)
    x = selection.x_of(run)
    found = {name: run.trial.values(key) for name, key in plot.keys.items()}
    drawn = {name: values for name, values in found.items() if values is not None}
    if x is None or not drawn:
        return not_in_results(*panel, *plot.keys.values())
    if all(is_count(plot.keys[name]) for name in drawn):
        selection = replace(selection, smoothing=0.0, log=False)
    return line_plot(
        panel,
        selection,
        [run],
        [
            Line(x, drawn[name], name, name, phase_color(name, number))
            for number, name in enumerate(plot.keys)
            if name in drawn
        ],
        plot.unit,
        scale_of({run.group: list(drawn.values())}, selection.log, robust=False),
        from_zero=True,
        run=run.label,
    )
