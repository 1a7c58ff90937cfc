"""Writes Grafana dashboards of all optimizers and of each optimizer, and Grafana alert rules."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.dashboards.data.colors import PHASE_COLORS
from polopt.dashboards.data.prometheus import UNDECLARED, Metric, metrics_of
from polopt.dashboards.data.tab import OptimizerTab
from polopt.dashboards.data.tune_state import is_own, ray_root
from polopt.trainers.numbers import numbers_of

#: For each tag (see `Metric.tag`) of a stacked panel, a value that occurs in every trial. The panel
#: counts the trials with this value.
_IN_EVERY_TRIAL = {"phase": "other", "part": "idle"}
_UNITS = {"share": "percentunit", "ms": "ms", "bytes": "bytes"}
#: Units of counters, which panels show as rates.
_RATES = {"bytes": "Bps"}
#: A line does not join two results that are further apart than this.
_JOIN_MS = 5 * 60 * 1000


@dataclass(frozen=True)
class View:
    """A panel of a dashboard.

    Attributes:
        title: title of the panel.
        text: description of the panel. Empty: the meaning of the first metric.
        metrics: names of the metrics to show on one axis. Without `stacked`, each metric has a line
            for each trial and value of its tag (see `Metric.tag`).
        stacked: whether to stack one area for each value of the tag. An area shows the mean over
            the trials.
        where: a Prometheus matcher that selects values of the tag. Empty for all values.
    """

    title: str
    text: str
    metrics: tuple[str, ...]
    stacked: bool = False
    where: str = ""


_LEARNER = ("polopt_learner",)
VIEWS = (
    View("Return", "", ("polopt_episode_return",)),
    View("Return of evaluation", "", ("polopt_evaluation_return",)),
    View("Environment steps/s", "", ("polopt_env_steps_per_s",)),
    View(
        "Driver's time",
        "With remote workers, the driver is idle in the phases wait and sample, and also in the "
        "phase learn if the workers learn. If the share of these phases is near 0, the driver "
        "limits the run.",
        ("polopt_driver_share",),
        stacked=True,
    ),
    View(
        "Workers' time",
        "Idle is the time in which workers wait for the driver or for each other.",
        ("polopt_workers_share",),
        stacked=True,
    ),
    View("Policy lag", "", ("polopt_policy_lag",)),
    View(
        "Mean and largest lag",
        "Policy, gradient and priority lag, in updates.",
        ("polopt_lag_mean", "polopt_lag_max"),
    ),
    View("Lag in rollouts", "", ("polopt_lag_rollouts",)),
    View(
        "Driver's phases, p50 and p99",
        "Percentiles of the durations of each phase since the last result.",
        ("polopt_driver_p50_ms", "polopt_driver_p99_ms"),
    ),
    View(
        "Workers' parts, p50 and p99",
        "Percentiles of the durations of each part of a worker's time (a phase, other or idle), "
        "measured per reply since the last result.",
        ("polopt_workers_p50_ms", "polopt_workers_p99_ms"),
    ),
    View("Workers' steps/s", "", ("polopt_workers_env_steps_per_s",)),
    View("Workers' idle share", "", ("polopt_workers_idle_share",)),
    View(
        "Processors in use",
        "Processors that the driver's process and the workers' processes use. If cores are free, "
        "more workers can use them.",
        ("polopt_driver_cpus", "polopt_workers_cpus"),
    ),
    View(
        "Memory",
        "Resident memory of the driver's process and of the workers' processes. A line that never "
        "stops rising is a memory leak.",
        ("polopt_driver_memory_bytes", "polopt_workers_memory_bytes"),
    ),
    View(
        "GPUs busy",
        "Share of the time in which the GPU of the driver or of a worker is busy. 0 without a GPU.",
        ("polopt_driver_gpu_share", "polopt_workers_gpu_share"),
    ),
    View(
        "Requests in flight",
        "Mean number of pending calls at the end of each call. For an asynchronous optimizer, a "
        "mean below the number of workers means that some workers have no work. A synchronous "
        "optimizer starts N calls at the same time, so its mean is (N + 1) / 2.",
        ("polopt_requests_in_flight",),
    ),
    View("Updates/s", "", ("polopt_updates_per_s",)),
    View(
        "Steps and updates, smoothed",
        "Rates of steps and updates over at least a minute.",
        ("polopt_env_steps", "polopt_env_steps_trained", "polopt_updates"),
    ),
    View(
        "Bytes",
        "Bytes per second of weights, gradients and batches that the driver sends and receives, or "
        "that bypass the driver (by_reference).",
        ("polopt_bytes",),
    ),
    View(
        "Faults",
        "Numbers of faults so far. If a curve of another panel dips when a number rises, the "
        "fault is a likely cause.",
        (
            "polopt_worker_restarts",
            "polopt_worker_failures",
            "polopt_env_faults",
            "polopt_non_finite",
            "polopt_skipped_updates",
        ),
    ),
    View("Healthy workers", "", ("polopt_healthy_workers",)),
    # The learner's statistics have several panels, because each axis should have values of similar
    # size. For example, the learning rate would be a flat line beside the losses.
    View(
        "Losses",
        "Losses of the learner. mean_kl_loss is the KL divergence.",
        _LEARNER,
        where='statistic=~".*loss"',
    ),
    View(
        "Entropy and other statistics of the learner",
        "With discrete actions, a fall of the entropy to 0 means that exploration has ended. A "
        "clip fraction above 0.5 together with a KL divergence above 0.05 means that updates are "
        "too large.",
        _LEARNER,
        where='statistic!~".*loss|grad_norm|.*learning_rate"',
    ),
    View(
        "Gradient norm",
        "Norm of the gradient before clipping.",
        _LEARNER,
        where='statistic="grad_norm"',
    ),
    View(
        "Learning rate",
        "Current learning rate, which follows the schedule.",
        _LEARNER,
        where='statistic=~".*learning_rate"',
    ),
)
#: Index in `VIEWS` at which the views of one optimizer are inserted, after the driver's time.
_OWN_AT = 4


@dataclass(frozen=True)
class Alert:
    """An alert rule. It applies to every trial.

    Attributes:
        uid: identifier of the rule.
        title: title of the alert.
        text: what has happened, and what the user should look at. `{trial}` stands for the trial.
        expr: a Prometheus query. The alert fires while the query has a value above 0.
        minutes: the alert fires only if the value has been above 0 for this time.
    """

    uid: str
    title: str
    text: str
    expr: str
    minutes: int = 0


def _of_trial(expr: str) -> str:
    return f"max by (optimizer, trial) ({expr})"


def _rise(name: str) -> str:
    """Returns a query for the increase of a metric within ten minutes.

    It does not use `delta` or `increase`, because these functions extrapolate.
    """
    return f"(ray_{name} - min_over_time(ray_{name}[10m]))"


ALERTS = (
    Alert(
        "polopt-workers-lost",
        "polopt: fewer healthy workers than before",
        "For at least 3 minutes, trial {trial} has had fewer healthy workers than before.",
        _of_trial("max_over_time(ray_polopt_healthy_workers[15m]) - ray_polopt_healthy_workers"),
        3,
    ),
    Alert(
        "polopt-restarts",
        "polopt: workers restart again and again",
        "Workers of trial {trial} restarted more than three times within ten minutes.",
        _of_trial(f"{_rise('polopt_worker_restarts')} > 3"),
    ),
    Alert(
        "polopt-env-faults",
        "polopt: environments raise exceptions",
        "Environments of trial {trial} raised exceptions within the last ten minutes.",
        _of_trial(_rise("polopt_env_faults")),
    ),
    Alert(
        "polopt-non-finite",
        "polopt: data or gradients are not finite",
        "Trial {trial} dropped data or skipped updates within the last ten minutes.",
        # Unlike a sum, `or` also has a value if a trial has only one of the two metrics.
        _of_trial(f"{_rise('polopt_non_finite')} > 0 or {_rise('polopt_skipped_updates')} > 0"),
    ),
    Alert(
        "polopt-driver-busy",
        "polopt: the driver cannot keep up",
        "The driver of trial {trial} waits for less than 15 percent of its time, and the workers "
        "are idle for more than 20 percent of their time. Use longer fragments or fewer workers.",
        # The same limits as in the rule `driver-busy` of the diagnosis. The query has a value for
        # each trial for which both conditions hold.
        _of_trial('ray_polopt_workers_share{part="idle"} > 0.2')
        + " and "
        + _of_trial('ray_polopt_driver_share{phase="wait"} < 0.15'),
        10,
    ),
)


def metrics_folder() -> tuple[Path, str]:
    """Returns the folder of Ray's configurations for Prometheus and Grafana.

    This is `RAY_METRICS_OUTPUT_ROOT`, if this variable is set. Otherwise, it is the folder of this
    user's newest running session of Ray. Without such a session, it is the folder of
    `session_latest`, the session that started last. This session is only the fallback, because it
    may belong to another user, may have ended, or may be the local Ray of a run, which exports
    nothing.

    Returns:
        The folder, and a text that names the running session and says how it was chosen. The text
        is empty if no running session was chosen.
    """
    given = os.environ.get("RAY_METRICS_OUTPUT_ROOT")
    if given is not None:
        return Path(given), ""
    root = ray_root()
    # The name of a session contains the time of its start.
    sessions = [path.parent for path in sorted(root.glob("session_[0-9]*/metrics"), reverse=True)]
    running = [path for path in sessions if is_own(path) and _is_running(path)]
    if not running:
        return root / "session_latest" / "metrics", ""
    newest = f"the newest of your {len(running)} running sessions"
    which = newest if len(running) > 1 else "your only running session"
    return running[0] / "metrics", f"{running[0].name}, {which}"


def _is_running(session: Path) -> bool:
    """Returns whether the raylet of a session accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(session / "sockets" / "raylet"))
        except OSError:
            return False
    return True


