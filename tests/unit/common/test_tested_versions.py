"""One warning names installed versions that are newer than the newest tested versions."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path

import pytest
import versions
from packaging.requirements import Requirement

from polopt.common import tested_versions
from polopt.common.tested_versions import NEWEST_TESTED, warn_of_untested_versions


@pytest.fixture(autouse=True)
def _fresh() -> None:
    warn_of_untested_versions.cache_clear()


def test_versions_of_the_tests_are_tested_ones(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polopt"):
        warn_of_untested_versions()
    assert caplog.messages == []
    pins = (Path(versions.ROOT) / "constraints.txt").read_text().splitlines()
    pinned = dict(line.partition(";")[0].strip().split("==") for line in pins if "==" in line)
    for name, tested in NEWEST_TESTED.items():
        assert tested_versions._release(pinned[name]) <= tested_versions._release(tested)


@pytest.mark.parametrize(
    ("installed", "newer"),
    [("2.60.9", False), ("2.61.0", True), ("3.0.0.dev0", True), ("2.9.1", False)],
)
def test_newer_version_is_named_once(
    installed: str, newer: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: installed if name == "ray" else real(name)
    )
    with caplog.at_level(logging.WARNING, "polopt"):
        warn_of_untested_versions()
        warn_of_untested_versions()
    said = f"polopt has not been tested with ray {installed} (tested up to 2.60)"
    assert [message.startswith(said) for message in caplog.messages] == [True] * newer


def test_no_requirement_of_the_package_has_an_upper_bound() -> None:
    for line in versions.requirements("options", "install_requires"):
        operators = {specifier.operator for specifier in Requirement(line).specifier}
        assert operators <= {">="}, line
