"""A real Prometheus scrapes a real run, and every query of every panel returns data."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from polopt.dashboards.grafana import ALERTS, dashboards
from polopt.dashboards.tab_file import tab_of
from polopt.optimizers.optimizer_registry import OPTIMIZERS

NAMES = OPTIMIZERS.names()
pytestmark = [
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="needs Debian's package prometheus"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("opentelemetry") is None
        or not importlib.util.find_spec("aiohttp"),
        reason="the extra polopt[metrics] is not installed",
    ),
]
#: A program that trains with each optimizer in turn. At the end, it prints the begin, the end and
#: the number of environment steps of each trial.
RUN = """
import json, pathlib, sys
import ray
from ray import tune
import polopt

ray.init(num_cpus=4, log_to_driver=False, object_store_memory=100_000_000)
input()  # until Prometheus has scraped Ray's agent

def is_scraped(trial_id, result):
    return pathlib.Path(sys.argv[1], result["optimizer"]["name"]).exists()

config = {
    "env": "CartPole-v1",
    "policy": "ppo",
    "optimizer": tune.grid_search(sys.argv[2:]),
    "num_workers": 2,
    "rollout_fragment_length": 16,
    "min_time_s_per_iteration": 0.5,
    "evaluation_interval": 1,
    "evaluation_duration": 1,
    "model": {"fcnet_hiddens": [8]},
}
results = tune.Tuner(
    polopt.PolicyOptimizerTrainer,
    param_space=config,
    tune_config=tune.TuneConfig(max_concurrent_trials=1, reuse_actors=True),
    run_config=tune.RunConfig(stop=is_scraped, storage_path=sys.argv[1], verbose=0),
).fit()
assert not results.errors, results.errors
print(json.dumps([
    {
        "optimizer": result.metrics["optimizer"]["name"],
        "trial": result.metrics["trial_id"],
        "end_s": result.metrics["timestamp"],
        "begin_s": result.metrics["timestamp"] - result.metrics["time_total_s"],
        "env_steps": result.metrics["optimizer"]["num_env_steps_sampled"],
    }
    for result in results
]))
"""
Ask = Callable[[str, float, float], list[dict[str, Any]]]


@contextmanager
def prometheus(discovery: Path, folder: Path) -> Iterator[Ask]:
    """Starts Prometheus. Yields a function that evaluates a query every second of an interval."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"- {{job_name: ray, file_sd_configs: [{{files: ['{discovery}']}}]}}\n"
    )
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{key}={value}" for key, value in options.items())]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def ask(query: str, begin_s: float, end_s: float) -> list[dict[str, Any]]:
        arguments = {"query": query, "start": begin_s, "end": end_s, "step": 1}
        url = f"http://{address}/api/v1/query_range?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    try:
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def scrapes_agent(ask: Ask) -> bool:
    """Returns whether Prometheus has data of the agent that exports the metrics of Ray."""
    try:
        return bool(ask("ray_node_mem_total", time.time() - 5, time.time()))
    except urllib.error.URLError:  # Prometheus is starting
        return False


def mark_scraped(ask: Ask, folder: Path) -> None:
    """Ends the trial of each optimizer after several scrapes, by creating a file."""
    for series in ask("ray_polopt_lag_mean", time.time() - 60, time.time()):
        if len(series["values"]) > 4:
            (folder / series["metric"]["optimizer"]).touch()


@pytest.fixture(scope="module")
def scraped() -> Iterator[tuple[Ask, dict[str, dict[str, Any]]]]:
    """Returns a function for queries, and the trial of each optimizer."""
    # This does not use `tmp_path`, because paths of Unix sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="polopt-"))
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_metrics_report_interval_ms": "1000",
        "RAY_AIR_NEW_OUTPUT": "0",
    }
    command = [sys.executable, "-c", RUN, str(folder / "results"), *NAMES]
    (folder / "results").mkdir()
    run = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    discovery = folder / "ray" / "session_latest" / "prom_metrics_service_discovery.json"
    try:
        wait_until(lambda: discovery.exists() or run.poll() is not None)
        with prometheus(discovery, folder) as ask:
            wait_until(lambda: scrapes_agent(ask) or run.poll() is not None)
            assert run.stdin
            run.stdin.write("\n")
            run.stdin.flush()
            wait_until(lambda: run.poll() is not None or mark_scraped(ask, folder / "results"), 240)
            output, errors = run.communicate(timeout=30)
            assert run.returncode == 0, errors[-3000:]
            trials = json.loads(output.strip().splitlines()[-1])
            yield ask, {trial["optimizer"]: trial for trial in trials}
    finally:
        run.kill()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("optimizer", NAMES)
def test_every_query_of_every_panel_returns_data(
    scraped: tuple[Ask, dict[str, dict[str, Any]]], optimizer: str
) -> None:
    ask, trials = scraped
    trial = trials[optimizer]
    values = {"$optimizer": optimizer, "$trial": trial["trial"], "$__rate_interval": "1m"}
    empty, asked = [], 0
    for uid, board in dashboards([tab_of(OPTIMIZERS.get(optimizer))]).items():
        for panel in board["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in values.items():
                    query = query.replace(variable, value)
                found = ask(query, trial["begin_s"], trial["end_s"] + 1)
                asked += 1
                numbers = [float(value) for series in found for _, value in series["values"]]
                if not any(map(math.isfinite, numbers)):
                    empty.append((uid, panel["title"], query))
    assert empty == []
    assert asked > 40


def test_no_alert_fires_for_runs_without_faults(
    scraped: tuple[Ask, dict[str, dict[str, Any]]],
) -> None:
    ask, trials = scraped
    for trial in trials.values():
        found = {  # an invalid query raises
            alert.uid: ask(alert.expr, trial["begin_s"], trial["end_s"] + 1)
            for alert in ALERTS
            if alert.minutes == 0
        }
        values = {
            uid: [float(value) for one in series for _, value in one["values"]]
            for uid, series in found.items()
        }
        assert {uid for uid, numbers in values.items() if max(numbers, default=0.0) > 0.0} == set()


def test_counters_hold_the_totals_of_the_last_result(
    scraped: tuple[Ask, dict[str, dict[str, Any]]],
) -> None:
    ask, trials = scraped
    # The process of a trial also runs the next trial. The process of the last trial may end before
    # Ray has exported its last values.
    for trial in sorted(trials.values(), key=lambda trial: trial["end_s"])[:-1]:
        query = f'ray_polopt_env_steps_total{{trial="{trial["trial"]}"}}'
        (series,) = ask(query, trial["begin_s"], trial["end_s"] + 60)
        assert float(series["values"][-1][1]) == trial["env_steps"]


def test_gauges_end_with_their_trial(scraped: tuple[Ask, dict[str, dict[str, Any]]]) -> None:
    ask, trials = scraped
    first, *_, last = sorted(trials.values(), key=lambda trial: trial["end_s"])
    query = 'ray_polopt_driver_share{{phase="other",trial="{}"}}'
    # The agent drops a gauge after two intervals of Ray's export, here 2 s.
    end_s = last["end_s"]
    assert ask(query.format(last["trial"]), end_s - 5, end_s)
    assert not ask(query.format(first["trial"]), end_s - 1, end_s)
