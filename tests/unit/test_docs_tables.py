"""The tables of docs name tests that exist, and miss no parameter of what they compare with."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from polopt.rollouts.collectors.collector_config import CollectorConfig

ROOT = Path(__file__).parents[2]
TABLES = ("collector.md", "pytorchrl.md", "faults.md")
COLLECTOR = (ROOT / "docs" / "collector.md").read_text()


@pytest.mark.parametrize("page", TABLES)
def test_tests_that_rows_name_exist(page: str) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    assert named - there == set()
    assert len(named) > 10


def test_every_parameter_of_torchrl_has_a_row() -> None:
    distributed = pytest.importorskip("torchrl.collectors.distributed")
    parameters = set(inspect.signature(distributed.RayCollector.__init__).parameters) - {"self"}
    rows = [row for row in COLLECTOR.splitlines() if row.startswith("| `")]
    assert parameters <= set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows)))


def test_every_option_of_collector_is_there() -> None:
    options = set(CollectorConfig.model_fields)
    assert options - set(re.findall(r"`(\w+)`", COLLECTOR)) == set()
