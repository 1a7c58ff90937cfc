"""The report: all views as one HTML file that opens without a network; PNG and CSV of each plot."""

from __future__ import annotations

import csv
import html
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from polopt.common.config import ConfigError
from polopt.dashboards.data.selection import Run, Selection, last_return, make_runs
from polopt.dashboards.data.trials import Progress, ResultsDirectory
from polopt.dashboards.server import existing_directory
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import Tab, tabs_of

_PNG_WIDTH, _PNG_SCALE = 800, 2
_STYLE = """
:root { color-scheme: light dark; --text: #1f2933; --muted: #616e7c; --line: #d9dee4; --bg: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e7eb; --muted: #9aa5b1; --line: #3b444f; --bg: #0e1117; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--bg);
  margin: 0 auto; max-width: 1400px; padding: 1rem 1.5rem 3rem; }
h1 { font-size: 1.5rem; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 0; } nav a { margin-right: 1rem; color: inherit; }
p { color: var(--muted); margin: 0.2rem 0 0.4rem; font-size: 0.85rem; overflow-wrap: anywhere; }
p.note { color: var(--text); }
.panels { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
section { min-width: 0; } section.wide { grid-column: 1 / -1; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.85rem; }
.findings { border-left: 4px solid #d9a514; margin: 0; padding: 0.4rem 0.8rem 0.4rem 1.8rem; }
th, td { border: 1px solid var(--line); padding: 0.25rem 0.6rem; text-align: left;
  max-width: 30rem; overflow-wrap: break-word; }
"""
# Plots are drawn in the colors of the page, which follow the setting of the system.
_SCRIPT = """
const draw = (id, figure) => {
  const color = getComputedStyle(document.body).color;
  figure.layout.font = Object.assign({}, figure.layout.font, {color: color});
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false,
    displayModeBar: false});
};
"""


def write_report(
    results_dir: Path,
    output: Path,
    figures: Path | None = None,
    *,
    progress: Progress | None = None,
) -> list[str]:
    """Writes the report of all trials in a directory.

    Args:
        results_dir: directory of Tune results.
        output: the HTML file; it is replaced.
        figures: directory for a CSV and a PNG of each plot; None writes none.
        progress: receives bytes read, bytes to read in all, and the name of the trial.

    Returns:
        Notes for the user, such as why PNG files could not be written.

    Raises:
        ConfigError: if there are no trials, the directory is none, or a file cannot be written.
    """
    folder = existing_directory(results_dir)
    directory = ResultsDirectory(folder)
    directory.refresh(progress)
    runs = make_runs(directory.trials)
    if not runs:
        raise ConfigError(f"no trials (directories with result.json) in {str(results_dir)!r}")
    sections = list(_sections(runs))
    try:
        output.expanduser().write_text(_document(folder, runs, sections), encoding="utf-8")
        return _write_figures(figures.expanduser(), sections) if figures is not None else []
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or output}: {error.strerror}") from error


#: Groups of one optimizer whose shares and histograms are in a report: its length is bounded.
_MOST_GROUPS = 6


def _sections(runs: Sequence[Run]) -> Iterator[tuple[Tab, Run | None, list[Panel]]]:
    """Tabs with their panels. Where an optimizer has runs of several groups, what depends on the
    run in focus is repeated for the first run of each group; of many groups for those with the
    highest return."""
    for tab in tabs_of(runs):
        groups = Selection(runs).of([tab.optimizer]).groups if tab.optimizer else {}
        if not groups:
            yield tab, None, tab.panels(Selection(runs))
        shown = list(groups.values())
        if len(shown) > _MOST_GROUPS:
            shown = sorted(shown, key=lambda members: -max(map(last_return, members)))
        for number, members in enumerate(shown[:_MOST_GROUPS]):
            focus = str(members[0].trial.folder)
            panels = tab.panels(Selection(runs, focus=focus))
            if number:
                panels = [panel for panel in panels if panel.run]
            if number == _MOST_GROUPS - 1 and len(shown) > _MOST_GROUPS:
                why = (
                    f"Shares and histograms of {len(shown) - _MOST_GROUPS} groups with lower "
                    "returns are left out; polopt dashboard shows those of every run"
                )
                panels.append(Panel("other-groups", "Other groups", "", missing=why, wide=True))
            yield tab, members[0], panels


