"""Attaches `polopt compare`, and its page on the dashboard and in the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polopt.common.add_ons import AddOn


class Comparison(AddOn):
    """Compares variants of an experiment until each pair is decided."""

    def commands(self) -> dict[str, Any]:
        from polopt.comparison.compare_command import compare

        return {"compare": compare}

    def tabs(self, runs: Sequence[Any]) -> list[Any]:
        from polopt.comparison.decisions_tab import tabs_of

        return tabs_of(runs)


ADD_ON = Comparison()
