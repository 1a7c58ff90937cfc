"""The exporter, the Grafana dashboards and the docs agree with the table of metrics."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from commands import run_command

from polopt.dashboards import prometheus_exporter
from polopt.dashboards.data.prometheus import LAG_BOUNDARIES
from polopt.dashboards.data.tab import OptimizerTab
from polopt.dashboards.grafana import (
    ALERTS,
    VIEWS,
    all_metrics,
    dashboards,
    views_of,
    write_alerts,
)
from polopt.dashboards.prometheus_exporter import PrometheusExporter
from polopt.dashboards.tab_file import tab_of
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.trainers.numbers import numbers_of
from polopt.trainers.trainer import PolicyOptimizerTrainer

TABS = [tab_of(OPTIMIZERS.get(name)) for name in OPTIMIZERS.names()]


def board_names() -> set[str]:
    """Returns the identifiers of the dashboards that the command writes now, with those of plugins
    that other tests have registered."""
    return uids([tab_of(OPTIMIZERS.get(name)) for name in OPTIMIZERS.names()])


def uids(tabs: Sequence[OptimizerTab]) -> set[str]:
    return {"polopt", *(f"polopt-{tab.name.replace('_', '-')}" for tab in tabs)}


CONFIG = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 32,
    "model": {"fcnet_hiddens": [8]},
}


class Recorded:
    """A fake of the classes of `ray.util.metrics`, which keeps the values by name and tags."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], list[float]]

    def __init__(self, name: str, text: str, *arguments: Any) -> None:
        self.name, self.tag_keys = name, arguments[-1]

    def _record(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.tag_keys)
        assert isinstance(value, int | float)
        self.values.setdefault((self.name, frozenset(tags.items())), []).append(value)

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses this value"
        self._record(value, tags)

    set = observe = _record


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[Any, list[float]]:
    Recorded.values = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(prometheus_exporter, "PERIOD_S", 0.0)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_exporter, kind, Recorded)
    return Recorded.values


def of(recorded: dict[Any, list[float]], name: str, **tags: str) -> list[float]:
    """Returns the recorded values of one series of the trial `t`."""
    tags = {"optimizer": "async_gradients", "trial": "t", **tags}
    return recorded.get((name, frozenset(tags.items())), [])


def exporter_of(optimizer: str = "async_gradients") -> PrometheusExporter:
    exporter = PrometheusExporter()
    exporter.restart(numbers_of(OPTIMIZERS.get(optimizer)))
    return exporter


def result(updates: int = 3, **changes: Any) -> dict[str, Any]:
    block = {"name": "async_gradients", "num_updates": updates, **changes}
    return {"optimizer": block, "env_runners": {"episode_return_mean": math.nan}}


def test_counter_takes_the_increase_of_its_key(recorded: Any) -> None:
    exporter = exporter_of()
    for updates in (3, 3, 10):
        exporter.add(result(updates, num_bytes_sent=updates * 2, num_bytes_received=0), "t")
    assert of(recorded, "polopt_updates") == [3, 7]
    assert of(recorded, "polopt_bytes", direction="sent") == [6, 14]
    assert of(recorded, "polopt_bytes", direction="received") == []


def test_counter_after_a_restore_leaves_earlier_counts_out(recorded: Any) -> None:
    exporter = exporter_of()
    exporter.restart(restored=True)
    for updates in (1000, 1004):
        exporter.add(result(updates), "t")
    assert of(recorded, "polopt_updates") == [4]


def test_gauge_takes_finite_values(recorded: Any) -> None:
    exporter = exporter_of()
    share = {"share": {"wait": 0.75, "other": 0.25}}
    exporter.add(result(driver=share), "t")
    exporter.add(result(driver=share) | {"env_runners": {"episode_return_mean": 9.0}}, "t")
    assert of(recorded, "polopt_episode_return") == [9.0]
    assert of(recorded, "polopt_driver_share", phase="wait") == [0.75, 0.75]


def test_histogram_is_bounded_and_keeps_shares(recorded: Any) -> None:
    exporter = exporter_of()
    exporter.add(result(policy_lag={"histogram": [2, 1, 0]}), "t")
    assert of(recorded, "polopt_policy_lag") == [0, 0, 1]
    recorded.clear()
    exporter.add(result(policy_lag={"histogram": [30_000, 10_000, 1]}), "t")
    observed = of(recorded, "polopt_policy_lag")
    assert len(observed) <= 256 + 3
    assert observed.count(0) / observed.count(1) == pytest.approx(3.0, rel=0.05)
    assert observed.count(2) == 1, "a rare lag is not lost"


