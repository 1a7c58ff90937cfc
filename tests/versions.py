"""Runs tests with other versions of packages than constraints.txt has, or with an installed wheel.

    python tests/versions.py oldest .venv-oldest tests/unit
    python tests/versions.py newest .venv-newest tests/unit
    python tests/versions.py wheel .venv-wheel tests/unit -k config

The first argument is the mode. The second argument is the folder of the virtual environment, which
is created, or updated if it exists. All further arguments go to pytest. Without further arguments,
no test runs.

- `oldest`: the lower bound `>=X` of each requirement in setup.cfg, in `install_requires` and in the
  extra `dashboard`, becomes `==X`. Everything else is the newest version that fits.
- `newest`: the newest versions of the registry. setup.cfg has no upper bounds. Deprecation warnings
  of Ray, Gymnasium, torch and NumPy about a call by polopt or by one of them are errors
  (`DEPRECATIONS_ARE_ERRORS`), so that this mode fails before a later release removes what polopt
  uses.
- `wheel`: builds the sdist, and the wheel from the sdist, into `dist/`. Checks both with twine.
  Installs the wheel with the versions of constraints.txt. Then runs the tests of the unpacked
  sdist, without the folders of the package, so that Python can only import the installed wheel. The
  tests in `SOURCE_TESTS` do not run.

On Linux, torch's default wheel brings CUDA libraries of gigabytes.
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` selects CPU wheels. `--torch X` installs
the version X of torch, for machines that have a CPU wheel of this version only.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The extras that are installed. Tests that need other extras are skipped.
EXTRAS = "dev,agents,atari,dashboard"
#: Tests that need the source tree of the package, and their use of this tree.
SOURCE_TESTS = {
    "tests/unit/project/test_import_direction.py": "parses the modules in the folders at the root",
    "tests/unit/project/test_source_rules.py": "parses the modules in the folders at the root",
    "tests/unit/project/test_pages_of_figures.py": "reads the tuned examples in their folder",
    "tests/integration/project/test_packaging.py": "compares setup.cfg with folders, builds wheels",
}
#: The option of pytest that makes deprecation warnings errors. It replaces the filters of
#: pyproject.toml. A dependency's own use of another dependency, which polopt cannot change, gets a
#: filter `ignore` after these.
DEPRECATIONS_ARE_ERRORS = (
    "-o",
    "filterwarnings=error::DeprecationWarning:(polopt|ray|gymnasium|torch|numpy)\n"
    "error::FutureWarning:(polopt|ray|gymnasium|torch|numpy)\n"
    "error::numpy.exceptions.VisibleDeprecationWarning",
)
#: Folders that the sdist must contain, because tests that run without a checkout need them.
SDIST_FOLDERS = ("tests", "docs", "benchmarks")


def requirements(section: str, option: str) -> list[str]:
    """Returns the lines of one option of setup.cfg."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return [line.strip() for line in parser[section][option].splitlines() if line.strip()]


def lower_bounds(lines: list[str]) -> list[str]:
    """Returns `name==X` for each requirement `name>=X`.

    Raises:
        ValueError: a requirement has no lower bound.
    """
    pins = []
    for line in lines:
        match = re.fullmatch(r"([\w.-]+(?:\[[\w,-]+\])?)\s*>=\s*([\w.]+)\s*(,.*)?", line)
        if not match:
            raise ValueError(f"setup.cfg: {line!r} has no lower bound")
        pins.append(f"{match[1]}=={match[2]}")
    return pins