def write_alerts(path: Path, source: str) -> None:
    """Writes the alert rules as a file for Grafana's provisioning (`provisioning/alerting`).

    Args:
        path: the YAML file. Its folder is created if necessary.
        source: name of the Prometheus data source in Grafana. Ray provisions this data source.

    Raises:
        OSError: if the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rules = [_alert_rule(alert, _uid_of_source(source)) for alert in ALERTS]
    group = {"orgId": 1, "name": "polopt", "folder": "polopt", "interval": "1m", "rules": rules}
    # Every JSON file is a valid YAML file.
    path.write_text(json.dumps({"apiVersion": 1, "groups": [group]}, indent=1) + "\n")


def _uid_of_source(name: str) -> str:
    """Returns the identifier that Grafana generates for a data source without an identifier. Ray
    provisions such a data source."""
    return f"P{hashlib.sha256(name.encode()).hexdigest()[:16]}".upper()


def _alert_rule(alert: Alert, source: str) -> dict[str, Any]:
    query = {"refId": "A", "expr": alert.expr, "instant": True}
    above = {"evaluator": {"type": "gt", "params": [0]}}
    condition = {"refId": "B", "type": "threshold", "expression": "A", "conditions": [above]}
    models: dict[str, dict[str, Any]] = {source: query, "__expr__": condition}
    return {
        "uid": alert.uid,
        "title": alert.title,
        "condition": "B",
        "for": f"{alert.minutes}m",
        "noDataState": "OK",  # the query has no value if no trial has the fault
        "execErrState": "Error",
        "annotations": {"summary": alert.text.format(trial="{{ $labels.trial }}")},
        "data": [
            {
                "refId": model["refId"],
                "relativeTimeRange": {"from": 900, "to": 0},
                "datasourceUid": uid,
                "model": model,
            }
            for uid, model in models.items()
        ],
    }


def write_dashboards(folder: Path, tabs: Iterable[OptimizerTab]) -> list[Path]:
    """Writes the dashboards as JSON files for Grafana's provisioning. Returns their paths.

    Args:
        folder: folder of the files. It is created if necessary.
        tabs: declarations of the optimizers that get their own dashboard.

    Raises:
        OSError: if a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for identifier, board in dashboards(tabs).items():
        path = folder / f"{identifier.replace('-', '_')}_grafana_dashboard.json"
        path.write_text(json.dumps(board, indent=1) + "\n")
        written.append(path)
    return written


