"""Runs the plugins of docs/write-an-optimizer.md as they are printed there."""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

from source_tree import ROOT

PAGE = ROOT / "docs" / "write-an-optimizer.md"
#: The names of the plugins in configs.
PLUGINS = ("local_sgd", "elastic_averaging")


def code_blocks() -> list[str]:
    """Returns the Python code blocks of the page."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@functools.cache
def plugin(name: str) -> SimpleNamespace:
    """Runs the code of a plugin, which registers the plugin. Returns the names that it defines."""
    (block,) = [b for b in code_blocks() if f'register_optimizer("{name}"' in b]
    names = {"__name__": f"page_with_{name}"}
    exec(compile(block, PAGE.name, "exec"), names)
    return SimpleNamespace(**names)
