"""Tables in the docs name only tests that exist, and have a row for every parameter. Links lead to
pages and headings that exist, and the README has a link to each page."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from source_tree import ROOT

from polopt.collectors.collector_config import CollectorConfig

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
TABLES = ("collector.md", "pytorchrl.md", "fault-list.md")
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


def test_every_option_of_collector_is_documented() -> None:
    options = set(CollectorConfig.model_fields)
    assert options - set(re.findall(r"`(\w+)`", COLLECTOR)) == set()


def prose_of(page: Path) -> str:
    """Returns the text of a page without its code blocks."""
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes for the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target), link


def test_readme_has_a_link_to_each_page() -> None:
    links = set(re.findall(r"\]\(docs/([\w-]+\.md)", (ROOT / "README.md").read_text()))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - links == set()


def test_scripts_that_pages_name_exist() -> None:
    """A figure names the script that measures it."""
    named = {
        (page.name, script)
        for page in PAGES
        for script in re.findall(r"\b((?:benchmarks|tests)/[\w/]+\.py)\b", page.read_text())
        if page.name != "CHANGELOG.md"
    }
    assert len(named) > 40
    assert [(page, script) for page, script in sorted(named) if not (ROOT / script).is_file()] == []
