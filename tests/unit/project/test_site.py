"""The site: `mkdocs.yml` lists each page once, and needs nothing but plain Markdown. Links and
anchors are right on the site, too. Pictures are those of their table, and the notebook runs."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import generated_files
import pytest
import scheme_pictures
import yaml
from source_tree import ROOT

from polopt.optimizers.optimizer_registry import OPTIMIZERS

DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
NOTEBOOK = DOCS / "examples" / "first_run.ipynb"


@pytest.fixture(scope="module")
def site() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "mkdocs.yml").read_text()))


def leaves(entry: Any) -> Iterator[str]:
    """Yields the pages of a part of the navigation, in its order."""
    if isinstance(entry, str):
        yield entry
        return
    for one in entry.values() if isinstance(entry, dict) else entry:
        yield from leaves(one)


def text_of(page: str) -> str:
    """Returns a page without its code blocks and code spans."""
    text = re.sub(r"^ *```.*?^ *```", "", (DOCS / page).read_text(), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "code", text)


def test_navigation_has_each_page_once(site: dict[str, Any]) -> None:
    assert Counter(leaves(site["nav"])) == Counter(PAGES)


def test_navigation_begins_with_guides_and_ends_with_reference(site: dict[str, Any]) -> None:
    pages = [*leaves(site["nav"])]
    assert pages[0] == "index.md"
    order = [
        "install.md", "choose-an-optimizer.md", "dashboards.md", "many-agents.md",
        "write-an-optimizer.md", "write-a-policy.md", "use-a-policy.md", "tasks.md", "migration.md",
        "faults.md", "security.md", "architecture.md", "options.md",
    ]  # fmt: skip
    assert sorted(order, key=pages.index) == order
    assert {*leaves(site["nav"][-1])} >= {"options.md", "api.md", "metrics.md"}


def test_site_needs_no_plugin_and_no_other_server(site: dict[str, Any]) -> None:
    assert site["plugins"] == ["search"]
    assert site["theme"]["font"] is False
    assert not {"extra_javascript", "hooks"} & {*site}
    assert site["extra_css"] == ["site.css"]
    assert "url(" not in (DOCS / "site.css").read_text()
    for page in PAGES:
        assert not re.search(r"^ *(!!!|\?\?\?|:::|--8<--)", text_of(page), re.M), page
        assert not re.search(r"!\[[^]]*\]\(http", text_of(page)), page


@pytest.mark.parametrize("page", PAGES)
def test_page_begins_with_what_the_reader_gets(page: str) -> None:
    title, _, rest = (DOCS / page).read_text().partition("\n\n")
    assert re.fullmatch(r"# .+", title)
    if page not in ("index.md", "api.md", "options.md", "metrics.md"):
        assert rest.startswith("What you get from this page: ")


def test_guides_are_read_in_ten_minutes(site: dict[str, Any]) -> None:
    """A person reads about 200 words a minute. Numbers and code are not counted."""
    longer = {}
    for page in leaves(site["nav"][:-1]):
        prose = re.sub(r"\]\([^)]*\)", "]", text_of(page))
        words = [word for word in re.split(r"[\s|]+", prose) if re.search(r"[A-Za-z]", word)]
        if len(words) > 2_000:
            longer[page] = len(words)
    assert longer == {}, "shorten the page, or move its reference to a page of its own"


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_stay_on_the_site(page: str) -> None:
    """`test_links_of_a_page_lead_somewhere` checks that pages and anchors exist."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in link:
            assert link.startswith("https://"), link
        else:
            assert not link.startswith(("/", "..")), f"{link} leaves docs/, which is the site"


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_tables_on_the_site(page: str) -> None:
    """Python-Markdown needs an empty line between a paragraph and a table. GitHub does not."""
    lines = text_of(page).splitlines()
    for before, line in pairwise(lines):
        if line.startswith("|") and not before.startswith(("|", "<!--", "#")):
            assert not before.strip(), line


def site_anchor(heading: str) -> str:
    """Returns the anchor of Python-Markdown for a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def headings_of(page: str) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```", "", (DOCS / page).read_text(), flags=re.M | re.S)
    return re.findall(r"^#+ (.*)$", text, re.M)


@pytest.mark.parametrize("page", PAGES)
def test_anchors_of_links_exist_on_the_site(page: str) -> None:
    """GitHub and Python-Markdown make different anchors for some headings."""
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        name, _, anchor = link.partition("#")
        if anchor and "://" not in link:
            assert anchor in map(site_anchor, headings_of(name or page)), link


def test_first_page_has_a_picture_in_the_first_screen() -> None:
    lines = (DOCS / "index.md").read_text().splitlines()
    assert any(line.startswith("![") for line in lines[:8])


def test_pictures_are_those_of_the_table() -> None:
    for path, text in generated_files.pictures().items():
        assert path.read_text() == text, "run python tests/generated_files.py"
    found = {path.name for path in generated_files.IMAGES.glob("waits-*.svg")}
    assert found == {path.name for path in generated_files.pictures()}


def test_each_optimizer_has_a_picture_and_a_preset_row() -> None:
    page = (DOCS / "choose-an-optimizer.md").read_text()
    for name in OPTIMIZERS.names():
        if OPTIMIZERS.get(name).__module__.startswith("polopt."):
            picture = scheme_pictures.file_name(name.replace("_", "-"))
            assert f"### `{name}`" in page
            assert f"(images/{picture})" in page


@pytest.mark.parametrize("name", scheme_pictures.PICTURES)
def test_picture_has_no_process_that_does_two_things(name: str) -> None:
    picture = scheme_pictures.PICTURES[name]
    for blocks in picture.rows.values():
        times = [time for block in blocks for time in (block.start, block.end)]
        assert times == sorted(times)
    for source, sent, target, arrived in picture.messages:
        assert sent <= arrived
        assert {source, target} <= {*picture.rows}
        ends = [block.end for block in picture.rows[source]]
        assert min(abs(sent - end) for end in ends) < 1e-9


def test_notebook_runs_and_installs_polopt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "%pip install" in code[0]
    names: dict[str, Any] = {}
    for block in code[1:]:
        exec(compile(block.replace("40_000", "4_000"), NOTEBOOK.name, "exec"), names)
    assert "return of one episode" in capsys.readouterr().out
