"""Files of stored runs: one line of JSON for each run, so that a change of a run is one line. Also
the command line of scripts that store their runs and write a page from them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from about import about


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


def facts_of(store: Mapping[str, Any]) -> str:
    """Returns the commit, versions and hardware of stored runs, for the line below a table."""
    return ", ".join(f"{name} {value}" for name, value in store.get("about", {}).items())


def measure_or_page(
    description: str | None,
    store: Path,
    path: Path,
    page: Callable[[dict[str, Any], str], str],
    measure: Callable[[argparse.Namespace], dict[str, Any]],
    **options: float,
) -> None:
    """Runs a script from its command line: measures and stores all runs unless `--page` is given,
    and writes the page.

    Args:
        description: the docstring of the script.
        store: the file of the runs.
        path: the page.
        page: returns the text of the page, from the runs and the former text.
        measure: returns all runs by name.
        options: the options of the script with numbers, and their defaults.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--page", action="store_true", help="only write the page")
    args = parser.parse_args()
    if not args.page:
        write_runs(store, {**measure(args), "about": about()})
    path.write_text(page(read_runs(store), path.read_text()))