def dashboards(tabs: Iterable[OptimizerTab] = ()) -> dict[str, dict[str, Any]]:
    """Returns the dashboards by identifier, in Grafana's JSON model."""
    boards = {"polopt": _dashboard("polopt", None)}
    for tab in tabs:
        uid = "polopt-" + re.sub("[^a-z0-9]+", "-", tab.name.lower())[:33]  # Grafana's limit is 40
        boards[uid] = _dashboard(uid, tab)
    return boards


def views_of(tab: OptimizerTab | None) -> list[View]:
    """Returns `VIEWS`, and a view of each other metric of all optimizers or of `tab`."""
    shown = {name for view in VIEWS for name in view.metrics}
    own = [
        View(_title(metric), "", (metric.name,))
        for metric in all_metrics(tab).values()
        if metric.name not in shown
    ]
    return [*VIEWS[:_OWN_AT], *own, *VIEWS[_OWN_AT:]]


def all_metrics(tab: OptimizerTab | None = None) -> dict[str, Metric]:
    """Returns the metrics of all optimizers, and those that `tab` declares, by name."""
    return metrics_of([*numbers_of(), UNDECLARED, *(tab.numbers if tab is not None else ())])


def _title(metric: Metric) -> str:
    return metric.name.removeprefix("polopt_").replace("_", " ").capitalize()


