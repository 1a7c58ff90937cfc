"""Makes the tables of the pages on migration from the same data as error messages.

python tests/unit/rllib/migration_tables.py     # writes the tables into the pages
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from polopt.rllib.other_libraries import (
    CLEANRL,
    RLLIB,
    RLLIB_FIXED,
    RLLIB_MODEL_FIXED,
    RLLIB_REPLAY,
    STABLE_BASELINES3,
    STABLE_BASELINES3_REPLAY,
    Fixed,
    Option,
)

MOST_NAMES = 4
DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / name for name in ("migration.md", "migration-rllib-options.md", "migration-sb3.md")]


def of_options(library: str, defaults: str, options: Iterable[Option]) -> list[str]:
    """Returns the lines of a table of options."""
    lines = [f"| {library} | polopt | {defaults} |", "|---|---|---|---|"]
    for row in options:
        lines.append(f"| {row.given} | {row.here} | {row.defaults or '|'} |")
    return lines


def of_fixed(what: str, rows: Iterable[Fixed]) -> list[str]:
    """Returns the lines of a table of options that polopt accepts only with certain values. If a
    row has many names, it shows only the first names."""
    lines = [
        f"| {what}: accepted values | what polopt does, or what to use instead of other values |",
        "|---|---|",
    ]
    for row in rows:
        given = []
        shown = list(row.same)[: MOST_NAMES if len(row.same) > MOST_NAMES + 1 else None]
        for name in shown:
            values = " or ".join(f"`{value!r}`" for value in row.allowed(name))
            given.append(f"`{name}`: {values}" if values else f"`{name}`")
        others = len(row.same) - len(shown)
        more = f" and {others} others" if others else ""
        lines.append(f"| {', '.join(given)}{more} | {row.here} |")
    return lines


def tables() -> list[list[str]]:
    """Returns all tables, each as a list of lines. The first line identifies the table."""
    return [
        of_options("RLlib", "default of RLlib's PPO | default of `SyncPPO`", RLLIB),
        of_options("RLlib, replay", "default of RLlib's DQN | default of `DQN`", RLLIB_REPLAY),
        of_fixed("RLlib", RLLIB_FIXED),
        of_fixed("key of RLlib's `model`", RLLIB_MODEL_FIXED),
        of_options(
            "Stable-Baselines3", "default of its PPO | default of `SyncPPO`", STABLE_BASELINES3
        ),
        of_options(
            "Stable-Baselines3, replay",
            "default of its DQN | default of `DQN`",
            STABLE_BASELINES3_REPLAY,
        ),
        of_options("CleanRL", "default of `ppo.py` | default of `SyncPPO`", CLEANRL),
    ]


def with_tables(text: str) -> str:
    """Returns the text of a page with new tables. Each new table replaces the table that begins
    with the same line."""
    lines = text.splitlines()
    for table in tables():
        if table[0] not in lines:
            continue  # it is on another page
        first = last = lines.index(table[0])
        while last < len(lines) and lines[last].startswith("|"):
            last += 1
        lines[first:last] = table
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
