"""The Python code of some documentation pages runs as printed, without further processes, and the
printed commands name presets, examples and options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from source_tree import ROOT

from polopt.command_line.examples import apply_changes, load_example, merge
from polopt.command_line.sweep import configs_to_check
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS

DOCS = ROOT / "docs"


PAGES = [
    "add-ons.md",
    "install.md",
    "many-agents.md",
    "memory.md",
    "normalization.md",
    "results.md",
    "train.md",
    "wrappers.md",
]
#: The packages that a page needs beside polopt's requirements.
EXTRAS = {"many-agents.md": "mpe2"}


@pytest.fixture(autouse=True)
def _own_add_ons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polopt.common.add_ons._registered", [])


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page in EXTRAS:
        pytest.importorskip(EXTRAS[page])
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert blocks
    names = {"__name__": f"code_of_{Path(page).stem}"}
    for block in blocks:
        exec(compile(block, page, "exec"), names)


def commands_of(page: Path) -> list[list[str]]:
    """Returns the words of each printed `polopt train` without placeholders and files of a user."""
    printed = re.findall(r"(?:^ *|^\$ |`)polopt train ([^`#\n]+)", page.read_text(), re.M)
    words = [shlex.split(text) for text in printed]
    return [one for one in words if not re.search(r"[A-Z]{4}|\$|\.yaml|--restore", " ".join(one))]


@pytest.mark.parametrize(
    "page", ["index.md", "install.md", "train.md", "start.md", "many-agents.md", "../README.md"]
)
def test_printed_commands_have_known_options(page: str) -> None:
    commands = commands_of(DOCS / page)
    assert commands
    for name, *words in commands:
        changes = [word for word in words if "=" in word and not word.startswith("--")]
        example, options = apply_changes(load_example(name), changes)
        preset = PRESETS[example.run].preset
        for _, config in configs_to_check(merge(example.config, options)):
            Experiment.parse(config, preset)
