"""The Python code of some documentation pages runs as printed, without further processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


PAGES = ["add-ons.md", "memory.md", "normalization.md", "results.md", "wrappers.md"]


@pytest.fixture(autouse=True)
def _own_add_ons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polopt.common.add_ons._registered", [])


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": f"code_of_{Path(page).stem}"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
