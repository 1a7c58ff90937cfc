"""`polopt.predict`: calibrates and simulates an experiment in a program."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polopt.command_line.examples import load_example
from polopt.command_line.plan import plan_of
from polopt.common.config import ConfigError
from polopt.simulation.calibration import Calibration, calibrate, check_supported
from polopt.simulation.predictions import Machines, Prediction, predict_with


class Forecast(NamedTuple):
    """The predictions for one experiment.

    Attributes:
        predictions: one prediction for each number of workers.
        calibration: what was measured on this machine.
        machines: the machines of the simulation.
    """

    predictions: list[Prediction]
    calibration: Calibration
    machines: Machines


def predict(
    experiment: str,
    config: Mapping[str, Any] | None = None,
    *,
    workers: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    nodes: int = 1,
    cores: float | None = None,
    latency_s: float = 0.0,
    bandwidth: float = math.inf,
    seconds: float = 40.0,
    repeats: int = 5,
    budget_s: float = 5.0,
    earlier: Forecast | None = None,
) -> Forecast:
    """Predicts how fast an experiment runs with several numbers of workers.

        forecast = polopt.predict("A3C", {"env": "CartPole-v1"}, workers=[4, 64], cores=16)
        print(forecast.predictions[1].env_steps_per_s)

    Args:
        experiment: a preset, a tuned example, or the path of a YAML or Python file.
        config: options that replace options of the experiment.
        workers: the numbers of workers.
        nodes: number of nodes. The driver runs on the first one.
        cores: cores of each node. None means the cores of this machine.
        latency_s: latency of the link of the first node to the others, in seconds.
        bandwidth: bytes per second of this link.
        seconds: about the duration of the calibration, without the start of its workers: two, or up
            to 8 if there are more workers than cores.
        repeats: simulations for each number of workers, from which the intervals follow.
        budget_s: real seconds of one simulation, once it is warm.
        earlier: a forecast that was made on this machine. Its costs of calls and starts are used
            again, so no workers start.

    Raises:
        ConfigError: the config is wrong, or the experiment is one for which simulations were never
            calibrated. The message has the reason.
    """
    if nodes == 1 and (latency_s or bandwidth != math.inf):
        raise ConfigError(
            "latency and bandwidth are those of a link, but nodes is 1. Allowed: 2 or more"
        )
    path = Path(experiment)
    folder = path.resolve().parent if path.suffix == ".py" else None
    planned = plan_of(path.stem, load_example(experiment), dict(config or {}), folder=folder)
    if planned.is_sweep:
        raise ConfigError(f"{experiment}: a sweep has several experiments. Give one of them")
    check_supported(planned.experiment)
    machines = Machines(nodes, cores or float(os.cpu_count() or 1), latency_s, bandwidth)
    costs = None if earlier is None else earlier.calibration.costs
    sharing = max(workers) / nodes / machines.cores
    calibration = calibrate(planned.experiment, seconds, nodes, costs, sharing)
    found = predict_with(calibration, workers, machines, repeats, budget_s)
    return Forecast(found, calibration, machines)