def oldest_pins() -> list[str]:
    """Returns the requirements `name==X` of mode `oldest`."""
    lines = requirements("options", "install_requires")
    return lower_bounds([*lines, *requirements("options.extras_require", "dashboard")])


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Runs a program.

    Raises:
        subprocess.CalledProcessError: the program fails.
    """
    print("+", *command, flush=True)
    subprocess.run([*map(str, command)], check=True, cwd=cwd)


def create(folder: Path) -> Path:
    """Creates the virtual environment if it does not exist. Returns the path of its Python."""
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    return python


def install(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def install_range(python: Path, mode: str, torch: str | None) -> None:
    """Installs polopt in editable mode, with the versions of mode `oldest` or `newest`."""
    pins = oldest_pins() if mode == "oldest" else []
    if torch:
        pins = [pin for pin in pins if not pin.startswith("torch==")] + [f"torch=={torch}"]
    upgrade = ["--upgrade", "--upgrade-strategy", "eager"] if mode == "newest" else []
    install(python, *upgrade, *pins, "-e", f"{ROOT}[{EXTRAS}]")


def build(python: Path, dist: Path) -> tuple[Path, Path]:
    """Builds the sdist and the wheel, and checks their metadata with twine.

    Returns:
        The paths of the sdist and of the wheel.

    Raises:
        subprocess.CalledProcessError: a build or a check fails.
        ValueError: the sdist lacks a tracked file of the folders `SDIST_FOLDERS`.
    """
    install(python, "-c", ROOT / "constraints.txt", "build", "twine>=6.1")
    # Without options, `build` makes the wheel from the sdist. So the wheel also lacks a file that
    # the sdist lacks.
    run(python, "-m", "build", "--outdir", dist, ROOT)
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    run(python, "-m", "twine", "check", "--strict", sdist, wheel)
    missing = missing_files(sdist)
    if missing:
        raise ValueError(f"the sdist misses {', '.join(missing)}: see MANIFEST.in")
    return sdist, wheel


def missing_files(sdist: Path) -> list[str]:
    """Returns the files of `SDIST_FOLDERS` that git tracks, but the sdist does not contain."""
    command = ["git", "ls-files", "-z", *SDIST_FOLDERS]
    listed = subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    return sorted(set(filter(None, listed.split("\0"))) - held)


def unpack_tests(sdist: Path, folder: Path) -> Path:
    """Unpacks an sdist without the folders of the package.

    Returns:
        The folder that contains `tests`.
    """
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.10.12 and 3.11.4
            archive.extractall(folder, filter="data")
        else:
            archive.extractall(folder)
    (tree,) = folder.iterdir()
    for init in [*tree.glob("*/__init__.py"), *tree.glob("src/*/__init__.py")]:
        shutil.rmtree(init.parent)
    return tree


def check_imported_from(python: Path, tree: Path) -> None:
    """Checks that Python in `tree` imports the installed polopt.

    Raises:
        ValueError: it imports a different polopt.
    """
    code = "import polopt; print(polopt.__file__)"
    command = [str(python), "-c", code]
    done = subprocess.run(command, check=True, cwd=tree, stdout=subprocess.PIPE, text=True)
    found = Path(done.stdout.strip())
    if python.parents[1] not in found.parents:
        raise ValueError(f"polopt is {found}, not the wheel in {python.parents[1]}")


def main() -> int:
    """Prepares the virtual environment, and runs the tests. Returns the exit status of pytest, or 0
    if no test runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch", help="version of torch instead of the oldest or newest one")
    parser.add_argument("mode", choices=("oldest", "newest", "wheel"))
    parser.add_argument("folder", type=Path, help="virtual environment")
    parser.add_argument("pytest", nargs=argparse.REMAINDER, help="arguments for pytest")
    args = parser.parse_args()
    if args.torch and args.mode == "wheel":
        parser.error("mode wheel has the torch of constraints.txt; leave --torch out")

    python = create(args.folder)
    with tempfile.TemporaryDirectory(prefix="polopt-versions-") as temporary:
        tree = ROOT
        skipped: list[str] = []
        if args.mode == "wheel":
            shutil.rmtree(ROOT / "dist", ignore_errors=True)  # holds what a release publishes
            sdist, wheel = build(python, ROOT / "dist")
            install(python, "-c", ROOT / "constraints.txt", f"{wheel}[{EXTRAS}]")
            # Without this, pip would keep an older wheel with the same version number.
            install(python, "--force-reinstall", "--no-deps", wheel)
            tree = unpack_tests(sdist, Path(temporary) / "tests")
            check_imported_from(python, tree)
            skipped = [f"--ignore={path}" for path in SOURCE_TESTS]
            for path, reason in SOURCE_TESTS.items():
                print(f"left out: {path}: it {reason}", flush=True)
        else:
            install_range(python, args.mode, args.torch)
        if not args.pytest:
            return 0
        strict = DEPRECATIONS_ARE_ERRORS if args.mode == "newest" else ()
        command = [str(python), "-m", "pytest", *skipped, *strict, *args.pytest]
        return subprocess.run(command, cwd=tree).returncode


if __name__ == "__main__":
    sys.exit(main())
