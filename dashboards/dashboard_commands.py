"""Commands that show results: `polopt dashboard`, `report`, `grafana` and `trace`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polopt.command_line.output import RESULTS_DIR, bad_input, say, say_findings
from polopt.common.config import ConfigError
from polopt.dashboards.data.chrome_trace import TRACE_FILE, read_trace

_Results = Annotated[
    Path,
    typer.Argument(help="Directory with the results of one run or of many experiments."),
]


def dashboard(
    results_dir: _Results = RESULTS_DIR,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port. Default: the first free port from 8501 on."),
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
) -> None:
    """Show results in a live web page on this machine. Ctrl-C ends the server."""
    with bad_input():
        from polopt.dashboards.server import serve

        serve(results_dir, port, browser)


def report(
    results_dir: _Results = RESULTS_DIR,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The HTML file.")
    ] = Path("report.html"),
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each plot as PNG and CSV to this directory."),
    ] = None,
) -> None:
    """Write the plots of the dashboard to one HTML file that needs no network connection."""
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
            help="Directory from which Grafana loads dashboards. Default: the directory that Ray "
            "uses, which is $RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR or a directory of the "
            "running Ray.",
        ),
    ] = None,
) -> None:
    """Write Grafana dashboards for each policy optimizer, and alert rules."""
    with bad_input():
        from polopt.dashboards.grafana import metrics_folder, write_alerts, write_dashboards
        from polopt.dashboards.tab_file import tab_of
        from polopt.optimizers.optimizer_registry import OPTIMIZERS

        metrics, session = metrics_folder()
        given = folder or os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
        target = Path(given or metrics / "grafana" / "dashboards").expanduser()
        if not given and not target.is_dir():
            raise ConfigError(
                f"{target} does not exist, because no Ray that you have started exports metrics. "
                "Run `pip install 'polopt[metrics]'` and `ray start --head`, or give a directory"
            )
        tabs = []
        for name in OPTIMIZERS.names():
            try:
                tabs.append(tab_of(OPTIMIZERS.get(name)))
            except ConfigError as error:  # the plugin cannot be imported
                say(f"note        {error}")
        try:
            written = write_dashboards(target, tabs)
            alerts = target if given else metrics / "grafana" / "provisioning" / "alerting"
            write_alerts(
                alerts / "polopt_alert_rules.yaml",
                os.environ.get("RAY_PROMETHEUS_NAME", "Prometheus"),
            )
        except OSError as error:
            raise ConfigError(f"{error.filename or target}: {error.strerror or error}") from None
    if session and not given:
        say(f"session     {session}")
    say(f"dashboards  {target} ({len(written)} files)")
    say(f"alerts      {'polopt_alert_rules.yaml, in the same directory' if given else alerts}")
    for line in _NEXT.splitlines():
        say(line.format(metrics=metrics))


_NEXT = """next        in each of three terminals, run `cd` and one of the other commands:
    cd {metrics}
    prometheus --config.file prometheus/prometheus.yml
    grafana server --homepath /usr/share/grafana --config grafana/grafana.ini
    RAY_ADDRESS=auto polopt train cartpole_a3c
page        http://localhost:3000/d/polopt"""


def trace(
    trial: Annotated[
        Path, typer.Argument(help="A trace file, or a directory that contains trace files.")
    ],
) -> None:
    """Show how the recorded steps of a run with trace=true spent their time."""
    with bad_input():
        folder = trial.expanduser()
        if not folder.exists():
            raise ConfigError(
                f"{str(trial)!r} does not exist. Allowed: a trace file, or a directory"
            )
        paths = [folder] if folder.is_file() else sorted(folder.rglob(TRACE_FILE))
        if not paths:
            raise ConfigError(
                f"no {TRACE_FILE} in {str(trial)!r}. A run with trace=true writes this file after "
                "trace_first_step + trace_num_steps - 1 optimizer steps"
            )
        for path in paths:
            _show(path)
    say("open        https://ui.perfetto.dev (open the file on this page), or vizviewer FILE")


def _show(path: Path) -> None:
    steps, shares = read_trace(path)
    say(f"trace       {path}")
    last = steps["first_step"] + steps["num_steps"] - 1
    say(f"steps       {steps['first_step']} to {last}, {steps['duration_s']:.3f} s")
    for process in steps["truncated"]:
        say(f"note        {process} has too many events for a trace. The last events are missing")
    for process, by_name in shares.items():
        say(f"{process:<12}" + "  ".join(f"{name} {share}%" for name, share in by_name.items()))
    results = path.with_name("result.json")
    if results.is_file():
        from polopt.dashboards.data.diagnosis import diagnose
        from polopt.dashboards.data.run_results import read_results

        say_findings((one.text, one.change) for one in diagnose(read_results(results)))
