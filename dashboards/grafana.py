"""Grafana dashboards, one for all optimizers and one for each optimizer, and alert rules."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polopt.dashboards.data.colors import PHASE_COLORS
from polopt.dashboards.data.tune_state import is_own, ray_root
from polopt.metrics.prometheus import METRICS, Metric
from polopt.metrics.tab import OptimizerTab

#: A value of each tag that every trial has, to count the trials of a stack.
_IN_EVERY_TRIAL = {"phase": "other", "part": "idle"}
_UNITS = {"share": "percentunit", "ms": "ms", "bytes": "bytes"}
#: Of counters, which are shown as rates.
_RATES = {"bytes": "Bps"}
#: Results that are further apart than this are not joined by a line.
_JOIN_MS = 5 * 60 * 1000


@dataclass(frozen=True)
class View:
    """One panel.

    Attributes:
        title: of the panel.
        text: what it answers.
        metrics: names of metrics of one unit, each shown by trial and by its tag.
        stacked: shares by tag, as the mean over the trials.
        where: matcher of the tag in Prometheus' language. Empty: all its values.
    """

    title: str
    text: str
    metrics: tuple[str, ...]
    stacked: bool = False
    where: str = ""


_LEARNER = ("polopt_learner",)
VIEWS = (
    View("Return", "Mean of the last 100 episodes.", ("polopt_episode_return",)),
    View("Return of evaluation", "Mean of the last evaluation.", ("polopt_evaluation_return",)),
    View("Environment steps/s", "Sampled, since the last result.", ("polopt_env_steps_per_s",)),
    View(
        "Driver's time",
        "The share of waiting or sampling is the driver's idle time. Near 0, it limits the run.",
        ("polopt_driver_share",),
        stacked=True,
    ),
    View(
        "Workers' time",
        "Idle: workers wait for the driver or for each other.",
        ("polopt_workers_share",),
        stacked=True,
    ),
    View("Policy lag", "Age of the weights that acted, as a distribution.", ("polopt_policy_lag",)),
    View("Mean and largest lag", "Of policy and gradients.", ("polopt_lag_mean", "polopt_lag_max")),
    View("Lag in rollouts", "How far behind workers are.", ("polopt_lag_rollouts",)),
    View(
        "Driver's phases, p50 and p99",
        "Single timings since the last result.",
        ("polopt_driver_p50_ms", "polopt_driver_p99_ms"),
    ),
    View(
        "Workers' parts, p50 and p99",
        "Single answers since the last result.",
        ("polopt_workers_p50_ms", "polopt_workers_p99_ms"),
    ),
    View("Workers' steps/s", "Mean, slowest, fastest.", ("polopt_workers_env_steps_per_s",)),
    View(
        "Workers' idle share",
        "Mean, smallest and largest over workers.",
        ("polopt_workers_idle_share",),
    ),
    View(
        "Processors in use",
        "By the driver's process and by workers'. Free cores can have further workers.",
        ("polopt_driver_cpus", "polopt_workers_cpus"),
    ),
    View(
        "Memory",
        "Resident, of the driver's process and of workers'. A line that rises without end is a "
        "leak.",
        ("polopt_driver_memory_bytes", "polopt_workers_memory_bytes"),
    ),
    View(
        "GPUs busy",
        "Share of the time, of the driver's GPU and of workers'. 0 without one.",
        ("polopt_driver_gpu_share", "polopt_workers_gpu_share"),
    ),
    View(
        "Requests in flight",
        "Mean of the calls pending whenever one ends. Asynchronous: fewer than workers, if some "
        "have no work. Synchronous: N calls start together, so the mean is (N + 1) / 2.",
        ("polopt_requests_in_flight",),
    ),
    View("Updates/s", "Applied, since the last result.", ("polopt_updates_per_s",)),
    View(
        "Steps and updates, smoothed",
        "Rates over a minute or more.",
        ("polopt_env_steps", "polopt_env_steps_trained", "polopt_updates"),
    ),
    View("Bytes", "Weights, gradients and data between processes.", ("polopt_bytes",)),
    View(
        "Faults",
        "Totals so far. A dip of a curve at a step has a cause.",
        (
            "polopt_worker_restarts",
            "polopt_worker_failures",
            "polopt_env_faults",
            "polopt_non_finite",
            "polopt_skipped_updates",
        ),
    ),
    View("Healthy workers", "Now.", ("polopt_healthy_workers",)),
    # Each axis has values of one size: the learning rate would be a flat line beside the losses.
    View(
        "Losses",
        "As they are minimised; mean_kl_loss is the KL divergence.",
        _LEARNER,
        where='statistic=~".*loss"',
    ),
    View(
        "Entropy and other statistics of the learner",
        "Entropy near 0: exploration has ended. Clip fraction above 0.3: updates are too large.",
        _LEARNER,
        where='statistic!~".*loss|grad_norm|.*learning_rate"',
    ),
    View("Gradient norm", "Before clipping.", _LEARNER, where='statistic="grad_norm"'),
    View("Learning rate", "As scheduled.", _LEARNER, where='statistic=~".*learning_rate"'),
)
#: The place of an optimizer's own views: after the shares of time.
_OWN_AT = 4


@dataclass(frozen=True)
class Alert:
    """One alert rule, for every trial.

    Attributes:
        uid: its identifier.
        title: shown.
        text: what has happened, and what to look at. `{trial}` is the trial.
        expr: query of Prometheus. The alert fires while it has a value above 0.
        minutes: for which it has to do so.
    """

    uid: str
    title: str
    text: str
    expr: str
    minutes: int = 0


def _of_trial(expr: str) -> str:
    return f"max by (optimizer, trial) ({expr})"


def _rise(name: str) -> str:
    """How much a total rose within ten minutes. `delta` and `increase` extrapolate."""
    return f"(ray_{name} - min_over_time(ray_{name}[10m]))"


ALERTS = (
    Alert(
        "polopt-workers-lost",
        "polopt: fewer healthy workers than before",
        "Workers of trial {trial} are gone, and none has replaced them for 3 minutes.",
        _of_trial("max_over_time(ray_polopt_healthy_workers[15m]) - ray_polopt_healthy_workers"),
        3,
    ),
    Alert(
        "polopt-restarts",
        "polopt: workers restart again and again",
        "More than three workers of trial {trial} restarted within ten minutes.",
        _of_trial(f"{_rise('polopt_worker_restarts')} > 3"),
    ),
    Alert(
        "polopt-env-faults",
        "polopt: environments raise",
        "Environments of trial {trial} raised within the last ten minutes.",
        _of_trial(_rise("polopt_env_faults")),
    ),
    Alert(
        "polopt-non-finite",
        "polopt: data or gradients are not finite",
        "Trial {trial} dropped data or skipped updates within the last ten minutes.",
        # Not a sum: an optimizer may have only one of them.
        _of_trial(f"{_rise('polopt_non_finite')} > 0 or {_rise('polopt_skipped_updates')} > 0"),
    ),
    Alert(
        "polopt-driver-busy",
        "polopt: the driver cannot keep up",
        "The driver of trial {trial} waits in less than 15 percent of its time, and workers are "
        "idle for more than 20: larger fragments or fewer workers.",
        # As the rule of this name in metrics/diagnosis.py. A result for each trial, if both hold.
        _of_trial('ray_polopt_workers_share{part="idle"} > 0.2')
        + " and "
        + _of_trial('ray_polopt_driver_share{phase="wait"} < 0.15'),
        10,
    ),
)


def metrics_folder() -> tuple[Path, str]:
    """Returns where Ray writes its configurations of Prometheus and Grafana, and text on which
    session of Ray that is.

    `session_latest` is the session that started last, which may be another user's, one that has
    ended, or the local Ray of a run, which exports nothing.
    """
    given = os.environ.get("RAY_METRICS_OUTPUT_ROOT")
    if given is not None:
        return Path(given), ""
    root = ray_root()
    # Names end with the time of the start.
    sessions = [path.parent for path in sorted(root.glob("session_[0-9]*/metrics"), reverse=True)]
    running = [path for path in sessions if is_own(path) and _is_running(path)]
    if not running:
        return root / "session_latest" / "metrics", ""
    newest = f"the newest of {len(running)} of yours that run"
    which = newest if len(running) > 1 else "your only one that runs"
    return running[0] / "metrics", f"{running[0].name}, {which}"


def _is_running(session: Path) -> bool:
    """Whether a raylet of the session accepts connections."""
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
        path: the YAML file. Its folder is made if it does not exist.
        source: name of the data source of Prometheus in Grafana, which Ray provisions.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rules = [_alert_rule(alert, _uid_of_source(source)) for alert in ALERTS]
    group = {"orgId": 1, "name": "polopt", "folder": "polopt", "interval": "1m", "rules": rules}
    # YAML contains JSON.
    path.write_text(json.dumps({"apiVersion": 1, "groups": [group]}, indent=1) + "\n")


def _uid_of_source(name: str) -> str:
    """The identifier that Grafana gives a provisioned data source without one, as Ray's is."""
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
        "noDataState": "OK",  # no trial, or none with a fault
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
    """Writes the dashboards as JSON files, for Grafana's provisioning. Returns their paths.

    Args:
        folder: made if it does not exist.
        tabs: of the optimizers that get a dashboard of their own.

    Raises:
        OSError: a file in the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for identifier, board in dashboards(tabs).items():
        path = folder / f"{identifier.replace('-', '_')}_grafana_dashboard.json"
        path.write_text(json.dumps(board, indent=1) + "\n")
        written.append(path)
    return written


def dashboards(tabs: Iterable[OptimizerTab] = ()) -> dict[str, dict[str, Any]]:
    """The dashboards by identifier, as Grafana reads them."""
    boards = {"polopt": _dashboard("polopt", None)}
    for tab in tabs:
        uid = "polopt-" + re.sub("[^a-z0-9]+", "-", tab.name.lower())[:33]  # Grafana's limit is 40
        boards[uid] = _dashboard(uid, tab)
    return boards


def views_of(tab: OptimizerTab | None) -> list[View]:
    """The views of all optimizers, and of the metrics that one optimizer declares."""
    own = [View(_title(metric), metric.text, (metric.name,)) for metric in _own(tab)]
    return [*VIEWS[:_OWN_AT], *own, *VIEWS[_OWN_AT:]]


def _own(tab: OptimizerTab | None) -> Sequence[Metric]:
    return tab.tab.metrics if tab is not None else ()


def _title(metric: Metric) -> str:
    return metric.name.removeprefix("polopt_").replace("_", " ").capitalize()


def _dashboard(uid: str, tab: OptimizerTab | None) -> dict[str, Any]:
    chosen = tab.name if tab is not None else "$optimizer"
    series = {metric.name: metric for metric in (*METRICS, *_own(tab))}
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
        "schemaVersion": 27,  # as Ray's: Grafana then migrates data sources given by name
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
        "refresh": 2,  # whenever the range of time changes
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
        "description": view.text,
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
    """The color that a phase has on the page, too."""
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
        # Not `avg`: optimizers have different phases, and the mean is over all trials.
        one = f'{metric.series}{{{selector},{metric.tag}="{_IN_EVERY_TRIAL[metric.tag]}"}}'
        expr += f" / scalar(count({one}))"
    return {"expr": expr, "legendFormat": legend}
