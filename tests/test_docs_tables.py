"""The tables of docs name tests that exist, and miss no parameter of what they compare with."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TABLES = ("collector.md", "pytorchrl.md")


@pytest.mark.parametrize("page", TABLES)
def test_tests_that_rows_name_exist(page: str) -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    there = set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / page).read_text()))
    assert named - there == set()
    assert len(named) > 10


def test_every_parameter_of_torchrl_has_a_row() -> None:
    distributed = pytest.importorskip("torchrl.collectors.distributed")
    parameters = set(inspect.signature(distributed.RayCollector.__init__).parameters) - {"self"}
    rows = (ROOT / "docs" / "collector.md").read_text().splitlines()
    named = set(re.findall(r"`(\w+)`", " ".join(r.split("|")[1] for r in rows if r[:3] == "| `")))
    # In its documentation, but not in its signature of this version.
    assert parameters <= named
