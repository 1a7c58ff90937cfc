"""Private names of dependencies are in one file each, which has a test for them. Each module has a
name of its own. Tests lie in the folder that they test."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ray import tune
from source_tree import PACKAGE_FOLDERS, ROOT, Module, modules

from polopt.common.ray_names import DOCUMENTED_MODULES

DEPENDENCIES = {"torch", "ray", "gymnasium"}
#: Maps each private name without a public equivalent to the only file that may use it, and to a
#: test that fails if the dependency removes or changes the name.
ALLOWED = {
    "torch._fused_adam_": (
        "policies/learning/weight_updater.py",
        "test_torch_optimizers.py::test_equals_class_bit_for_bit_through_a_restore",
    ),
    "torch.ops.mkldnn._linear_pointwise": (
        "policies/fast_cpu/linear_layer.py",
        "test_linear_layer.py::test_torch_has_the_operation",
    ),
    "_schema": (
        "policies/fast_cpu/linear_layer.py",
        "test_linear_layer.py::test_torch_has_the_operation",
    ),
    "_forward_hooks": (
        "common/overrides.py",
        "test_fast_gpu.py::test_networks_with_hooks_learn_without_graphs",
    ),
    "_forward_pre_hooks": (
        "common/overrides.py",
        "test_fast_gpu.py::test_networks_with_hooks_learn_without_graphs",
    ),
    "_current_frames": (
        "command_line/ray_thread.py",
        "test_stopping.py::test_control_service_lives_while_ray_waits_for_it",
    ),
    "ray.tune.tune._Config": (
        "common/ray_names.py",
        "test_rllib_builders.py::test_tune_takes_a_builder_as_its_config",
    ),
    "_elapsed_steps": (
        "rollouts/envs/env_state.py",
        "test_env_state.py::test_restored_environments_continue_bit_for_bit",
    ),
    "_autoreset_envs": (
        "rollouts/envs/env_state.py",
        "test_env_state.py::test_restored_environments_continue_bit_for_bit",
    ),
}
#: Maps each file that may use `sys.modules` to the test of this use.
SYS_MODULES = {
    # Checks whether RLlib is imported, which then registers its algorithms with Tune.
    "rllib/add_on.py": "test_accepted_names.py::test_name_that_rllib_is_about_to_take",
    # Checks whether Tune is imported, because importing Tune takes seconds.
    "common/ray_names.py": "test_env_sources.py::test_name_registered_with_tune",
    # Registers the module of a user's file, as in the documentation of importlib.
    "command_line/names.py": "test_examples.py::test_python_file_with_variables_or_a_function",
}
#: Documented names that start with an underscore: methods of named tuples, and `os._exit`.
DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_exit"}


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.AST) -> str | None:
    """Returns `a.b.c` for a chain of attributes that starts at a name, and None otherwise."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return None