def test_frequent_results_are_recorded_together(
    recorded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus_exporter, "PERIOD_S", 3600.0)
    exporter = exporter_of()
    for updates, lags in ((1, [1, 0]), (3, [0, 2]), (6, [2, 1])):
        exporter.add(result(updates, policy_lag={"histogram": lags}), "t")
    assert of(recorded, "polopt_updates") == [1]
    exporter.record()
    exporter.record()
    assert of(recorded, "polopt_updates") == [1, 5]
    assert of(recorded, "polopt_policy_lag") == [0, 0, 0, 1, 1, 1]


def test_restart_keeps_what_is_not_recorded(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_exporter, "PERIOD_S", 3600.0)
    exporter = exporter_of()
    for updates in (1, 3):
        exporter.add(result(updates), "t")
    exporter.restart(restored=True)
    for updates in (2, 4):  # the first is the baseline, and is recorded at once
        exporter.add(result(updates), "t")
    exporter.record()
    assert of(recorded, "polopt_updates") == [1, 2, 2]


def test_last_bin_of_lag_is_the_open_bucket() -> None:
    assert LAG_BOUNDARIES[-1] < 16
    assert LAG_BOUNDARIES[0] > 0


def test_nothing_is_recorded_without_ray(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    exporter_of().add(result(), "t")
    assert recorded == {}


def test_trainer_records_each_result_once(recorded: Any, tmp_path: Path) -> None:
    trainer = PolicyOptimizerTrainer({**CONFIG, "optimizer": "sync_samples", "policy": "ppo"})
    first, _ = trainer.train(), trainer.save(str(tmp_path))
    tags = {"optimizer": "sync_samples", "trial": "default"}
    assert of(recorded, "polopt_env_steps", **tags) == [first["num_env_steps_sampled_lifetime"]]
    trainer.restore(str(tmp_path))
    trainer.train()
    assert len(of(recorded, "polopt_env_steps", **tags)) == 1, (
        "the first result after the restore is a baseline"
    )
    trainer.train()
    assert len(of(recorded, "polopt_env_steps", **tags)) == 2
    trainer.stop()


def test_stop_records_the_last_results(recorded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus_exporter, "PERIOD_S", 3600.0)
    trainer = PolicyOptimizerTrainer({**CONFIG, "optimizer": "sync_samples", "policy": "ppo"})
    results = [trainer.train() for _ in range(3)]
    trainer.stop()
    steps = of(recorded, "polopt_env_steps", optimizer="sync_samples", trial="default")
    assert len(steps) == 2
    assert sum(steps) == results[-1]["num_env_steps_sampled_lifetime"]


def test_keys_that_appear_later_are_recorded(recorded: Any) -> None:
    exporter = exporter_of()
    for statistics in ({}, {"margin": 2.0}, {"margin": 3.0, "depth": 4.0}, {"depth": 5.0}):
        exporter.add(result() | {"learners": {"default_policy": statistics}}, "t")
    assert of(recorded, "polopt_learner", statistic="margin") == [2.0, 3.0]
    assert of(recorded, "polopt_learner", statistic="depth") == [4.0, 5.0]
    assert of(recorded, "polopt_updates") == [3]


@pytest.mark.parametrize(
    ("title", "name", "tag", "value"),
    [
        ("Driver's time", "ray_polopt_driver_share", "phase", "other"),
        ("Workers' time", "ray_polopt_workers_share", "part", "idle"),
    ],
)
def test_stacked_shares_are_divided_by_all_trials(
    title: str, name: str, tag: str, value: str
) -> None:
    # The stack sums to 1, because a phase counts as 0 in trials that do not have this phase.
    (panel,) = [p for p in dashboards()["polopt"]["panels"] if p["title"] == title]
    chosen = 'optimizer=~"$optimizer",trial=~"$trial"'
    (target,) = panel["targets"]
    assert target["expr"] == (
        f'sum by ({tag}) ({name}{{{chosen}}}) / scalar(count({name}{{{chosen},{tag}="{value}"}}))'
    )


def test_names_and_panels_are_unique_and_complete() -> None:
    assert {name for view in VIEWS for name in view.metrics} <= set(all_metrics())
    for tab in (None, *TABS):
        metrics = all_metrics(tab)
        assert all(re.fullmatch("polopt_[a-z0-9_]+", name) for name in metrics)
        assert {name for view in views_of(tab) for name in view.metrics} == set(metrics)
    boards = dashboards(TABS)
    assert set(boards) == uids(TABS)
    for board in boards.values():
        identifiers = [panel["id"] for panel in board["panels"]]
        places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
        assert len(set(identifiers)) == len(set(places)) == len(identifiers)


def test_alert_rules_read_metrics_that_are_exported(tmp_path: Path) -> None:
    write_alerts(tmp_path / "alerting" / "rules.yaml", "Prometheus")
    (group,) = yaml.safe_load((tmp_path / "alerting" / "rules.yaml").read_text())["groups"]
    known = {metric.series for metric in all_metrics().values()}
    assert [rule["uid"] for rule in group["rules"]] == [alert.uid for alert in ALERTS]
    for rule in group["rules"]:
        query, threshold = rule["data"]
        # Grafana generates this identifier for a provisioned data source with this name.
        assert query["datasourceUid"] == "PBFA97CFB590B2093"
        assert set(re.findall(r"ray_polopt_\w+", query["model"]["expr"])) <= known
        assert threshold["model"]["expression"] == query["refId"] == "A"
        assert rule["condition"] == threshold["refId"]
        assert "{{ $labels.trial }}" in rule["annotations"]["summary"]
        assert len(rule["uid"]) <= 40


# For each alert, series with one value per minute in promtool's notation: of a run with the fault,
# and of a run without the fault.
ALERT_CASES = {
    "polopt-workers-lost": ({"healthy_workers": "4x9 3x20"}, {"healthy_workers": "4x9 3 4x20"}),
    "polopt-restarts": ({"worker_restarts": "0x9 4x20"}, {"worker_restarts": "7x9 10x20"}),
    "polopt-env-faults": ({"env_faults": "2x14 3x15"}, {"env_faults": "620x30"}),
    "polopt-non-finite": (
        {"non_finite": "0x30", "skipped_updates": "0x14 1x15"},
        {"non_finite": "3x30", "skipped_updates": "1x30"},
    ),
    "polopt-driver-busy": (
        {'driver_share{phase="wait"}': "0.05x30", 'workers_share{part="idle"}': "0.5x30"},
        {'driver_share{phase="wait"}': "0.05x30", 'workers_share{part="idle"}': "0.1x30"},
    ),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_alerts_fire_for_runs_with_the_fault_only(tmp_path: Path) -> None:
    rules = [
        {"alert": alert.uid, "expr": f"({alert.expr}) > 0", "for": f"{alert.minutes}m"}
        for alert in ALERTS
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "p", "rules": rules}]}))
    tests = []
    for uid, runs in ALERT_CASES.items():
        series = [
            {"series": labelled(name, trial), "values": values}
            for trial, run in zip(("bad", "good"), runs, strict=True)
            for name, values in run.items()
        ]
        fires = [{"exp_labels": {"optimizer": "sync_samples", "trial": "bad"}}]
        asked = [
            {"eval_time": "18m", "alertname": alert.uid, "exp_alerts": fires if is_it else []}
            for alert in ALERTS
            for is_it in [alert.uid == uid]
        ]
        # A worker that is replaced within 3 minutes does not count as lost.
        asked.append({"eval_time": "10m", "alertname": "polopt-workers-lost", "exp_alerts": []})
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": asked})
    content = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(json.dumps(content))
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(ALERT_CASES) == {alert.uid for alert in ALERTS}


