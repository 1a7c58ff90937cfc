"""Files of stored runs: one line of JSON for each run, so that a change of a run is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_runs(path: Path) -> dict[str, Any]:
    """Returns the runs in a file by name, or an empty dict if there is no file."""
    if not path.exists():
        return {}
    runs = [json.loads(line) for line in path.read_text().splitlines()]
    return {run.pop("run"): run for run in runs}


def write_runs(path: Path, runs: dict[str, Any]) -> None:
    """Writes runs, sorted by name. If the process ends before all is written, the file is as
    before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"run": name, **runs[name]}) for name in sorted(runs)]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(f"{line}\n" for line in lines))
    partial.replace(path)


def between(text: str, begin: str, end: str, lines: list[str]) -> str:
    """Returns the text of a page with other lines between the lines `begin` and `end`.

    Raises:
        ValueError: the page does not have these lines.
    """
    before, begun, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the page has no {begin} ... {end}")
    return "\n".join([before + begin, *lines, end + after])
