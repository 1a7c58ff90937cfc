"""What there is to choose from, each with a line about it, read from sources instead of imported:
a list should not wait for Ray and torch."""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

from polopt.optimizers.registry import OPTIMIZERS
from polopt.policies.registry import POLICIES
from polopt.trainers.examples import example_names, load_example

_PRESETS = "polopt.trainers.presets"
_GENERAL = ("polopt.trainers.trainer", "PolicyOptimizerTrainer")


def catalogue() -> dict[str, dict[str, str]]:
    """Kind to name to description: presets, optimizers, policies and examples."""
    return {
        "presets": presets(),
        "optimizers": _described(OPTIMIZERS.paths()),
        "policies": _described(POLICIES.paths()),
        "examples": {name: load_example(name).description for name in example_names()},
    }


def presets() -> dict[str, str]:
    """Presets and the first sentences of their docstrings."""
    module, general = _GENERAL
    return {**_docstrings(_PRESETS), general: _docstrings(module).get(general, "")}


def _described(paths: dict[str, str]) -> dict[str, str]:
    described = {}
    for name, path in sorted(paths.items()):
        module, _, cls = path.partition(":")
        described[name] = _docstrings(module).get(cls, path)
    return described


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Of each class that a module defines, by name, the first sentence of its docstring; of the
    module's, where the class and its config are all there is in it, as in one file per strategy."""
    try:
        spec = importlib.util.find_spec(module)
        tree = ast.parse(Path(spec.origin).read_bytes() if spec and spec.origin else b"")
    except (ImportError, OSError, SyntaxError, ValueError):  # of somebody's plugin
        return {}
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    shown = [c for c in classes if not c.name.startswith("_") and not c.name.endswith("Config")]
    whole = _first_sentence(ast.get_docstring(tree) or "") if len(shown) == 1 else ""
    return {c.name: whole or _first_sentence(ast.get_docstring(c) or "") for c in shown}


def _first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".").replace("`", "")