def labelled(name: str, trial: str) -> str:
    """Returns a series as Ray exports it, with a label of the process."""
    name, _, tag = name.partition("{")
    labels = f'optimizer="sync_samples",trial="{trial}",WorkerId="{trial}"'
    return f"ray_polopt_{name}{{{labels}{',' if tag else ''}{tag or '}'}"


def test_learning_rate_is_not_on_one_axis_with_losses() -> None:
    statistics = (
        "policy_loss",
        "q_loss",
        "entropy",
        "grad_norm",
        "default_optimizer_learning_rate",
    )
    (losses, *others) = [view for view in VIEWS if view.metrics == ("polopt_learner",)]
    shown = {
        view.title: [name for name in statistics if matches(view.where, name)]
        for view in (losses, *others)
    }
    assert shown == {
        "Losses": ["policy_loss", "q_loss"],
        "Entropy and other statistics of the learner": ["entropy"],
        "Gradient norm": ["grad_norm"],
        "Learning rate": ["default_optimizer_learning_rate"],
    }
    (panel,) = [p for p in dashboards()["polopt"]["panels"] if p["title"] == "Losses"]
    assert f",{losses.where}}}" in panel["targets"][0]["expr"]


def matches(where: str, value: str) -> bool:
    """Returns whether a Prometheus matcher matches a value. Matchers are anchored at both ends."""
    operator, pattern = re.fullmatch(r'statistic(=|=~|!~)"(.*)"', where).groups()  # type: ignore[union-attr]
    return (re.fullmatch(pattern, value) is not None) == (operator != "!~")


