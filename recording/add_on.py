"""Attaches the record of a run and its rerun."""

from __future__ import annotations

from typing import Any

from polopt.common.add_ons import AddOn


class Recording(AddOn):
    """Records the events of a run whose order depends on timing, and repeats runs."""

    def commands(self) -> dict[str, Any]:
        from polopt.recording.rerun_command import rerun

        return {"rerun": rerun}


ADD_ON = Recording()
