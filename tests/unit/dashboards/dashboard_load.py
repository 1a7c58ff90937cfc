"""Measures when a browser shows the first plot of the live page, and how many bytes it receives.

    python tests/unit/dashboards/dashboard_load.py             # 20 trials of 2,000 results
    python tests/unit/dashboards/dashboard_load.py --trials 60 --repeats 5

Writes result files with made-up numbers (`dashboard_results.py`), starts the server and opens the
page in new browsers with empty caches. The first browser is not in the table, because the server
reads the results for it. The column `MB` is the number of bytes that the server sends to the
browser until all plots of the tab are drawn. Some of these bytes are files of Streamlit, which have
their own column. The other bytes are the content of the page.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from browser import Browser
from dashboard_server import running_server

GENERATOR = Path(__file__).with_name("dashboard_results.py")
FIRST_PLOT = "[...document.querySelectorAll('.js-plotly-plot')].some(plot => plot._fullData)"
ALL_PLOTS = """(plots => plots.length > 0 && plots.every(plot => plot._fullData))(
    [...document.querySelectorAll('.js-plotly-plot')]) &&
    !document.querySelector('[data-testid="stStatusWidget"], [data-stale="true"]')"""
QUIET_S = 1.0  # the page is complete once all plots have stayed drawn for this many seconds


class Counter:
    """A proxy that forwards connections to a server, and counts the bytes that the server sends.

    Attributes:
        address: address of this proxy.
        received: number of bytes from the server so far.
    """

    def __init__(self, address: str) -> None:
        self._target = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            browser, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            for pair in ((browser, server, False), (server, browser, True)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counts:
                    self.received += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # the other side has closed the connection
            source.close()
            target.close()


@contextmanager
def opened(address: str) -> Iterator[Browser]:
    """Starts a browser with an empty cache, and ends it with the block."""
    profile = Path(tempfile.mkdtemp(prefix="polopt-browser-"))
    try:
        with Browser(profile) as browser:
            browser.look(1280, "light")
            yield browser
    finally:
        shutil.rmtree(profile, ignore_errors=True)


def open_page(counter: Counter) -> tuple[float, float, float, int]:
    """Opens the page in a new browser. Returns the seconds to the first plot, the megabytes from
    the server, the megabytes of files among them, and the number of requests."""
    with opened(counter.address) as browser:
        before = counter.received
        begun = time.perf_counter()
        browser.open(counter.address)
        browser.wait_for(FIRST_PLOT)
        first_s = time.perf_counter() - begun
        drawn_since = time.perf_counter()
        while time.perf_counter() - drawn_since < QUIET_S:
            if not browser.run(ALL_PLOTS):
                drawn_since = time.perf_counter()
            time.sleep(0.1)
        total = counter.received - before
        return first_s, total / 1e6, browser.file_bytes / 1e6, len(browser.requests)


def spread(values: list[float]) -> str:
    """Formats values as `median (smallest to largest)`."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Runs the measurement, and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="polopt-dashboard-"))
    results = folder / "results" / "made-up"
    sizes = ["--trials", str(args.trials), "--iterations", str(args.iterations)]
    try:
        subprocess.run([sys.executable, str(GENERATOR), str(results), *sizes], check=True)
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        with running_server(results.parent, environment) as address:
            counter = Counter(address)
            open_page(counter)
            found = [open_page(counter) for _ in range(args.repeats)]
    finally:
        shutil.rmtree(folder)
    first, total, files, requests = (
        list(map(float, values)) for values in zip(*found, strict=True)
    )
    print("| trials x results | first plot, s | MB | of them files, MB | requests |")
    print("|---|---:|---:|---:|---:|")
    print(
        f"| {args.trials:,} x {args.iterations:,} | {spread(first)} | {spread(total)} "
        f"| {spread(files)} | {statistics.median(requests):.0f} |"
    )
    command = " ".join(["python", *sys.argv])
    print(f"\nMedian (smallest to largest) of {args.repeats}. Command: `{command}`")


if __name__ == "__main__":
    main()