def test_own_metrics_of_an_optimizer_are_recorded(recorded: Any) -> None:
    exporter = exporter_of()
    exporter.add(result(num_ranks=2), "t")
    assert of(recorded, "polopt_ranks") == []
    exporter.restart(numbers_of(OPTIMIZERS.get("decentralized_allreduce")))
    exporter.add(result(num_ranks=3), "t")
    exporter.restart(restored=True)
    exporter.add(result(num_ranks=4), "t")
    assert of(recorded, "polopt_ranks") == [3, 4]


#: The metrics that dashboards of users read. They keep their names, kinds and tags.
KEPT = {
    "counter": {
        "polopt_env_steps": "",
        "polopt_agent_steps": "",
        "polopt_env_steps_trained": "",
        "polopt_updates": "",
        "polopt_bytes": "direction",
        "polopt_gradients": "outcome",
    },
    "histogram": {"polopt_policy_lag": ""},
    "gauge": {
        **dict.fromkeys(("polopt_episode_return", "polopt_evaluation_return"), ""),
        **dict.fromkeys(("polopt_env_steps_per_s", "polopt_updates_per_s"), ""),
        **{f"polopt_driver_{key}": "phase" for key in ("share", "p50_ms", "p99_ms")},
        **{f"polopt_workers_{key}": "part" for key in ("share", "p50_ms", "p99_ms")},
        **{
            f"polopt_workers_{key}": "over"
            for key in ("env_steps_per_s", "idle_share", "cpus", "memory_bytes", "gpu_share")
        },
        **{f"polopt_driver_{key}": "" for key in ("cpus", "memory_bytes", "gpu_share")},
        **dict.fromkeys(("polopt_lag_mean", "polopt_lag_max", "polopt_worker_failures"), "kind"),
        **dict.fromkeys(("polopt_lag_rollouts", "polopt_requests_in_flight"), ""),
        **dict.fromkeys(
            ("polopt_healthy_workers", "polopt_worker_restarts", "polopt_worker_preemptions"), ""
        ),
        **dict.fromkeys(("polopt_env_faults", "polopt_non_finite"), ""),
        **dict.fromkeys(("polopt_skipped_updates", "polopt_early_stopped"), ""),
        "polopt_learner": "statistic",
        "polopt_peak_env_steps_per_s": "phase",
        **dict.fromkeys(("polopt_ranks", "polopt_broken_rounds"), ""),
        **dict.fromkeys(("polopt_fragments_waiting", "polopt_training_intensity"), ""),
        **dict.fromkeys(("polopt_buffer_fill", "polopt_row_age", "polopt_replay_shards"), ""),
        "polopt_blocked_s": "who",
        "polopt_priority": "over",
    },
}


def test_metrics_keep_their_names_kinds_and_tags() -> None:
    found: dict[str, dict[str, str]] = {kind: {} for kind in KEPT}
    for tab in TABS:
        for metric in all_metrics(tab).values():
            found[metric.kind][metric.name] = metric.tag
    for kind, kept in KEPT.items():
        assert {name: found[kind].get(name) for name in kept} == kept
    common = [metric.name for metric in all_metrics().values()]
    assert set(common) - {name for kept in KEPT.values() for name in kept} == set()


