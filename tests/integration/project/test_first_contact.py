"""Tests what a new user sees first: the examples of the README and of docs/start.md, and the output
of Tune."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from printed_code import blocks_of, run_blocks
from ray import tune

from polopt.trainers.presets import A2C, A3C, PolicyOptimizerTrainer

SMALL = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"fcnet_hiddens": [8]},
}
SHOWN = {
    "episode_return_mean",
    "fault_tolerance/num_healthy_workers",
    "num_env_steps_sampled_lifetime",
    "num_env_steps_sampled_per_second",
    "optimizer/policy_lag/mean",
}


@pytest.mark.timeout(1200)
def test_first_pages_run_as_printed_on_two_cpus(tmp_path: Path) -> None:
    printed = [*blocks_of("README.md"), *blocks_of("docs/start.md")]
    blocks, done = run_blocks(printed, tmp_path, num_cpus=2)
    # The README and the last block of start.md run Tune, with 3 trials and 1 trial.
    ended = [set(re.findall(r"(\w+_0000\d) +TERMINATED", block)) for block in blocks]
    assert [len(trials) for trials in ended] == [3, 0, 1]
    assert "requests" not in done.stderr, "no warning about resources"


@pytest.mark.usefixtures("ray_session")
def test_tune_prints_a_few_lines_for_each_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune.run(A2C, config=SMALL, stop={"training_iteration": 3}, storage_path=str(tmp_path))
    printed = capsys.readouterr().out
    tables = re.findall(r" result +│\n├─+┤\n(.*?)╰", printed, re.DOTALL)
    assert len(tables) == 3
    for table in tables:
        assert {row.split()[1] for row in table.splitlines()} == SHOWN
        assert max(map(len, table.splitlines())) <= 80
    header = [line for line in printed.splitlines() if "Trial name" in line][-1]
    assert re.search(r" ts +episode_return_mean ", header), header


@pytest.mark.usefixtures("ray_session")
def test_older_table_of_trials_begins_with_the_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AIR_NEW_OUTPUT", "0")
    tune.run(A2C, config=SMALL, stop={"training_iteration": 1}, storage_path=str(tmp_path))
    header = [line for line in capsys.readouterr().out.splitlines() if "Trial name" in line][-1]
    assert re.search(r" ts \| +episode_return_mean ", header), header


#: Replaces the part of IPython that Ray uses in a notebook. Prints the last table of progress.
NOTEBOOK = """
import sys, types
from unittest.mock import MagicMock
class ZMQInteractiveShell(MagicMock): pass
class Handle:
    def __init__(self, html): self.update(html)
    def update(self, html):
        if "Trial Progress" in html: Handle.progress = html
sys.modules["IPython"], sys.modules["IPython.display"] = MagicMock(), MagicMock()
sys.modules["IPython"].get_ipython = ZMQInteractiveShell
sys.modules["IPython.display"].HTML = str
sys.modules["IPython.display"].display = lambda html, display_id=False: Handle(html)

import polopt, ray
from ray import tune
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
tune.run(polopt.A2C, config=CONFIG, stop={"training_iteration": 2}, storage_path=RESULTS)
print(Handle.progress)
"""


def test_notebook_shows_the_same_metrics(tmp_path: Path) -> None:
    code = NOTEBOOK.replace("CONFIG", repr(SMALL)).replace("RESULTS", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    header = re.findall(r"<th[^>]*>(.*?)</th>", done.stdout)
    assert {name.strip() for name in header} == {"Trial name", *SHOWN}


def warnings_of(caplog: pytest.LogCaptureFixture, trainable: type[PolicyOptimizerTrainer]) -> str:
    caplog.clear()
    for _ in range(3):  # like three trials of one experiment
        trainable.default_resource_request({"env": "CartPole-v1", "num_workers": 40})
    return caplog.text


@pytest.mark.usefixtures("ray_session")
def test_request_larger_than_the_cluster_warns_at_once(caplog: pytest.LogCaptureFixture) -> None:
    has = ray.cluster_resources()["CPU"]
    said = warnings_of(caplog, A3C)
    assert said.count("\n") == 1
    assert f"A3C requests 41 CPU while Ray has {has:g}" in said
    assert "ray.init(num_cpus=41)" in said
    assert warnings_of(caplog, A3C) == "", (
        "the same warning is repeated after a minute at the earliest"
    )
    own = tune.with_resources(A2C, {"CPU": 2, "GPU": 3})
    assert "requests 3 GPU while Ray has 0" in warnings_of(caplog, own)
