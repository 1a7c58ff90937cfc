"""Who may import whom, read from the syntax trees: the table of folders in the design."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import polopt

ROOT = Path(__file__).parents[2]

# Each inner folder and the folders that it may import, besides itself.
MAY_IMPORT = {
    "common": set(),
    "metrics": {"common"},
    "policies": {"common", "metrics"},
    "rollouts": {"common", "metrics", "policies"},
    "optimizers": {"common", "metrics", "policies", "rollouts"},
    "trainers": {"common", "metrics", "policies", "rollouts", "optimizers"},
    "dashboards": {"common", "metrics"},
}
# Written like a user's code: from polopt they may import what it exports, and nothing behind it.
PUBLIC_NAMES_ONLY = {"tuned_examples", "benchmarks"}
UNRESTRICTED = {"src", "tests"}  # but for bare imports, which nobody may write
SUB_PACKAGES = {*MAY_IMPORT, "tuned_examples"}


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of all that a module of `package` imports, at any depth.

    `import polopt` is followed to the attributes that the module takes from it, and a constant
    given to `import_module` counts as what it imports.
    """
    handles = {  # the local names of the polopt module itself
        alias.asname or "polopt"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "polopt" or (alias.name.startswith("polopt.") and not alias.asname)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = [module] if module else []
                if level:
                    parts = package.split(".")
                    base = [*parts[: len(parts) - level + 1], *base]
                yield from ((node.lineno, ".".join([*base, alias.name])) for alias in names)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in handles:
                yield node.lineno, f"polopt.{attr}"
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                called = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                if called in {"import_module", "__import__"}:
                    yield node.lineno, name


def fault(folder: str, name: str) -> str | None:
    """Why a module in `folder` may not import `name`; None if it may."""
    top, _, rest = name.partition(".")
    if top in SUB_PACKAGES:
        return f"bare import: the name is polopt.{name}"
    if folder == "metrics" and top not in {*sys.stdlib_module_names, "numpy", "polopt"}:
        return "metrics needs nothing but the standard library and NumPy"
    if folder == "policies" and top == "ray":
        return "policies know nothing of Ray"
    if top != "polopt" or not rest or rest.startswith("__"):
        return None
    if folder in PUBLIC_NAMES_ONLY:
        own = name.startswith(f"polopt.{folder}.") or name == f"polopt.{folder}"
        return None if own or rest in polopt.__all__ else "not a public name of polopt"
    if folder in MAY_IMPORT:
        allowed = {folder, *MAY_IMPORT[folder]}
        # A public name stands for the module that it is lazily imported from.
        target = polopt._MODULE_OF.get(rest.split(".")[0], name).split(".")[1]
        if target not in allowed:
            return f"{folder} may import {', '.join(sorted(allowed - {folder})) or 'no other'}"
    return None


def violations(root: Path) -> tuple[list[str], set[str]]:
    """Every forbidden import under `root`, and the folders in which modules were read."""
    found, read = [], set()
    for folder in sorted({*MAY_IMPORT, *PUBLIC_NAMES_ONLY, *UNRESTRICTED}):
        for path in sorted((root / folder).rglob("*.py")):
            if folder == "src" and any(parent.is_symlink() for parent in path.parents):
                continue  # a link to a folder that is read under its own name
            read.add(folder)
            parent = ".".join(path.relative_to(root).parent.parts)
            package = f"polopt.{parent}" if folder in SUB_PACKAGES else parent
            for line, name in imported_names(ast.parse(path.read_bytes()), package):
                if why := fault(folder, name):
                    found.append(f"{path.relative_to(root)}:{line}: {name}: {why}")
    return found, read


def test_imports_point_one_way() -> None:
    found, read = violations(ROOT)
    assert not found, "\n".join(found)
    folders = {"metrics", "policies", "rollouts", "optimizers", "trainers", "tuned_examples"}
    assert read >= {*folders, "src", "tests"}


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("metrics", "import torch", "torch"),
        ("metrics", "from ..policies import policy", "polopt.policies.policy"),
        ("policies", "def f():\n    import ray.util", "ray.util"),
        (
            "policies",
            "from polopt.rollouts.workers.rollout_worker import RolloutWorker",
            "polopt.rollouts.workers.rollout_worker",
        ),
        ("policies", "from polopt import RolloutWorker", "polopt.RolloutWorker"),
        ("policies", "import polopt as p\nx = p.RolloutWorker", "polopt.RolloutWorker"),
        ("rollouts", "from polopt import optimizers", "polopt.optimizers"),
        ("rollouts", "from polopt import *", "polopt.*"),
        ("rollouts", "import polopt.optimizers.base as base", "polopt.optimizers.base"),
        ("rollouts", "import polopt.policies\nx = polopt.A3C", "polopt.A3C"),
        ("optimizers", "from .. import trainers", "polopt.trainers"),
        ("optimizers", "import optimizers.base", "optimizers.base"),
        ("optimizers", "import importlib\nimportlib.import_module('polopt.trainers.cli')", "cli"),
        ("trainers", "import polopt.tuned_examples", "polopt.tuned_examples"),
        ("trainers", "if TYPE_CHECKING:\n    from polopt.dashboards import x", "polopt.dashboards"),
        ("dashboards", "from polopt.trainers.presets import A3C", "polopt.trainers.presets"),
        ("tuned_examples", "from polopt.trainers.presets import A3C", "polopt.trainers.presets"),
        ("benchmarks", "from polopt.policies import policy", "polopt.policies.policy"),
        ("tests", "from rollouts import worker", "rollouts.worker"),
        ("src", "import metrics", "metrics"),
    ],
)
def test_planted_violation_is_found(tmp_path: Path, folder: str, source: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "planted.py").write_text(source)
    found, _ = violations(tmp_path)
    assert len(found) == 1
    assert found[0].startswith(str(Path(folder) / "planted.py"))
    assert name in found[0]


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("metrics", "import json\nimport numpy as np\nfrom . import timers"),
        (
            "policies",
            "import torch\nfrom polopt.metrics import timers\nfrom ..common.config import Config",
        ),
        ("rollouts", "import ray\nfrom polopt import Policy, __version__"),
        ("optimizers", "from ..rollouts.worker_set import WorkerSet"),
        ("trainers", "import polopt\nx = polopt.WorkerSet, polopt.__version__"),
        (
            "tuned_examples",
            "import ray\nfrom polopt import A3C\nfrom . import showcase",
        ),
        ("benchmarks", "import polopt\npolopt.register()"),
        ("tests", "from polopt.trainers import config"),
    ],
)
def test_permitted_import_is_not(tmp_path: Path, folder: str, source: str) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "innocent.py").write_text(source)
    assert violations(tmp_path)[0] == []
