"""Attaches `polopt compare`, and its page on the dashboard and in the report."""

from __future__ import annotations

from typing import Any

from polopt.common.add_ons import AddOn


class Comparison(AddOn):
    """Compares variants of an experiment until each pair is decided."""

    def commands(self) -> dict[str, Any]:
        from polopt.comparison.compare_command import compare

        return {"compare": compare}


ADD_ON = Comparison()
