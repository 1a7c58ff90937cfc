"""Small calibrations with made-up costs, for tests of simulations."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from toy_envs import Drift

from polopt.simulation import predictions
from polopt.simulation.calibration import Calibration, calibrate
from polopt.simulation.costs import Costs
from polopt.simulation.predictions import Machines, Outcome, simulate
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS

#: More cores than any test uses.
MANY = Machines(cores=1e9)


@functools.cache
def _measured(preset: str, steps: int, options: tuple[tuple[str, Any], ...]) -> Calibration:
    free = Costs(np.zeros(1), np.zeros(1), exchange_s=1.0)  # so that no workers start
    given = {"env": Drift, "num_workers": 2, "rollout_fragment_length": steps, "seed": 0}
    small: dict[str, Any] = {"num_envs_per_worker": 1, "model": {"fcnet_hiddens": (4,)}}
    if preset == "A3C":
        small["grads_per_step"] = 10
    experiment = Experiment.parse({**given, **small, **dict(options)}, PRESETS[preset].preset)
    return calibrate(experiment, 0.02, messages=free)


def calibrated(preset: str, steps: int = 4, options: Any = (), **costs: Any) -> Calibration:
    """Returns a calibration whose values are measured, and whose costs are `costs`. All other costs
    are 0."""
    measured = _measured(preset, steps, tuple(dict(options).items()))
    waits = np.atleast_1d(np.asarray(costs.pop("wait_s", 0.0), float))
    computing = np.broadcast_to(np.asarray(costs.pop("compute_s", 0.0), float), waits.shape)
    kept = {
        "gradient_s": tuple(0.0 for _ in measured.costs.gradient_s),
        "learning": tuple(one._replace(seconds=0.0) for one in measured.costs.learning),
        "transitions_s": tuple((rows, 0.0) for rows, _ in measured.costs.transitions_s),
        "errors_s": tuple((rows, 0.0) for rows, _ in measured.costs.errors_s),
    }
    return measured._replace(costs=Costs(computing, waits, **{**kept, **costs}))


def outcome(calibration: Calibration, workers: int, machines: Machines = MANY) -> Outcome:
    """Simulates briefly, and with exact repetition: the driver's own code takes no time."""
    least, most = predictions.LEAST_ANSWERS, predictions.MANY_ANSWERS
    predictions.LEAST_ANSWERS, predictions.MANY_ANSWERS = 200, 300
    try:
        return simulate(calibration, workers, machines, budget_s=30.0, own_code=0.0)
    finally:
        predictions.LEAST_ANSWERS, predictions.MANY_ANSWERS = least, most


def with_costs(calibration: Calibration, **costs: Any) -> Calibration:
    """Returns the calibration with some other costs."""
    return calibration._replace(costs=dataclasses.replace(calibration.costs, **costs))