def test_command_writes_dashboards_where_ray_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", str(tmp_path / "boards"))
    done = run_command(["grafana"])
    assert done.exit_code == 0, done.output
    files = (tmp_path / "boards").glob("*.json")
    assert {json.loads(path.read_text())["uid"] for path in files} == board_names()
    assert (tmp_path / "boards" / "polopt_alert_rules.yaml").exists()
    assert max(map(len, done.output.splitlines()[1:])) <= 80


def test_command_without_ray_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(tmp_path / "none"))
    monkeypatch.delenv("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR", raising=False)
    done = run_command(["grafana"])
    assert done.exit_code == 2
    assert "polopt[metrics]" in done.output
    assert "ray start --head" in done.output
    session = tmp_path / "session" / "grafana" / "dashboards"
    session.mkdir(parents=True)
    monkeypatch.setenv("RAY_METRICS_OUTPUT_ROOT", str(tmp_path / "session"))
    assert run_command(["grafana"]).exit_code == 0
    assert len(list(session.iterdir())) == len(board_names())


@contextmanager
def running_session(folder: Path, name: str) -> Iterator[Path]:
    """Creates a fake session of Ray with a folder for dashboards and a raylet that listens."""
    session = folder / "ray" / name
    (session / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    (session / "sockets").mkdir()
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(session / "sockets" / "raylet"))
        raylet.listen()
        yield session


@pytest.fixture
def ray_tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, because paths of sockets must be short."""
    for name in ("METRICS_OUTPUT_ROOT", "METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"):
        monkeypatch.delenv(f"RAY_{name}", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        yield Path(folder)


def test_command_takes_a_session_that_runs_and_says_which(ray_tmpdir: Path) -> None:
    # There are also an ended session, the local session of a run, and a link to the last session.
    (ray_tmpdir / "ray" / "session_3" / "metrics" / "grafana" / "dashboards").mkdir(parents=True)
    (ray_tmpdir / "ray" / "session_4" / "sockets").mkdir(parents=True)
    (ray_tmpdir / "ray" / "session_latest").symlink_to("session_4")
    with running_session(ray_tmpdir, "session_1"):
        done = run_command(["grafana"])
        assert done.exit_code == 0, done.output
        assert "session     session_1, your only running session" in done.output
        with running_session(ray_tmpdir, "session_2") as second:
            done = run_command(["grafana"])
            alerting = second / "metrics" / "grafana" / "provisioning" / "alerting"
            assert [path.name for path in alerting.iterdir()] == ["polopt_alert_rules.yaml"]
            assert "session_2, the newest of your 2 running sessions" in done.output
            assert len(list((second / "metrics/grafana/dashboards").iterdir())) == len(
                board_names()
            )
    done = run_command(["grafana"])
    assert done.exit_code == 2
    assert "no Ray that you have started exports metrics" in done.output


def test_command_leaves_sessions_of_other_users_out(
    ray_tmpdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_session(ray_tmpdir, "session_1"):
        monkeypatch.setattr("os.getuid", lambda: 12345)
        assert run_command(["grafana"]).exit_code == 2


@pytest.mark.parametrize(
    ("platform", "variables", "used"),
    [
        ("linux", {"RAY_TMPDIR": "r", "TMPDIR": "s"}, "r"),
        ("linux", {"RAY_TMPDIR": "", "TMPDIR": "s"}, "s"),
        ("darwin", {"RAY_TMPDIR": "r", "TMPDIR": "s"}, "r"),
        ("darwin", {"TMPDIR": "s"}, None),
    ],
)
def test_command_looks_where_ray_keeps_its_sessions(
    ray_tmpdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    variables: dict[str, str],
    used: str | None,
) -> None:
    for name in ("RAY_TMPDIR", "TMPDIR"):
        value = variables.get(name)
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value and str(ray_tmpdir / value))
    monkeypatch.setattr("sys.platform", platform)
    first = running_session(ray_tmpdir / "r", "session_1_r")
    with first, running_session(ray_tmpdir / "s", "session_1_s"):
        # The test does not use the default directory, because this machine may run Ray.
        given = [] if used else [str(ray_tmpdir / "given")]
        done = run_command(["grafana", *given])
    assert done.exit_code == 0, done.output
    assert (f"session_1_{used}" in done.output) == (used is not None)
    assert "session_1_s" not in done.output or used == "s"
