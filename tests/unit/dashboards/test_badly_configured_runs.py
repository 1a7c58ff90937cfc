"""Tests of the configs of badly configured runs. These runs are only trained by hand."""

from __future__ import annotations

import pytest
from badly_configured_runs import RUNS, config_of

from polopt.dashboards.data.diagnosis import RULES
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS


@pytest.mark.parametrize("name", RUNS)
def test_badly_configured_run_is_accepted_and_has_a_rule(name: str) -> None:
    bad = RUNS[name]
    Experiment.parse(config_of(bad), PRESETS[bad.preset].preset)
    assert bad.rule in {rule.key for rule in RULES}
