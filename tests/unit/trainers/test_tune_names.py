"""Tests of the names of presets in Tune's registry. RLlib also registers some of these names."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from ray import tune
from ray.tune.registry import get_trainable_cls, register_trainable

import polopt
from polopt.common.ray_names import registered
from polopt.trainers import presets
from polopt.trainers.presets import PRESETS, register_names


class Other(tune.Trainable):
    """A trainable of another library."""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(presets, "_warned", set())
    with mock.patch.dict(sys.modules):
        sys.modules.pop("ray.rllib", None)
        yield
    polopt.register(override=True)


def messages_of(caplog: pytest.LogCaptureFixture, **arguments: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "polopt"):
        polopt.register(**arguments)
    return caplog.messages


def test_each_preset_has_a_name_that_nobody_else_has(caplog: pytest.LogCaptureFixture) -> None:
    assert messages_of(caplog) == []
    for name, cls in PRESETS.items():
        assert get_trainable_cls(name) is get_trainable_cls(f"polopt/{name}") is cls
    assert messages_of(caplog) == []


def test_replacing_a_foreign_name_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    register_trainable("APPO", Other)
    (message,) = messages_of(caplog)
    assert message.startswith(
        f"'APPO' was registered with Tune by {Other.__module__}, and now names the"
    )
    assert "polopt/APPO" in message
    assert get_trainable_cls("APPO") is polopt.APPO
    register_trainable("APPO", Other)
    assert messages_of(caplog) == []
    assert get_trainable_cls("APPO") is polopt.APPO


def test_override_decides_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    register_trainable("IMPALA", Other)
    assert messages_of(caplog, override=False) == []
    assert registered("trainable_class", "IMPALA").__name__ == "Other"  # type: ignore[union-attr]
    assert get_trainable_cls("polopt/IMPALA") is polopt.IMPALA
    assert get_trainable_cls("A3C") is polopt.A3C
    assert messages_of(caplog, override=True) == []
    assert get_trainable_cls("IMPALA") is polopt.IMPALA


def test_unknown_names_register_nothing_of_rllib() -> None:
    """`get_trainable_cls` of an unknown name would import RLlib, which registers its algorithms."""
    assert registered("trainable_class", "no such name") is None
    assert "ray.rllib" not in sys.modules
    register_names({"a name": polopt.A3C})
    assert registered("trainable_class", "a name") is polopt.A3C
