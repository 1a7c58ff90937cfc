"""Measures how long large results take to open, to open again and to refresh.

`python tests/dashboard_scale.py DIR --trials 20 --iterations 2000` writes results to DIR if it has
none, and prints wall and processor seconds. Opening and refreshing include the figures of the
Compare tab. The cache is below DIR.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dashboard_results import PHASES, write_trial

from polopt.dashboards.data.results import ResultsDirectory
from polopt.dashboards.data.selection import Selection, make_runs
from polopt.dashboards.views import compare
from polopt.dashboards.views.tabs import tabs_of


def drawn(directory: ResultsDirectory) -> int:
    """Bytes of the figures of the Compare tab."""
    panels = compare.panels(Selection(make_runs(directory.trials)))
    return sum(len(str(p.figure.to_json())) for p in panels if p.figure is not None)


def timed(name: str, action: object) -> None:
    """Prints the wall and processor seconds of a call."""
    assert callable(action)
    wall, processor = time.perf_counter(), time.process_time()
    action()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    print(f"{name:<28}{wall:7.2f} s wall {processor:7.2f} s processor", flush=True)


def append(results: Path, rows: int) -> None:
    """Appends rows to a tenth of the trials, as running trials do."""
    folders = sorted(results.iterdir())
    for folder in folders[: max(1, len(folders) // 10)]:
        file = folder / "result.json"
        with file.open("rb") as stream:
            stream.seek(-20_000, 2)
            last = json.loads(stream.read().splitlines()[-1])
        with file.open("a") as stream:
            for number in range(1, rows + 1):
                row = {**last, "training_iteration": last["training_iteration"] + number}
                stream.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--again", action="store_true", help="opens with the cache that is there")
    arguments = parser.parse_args()
    results, cache = arguments.directory / "results", arguments.directory / "cache"
    if not results.exists():
        for number in range(arguments.trials):
            optimizer = list(PHASES)[number % len(PHASES)]
            write_trial(results, optimizer, number, arguments.iterations, num_workers=8)
    directory = ResultsDirectory(results, cache)

    def refresh() -> None:
        directory.refresh()
        drawn(directory)

    if arguments.again:
        timed("open again, Compare", refresh)
        append(results, 10)
        timed("refresh, Compare", refresh)
        selection = Selection(make_runs(directory.trials))
        for tab in tabs_of(list(selection.runs)):
            timed(f"tab {tab.title}", lambda tab=tab: tab.panels(selection))
        return
    size = sum(file.stat().st_size for file in results.glob("*/result.json"))
    print(f"{len(list(results.iterdir()))} trials, {size / 1e9:.2f} GB", flush=True)
    shutil.rmtree(cache, ignore_errors=True)
    timed("first open, Compare", refresh)
    kept = sum(file.stat().st_size for file in cache.iterdir())
    print(f"cache {kept / 1e6:.0f} MB", flush=True)
    subprocess.run([sys.executable, __file__, str(arguments.directory), "--again"], check=True)


if __name__ == "__main__":
    main()
