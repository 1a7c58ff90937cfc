"""Commands that show results: `polopt dashboard`, `report`, `grafana` and `trace`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from polopt.common.config import ConfigError
from polopt.metrics.chrome_trace import TRACE_FILE, read_trace
from polopt.trainers.command_line.output import RESULTS_DIR, bad_input, say, say_findings

_Results = Annotated[
    Path, typer.Argument(help="Directory of results: of one run, or of many experiments.")
]


def dashboard(
    results_dir: _Results = RESULTS_DIR,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free one from 8501.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser where there is one.")] = True,
) -> None:
    """Show results in a live web page on this machine. Ctrl-C ends it."""
    with bad_input():
        from polopt.dashboards.server import serve

        serve(results_dir, port, browser)


def report(
    results_dir: _Results = RESULTS_DIR,
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
            "$RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR or a folder of your Ray that runs.",
        ),
    ] = None,
) -> None:
    """Write Grafana dashboards of each policy optimizer, and alert rules."""
    with bad_input():
        from polopt.dashboards.grafana import metrics_folder, write_alerts, write_dashboards
        from polopt.optimizers.optimizer_registry import OPTIMIZERS
        from polopt.trainers.tab_file import tab_of

        metrics, session = metrics_folder()
        given = folder or os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR")
        target = Path(given or metrics / "grafana" / "dashboards").expanduser()
        if not given and not target.is_dir():
            raise ConfigError(
                f"no running Ray of yours exports metrics: {target} does not exist; "
                "pip install 'polopt[metrics]' and `ray start --head` first, or name a directory"
            )
        tabs = []
        for name in OPTIMIZERS.names():
            try:
                tabs.append(tab_of(OPTIMIZERS.get(name)))
            except ConfigError as error:  # a plugin that cannot be imported
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
    say(f"alerts      {'polopt_alert_rules.yaml, beside them' if given else alerts}")
    for line in _NEXT.splitlines():
        say(line.format(metrics=metrics))


_NEXT = """next        each in its own terminal:
    cd {metrics}
    prometheus --config.file prometheus/prometheus.yml
    grafana server --homepath /usr/share/grafana --config grafana/grafana.ini
    RAY_ADDRESS=auto polopt train cartpole_a3c
page        http://localhost:3000/d/polopt"""


def trace(
    trial: Annotated[Path, typer.Argument(help="A trace, or a directory of a trial or of trials.")],
) -> None:
    """Show where the time of the recorded steps went, of runs with trace=true."""
    with bad_input():
        folder = trial.expanduser()
        if not folder.exists():
            raise ConfigError(f"{str(trial)!r} does not exist. Allowed: a trace, or a directory")
        paths = [folder] if folder.is_file() else sorted(folder.rglob(TRACE_FILE))
        if not paths:
            raise ConfigError(
                f"no {TRACE_FILE} in {str(trial)!r}: it is there after a run with trace=true whose "
                "optimizer made trace_first_step + trace_num_steps - 1 steps"
            )
        for path in paths:
            _show(path)
    say("open        https://ui.perfetto.dev (choose the file there), or vizviewer FILE")


def _show(path: Path) -> None:
    steps, shares = read_trace(path)
    say(f"trace       {path}")
    last = steps["first_step"] + steps["num_steps"] - 1
    say(f"steps       {steps['first_step']} to {last}, {steps['duration_s']:.3f} s")
    for process in steps["truncated"]:
        say(f"note        {process} has more events than a trace keeps; the last are missing")
    for process, by_name in shares.items():
        say(f"{process:<12}" + "  ".join(f"{name} {share}%" for name, share in by_name.items()))
    results = path.with_name("result.json")
    if results.is_file():
        from polopt.metrics.diagnosis import diagnose
        from polopt.metrics.run_results import read_results

        say_findings(diagnose(read_results(results)))
