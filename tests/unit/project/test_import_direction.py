"""Imports point one way, as `docs/architecture.md` says, and form no cycle."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from source_tree import (
    PACKAGE_FOLDERS,
    ROOT,
    Module,
    cycles,
    import_graph,
    imported_names,
    modules,
    public_names,
)

_POLICIES = {
    "policies",
    "policies/networks",
    "policies/distributions",
    "policies/learning",
}
_BASE = {"common", "metrics"}
_ROLLOUTS = {
    "rollouts",
    "rollouts/envs",
    "rollouts/sampling",
    "rollouts/transport",
    "rollouts/workers",
}
_CORE = _BASE | _POLICIES | _ROLLOUTS | {"replay", "optimizers", "trainers"}
# Each folder and the folders that it may import, besides itself. First the core.
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    "metrics": {"common"},
    "replay": _BASE,
    "policies/distributions": _BASE,
    "policies/networks": _BASE,
    "policies/learning": _BASE | {"policies/networks"},
    "policies": _BASE | _POLICIES,
    "rollouts": _BASE,  # the modules directly in this folder
    "rollouts/envs": {*_BASE, "rollouts"},
    "rollouts/sampling": {*_BASE, *_POLICIES, "rollouts", "rollouts/envs"},
    "rollouts/transport": {"common"},
    "rollouts/workers": _BASE | _POLICIES | _ROLLOUTS,
    "optimizers": _BASE | _POLICIES | _ROLLOUTS | {"replay"},
    "trainers": _CORE,
    # Add-ons: each may import the core. The core imports none of them.
    "policies/fast_cpu": _BASE | {"policies/distributions", "policies/networks"},
    "policies/fast_gpu": {"common"},
    "collectors": _CORE | {"recording"},
    "recording": _CORE | {"command_line"},
    "rllib": _CORE,
    "command_line": _CORE,
    "comparison": _CORE | {"command_line", "dashboards", "dashboards/data", "dashboards/views"},
    "simulation": _CORE | {"command_line"},
    "dashboards/data": _BASE,
    "dashboards/views": _BASE | {"dashboards/data"},
    "dashboards": {*_CORE, "dashboards/data", "dashboards/views", "command_line"},
}
ADD_ONS = {
    "collectors",
    "comparison",
    "recording",
    "rllib",
    "command_line",
    "dashboards",
    "simulation",
}
ADD_ONS |= {"policies/fast_cpu", "policies/fast_gpu"}
# These folders may import only the public names of polopt, like a user's code, and the examples.
PUBLIC_NAMES_ONLY = {"tuned_examples", "benchmarks"}


def folder_of(name: str) -> str | None:
    """Returns the folder in `MAY_IMPORT` that contains the module or name `name`, such as
    `polopt.x.y`. Returns None if no such folder contains it."""
    parts = public_names().get(name.removeprefix("polopt."), name).split(".")[1:]
    candidates = ("/".join(parts[:length]) for length in (2, 1))
    return next((folder for folder in candidates if folder in MAY_IMPORT), None)


def fault(folder: str, name: str) -> str | None:
    """Returns why a module in `folder` may not import `name`, or None if it may."""
    top, _, rest = name.partition(".")
    if top in PACKAGE_FOLDERS:
        return f"bare import; the name is polopt.{name}"
    if folder == "metrics" and top not in {*sys.stdlib_module_names, "numpy", "psutil", "polopt"}:
        return "metrics needs only the standard library, NumPy and psutil"
    if folder.startswith("policies") and top == "ray":
        return "policies do not use Ray"
    if top != "polopt" or not rest or rest.startswith("__"):
        return None
    if folder.split("/")[0] in PUBLIC_NAMES_ONLY:
        own = f"polopt.{folder}.", "polopt.tuned_examples."
        return None if f"{name}.".startswith(own) or rest in public_names() else "not a public name"
    if folder in MAY_IMPORT:
        target = folder_of(name)
        if target is None:
            return f"no folder that {folder} may import"
        if target != folder and target not in MAY_IMPORT[folder]:
            return f"{folder} may import {', '.join(sorted(MAY_IMPORT[folder])) or 'no other'}"
    return None


def add_on_of(name: str) -> str | None:
    """Returns the add-on that holds the module or public name `name`, or None if it is no part of
    an add-on."""
    top, *parts = public_names().get(name.removeprefix("polopt."), name).split(".")
    candidates = ("/".join(parts[:length]) for length in (2, 1))
    return next((one for one in candidates if top == "polopt" and one in ADD_ONS), None)


def faults_of_tests(found: Sequence[Module]) -> list[str]:
    """Returns a line of text for each forbidden import of a test. Helpers do not live in test
    modules. If somebody deletes an add-on together with the folder of its tests, all other tests
    still run. A test of another folder that needs an add-on asks `pytest.importorskip` for it. The
    tests in `project` check the whole repository."""
    helper_of = {
        module.path.stem: module.path.parts[2]
        for module in found
        if len(module.path.parts) > 3 and not module.path.stem.startswith("test_")
    }
    lines = []
    for module in found:
        folder = "/".join(module.path.parts[2:-1])
        for line, name in imported_names(module):
            top = name.split(".")[0]
            add_on = add_on_of(name) or helper_of.get(top)
            if top.startswith("test_"):
                lines.append(f"{module.path}:{line}: {name}: helpers have a module of their own")
            elif add_on and not f"{folder}/".startswith((f"{add_on}/", "project/")):
                lines.append(f"{module.path}:{line}: {name}: only tests of {add_on} may need it")
    return lines


def violations(found: Sequence[Module]) -> list[str]:
    """Returns a line of text for each forbidden import."""
    return [
        f"{module.path}:{line}: {name}: {why}"
        for module in found
        for line, name in imported_names(module)
        if (why := fault(module.folder, name))
    ]


def test_imports_point_one_way() -> None:
    found = modules(ROOT, [*PACKAGE_FOLDERS, "benchmarks", "src", "tests"])
    assert violations(found) == []
    folders = {module.folder for module in found}
    packages = {folder for folder in folders if folder.split("/")[0] in PACKAGE_FOLDERS}
    assert packages <= {*MAY_IMPORT, "tuned_examples"}, "each folder has a row in the table"
    assert packages >= set(MAY_IMPORT) - {"dashboards"}


def test_tests_need_no_other_add_on_and_no_test_module() -> None:
    assert faults_of_tests(modules(ROOT, ["tests"])) == []


def test_modules_form_no_cycle() -> None:
    assert cycles(import_graph(modules(ROOT))) == []


def test_folders_form_no_cycle() -> None:
    found = modules(ROOT)
    folder = {module.name: module.folder for module in found}
    graph: dict[str, set[str]] = {name: set() for name in folder.values()}
    for name, targets in import_graph(found).items():
        graph[folder[name]] |= {folder[target] for target in targets} - {folder[name]}
    assert cycles(graph) == []


def planted(root: Path, folder: str, **sources: str) -> list[Module]:
    """Writes modules with the texts `sources` into a new folder, and returns these modules."""
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, source in sources.items():
        (root / folder / f"{name}.py").write_text(source)
    return modules(root, [folder.split("/")[0]])


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("metrics", "import torch", "torch"),
        ("metrics", "from ..policies import policy", "polopt.policies.policy"),
        ("policies", "def f():\n    import ray.util", "ray.util"),
        ("policies/networks", "import ray", "ray"),
        ("policies/networks", "from polopt import Policy", "polopt.Policy"),
        ("policies", "import polopt.rollouts.envs.spec", "polopt.rollouts.envs.spec"),
        ("policies", "from polopt import RolloutWorker", "polopt.RolloutWorker"),
        (
            "policies",
            "from polopt.policies.fast_cpu import add_on",
            "polopt.policies.fast_cpu.add_on",
        ),
        ("policies", "import polopt as p\nx = p.RolloutWorker", "polopt.RolloutWorker"),
        ("rollouts", "from polopt import optimizers", "polopt.optimizers"),
        ("rollouts", "from polopt import *", "polopt.*"),
        ("rollouts", "from .workers import health", "polopt.rollouts.workers.health"),
        ("rollouts/envs", "from ..sampling import sampler", "polopt.rollouts.sampling.sampler"),
        ("rollouts/sampling", "from polopt import WorkerSet", "polopt.WorkerSet"),
        ("rollouts/transport", "import polopt.policies.policy", "polopt.policies.policy"),
        ("rollouts/transport", "from polopt import WorkerSet", "polopt.WorkerSet"),
        ("rollouts/workers", "from polopt import Collector", "polopt.Collector"),
        ("rollouts/workers", "import polopt.policies\nx = polopt.A3C", "polopt.A3C"),
        ("optimizers", "from .. import trainers", "polopt.trainers"),
        ("optimizers", "import optimizers.policy_optimizer", "optimizers.policy_optimizer"),
        (
            "optimizers",
            "import importlib\nimportlib.import_module('polopt.trainers.experiment')",
            "polopt.trainers.experiment",
        ),
        ("trainers", "import polopt.tuned_examples", "polopt.tuned_examples"),
        ("trainers", "if TYPE_CHECKING:\n    from polopt.dashboards import x", "polopt.dashboards"),
        ("dashboards", "from polopt.rllib import PPOConfig", "polopt.rllib"),
        ("tuned_examples", "from polopt.trainers.presets import A3C", "polopt.trainers.presets"),
        ("benchmarks", "from polopt.policies import policy", "polopt.policies.policy"),
        ("benchmarks/peers", "from polopt.policies import policy", "polopt.policies.policy"),
        ("tests", "from rollouts import worker", "rollouts.worker"),
        ("src", "import metrics", "metrics"),
    ],
)
def test_forbidden_import_is_found(tmp_path: Path, folder: str, source: str, name: str) -> None:
    (found,) = violations(planted(tmp_path, folder, planted=source))
    assert found.startswith(f"{folder}/planted.py")
    assert name in found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("metrics", "import json\nimport numpy as np\nfrom . import timers"),
        (
            "policies",
            "import torch\nfrom polopt.metrics import timers\nfrom ..common import config",
        ),
        ("rollouts/workers", "import ray\nfrom polopt import Policy, __version__"),
        ("rollouts/sampling", "from ..rollout_config import RolloutConfig"),
        ("optimizers", "from ..rollouts.workers.worker_set import WorkerSet"),
        ("trainers", "import polopt\nx = polopt.WorkerSet, polopt.__version__"),
        ("tuned_examples", "import ray\nfrom polopt import A3C\nfrom . import showcase"),
        ("benchmarks", "import polopt\npolopt.register()"),
        ("tests", "from polopt.trainers import experiment"),
    ],
)
def test_allowed_import_is_not_found(tmp_path: Path, folder: str, source: str) -> None:
    assert violations(planted(tmp_path, folder, innocent=source)) == []


@pytest.mark.parametrize(
    ("folder", "source", "name"),
    [
        ("tests/unit/policies", "from polopt.collectors import scheme", "polopt.collectors.scheme"),
        ("tests/unit/policies/networks", "import polopt\npolopt.Collector", "polopt.Collector"),
        ("tests/integration/trainers", "def f():\n    import polopt.rllib", "polopt.rllib"),
        ("tests/unit/recording", "from polopt import evaluate", "polopt.evaluate"),
        (
            "tests/unit/policies",
            "from polopt.policies.fast_cpu import numpy_q",
            "polopt.policies.fast_cpu.numpy_q",
        ),
        ("tests/unit/dashboards", "from planted import x", "planted.x"),
        ("tests/unit/trainers", "from test_checkpoints import SMALL", "test_checkpoints.SMALL"),
        ("tests", "import polopt.dashboards.report", "polopt.dashboards.report"),
    ],
)
def test_forbidden_import_of_a_test_is_found(
    tmp_path: Path, folder: str, source: str, name: str
) -> None:
    """`planted` is a helper of the tests of Collectors."""
    planted(tmp_path, "tests/unit/collectors", planted="import polopt")
    planted(tmp_path, folder, test_planted=source)
    (found,) = faults_of_tests(modules(tmp_path, ["tests"]))
    assert found.startswith(f"{folder}/test_planted.py")
    assert name in found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("tests/unit/collectors", "import polopt\nfrom helper import x\npolopt.Collector"),
        ("tests/unit/project", "from polopt.dashboards import report"),
        ("tests/unit/policies/fast_cpu", "from polopt.policies.fast_cpu import numpy_q"),
        ("tests/unit/recording", "import pytest\npytest.importorskip('polopt.command_line.cli')"),
        ("tests/unit/trainers", "import polopt\nfrom fakes import FakeTransport\npolopt.A3C"),
    ],
)
def test_allowed_import_of_a_test_is_not_found(tmp_path: Path, folder: str, source: str) -> None:
    planted(tmp_path, folder, test_innocent=source)
    assert faults_of_tests(modules(tmp_path, ["tests"])) == []


def test_cycle_through_type_checking_is_found(tmp_path: Path) -> None:
    found = planted(
        tmp_path,
        "common",
        a="from polopt.common.b import f",
        b="def f():\n    from . import c",
        c="if TYPE_CHECKING:\n    import polopt.common.a",
        d="from . import a",
    )
    assert cycles(import_graph(found)) == [
        ["polopt.common.a", "polopt.common.b", "polopt.common.c"]
    ]


def test_cycle_through_a_public_name_is_found(tmp_path: Path) -> None:
    found = planted(
        tmp_path, "common", config="from . import other", other="import polopt as p\np.Config"
    )
    assert cycles(import_graph(found)) == [["polopt.common.config", "polopt.common.other"]]
