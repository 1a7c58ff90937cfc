"""Commands that show results: `polopt dashboard`, `report`, `grafana` and `trace`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polopt.common.config import ConfigError
from polopt.metrics.chrome_trace import TRACE_FILE, self_times_s
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


def grafana(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Where Grafana's provisioning looks. Default: where Ray's does, which is "
            "$RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR or a folder of Ray's newest session.",
        ),
    ] = None,
) -> None:
    """Write Grafana dashboards of each policy optimizer."""
    with bad_input():
        from polopt.dashboards.grafana import write_dashboards

        metrics = _metrics_folder()
        given = folder or os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
        target = Path(given or metrics / "grafana" / "dashboards").expanduser()
        if not given and not target.is_dir():
            raise ConfigError(
                f"no running Ray exports metrics: {target} does not exist; "
                "pip install 'polopt[metrics]' and `ray start --head` first, or name a directory"
            )
        try:
            written = write_dashboards(target)
        except OSError as error:
            raise ConfigError(f"{target}: {error.strerror or error}") from None
    say(f"dashboards  {target} ({len(written)} files)")
    say(_NEXT.format(metrics=metrics))


_NEXT = """next        each in its own terminal:
    cd {metrics}
    prometheus --config.file prometheus/prometheus.yml
    grafana server --homepath /usr/share/grafana --config grafana/grafana.ini
    RAY_ADDRESS=auto polopt train cartpole_a3c
page        http://localhost:3000/d/polopt"""


def _metrics_folder() -> Path:
    """Returns where Ray writes its configurations of Prometheus and Grafana."""
    on_linux = os.environ.get("TMPDIR") if sys.platform == "linux" else None  # as Ray
    folder = Path(os.environ.get("RAY_TMPDIR") or on_linux or "/tmp", "ray", "session_latest")
    # The name of the session, because the link points to another one once Ray starts again.
    return Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT", folder.resolve() / "metrics"))


def trace(
    trial: Annotated[Path, typer.Argument(help="A trace, or a directory of a trial or of trials.")],
) -> None:
    """Show where the time of the recorded steps went, of runs with trace=true."""
    with bad_input():
        folder = trial.expanduser()
        paths = [folder] if folder.is_file() else sorted(folder.rglob(TRACE_FILE))
        if not paths:
            raise ConfigError(
                f"no {TRACE_FILE} in {str(trial)!r}. Allowed: a trial that ran with trace=true for "
                "trace_first_step + trace_num_steps - 1 optimizer steps"
            )
        for path in paths:
            _show(path)
    say("open        https://ui.perfetto.dev (choose the file there), or vizviewer FILE")


def _show(path: Path) -> None:
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
        steps, times = recorded["otherData"], self_times_s(recorded)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error!r}") from error
    say(f"trace       {path}")
    last = steps["first_step"] + steps["num_steps"] - 1
    say(f"steps       {steps['first_step']} to {last}, {steps['duration_s']:.3f} s")
    for process in steps["truncated"]:
        say(f"note        {process} has more events than a trace keeps; the last are missing")
    for process, by_name in times.items():
        shares = {name: time_s / steps["duration_s"] for name, time_s in by_name.items()}
        parts = sorted(shares.items(), key=lambda item: -item[1])
        say(f"{process:<12}" + "  ".join(f"{name} {share:.0%}" for name, share in parts))
