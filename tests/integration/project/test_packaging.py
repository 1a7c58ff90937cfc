"""Tests setup.cfg, the contents of the wheel, and the modules that `import polopt` loads."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_tree import PACKAGE_FOLDERS, ROOT, Module, imported_names, modules

import polopt

STUB = ROOT / "trainers" / "typed_presets.pyi"
# The files that the build of a wheel needs in addition to the folders of the packages.
#: Patterns of the files in a folder that the wheel holds.
PACKAGED = ("**/*.py", "*.yaml", "*.pyi", "*.json")
BUILD_FILES = ["setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"]


def declared() -> tuple[list[str], dict[str, str]]:
    """Returns the options `packages` and `package_dir` of setup.cfg."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    packages = parser["options"]["packages"].split()
    lines = parser["options"]["package_dir"].strip().splitlines()
    return packages, {key.strip(): value.strip() for key, value in (ln.split("=") for ln in lines)}


def package_folders(root: Path) -> dict[str, str]:
    """Returns the folder of each package below `root`, by import name."""
    folders = {"polopt": "src/polopt"}
    for top in sorted(root.glob("*/__init__.py")):
        for init in sorted(top.parent.rglob("__init__.py")):
            folder = init.parent.relative_to(root)
            folders["polopt." + ".".join(folder.parts)] = folder.as_posix()
    return folders


def packaging_faults(
    packages: list[str], package_dir: dict[str, str], folders: dict[str, str]
) -> list[str]:
    """Returns the differences between the lists of setup.cfg and the folders, one line each."""
    faults = [f"{name} is not in packages" for name in folders if name not in packages]
    faults += [f"{name} has no folder" for name in packages if name not in folders]
    faults += [f"{name} is listed twice" for name in set(packages) if packages.count(name) > 1]
    for name, folder in folders.items():
        # setuptools finds nested sub-packages in the folders of their parent packages.
        if name.count(".") < 2 and package_dir.get(name) != folder:
            faults.append(f"package_dir maps {name} to {package_dir.get(name)}, not to {folder}")
    return faults


def test_setup_cfg_lists_every_folder() -> None:
    packages, package_dir = declared()
    assert packaging_faults(packages, package_dir, package_folders(ROOT)) == []


def test_missing_package_is_found() -> None:
    packages, package_dir = declared()
    folders = package_folders(ROOT)
    for name in packages:
        rest = [other for other in packages if other != name]
        assert packaging_faults(rest, package_dir, folders) == [f"{name} is not in packages"]
    assert packaging_faults([*packages, "polopt.gone"], package_dir, folders) == [
        "polopt.gone has no folder"
    ]
    nested = {**folders, "polopt.rollouts.deeper": "rollouts/deeper"}
    assert packaging_faults(packages, package_dir, nested) == [
        "polopt.rollouts.deeper is not in packages"
    ]
    moved = {**package_dir, "polopt.metrics": "elsewhere"}
    assert packaging_faults(packages, moved, folders) == [
        "package_dir maps polopt.metrics to elsewhere, not to metrics"
    ]


def test_each_folder_has_a_relative_link() -> None:
    folders = {folder for name, folder in package_folders(ROOT).items() if name.count(".") == 1}
    links = {link.name: link for link in (ROOT / "src/polopt").iterdir() if link.is_symlink()}
    assert set(links) == folders
    for folder, link in links.items():
        assert link.readlink() == Path("../..") / folder


def copy_sources(tree: Path, with_links: bool) -> None:
    """Copies all that a build needs. Without links, `tree` looks like a checkout on a system
    without symbolic links."""
    shutil.copytree(
        ROOT / "src",
        tree / "src",
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"),
    )
    if not with_links:
        for link in [path for path in (tree / "src/polopt").iterdir() if path.is_symlink()]:
            link.unlink()
    for folder in {folder.split("/")[0] for folder in package_folders(ROOT).values()} - {"src"}:
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILD_FILES:
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree / name)