def _document(
    folder: Path, runs: Sequence[Run], sections: Sequence[tuple[Tab, Run | None, list[Panel]]]
) -> str:
    written = time.strftime("%Y-%m-%d %H:%M")
    links, bodies, scripts = [], [], []
    for number, (tab, run, panels) in enumerate(sections):
        title = html.escape(tab.title if run is None else f"{tab.title}: {run.group}")
        links.append(f'<a href="#s{number}">{title}</a>')
        about = "" if run is None else f"<p>Shares and histograms: {html.escape(run.label)}</p>"
        bodies.append(f'<h2 id="s{number}">{title}</h2>{about}<div class="panels">')
        for index, panel in enumerate(panels):
            plot = f"p{number}-{index}"
            bodies.append(_section(panel, plot))
            if panel.figure is not None:
                scripts.append(f"draw({plot!r}, {_json(panel.figure)});")
        bodies.append("</div>")
    name = html.escape(folder.absolute().name)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>polopt: {name}</title><style>{_STYLE}</style>",
            f"<script>{get_plotlyjs()}</script></head><body>",
            f"<h1>{name}</h1><p>{len(runs)} trials, written {written} by polopt report</p>",
            f"<nav>{' '.join(links)}</nav>",
            *bodies,
            f"<script>{_SCRIPT}",
            *scripts,
            "</script></body></html>",
        ]
    )


def _json(figure: go.Figure) -> str:
    """JSON for a script element: `<` would end it where a name contains `</script>`."""
    text = str(figure.to_json(remove_uids=True))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


def _section(panel: Panel, plot: str) -> str:
    head = f"<h3>{html.escape(panel.title)}</h3><p>{html.escape(panel.help)}</p>"
    if panel.note:
        head += f'<p class="note">{html.escape(panel.note)}</p>'
    if panel.figure is not None:
        body = f'<div id="{plot}" style="height:{panel.figure.layout.height}px"></div>'
    elif panel.findings:
        entries = "".join(
            f"<li><b>{html.escape(text)}</b><br>{html.escape(change)} ({html.escape(runs)})</li>"
            for text, change, runs in panel.findings
        )
        body = f'<ul class="findings">{entries}</ul>'
    elif panel.columns:
        header = "".join(f"<th>{html.escape(str(name))}</th>" for name in panel.columns)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(cell))}</td>" for cell in row) + "</tr>"
            for row in panel.rows
        )
        body = f'<div class="scroll"><table><tr>{header}</tr>{rows}</table></div>'
    else:
        body = f"<p><em>{html.escape(panel.missing)}</em></p>"
    return f'<section class="{"wide" if panel.wide else "panel"}">{head}{body}</section>'


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _write_figures(
    folder: Path, sections: Sequence[tuple[Tab, Run | None, list[Panel]]]
) -> list[str]:
    """Writes a CSV for each plot and table and a PNG for each plot; notes for the user."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[go.Figure] = []
    paths: list[Path] = []
    seen: dict[str, int] = {}
    for tab, _, panels in sections:
        seen[tab.key] = number = seen.get(tab.key, 0) + 1
        suffix = f"-{number}" if number > 1 else ""
        for panel in panels:
            path = folder / f"{tab.key}{suffix}-{panel.key}"
            if panel.figure is not None:
                _write_csv(path.with_suffix(".csv"), *figure_table(panel.figure))
                figures.append(panel.figure)
                paths.append(path.with_suffix(".png"))
            elif panel.findings:
                columns = ("finding", "change", "runs")
                _write_csv(path.with_suffix(".csv"), columns, panel.findings)
            elif panel.columns:
                _write_csv(path.with_suffix(".csv"), panel.columns, panel.rows)
    return _write_pngs(figures, paths)


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def figure_table(figure: go.Figure) -> tuple[list[str], list[list[Any]]]:
    """The data of a plot as a table with a row for each point.

    Returns:
        Names of the columns (`curve`, `x`, `y`; `z` for heat maps) and the rows.
    """
    rows: list[list[Any]] = []
    is_map = any(trace.type == "heatmap" for trace in figure.data)
    for trace in figure.data:
        if trace.type == "heatmap":
            rows += [
                ["", x, y, z]
                for y, line in zip(trace.y, trace.z, strict=True)
                for x, z in zip(trace.x, line, strict=True)
            ]
        else:
            points = zip(np.atleast_1d(trace.x), np.atleast_1d(trace.y), strict=True)
            rows += [[html.unescape(trace.name or ""), x, y, *([""] * is_map)] for x, y in points]
    return ["curve", "x", "y", *(["z"] * is_map)], rows


def _write_pngs(figures: Sequence[go.Figure], paths: Sequence[Path]) -> list[str]:
    from plotly.io import write_images

    opaque = [
        go.Figure(figure).update_layout(
            template="plotly_white", paper_bgcolor="white", plot_bgcolor="white"
        )
        for figure in figures
    ]
    try:
        write_images(
            opaque,
            [str(path) for path in paths],
            width=_PNG_WIDTH,
            height=[figure.layout.height for figure in opaque],
            scale=_PNG_SCALE,
        )
    except (ImportError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        return [f"no PNG files: {reason} (they need `pip install kaleido` and Chrome or Chromium)"]
    return []
