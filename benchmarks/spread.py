"""Two runs of `suite.py` side by side: how far the same figures lie apart.

    .venv/bin/python benchmarks/spread.py FIRST.json SECOND.json

Prints Markdown: the medians of each run, with the least and the largest of its turns.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def table(first: dict[str, Any], second: dict[str, Any]) -> str:
    """Rows that both runs measured; those of a rate without a peer as the rate itself."""
    lines = ["| what | peer | first run | second run | goal |", "|---|---|---:|---:|---:|"]
    others = _by_comparison(second["rows"])
    for comparison, row in _by_comparison(first["rows"]).items():
        other = others.get(comparison)
        key = "ratio" if row["peer"] else "ours"
        if other is None or row[key] is None or other[key] is None:
            continue
        goal = "" if row["goal"] is None else f"{row['goal']:,g}"
        cells = [row["what"], row["peer"], _text(row[key]), _text(other[key]), goal]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_comparison(rows: list[dict[str, Any]]) -> dict[tuple[str, str, int], dict[str, Any]]:
    """By what, by whom, and the how manieth of those it is. Not by the peer's setting: of several
    each run takes the one that it found the fastest."""
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        what, peer = row["what"], row["peer"].partition(" ")[0]
        number = sum(key[:2] == (what, peer) for key in found)
        found[what, peer, number] = row
    return found


def _text(spread: list[float]) -> str:
    median, low, high = spread
    digits = 0 if median >= 1000.0 else 1
    words = f"{median:,.{digits}f}"
    return words if low == high else f"{words} ({low:,.{digits}f} to {high:,.{digits}f})"


def main() -> None:
    """Reads two files, prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    args = parser.parse_args()
    first, second = (json.loads(path.read_text()) for path in (args.first, args.second))
    print(table(first, second))
    for name, run in (("First", first), ("second", second)):
        print(f"\n{name}: `{run['command']}`, commit {run['about']['commit']}.")


if __name__ == "__main__":
    main()
