"""The Python code of some documentation pages runs as printed, without further processes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from polopt.metrics.episode_window import EpisodeWindow

DOCS = Path(__file__).parents[2] / "docs"


PAGES = ["memory.md", "normalization.md", "results.md", "train.md", "wrappers.md"]


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": f"code_of_{Path(page).stem}"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def test_results_page_has_every_key_of_episodes() -> None:
    page = (DOCS / "results.md").read_text()
    keys = {re.sub(r"_(min|max|p\d+)$", "_mean", key) for key in EpisodeWindow().report()}
    named = set(re.findall(r"`(?:env_runners/)?(\w+)`", page))
    assert len(keys) > 5
    assert keys - named == set()
