"""Measures how long the live page takes to start, to open results, and to refresh.

    python tests/unit/dashboards/dashboard_scale.py                               # 10 minutes
    python tests/unit/dashboards/dashboard_scale.py --sizes 20x2000 --repeats 5   # a minute

Writes result files with made-up numbers (`dashboard_results.py`). A row has about 4 KB, so 100
trials of 10,000 results take 4 GB of disk, and minutes to write. Then measures in new processes:

- start: the time from the command `polopt dashboard` to the first response of its server.
- first open: the page reads all files, and writes the columnar cache.
- open again: the page reads the cache.
- refresh: the page reads one new row of each trial.

The times of "open" and "refresh" include the time to make the panels of the slowest tab as JSON,
which the page sends to the browser. They do not include the time in which the browser draws.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from dashboard_results import PHASES, write_trial

from polopt.dashboards.data.selection import Selection, make_runs
from polopt.dashboards.data.trials import ResultsDirectory
from polopt.dashboards.views.tabs import tabs_of

GENERATOR = Path(__file__).with_name("dashboard_results.py")
START_LIMIT_S = 60.0


def slowest_tab(directory: ResultsDirectory) -> tuple[float, str]:
    """Returns the seconds for the panels of the slowest tab, and the title of this tab."""
    times = []
    for tab in tabs_of(make_runs(directory.trials)):
        begun = time.perf_counter()
        runs = make_runs(directory.trials)
        for panel in tab.panels(Selection(runs)):
            if panel.figure is not None:
                panel.figure.to_json()
        times.append((time.perf_counter() - begun, tab.title))
    return max(times)


def measure(folder: Path, number: int) -> dict[str, float | str]:
    """Opens results in this process, appends one row to each trial, and refreshes the results.

    Args:
        folder: directory of the results.
        number: number of the appended row, which is also the number of rows afterwards.

    Returns:
        The seconds of `open` and `refresh`, and the title of the slowest tab.
    """
    begun = time.perf_counter()
    directory = ResultsDirectory(folder)
    directory.refresh()
    read_s = time.perf_counter() - begun
    drawn_s, tab = slowest_tab(directory)
    for index in range(len(directory.trials)):
        optimizer = list(PHASES)[index % len(PHASES)]
        write_trial(folder, optimizer, index, 1, num_workers=8, first=number)
    begun = time.perf_counter()
    directory.refresh()
    refreshed_s = time.perf_counter() - begun
    redrawn_s, _ = slowest_tab(directory)
    rows = {len(trial.values("training_iteration")) for trial in directory.trials}  # type: ignore[arg-type]
    assert rows == {number}, f"rows by trial: {rows}, expected {number}"
    return {"open": read_s + drawn_s, "refresh": refreshed_s + redrawn_s, "tab": tab}


def start(folder: Path, environment: dict[str, str]) -> float:
    """Returns the seconds from the command to the first response of the server.

    Raises:
        TimeoutError: after `START_LIMIT_S`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("polopt")), "dashboard", str(folder)]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port), "--no-browser"],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    try:
        while time.perf_counter() - begun < START_LIMIT_S:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5.0) as answer:
                    if answer.status == 200:
                        return time.perf_counter() - begun
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
    finally:
        process.terminate()
        process.wait(10.0)
    raise TimeoutError(f"no answer from port {port} within {START_LIMIT_S:g} s")


def in_new_process(folder: Path, number: int, environment: dict[str, str]) -> dict[str, float]:
    """Runs `measure` in a new process."""
    command = [sys.executable, __file__, "--measure", str(folder), str(number)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def spread(values: list[float]) -> str:
    """Formats values as `median (smallest to largest)`."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def row(trials: int, iterations: int, repeats: int) -> str:
    """Measures with one size of results, and returns the row of the table."""
    folder = Path(tempfile.mkdtemp(prefix="polopt-dashboard-"))
    # This `RAY_TMPDIR` has no sessions. So the page does not also read results of earlier sessions.
    isolated = {"XDG_CACHE_HOME": str(folder / "cache"), "RAY_TMPDIR": str(folder)}
    environment = {**os.environ, **isolated}
    results = folder / "results" / "made-up"
    try:
        sizes = ["--trials", str(trials), "--iterations", str(iterations)]
        subprocess.run([sys.executable, str(GENERATOR), str(results), *sizes], check=True)
        size_mb = sum(file.stat().st_size for file in results.rglob("*.json")) / 1e6
        starts = [start(results.parent, environment) for _ in range(repeats)]
        first = in_new_process(results, iterations + 1, environment)
        rest = [in_new_process(results, iterations + 2 + n, environment) for n in range(repeats)]
    finally:
        shutil.rmtree(folder)
    refreshes = [found["refresh"] for found in (first, *rest)]
    cells = [
        f"{trials:,} x {iterations:,}",
        f"{size_mb:,.0f}",
        spread(starts),
        f"{first['open']:.1f}",
        spread([found["open"] for found in rest]),
        spread(refreshes),
        str(first["tab"]),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs the measurement, and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["20x2000", "100x10000"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        folder, number = args.measure
        print(json.dumps(measure(Path(folder), int(number))))
        return
    print("| trials x results | MB | start, s | first open, s | open again, s ", end="")
    print("| refresh, s | slowest tab |")
    print("|---|---:|---:|---:|---:|---:|---|", flush=True)
    for size in args.sizes:
        trials, iterations = map(int, size.split("x"))
        print(row(trials, iterations, args.repeats), flush=True)
    command = " ".join(["python", *sys.argv])
    print(f"\nMedian (smallest to largest) of {args.repeats}. Command: `{command}`")


if __name__ == "__main__":
    main()
