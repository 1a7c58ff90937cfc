"""Creates a virtual environment with the oldest versions that setup.cfg allows.

    python tests/oldest.py .venv-oldest

The lower bound `>=X` of a requirement in `install_requires` becomes `==X`. Everything else is the
newest version that fits. On Linux, torch's default wheel brings CUDA libraries of gigabytes;
`PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` selects CPU wheels.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def lower_bounds(setup_cfg: Path = ROOT / "setup.cfg") -> Iterator[str]:
    """`name==X` for each requirement `name>=X` of the package."""
    parser = ConfigParser()
    parser.read(setup_cfg)
    for line in parser["options"]["install_requires"].split("\n"):
        match = re.fullmatch(r"([\w.-]+(?:\[[\w,-]+\])?)\s*>=\s*([\w.]+).*", line.strip())
        if match:
            yield f"{match[1]}=={match[2]}"


def main() -> None:
    """Creates the environment, or updates it."""
    folder = Path(sys.argv[1])
    pins = list(lower_bounds())
    print("installing", *pins, flush=True)
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *pins, "-e", f"{ROOT}[dev]"], check=True)


if __name__ == "__main__":
    main()
