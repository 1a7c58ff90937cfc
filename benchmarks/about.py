"""The commit, versions and hardware of a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def about() -> dict[str, Any]:
    """Returns commit, versions and hardware. The commit ends in `-dirty` if files differ from it.
    Changes of documents and results do not count, because measurements write them."""
    commit = _git("describe", "--always").stdout.strip()
    changed = _git("status", "--porcelain", "-uno", "--", ":/", ":!/docs", ":!/benchmarks/results")
    names = ("ray", "torch", "gymnasium", "numpy")
    return {
        "commit": commit + ("-dirty" if changed.stdout else ""),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "cpu": cpu_model(),
        **{name: metadata.version(name) for name in names},
    }


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )


def cpu_model() -> str:
    """Returns the model name from /proc/cpuinfo, or on other systems what `platform` reports."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()
