"""Measures when a browser shows one plot of several web frameworks, and how many bytes they send.

    python tests/unit/dashboards/framework_load.py --repeats 5 --python VENV/bin/python

Each framework shows only one figure with four curves of 500 points. The frameworks take turns, so
that other work on the machine slows all of them alike. Times and bytes are measured as in
`dashboard_load.py`: each page is opened in a new browser with an empty cache, and the first opening
does not count. `--python` is the interpreter that runs Dash, with `dash` and `flask-compress`. A
framework that is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dashboard_load import Counter, open_page, spread

FIGURE = """
import math
import plotly.graph_objects as go

figure = go.Figure()
for line in range(4):
    x = [0.5 * i for i in range(500)]
    figure.add_scatter(x=x, y=[math.sin(0.01 * i * (line + 1)) for i in range(500)])
"""
STREAMLIT = "import streamlit as st\nst.plotly_chart(figure)\n"
DASH = """
import sys
from dash import Dash, dcc, html
app = Dash(__name__, compress=COMPRESS)
app.layout = html.Div([dcc.Graph(figure=figure)])
app.run(host="127.0.0.1", port=int(sys.argv[1]))
"""
# An HTML file and plotly.js, which the HTTP server of Python serves. With `GZIP`, the script
# compresses the files before the server starts.
STATIC = """
import functools, gzip, http.server, sys
from pathlib import Path
folder = Path(sys.argv[0]).parent / f"static-{sys.argv[1]}"
folder.mkdir()
figure.write_html(folder / "index.html", include_plotlyjs="directory")
if GZIP:
    for file in folder.iterdir():
        file.write_bytes(gzip.compress(file.read_bytes()))

class Handler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self):
        if GZIP:
            self.send_header("Content-Encoding", "gzip")
        super().end_headers()

    def log_message(self, *args):
        pass

make = functools.partial(Handler, directory=str(folder))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), make).serve_forever()
"""
STREAMLIT_OPTIONS = (
    "--server.address=127.0.0.1 --server.headless=true --server.fileWatcherType=none "
    "--browser.gatherUsageStats=false"
)
# For each name: the script, the modules that it needs, and whether `--python` runs it.
FRAMEWORKS = {
    "Streamlit": (STREAMLIT, "streamlit", False),
    "static page": (STATIC.replace("GZIP", "False"), "plotly", False),
    "static page, gzip": (STATIC.replace("GZIP", "True"), "plotly", False),
    "Dash": (DASH.replace("COMPRESS", "False"), "dash", True),
    "Dash, gzip": (DASH.replace("COMPRESS", "True"), "dash, flask_compress", True),
}


@contextlib.contextmanager
def served(name: str, folder: Path, python: str) -> Iterator[str]:
    """Starts a server of the figure, yields its address, and stops it at the end of the block."""
    script, _, other = FRAMEWORKS[name]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = folder / f"{name.split()[0]}-{port}.py"
    file.write_text(FIGURE + script)
    command = [python if other else sys.executable, str(file), str(port)]
    if name == "Streamlit":
        options = [*STREAMLIT_OPTIONS.split(), f"--server.port={port}"]
        command = [sys.executable, "-m", "streamlit", "run", str(file), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, f"the server of {name} ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def has(python: str, modules: str) -> bool:
    """Returns whether a Python interpreter can import the modules."""
    return not subprocess.run([python, "-c", f"import {modules}"], capture_output=True).returncode


def main() -> None:
    """Runs the measurement, and prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="polopt-frameworks-"))
    names = [
        name
        for name, (_, modules, other) in FRAMEWORKS.items()
        if has(args.python if other else sys.executable, modules)
    ]
    try:
        with contextlib.ExitStack() as stack:
            counters = {
                name: Counter(stack.enter_context(served(name, folder, args.python)))
                for name in names
            }
            for counter in counters.values():
                open_page(counter)
            turns = [
                {name: open_page(counter) for name, counter in counters.items()}
                for _ in range(args.repeats)
            ]
    finally:
        shutil.rmtree(folder)
    print("| page of one plot | first plot, s | MB | requests |")
    print("|---|---:|---:|---:|")
    for name in names:
        first, total, _, requests = zip(*(turn[name] for turn in turns), strict=True)
        print(
            f"| {name} | {spread(list(first))} | {statistics.median(total):.1f} "
            f"| {statistics.median(requests):.0f} |"
        )
    command = " ".join(["python", *sys.argv])
    load = os.getloadavg()[0]
    print(
        f"\nMedian (smallest to largest) of {args.repeats}; load {load:.1f}. Command: `{command}`"
    )


if __name__ == "__main__":
    main()
