"""Runs the Python that a page of the documentation prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Runs each block as a program of its own, on a Ray that is there already.
_RUN = """
import json, sys, ray
ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False)
for block in json.load(sys.stdin):
    print("BLOCK", flush=True)
    exec(compile(block, "page", "exec"), {"__name__": "__main__"})
print("END")
"""


def blocks_of(page: str) -> list[str]:
    """The blocks of Python of a page, by its path in the repository."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def run_blocks(
    blocks: list[str], folder: Path, num_cpus: int
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Runs blocks in one process after each other. The output of each, and the process.

    Args:
        blocks: of `blocks_of`.
        folder: current directory, and home, of the process.
        num_cpus: of Ray.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(num_cpus)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},  # of the results
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("END\n")
    return done.stdout.split("BLOCK\n")[1:], done
