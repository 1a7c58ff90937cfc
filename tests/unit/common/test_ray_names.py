"""Runs each function of `common/ray_names.py` without the name that it takes from Ray."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import tune

from polopt.common import ray_names
from polopt.common.ray_names import points


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
    assert ray_names.draining_nodes("127.0.0.1:1") == frozenset()


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
