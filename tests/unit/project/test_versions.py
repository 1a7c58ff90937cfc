"""The ranges of setup.cfg, and how `make test-oldest`, `test-newest` and `test-wheel` use them."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tarfile
import warnings
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import versions
import yaml
from _pytest.config import parse_warning_filter
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from source_tree import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
#: Extras that `make` installs with the versions of constraints.txt.
INSTALLED = ("dev", "agents", "atari", "dashboard")


@pytest.fixture(scope="module")
def setup_cfg() -> ConfigParser:
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def needed() -> list[Requirement]:
    """Returns the requirements of the package and of the extras that `make` installs."""
    lines = versions.requirements("options", "install_requires")
    for extra in INSTALLED:
        lines += versions.requirements("options.extras_require", extra)
    return [Requirement(line) for line in lines]


def constraints(python: str) -> dict[str, str]:
    """Maps each package in constraints.txt to its version for a version of Python."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate({"python_version": python}):
                (specifier,) = pin.specifier
                assert specifier.operator == "==", line
                found[canonicalize_name(pin.name)] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_are_inside_the_ranges(python: str) -> None:
    pinned = constraints(python)
    for requirement in needed():
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version}"


def test_each_dependency_has_an_oldest_version() -> None:
    pins = {Requirement(pin).name: Requirement(pin).specifier for pin in versions.oldest_pins()}
    lines = versions.requirements("options", "install_requires")
    assert {Requirement(line).name for line in lines} < set(pins)
    for line in lines:
        requirement = Requirement(line)
        (pin,) = pins[requirement.name]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version)
    assert "plotly" in pins, "the extra dashboard, too"


def test_requirement_without_lower_bound_is_an_error() -> None:
    assert versions.lower_bounds(["ray[tune]>=2.52,<2.61"]) == ["ray[tune]==2.52"]
    for line in ("numpy", "numpy<3", "numpy==2.0"):
        with pytest.raises(ValueError, match=f"'{line}' has no lower bound"):
            versions.lower_bounds([line])


def test_python_versions_are_the_same_everywhere(setup_cfg: ConfigParser) -> None:
    prefix = "Programming Language :: Python :: 3."
    lines = setup_cfg["metadata"]["classifiers"].splitlines()
    assert [
        line.removeprefix("Programming Language :: Python :: ")
        for line in lines
        if line.startswith(prefix)
    ] == [*PYTHONS]
    allowed = SpecifierSet(setup_cfg["options"]["python_requires"])
    assert [minor for minor in range(30) if f"3.{minor}" in allowed] == [10, 11, 12, 13, 14]
    for page in ("Makefile", "README.md", "CONTRIBUTING.md"):
        named = re.findall(r"Python (3\.\d+) to (3\.\d+)", (ROOT / page).read_text())
        assert named, page
        assert set(named) == {(PYTHONS[0], PYTHONS[-1])}, page
    assert "(3, 10) <= sys.version_info[:2] <= (3, 14)" in (ROOT / "Makefile").read_text()


def test_version_is_the_same_everywhere() -> None:
    import polopt

    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == [polopt.__version__]


def test_workflow_tests_the_versions_of_setup_cfg_before_it_publishes() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests-and-release.yml").read_text())
    jobs = workflow["jobs"]
    assert tuple(jobs["versions"]["strategy"]["matrix"]["python"]) == PYTHONS
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test-oldest", "test-newest", "test-wheel"} <= targets
    assert set(jobs["publish"]["needs"]) == {"check", "versions", "wheel", "site"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in str(workflow), "trusted publishing needs no token"
    for page in (str(workflow), (ROOT / "CONTRIBUTING.md").read_text()):
        for pin in ("zensical==0.1.3", "mkdocs==1.6.1 mkdocs-material==9.8.2"):
            assert pin in page


def test_windows_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import polopt

    code = compile(Path(polopt.__file__).read_text(), polopt.__file__, "exec")
    monkeypatch.setattr("os.name", "nt")
    with pytest.raises(ImportError, match="Windows") as refused:
        exec(code, {"__name__": "polopt"})
    monkeypatch.undo()
    assert "\n" not in str(refused.value)


def test_supported_systems_are_the_same_everywhere(setup_cfg: ConfigParser) -> None:
    lines = setup_cfg["metadata"]["classifiers"].splitlines()
    systems = [line for line in lines if line.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]
    assert "You need Linux" in (ROOT / "README.md").read_text()


def test_newest_versions_run_with_deprecations_as_errors() -> None:
    """As pytest reads the option: each filter stops a warning of a module of the package."""
    (_, option) = versions.DEPRECATIONS_ARE_ERRORS
    filters = option.removeprefix("filterwarnings=").splitlines()
    for package in ("ray.tune.tune", "gymnasium.core", "torch.nn", "numpy", "polopt.common.config"):
        for category in (DeprecationWarning, FutureWarning):
            with warnings.catch_warnings():
                for one in filters:
                    warnings.filterwarnings(*parse_warning_filter(one, escape=False))
                with pytest.raises(category):
                    warnings.warn_explicit("old", category, "x.py", 1, module=package)


def test_changelog_has_the_form_of_keep_a_changelog() -> None:
    import polopt

    text = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(polopt.__version__)}\] - \d{{4}}-\d\d-\d\d", releases[1])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known"}
    assert {*re.findall(r"^### (.*)$", text, re.MULTILINE)} <= kinds


def test_tests_that_the_wheel_leaves_out_exist() -> None:
    for path, reason in versions.SOURCE_TESTS.items():
        assert (ROOT / path).is_file()
        assert len(reason.split()) > 4


def sdist_of(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"polopt-1/{name}"), io.BytesIO())
    return path


def test_unpacked_sdist_holds_no_package(tmp_path: Path) -> None:
    names = ["src/polopt/__init__.py", "common/__init__.py", "common/config.py", "setup.cfg"]
    sdist = sdist_of(tmp_path / "a.tar.gz", [*names, "tests/unit/test_a.py", "docs/a.md"])
    tree = versions.unpack_tests(sdist, tmp_path / "tests")
    left = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    assert left == {"setup.cfg", "tests/unit/test_a.py", "docs/a.md"}


def test_missing_files_of_the_sdist_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked = ["docs/a.md", "tests/b.py", "benchmarks/c.py"]
    for name in tracked:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert versions.missing_files(sdist_of(tmp_path / "all.tar.gz", tracked)) == []
    assert versions.missing_files(sdist_of(tmp_path / "some.tar.gz", tracked[1:])) == ["docs/a.md"]


def test_tests_of_a_wheel_import_no_other_polopt(tmp_path: Path) -> None:
    (tmp_path / "polopt").mkdir()
    (tmp_path / "polopt" / "__init__.py").touch()
    with pytest.raises(ValueError, match="not the wheel in"):
        versions.check_imported_from(Path(sys.executable), tmp_path)


@pytest.mark.parametrize(
    ("mode", "torch", "expected"),
    [
        ("oldest", None, "torch==2.11"),
        ("oldest", "2.13.0", "torch==2.13.0"),
        ("newest", "2.13.0", "torch==2.13.0"),
        ("newest", None, None),
    ],
)
def test_version_of_torch_that_is_installed(
    mode: str, torch: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[Any, ...]] = []
    monkeypatch.setattr(versions, "install", lambda _, *arguments: commands.append(arguments))
    versions.install_range(Path("python"), mode, torch)
    (arguments,) = commands
    assert [name for name in arguments if name.startswith("torch")] == ([expected] * bool(expected))
    assert ("eager" in arguments) == (mode == "newest")
