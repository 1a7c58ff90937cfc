"""The tab that the optimizer of an installed plugin declares is written beside its results."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed_plugin import install_plugin, with_plugin

from polopt.dashboards.data.tab import OptimizerTab
from polopt.optimizers.sync_samples import SyncSamples

PROGRAM = """
import polopt

trainer = polopt.PolicyOptimizerTrainer(
    {
        "env": "CartPole-v1", "num_workers": 0, "min_sample_timesteps_per_iteration": 1,
        "optimizer": "repeated_samples", "rounds": 2,
    },
    log_dir="results",
)
trainer.train()
trainer.stop()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_plugin(tmp_path_factory.mktemp("plugin"))


def test_tab_of_a_plugin_is_written_beside_its_results(installed: Path, tmp_path: Path) -> None:
    done = with_plugin(installed, "-c", PROGRAM, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("optimizer.json")
    assert (file.parent / "result.json").exists()
    tab = OptimizerTab.from_json(file.read_text())
    assert (tab.name, tab.title) == ("repeated_samples", "RepeatedSamples")
    assert tab.phases == SyncSamples.phases
    assert "optimizer/rounds" in {number.key for number in tab.numbers}
    assert [plot.title for plot in tab.tab.plots] == ["Lag"]
