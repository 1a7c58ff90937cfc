"""Registries refuse names that are taken and classes of another kind."""

from __future__ import annotations

from typing import Any

import pytest

from polopt.common import registry as registry_module
from polopt.common.config import Config, ConfigError
from polopt.common.registry import Registry


class First(Config):
    """A class to register."""


class Second(Config):
    """Another class to register."""


def make_registry() -> Registry:
    base = "polopt.common.config:Config"
    return Registry("test", "polopt.test", base, {"built_in": f"{__name__}:First"})


@pytest.mark.parametrize("name", ["built_in", "mine"])
def test_existing_name_is_refused(name: str) -> None:
    registry = make_registry()
    registry.register("mine", First)
    with pytest.raises(ConfigError, match=rf"{name}.*belongs to .*First\. Allowed:.*override=True"):
        registry.register(name, Second)
    assert registry.get(name) is First


def test_override_replaces_existing_name() -> None:
    registry = make_registry()
    registry.register("built_in", Second, override=True)
    assert registry.get("built_in") is Second


def test_other_processes_get_what_the_driver_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, Any] = {}  # replaces Tune's registry
    monkeypatch.setattr("ray.tune.register_env", known.__setitem__)
    monkeypatch.setattr(registry_module, "registered", lambda _, name: known.get(name))
    driver, trial = make_registry(), make_registry()
    driver.register("mine", First)
    driver.register("built_in", Second, override=True)
    assert trial.get("mine") is First
    assert trial.get("built_in") is Second, "an override, too"
    assert trial.name_of(Second) == "built_in"


def test_same_class_is_registered_twice() -> None:
    registry = make_registry()
    for name in ("built_in", "mine", "mine"):
        registry.register(name, First)


def test_class_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got <class 'int'>\. Allowed: a subclass of"):
        make_registry().register("mine", int)


def test_unknown_name_lists_known_names() -> None:
    with pytest.raises(ConfigError, match=r"got 'bilt_in'; did you mean 'built_in'\? Allowed: bu"):
        make_registry().get("bilt_in")


def test_class_given_as_value_is_registered() -> None:
    registry = make_registry()
    assert registry.get(Second) is Second
    assert registry.name_of(Second) == "Second"
