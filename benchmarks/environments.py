"""Makes a virtual environment for each peer from `peers/<peer>/requirements.txt`.

pip chooses its default builds. With `PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu`, pip
does not install the CUDA libraries, which take several gigabytes and which no benchmark uses.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parent / "peers"
CACHE = Path("~/.cache/polopt-bench").expanduser()
INSTALL_LIMIT_S = 3600.0


class PeerError(Exception):
    """Raised if a peer cannot be installed or does not run. The message is one line."""


def make_environment(peer: str, cache: Path, python: str = sys.executable) -> Path:
    """Returns the Python of a peer's virtual environment. Makes the environment if it is missing or
    if the requirements have changed.

    Args:
        peer: a folder of `peers`.
        cache: folder for environments.
        python: interpreter with which the environment is made.

    Raises:
        PeerError: the environment cannot be made.
    """
    requirements = PEERS / peer / "requirements.txt"
    folder = cache / peer
    made = folder / "bin" / "python"
    done = folder / "requirements.txt"
    if done.exists() and done.read_text() == requirements.read_text():
        return made
    print(f"installing {peer} into {folder}", file=sys.stderr, flush=True)
    if not _runs(python):
        raise PeerError(f"no Python runs as {python!r}")
    _call([python, "-m", "venv", "--clear", str(folder)])
    _call([str(made), "-m", "pip", "install", "--quiet", "-r", str(requirements)])
    done.write_text(requirements.read_text())
    return made


def _runs(python: str) -> bool:
    """Returns whether the interpreter starts. A shim of a version manager may point to a missing
    interpreter."""
    if not shutil.which(python):
        return False
    return subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=INSTALL_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{' '.join(command)}: not done in {INSTALL_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        raise PeerError(last_line(done.stderr or done.stdout))


def last_line(text: str) -> str:
    """Returns the last line of an output that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
