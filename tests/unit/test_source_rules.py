"""Rules for sources: no private names of dependencies, short files, small folders."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from source_tree import ROOT, Module, modules

DEPENDENCIES = {"torch", "ray", "gymnasium"}
MAX_LINES = 300
MAX_FUNCTION_LINES = 50
MAX_FILES = 14
# Private names without a public equivalent that is as fast, and the only file that may use each.
ALLOWED_PRIVATE_NAMES = {"torch._fused_adam_": "policies/learning/torch_optimizers.py"}
# Exceptions that are still there. Remove an entry together with its exception.
KNOWN_PRIVATE_NAMES = {
    "rollouts/workers/placement.py: ray._private",
}
KNOWN_LONG_FILES: set[str] = set()


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes that starts at a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def private_names(module: Module) -> Iterator[str]:
    """Private names of dependencies that a module imports or reaches through attributes, and
    keyword arguments of `ray.init` that start with an underscore."""
    local: dict[str, str] = {}  # local name to the full name of what it stands for
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                local[alias.asname or top] = alias.name if alias.asname else top
                if top in DEPENDENCIES and is_private(alias.name):
                    yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                local[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    foreign = {name: full for name, full in local.items() if full.split(".")[0] in DEPENDENCIES}
    yield from filter(is_private, foreign.values())
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            first, _, rest = (dotted(node) or "").partition(".")
            if first in foreign and is_private(name := f"{foreign[first]}.{rest}"):
                yield name
        elif isinstance(node, ast.Call) and dotted(node.func) == "ray.init":
            for keyword in node.keywords:
                if (keyword.arg or "").startswith("_"):
                    yield f"ray.init({keyword.arg})"


def assert_known(found: set[str], known: set[str]) -> None:
    assert not found - known, "new exceptions; the rule is at the top of this file"
    assert not known - found, "no exceptions any more; remove them from the list in this file"


def long_functions(found: Iterable[Module]) -> set[str]:
    return {
        f"{module.path}:{node.name}"
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    }


def long_files(found: Iterable[Module]) -> set[str]:
    return {module.path.as_posix() for module in found if module.lines > MAX_LINES}


def large_folders(found: Iterable[Module]) -> set[str]:
    """Folders with too many files; `__init__.py` does not count."""
    counts = Counter(module.folder for module in found if module.path.name != "__init__.py")
    return {folder for folder, files in counts.items() if files > MAX_FILES}


@pytest.fixture(scope="module")
def package() -> Sequence[Module]:
    return modules(ROOT)


def test_private_names_are_in_one_file_each(package: Sequence[Module]) -> None:
    found = {(name, module.path.as_posix()) for module in package for name in private_names(module)}
    allowed = set(ALLOWED_PRIVATE_NAMES.items())
    assert_known({f"{path}: {name}" for name, path in found - allowed}, KNOWN_PRIVATE_NAMES)
    assert allowed <= found, "an allowed name that is not used any more has to go"


def test_only_conftest_sets_internal_options_of_ray() -> None:
    found = modules(ROOT, ["tests", "benchmarks"])
    files = {m.path.as_posix() for m in found if any("ray.init" in n for n in private_names(m))}
    assert files <= {"tests/conftest.py"}


def test_files_are_short(package: Sequence[Module]) -> None:
    assert_known(long_files(package), KNOWN_LONG_FILES)


def test_functions_are_short(package: Sequence[Module]) -> None:
    assert long_functions(package) == set()


def test_folders_are_small(package: Sequence[Module]) -> None:
    assert large_folders(package) == set()


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C.x()", "torch._C"),
        ("import torch.distributed as dist\ndist.distributed_c10d._world", "._world"),
        ("from torch import nn\nnn.modules._functions", "torch.nn.modules._functions"),
        ("from torch._C import x", "torch._C.x"),
        ("import ray._private.worker", "ray._private.worker"),
        ("from ray import _private", "ray._private"),
        ("def f():\n    import gymnasium as gym\n    gym.envs._x", "gymnasium.envs._x"),
        ("import ray\nray.init(_system_config={})", "ray.init(_system_config)"),
    ],
)
def test_private_name_is_found(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "planted.py").write_text(source)
    (module,) = modules(tmp_path, ["common"])
    assert any(name in found for found in private_names(module))


def test_public_and_own_names_are_not_found(tmp_path: Path) -> None:
    source = "import torch\nimport polopt\ntorch.__version__\npolopt._x\nself._y\ntorch.nn.Linear"
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "innocent.py").write_text(source)
    (module,) = modules(tmp_path, ["common"])
    assert list(private_names(module)) == []


def test_long_sources_are_found(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    for number in range(MAX_FILES + 1):
        (tmp_path / "common" / f"m{number}.py").write_text("def f():\n" + "    x = 1\n" * 50)
    (tmp_path / "common" / "m0.py").write_text("x = 1\n" * 301)
    found = modules(tmp_path, ["common"])
    assert long_files(found) == {"common/m0.py"}
    assert "common/m1.py:f" in long_functions(found)
    assert large_folders(found) == {"common"}
