"""Runs the Python code blocks of a documentation page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from source_tree import ROOT

#: Runs each block like a separate program, on a Ray that is already running.
_RUN = """
import json, sys, ray
ray.init(num_cpus=int(sys.argv[1]), include_dashboard=False)
for block in json.load(sys.stdin):
    print("BLOCK", flush=True)
    exec(compile(block, "page", "exec"), {"__name__": "__main__"})
print("END")
"""


def blocks_of(page: str) -> list[str]:
    """Returns the Python code blocks of the page with this path in the repository."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def run_blocks(
    blocks: list[str], folder: Path, num_cpus: int
) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """Runs code blocks one after the other in one process. Returns the output of each block, and
    the process.

    Args:
        blocks: the result of `blocks_of`.
        folder: current directory and home directory of the process.
        num_cpus: number of Ray's CPUs.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(num_cpus)],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},  # so results are below this folder
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("END\n")
    return done.stdout.split("BLOCK\n")[1:], done