def imported(module: Module) -> dict[str, str]:
    """Maps each name that a module imports to its full name."""
    names = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                names[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def own_names(module: Module) -> set[str]:
    """Returns the functions, classes, variables and attributes of `self` that a module defines."""
    names = set()
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def internal_options(module: Module) -> Iterator[str]:
    """Yields the keyword arguments of `ray.init` that start with an underscore."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and dotted(node.func) == "ray.init":
            for keyword in node.keywords:
                if (keyword.arg or "").startswith("_"):
                    yield f"ray.init({keyword.arg})"


def private_names(module: Module) -> Iterator[str]:
    """Yields the private names that a module takes from a dependency or from the attributes of a
    dependency, the private attributes that the module does not define itself, `sys.modules`, and
    `internal_options`."""
    yield from internal_options(module)
    names, own = imported(module), own_names(module)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{base}{alias.name}"
                private = name.split(".")[0] in DEPENDENCIES and is_private(name)
                if private or name == "sys.modules":
                    yield name
        elif isinstance(node, ast.Attribute):
            first, _, rest = (dotted(node) or "").partition(".")
            name = f"{names[first]}.{rest}" if first in names else rest
            if name == "sys.modules":
                yield name
            if node.attr.startswith("__") or not node.attr.startswith("_"):
                continue
            if name.split(".")[0] in DEPENDENCIES and first in names:
                yield name
            elif first not in ("self", "cls") or rest != node.attr:
                is_super = isinstance(node.value, ast.Call) and dotted(node.value.func) == "super"
                if node.attr not in own | DOCUMENTED and not is_super:
                    yield node.attr


@pytest.fixture(scope="module")
def package() -> Sequence[Module]:
    return modules(ROOT)


def test_private_names_are_in_one_file_each(package: Sequence[Module]) -> None:
    found = {(name, module.path.as_posix()) for module in package for name in private_names(module)}
    allowed = {(name, path) for name, (path, _) in ALLOWED.items()}
    allowed |= {("sys.modules", path) for path in SYS_MODULES}
    assert found - allowed == set(), "the rule is at the top of this file"
    assert allowed - found == set(), "remove each allowed name that is no longer used"


@pytest.mark.parametrize(
    "test", sorted({test for _, test in ALLOWED.values()} | {*SYS_MODULES.values()})
)
def test_private_name_has_a_test(test: str) -> None:
    path, _, name = test.partition("::")
    (file,) = (ROOT / "tests").rglob(path)
    tree = ast.parse(file.read_text())
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


#: All undocumented names of Ray that `common/ray_names.py` imports.
RAY_NAMES = {
    "ray.autoscaler.v2.sdk.get_cluster_status",
    "ray.train.constants.DEFAULT_STORAGE_PATH",
    "ray.tune.progress_reporter.TrialProgressCallback",
    "ray.tune.search.sample.Categorical",
    "ray.tune.search.sample.Domain",
    "ray.tune.search.sample.Float",
    "ray.tune.search.sample.Integer",
    "ray.tune.search.sample.Quantized",
    "ray.tune.search.variant_generator.generate_variants",
    "ray.tune.tune",
    "ray.widgets.util.in_notebook",
}
#: Names that are not imported: attributes, and what `sys.modules` is asked for.
OTHER_RAY_NAMES = {
    "_storage": lambda: tune.Trainable,
    "_global_registry": lambda: sys.modules["ray.tune.registry"],
    "_Config": lambda: sys.modules["ray.tune.tune"],
    "start_gcs_server": lambda: sys.modules["ray._private.node"].Node,
}


def undocumented(module: Module) -> Iterator[str]:
    """Yields the names that a module imports from Ray, except public names of the documented
    modules."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
            yield from (name for name in found if name.split(".")[0] == "ray")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            for alias in node.names:
                private = alias.name.startswith("_") or alias.name == node.module.split(".")[-1]
                if private or node.module not in DOCUMENTED_MODULES:
                    yield f"{node.module}.{alias.name}"


def taken_by(found: Sequence[Module]) -> dict[str, set[str]]:
    """Maps the path of each module to its undocumented names."""
    names = {module.path.as_posix(): set(undocumented(module)) - {"ray"} for module in found}
    return {path: names for path, names in names.items() if names}


def test_undocumented_names_are_in_one_file(package: Sequence[Module]) -> None:
    assert taken_by(package) == {"common/ray_names.py": RAY_NAMES}


def test_other_names_exist() -> None:
    import ray._private.node
    import ray.tune.tune  # noqa: F401

    missing = [name for name, owner in OTHER_RAY_NAMES.items() if not hasattr(owner(), name)]
    trainable = tune.Trainable()
    assert [name for name in missing if not hasattr(trainable, name)] == []
    source = (ROOT / "common/ray_names.py").read_text()
    assert [name for name in OTHER_RAY_NAMES if name not in source] == []


@pytest.mark.parametrize(
    "source",
    [
        "from ray.train import Checkpoint",
        "from ray.train.constants import DEFAULT_STORAGE_PATH",
        "def f():\n    from ray.tune.search.variant_generator import generate_variants",
        "import ray._private.worker",
        "import ray.air.config as config",
        "from ray import _private",
        "from ray.tune import tune",
    ],
)
def test_an_undocumented_name_is_found(source: str, tmp_path: Path) -> None:
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / "planted.py").write_text(source)
    assert [*taken_by(modules(tmp_path, ["trainers"]))] == ["trainers/planted.py"]


def test_each_module_name_occurs_once(package: Sequence[Module]) -> None:
    """A search for the name of a module finds one file."""
    paths = [module.path for module in package]
    counts = Counter(path.name for path in paths if path.name not in ("__init__.py", "add_on.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_tests_lie_in_the_folders_of_the_package() -> None:
    """`project` holds the tests of the docs, of the source and of the packages to install."""
    folders = [path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")]
    below = ["/".join(folder.parts[2:]) for folder in folders if folder.parts[1] != "chaos"]
    assert {name for name in below if name != "project" and not (ROOT / name).is_dir()} == set()
    assert "" not in below
    present = {name for name in PACKAGE_FOLDERS if (ROOT / name).is_dir()} - {"tuned_examples"}
    assert present <= {name.split("/")[0] for name in below}


def test_only_conftest_sets_internal_options_of_ray() -> None:
    found = modules(ROOT, ["tests", "benchmarks"])
    files = {module.path.as_posix() for module in found if any(internal_options(module))}
    assert files <= {"tests/conftest.py"}


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
        ("def f(actor):\n    return actor._actor_id.hex()", "_actor_id"),
        ("def f(env):\n    env.unwrapped._elapsed_steps = 0", "_elapsed_steps"),
        ("def f(env):\n    return env.spec()._kwargs", "_kwargs"),
        ("class A:\n    def f(self):\n        return self.group._store", "_store"),
        ("import sys\nx = sys.modules['ray.tune']", "sys.modules"),
        ("from sys import modules\nmodules['ray']", "sys.modules"),
        ("import sys as s\ns.modules", "sys.modules"),
    ],
)
def test_private_name_is_found(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "planted.py").write_text(source)
    (module,) = modules(tmp_path, ["common"])
    assert any(name in found for found in private_names(module))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.nn.Linear",
        "class A:\n    def f(self):\n        self._y = super()._f()\n        return self._other",
        "class A:\n    def _f(self): ...\n    def g(self, other):\n        return other._f()",
        "def f(weights):\n    return weights._replace(version=1)",
    ],
)
def test_public_and_own_names_are_not_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "innocent.py").write_text(source)
    (module,) = modules(tmp_path, ["common"])
    assert list(private_names(module)) == []
