"""Writes the report: all tabs in one HTML file that needs no network, and PNG and CSV files."""

from __future__ import annotations

import csv
import html
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from polopt.common.config import ConfigError
from polopt.dashboards.data.selection import Run, Selection, last_return, make_runs
from polopt.dashboards.data.trials import ResultsDirectory
from polopt.dashboards.server import existing_directory
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import Tab, tabs_of

_PNG_WIDTH, _PNG_SCALE = 800, 2
_MOST_NAME_BYTES = 200  # of a file name without its suffix. File systems allow about 255 bytes
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
# Jinja escapes all values except those marked as safe. These are our style, Plotly's script, and
# Plotly's JSON of figures, in which Plotly has escaped everything that could end a script. The text
# of plots has the color of the page, which follows the light or dark setting of the system.
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>polopt: {{ name }}</title><style>{{ style|safe }}</style>
<script>{{ plotly|safe }}</script></head><body>
<h1>{{ name }}</h1><p>{{ num_trials }} trials, written {{ written }} by polopt report</p>
<nav>
{% for section in sections %}<a href="#s{{ loop.index0 }}">{{ section.title }}</a>
{% endfor %}</nav>
<script>
const draw = (id, figure) => {
  const color = getComputedStyle(document.body).color;
  figure.layout.font = Object.assign({}, figure.layout.font, {color: color});
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false,
    displayModeBar: false});
};
</script>
{% for section in sections %}{% set number = loop.index0 %}
<h2 id="s{{ number }}">{{ section.title }}</h2>
{% if section.run %}<p>Shares and histograms show the run {{ section.run.label }}.</p>{% endif %}
<div class="panels">
{% for panel in section.panels %}
<section class="{{ "wide" if panel.wide else "panel" }}">
<h3>{{ panel.title }}</h3><p>{{ panel.help }}</p>
{% if panel.note %}<p class="note">{{ panel.note }}</p>{% endif %}
{% if panel.figure is not none %}{% set plot = "p%d-%d" % (number, loop.index0) %}
<div id="{{ plot }}" style="height:{{ panel.figure.layout.height }}px"></div>
<script>draw('{{ plot }}', {{ panel.figure.to_json()|safe }});</script>
{% elif panel.findings %}<ul class="findings">
{% for text, change, runs in panel.findings %}
<li><b>{{ text }}</b><br>{{ change }} ({{ runs }})</li>
{% endfor %}</ul>
{% elif panel.columns %}<div class="scroll"><table>
<tr>{% for name in panel.columns %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in panel.rows %}<tr>
{% for cell in row %}<td>{{ "" if cell is none else cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% elif panel.missing %}<p><em>{{ panel.missing }}</em></p>{% endif %}
</section>
{% endfor %}</div>
{% endfor %}</body></html>
"""


def write_report(
    results_dir: Path,
    output: Path,
    figures: Path | None = None,
) -> list[str]:
    """Writes the report of all trials in a directory.

    Args:
        results_dir: directory of Tune results.
        output: the HTML file. An existing file is replaced.
        figures: directory for a CSV file of each plot, table and list of findings, and a PNG file
            of each plot. `None` writes no such files.

    Returns:
        Notes for the user: the reason why PNG files could not be written. Otherwise, the list is
        empty.

    Raises:
        ConfigError: if the directory does not exist, is a file, or contains no trial, or if a file
            of the report cannot be written.
    """
    folder = existing_directory(results_dir)
    directory = ResultsDirectory(folder)
    directory.refresh()
    runs = make_runs(directory.trials)
    if not runs:
        raise ConfigError(f"no trials (directories with result.json) in {str(results_dir)!r}")
    sections = list(_sections(runs))
    try:
        output.expanduser().write_text(_document(folder, len(runs), sections), encoding="utf-8")
        return _write_figures(figures.expanduser(), sections) if figures is not None else []
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or output}: {error.strerror}") from error


#: A report contains shares and histograms of at most this many groups of each optimizer. This
#: bounds the length of the report.
_MOST_GROUPS = 6


@dataclass(frozen=True)
class _Section:
    """A section of the report, which shows a tab. The tab of an optimizer has a section for each
    group, up to `_MOST_GROUPS` groups.

    Attributes:
        tab: the tab.
        run: the run whose shares and histograms the section shows. None if the tab does not belong
            to an optimizer.
        panels: the panels in order.
    """

    tab: Tab
    run: Run | None
    panels: Sequence[Panel]

    @property
    def title(self) -> str:
        """The title of the tab, with the group of the run."""
        return self.tab.title if self.run is None else f"{self.tab.title}: {self.run.group}"


def _sections(runs: Sequence[Run]) -> Iterator[_Section]:
    """Yields the sections of the report.

    Some panels of an optimizer's tab show a single run. If the optimizer has several groups, there
    is a section for each group, in which these panels show the first run of the group. The first
    section also has the other panels of the tab. If there are more than `_MOST_GROUPS` groups, only
    the groups with the highest returns have a section.
    """
    for tab in tabs_of(runs):
        groups = Selection(runs).of([tab.optimizer]).groups if tab.optimizer else {}
        if not groups:
            yield _Section(tab, None, tab.panels(Selection(runs)))
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
                    f"The report omits shares and histograms of {len(shown) - _MOST_GROUPS} groups "
                    "with lower returns. polopt dashboard shows every run"
                )
                panels.append(Panel("other-groups", "Other groups", "", missing=why, wide=True))
            yield _Section(tab, members[0], panels)


def _document(folder: Path, num_trials: int, sections: Sequence[_Section]) -> str:
    return (
        jinja2.Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            name=folder.absolute().name,
            num_trials=num_trials,
            written=time.strftime("%Y-%m-%d %H:%M"),
            style=_STYLE,
            plotly=get_plotlyjs(),
            sections=sections,
        )
    )


def _write_figures(folder: Path, sections: Sequence[_Section]) -> list[str]:
    """Writes a CSV file of each plot, table and list of findings, and a PNG file of each plot.

    Returns notes for the user."""
    folder.mkdir(parents=True, exist_ok=True)
    figures: list[go.Figure] = []
    paths: list[Path] = []
    seen: dict[str, int] = {}
    used: dict[str, int] = {}
    for section in sections:
        key = section.tab.key
        seen[key] = number = seen.get(key, 0) + 1
        suffix = f"-{number}" if number > 1 else ""
        for panel in section.panels:
            path = folder / _file_name(f"{key}{suffix}-{panel.key}", used)
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


def _file_name(name: str, used: dict[str, int]) -> str:
    """Returns a file name without a suffix. `name` contains text of results, which is not trusted.
    Therefore, `_` replaces all characters that are not letters, digits, `_` or `-`. The file name
    has at most `_MOST_NAME_BYTES` bytes. If it is in `used`, a number is appended."""
    plain = re.sub(r"[^\w-]", "_", name).encode()[:_MOST_NAME_BYTES].decode(errors="ignore")
    used[plain] = number = used.get(plain, 0) + 1
    return plain if number == 1 else f"{plain}+{number}"


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)


def figure_table(figure: go.Figure) -> tuple[list[str], list[list[Any]]]:
    """Returns the data of a plot as a table with a row for each point.

    Returns:
        The names of the columns and the rows. The columns are `curve`, `x` and `y`. Heat maps also
        have a column `z`.
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
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [f"no PNG files: {reason} (they need `pip install kaleido` and Chrome or Chromium)"]
    return []
