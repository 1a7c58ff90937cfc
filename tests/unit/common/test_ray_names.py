"""Lists the names that polopt takes from Ray beyond Ray's documented interface, and runs polopt
without each of them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import tune
from source_tree import ROOT, Module, modules

from polopt.common import ray_names
from polopt.common.ray_names import DOCUMENTED_MODULES, points

#: All undocumented names of Ray that `common/ray_names.py` imports.
TAKEN = {
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
ALSO_TAKEN = {
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


def test_undocumented_names_are_in_one_file() -> None:
    assert taken_by(modules(ROOT)) == {"common/ray_names.py": TAKEN}


def test_other_names_exist() -> None:
    import ray._private.node
    import ray.tune.tune  # noqa: F401

    missing = [name for name, owner in ALSO_TAKEN.items() if not hasattr(owner(), name)]
    trainable = tune.Trainable()
    assert [name for name in missing if not hasattr(trainable, name)] == []
    source = (ROOT / "common/ray_names.py").read_text()
    assert [name for name in ALSO_TAKEN if name not in source] == []


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


@pytest.fixture
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the import of a module raise ImportError."""
    monkeypatch.setitem(sys.modules, request.param, None)


@pytest.mark.parametrize("without", ["ray.train.constants"], indirect=True)
def test_storage_without_its_name(without: None) -> None:
    assert ray_names.storage_folder() == str(Path.home() / "ray_results")


def test_the_storage_folder_is_that_of_tune() -> None:
    assert ray_names.storage_folder() == str(Path.home() / "ray_results")


def test_distributions_without_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ray_names.distributions()
    monkeypatch.setitem(sys.modules, "ray.tune.search.sample", None)
    assert ray_names.distributions() == expected


@pytest.mark.parametrize("without", ["ray.tune.search.variant_generator"], indirect=True)
def test_points_without_the_name(without: None) -> None:
    assert [*points({"lr": tune.grid_search([1.0, 2.0])})] == []


def test_points_of_a_space() -> None:
    found = [spec["lr"] for _, spec in points({"lr": tune.grid_search([1.0, 2.0])})]
    assert found == [1.0, 2.0]


@pytest.mark.parametrize("without", ["ray.widgets.util"], indirect=True)
@pytest.mark.parametrize(
    ("shell", "expected"), [("ZMQInteractiveShell", True), ("TerminalInteractiveShell", False)]
)
def test_notebook_without_the_name(
    without: None, shell: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ipython = SimpleNamespace(get_ipython=lambda: type(shell, (), {})())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert ray_names.in_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert ray_names.in_notebook() is False


@pytest.mark.parametrize("without", ["ray.tune.progress_reporter"], indirect=True)
def test_progress_without_the_name(without: None) -> None:
    assert ray_names.notebook_callback() is tune.Callback


@pytest.mark.parametrize("without", ["ray.autoscaler.v2.sdk"], indirect=True)
def test_demands_without_the_name(without: None) -> None:
    assert ray_names.waiting_demands("127.0.0.1:1") == []


def test_builders_without_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.tune import tune as module

    monkeypatch.delattr(module, "_Config")
    ray_names.accept_as_config(dict)


def test_trainable_without_storage() -> None:
    assert ray_names.storage_of(object()) is None


def test_registry_without_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tune.register_env("ray-names-test", lambda config: None)
    assert ray_names.registered("env_creator", "ray-names-test") is not None
    monkeypatch.delattr("ray.tune.registry._global_registry")
    assert ray_names.registered("env_creator", "ray-names-test") is None
