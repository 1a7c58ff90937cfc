"""The commands `polopt dashboard` and `polopt report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polopt.trainers.command_line.output import RESULTS_DIR, bad_input, say


def dashboard(
    results_dir: Annotated[
        Path, typer.Argument(help="Directory of results: of one run, or of many experiments.")
    ] = RESULTS_DIR,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 8501.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser where there is one.")] = True,
) -> None:
    """Show results in a live web page on this machine; Ctrl-C ends it."""
    with bad_input():
        from polopt.dashboards.server import serve

        serve(results_dir, port, browser)


def report(
    results_dir: Annotated[
        Path, typer.Argument(help="Directory of results: of one run, or of many experiments.")
    ] = RESULTS_DIR,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file.")
    ] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a PNG and a CSV of each plot there.")
    ] = None,
) -> None:
    """Write the views of results as one HTML file that opens without a network."""
    with bad_input():
        from polopt.dashboards.server import check_installed

        check_installed("plotly")
        from polopt.dashboards.report import write_report

        notes = write_report(results_dir, output, figures)
    say(f"report      {output}")
    if figures is not None:
        say(f"figures     {figures}")
    for note in notes:
        say(f"note        {note}")
