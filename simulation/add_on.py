"""Attaches `polopt simulate` and `polopt plan`."""

from __future__ import annotations

from typing import Any

from polopt.common.add_ons import AddOn


class Simulation(AddOn):
    """Predicts rates, and plans workers."""

    def commands(self) -> dict[str, Any]:
        from polopt.simulation.plan_command import plan
        from polopt.simulation.simulate_command import simulate

        return {"simulate": simulate, "plan": plan}


ADD_ON = Simulation()