@pytest.mark.parametrize("with_links", [True, False])
def test_wheel_holds_every_module(tmp_path: Path, with_links: bool) -> None:
    tree = tmp_path / "tree"
    copy_sources(tree, with_links)
    (tree / "tuned_examples" / "planted.yaml").write_text("goal: 1\n")
    expected = {"polopt/__init__.py", "polopt/__main__.py", "polopt/py.typed"}
    for folder in {folder.split("/")[0] for folder in package_folders(ROOT).values()} - {"src"}:
        modules = [tree.glob(f"{folder}/{files}") for files in PACKAGED]
        expected |= {
            f"polopt/{path.relative_to(tree).as_posix()}" for found in modules for path in found
        }

    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*build, "--no-index", "-w", str(tmp_path / "dist"), str(tree)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob(f"polopt-{polopt.__version__}-*.whl")
    # This compares all names in the archive, so that it also finds a folder such as `optimizers/`
    # outside of `polopt/`.
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == expected


@pytest.mark.parametrize("with_links", [True, False])
def test_editable_install_is_a_path_where_possible(tmp_path: Path, with_links: bool) -> None:
    tree = tmp_path / "tree"
    copy_sources(tree, with_links)
    code = "from setuptools.build_meta import build_editable; build_editable('dist')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=tree, capture_output=True, timeout=300, check=True
    )
    (file,) = (tree / "dist").glob("*.whl")
    with ZipFile(file) as wheel:
        held = {name: wheel.read(name).decode() for name in wheel.namelist()}
    installed = {name: text for name, text in held.items() if ".dist-info/" not in name}
    if with_links:  # editors and type checkers follow a path file, but not an import hook
        assert [text.strip() for text in installed.values()] == [str(tree / "src")]
    else:
        assert any(name.endswith("_finder.py") for name in installed)


#: Extras, each with the only folder or file that may import packages of this extra.
OPTIONAL = [
    ("dashboard", "dashboards"),
    ("dashboard", "comparison/decisions_tab.py"),
    ("torchrl", "collectors/tensordict.py"),
    ("agents", "rollouts/envs/env_sources.py"),
    ("agents", "tuned_examples/self_play.py"),
]


def undeclared_imports(found: Sequence[Module], setup_cfg: Path = ROOT / "setup.cfg") -> list[str]:
    """Returns the imports of packages that setup.cfg does not declare for the importing module, one
    line each."""
    parser = ConfigParser()
    parser.read(setup_cfg)

    def named(section: str, option: str) -> set[str]:
        lines = parser[section][option].split("\n")
        return {canonicalize_name(Requirement(line).name) for line in lines if line.strip()}

    required = named("options", "install_requires")
    distributions = packages_distributions()
    faults = []
    for module in found:
        allowed = set(required)
        for extra, place in OPTIONAL:
            if module.path.is_relative_to(place):
                allowed |= named("options.extras_require", extra)
        for line, name in imported_names(module):
            top = name.partition(".")[0]
            of = {canonicalize_name(each) for each in distributions.get(top, [top])}
            if top not in sys.stdlib_module_names and top != "polopt" and not of & allowed:
                faults.append(f"{module.path}:{line}: {name}")
    return faults


def test_each_imported_package_is_declared() -> None:
    assert undeclared_imports(modules(ROOT, [*PACKAGE_FOLDERS, "src"])) == []


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("import tree", ["tree"]),
        ("def f():\n    from scipy.stats import rankdata", ["scipy.stats.rankdata"]),
        ("import yaml, rich.table, ray.tune, os.path\nfrom polopt.common import config", []),
    ],
)
def test_undeclared_import_is_found(tmp_path: Path, source: str, faults: list[str]) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "planted.py").write_text(source)
    found = undeclared_imports(modules(tmp_path, ["common"]))
    assert [fault.rpartition(": ")[2] for fault in found] == faults


def test_import_loads_no_dependency() -> None:
    script = """
import sys
import polopt
dir(polopt), polopt.__version__
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True
    )
    loaded = set(done.stdout.split())
    assert "polopt" in loaded
    assert not {"ray", "torch", "numpy", "gymnasium", "pydantic"} & loaded


def test_public_names_resolve_as_type_checkers_see_them() -> None:
    source = Path(polopt.__file__).read_text()
    for_checkers = {
        alias.asname: node.module
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
        if alias.asname
    }
    assert set(polopt.__all__) == {"__version__", *for_checkers}
    assert set(polopt.__all__) <= set(dir(polopt))
    for name, module in for_checkers.items():
        assert module is not None
        if module == "polopt.trainers.typed_presets":  # a stub, which no program imports
            found = getattr(polopt, name)
            assert re.search(rf"^(class|def) {name}\(", STUB.read_text(), re.MULTILINE)
            assert found.__module__.startswith(("polopt.trainers.", "polopt.command_line."))
            continue
        assert getattr(polopt, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = polopt.nothing