def _dashboard(uid: str, tab: OptimizerTab | None) -> dict[str, Any]:
    chosen = tab.name if tab is not None else "$optimizer"
    series = all_metrics(tab)
    panels = [
        {
            **_panel(view, series, f'optimizer=~"{chosen}",trial=~"$trial"'),
            "id": number + 1,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        }
        for number, view in enumerate(views_of(tab))
    ]
    known = "ray_polopt_env_steps_per_s"
    optimizer = _variable("optimizer", f"label_values({known}, optimizer)")
    trials = f'label_values({known}{{optimizer=~"{chosen}"}}, trial)'
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2}
    variables = [source, *([optimizer] if tab is None else []), _variable("trial", trials)]
    return {
        "uid": uid,
        "title": f"polopt: {tab.title if tab is not None else 'all optimizers'}",
        "tags": ["polopt", "ray"],
        "schemaVersion": 27,  # as in Ray. Grafana then migrates data sources given by name
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": "${datasource}",
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,  # 2 means: when the time range changes
        "sort": 1,
        "includeAll": True,
        "multi": True,
        "allValue": ".+",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(view: View, series: Mapping[str, Metric], selector: str) -> dict[str, Any]:
    metric = series[view.metrics[0]]
    panel = {
        "title": view.title,
        "description": view.text or metric.text,
        "datasource": "${datasource}",
        "targets": [
            {"refId": chr(ord("A") + number), **_target(series[name], view, selector)}
            for number, name in enumerate(view.metrics)
        ],
    }
    if metric.kind == "histogram":
        return {**panel, "type": "heatmap", "options": _HEAT_MAP}
    custom: dict[str, Any] = {"spanNulls": _JOIN_MS, "showPoints": "auto"}
    if view.stacked:
        custom |= {"stacking": {"mode": "normal"}, "fillOpacity": 60, "lineWidth": 0}
    limits = {"min": 0, "max": 1} if metric.unit == "share" else {}
    units = _RATES if metric.kind == "counter" else _UNITS
    defaults = {"unit": units.get(metric.unit, "short"), "custom": custom, **limits}
    overrides = [_fixed_color(name, color) for name, color in PHASE_COLORS.items()]
    return {
        **panel,
        "type": "timeseries",
        "fieldConfig": {"defaults": defaults, "overrides": overrides if view.stacked else []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
    }


def _fixed_color(name: str, color: str) -> dict[str, Any]:
    """Returns an override that gives a phase the same color as on the dashboard page."""
    value = {"mode": "fixed", "fixedColor": color}
    matcher = {"id": "byName", "options": name}
    return {"matcher": matcher, "properties": [{"id": "color", "value": value}]}


_HEAT_MAP: Mapping[str, Any] = {
    "calculate": False,
    "color": {"mode": "scheme", "scheme": "Blues", "steps": 64},
    "filterValues": {"le": 1e-9},
    "yAxis": {"axisPlacement": "left", "unit": "none"},
}


def _target(metric: Metric, view: View, selector: str) -> dict[str, Any]:
    chosen = f"{selector},{view.where}" if view.where else selector
    value = f"{metric.series}{{{chosen}}}"
    if metric.kind == "histogram":
        expr = f"sum by (le) (increase({value}[$__rate_interval]))"
        return {"expr": expr, "format": "heatmap", "legendFormat": "{{le}}"}
    if metric.kind == "counter":
        value = f"rate({value}[$__rate_interval])"
    tags = [metric.tag] if metric.tag else []
    labels = tags if view.stacked else ["optimizer", "trial", *tags]
    legend = " ".join(f"{{{{{label}}}}}" for label in labels)
    if len(view.metrics) > 1:
        legend = f"{metric.name.removeprefix('polopt_')} {legend}"
    expr = f"{'sum' if view.stacked else 'max'} by ({', '.join(labels)}) ({value})"
    if view.stacked:
        # `avg` would omit trials without this phase, but the mean is over all trials.
        one = f'{metric.series}{{{selector},{metric.tag}="{_IN_EVERY_TRIAL[metric.tag]}"}}'
        expr += f" / scalar(count({one}))"
    return {"expr": expr, "legendFormat": legend}
