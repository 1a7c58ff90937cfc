"""Parses the modules of polopt, and finds the modules and names that they import."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Folders that hold the sub-packages of polopt.
PACKAGE_FOLDERS = (
    "common",
    "metrics",
    "replay",
    "policies",
    "rollouts",
    "optimizers",
    "trainers",
    "collectors",
    "recording",
    "rllib",
    "comparison",
    "simulation",
    "dashboards",
    "command_line",
    "tuned_examples",
)


class Module(NamedTuple):
    """One source file.

    Attributes:
        name: import name of the module, such as `polopt.common.config`.
        path: path of the file, relative to the root of the repository.
        tree: syntax tree of the file.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        return self.path.parent.as_posix()

    @property
    def package(self) -> str:
        """The package from which relative imports in this module start."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


@functools.cache
def read(root: Path, path: Path) -> Module:
    """Parses the file `path` below `root`. A second call returns the same module."""
    relative = path.relative_to(root)
    parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
    if parts[0] in PACKAGE_FOLDERS:
        parts = ["polopt", *parts]
    return Module(".".join(parts), relative, ast.parse(path.read_text()))


def modules(root: Path, folders: Iterable[str] = PACKAGE_FOLDERS) -> list[Module]:
    """Returns all modules below `folders`, except modules below a symbolic link."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [
        read(root, path)
        for path in paths
        if not any((root / parent).is_symlink() for parent in path.relative_to(root).parents)
    ]


@functools.cache
def public_names() -> Mapping[str, str]:
    """Returns the module of polopt from which each public name is imported, by name."""
    tree = ast.parse((ROOT / "src/polopt/__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.name: node.module
        for node in imports
        if node.module and node.module.startswith("polopt.")
        for alias in node.names
    }


def imported_names(module: Module) -> Iterator[tuple[int, str]]:
    """Yields the line and the absolute dotted name of each import. This includes imports in
    functions, and imports only for type checkers.

    After `import polopt`, each use `polopt.x` yields `polopt.x`. A call `import_module("x")` yields
    `x`.
    """
    aliases = {  # local names of the polopt package itself
        alias.asname or "polopt"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "polopt" or (alias.name.startswith("polopt.") and not alias.asname)
    }
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                base = [source] if source else []
                if level:
                    parts = module.package.split(".")
                    base = [*parts[: len(parts) - level + 1], *base]
                yield from ((node.lineno, ".".join([*base, alias.name])) for alias in names)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in aliases:
                yield node.lineno, f"polopt.{attr}"
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                if called in {"import_module", "__import__"}:
                    yield node.lineno, name


def import_graph(found: Iterable[Module]) -> dict[str, set[str]]:
    """Returns the names of the modules in `found` that each of these modules imports.

    polopt imports the modules of its public names at their first use. So an import of a public name
    counts as an import of its module.
    """
    by_name = {module.name: module for module in found}
    graph: dict[str, set[str]] = {}
    for name, module in by_name.items():
        targets = set()
        for _, imported in imported_names(module):
            first = imported.removeprefix("polopt.")
            target = public_names().get(first, imported)
            while target and target not in by_name:
                target = target.rpartition(".")[0]
            targets.add(target)
        graph[name] = targets - {"", name}
    return graph


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns the groups of two or more nodes that reach each other. These groups are strongly
    connected components (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
