"""The command `polopt simulate`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polopt.command_line.output import bad_input, say
from polopt.common.config import ConfigError

#: What moves the rate, by bottleneck.
ADVICE = {
    "the cores": "more cores or nodes, or a cheaper environment",
    "the driver, which learns": "larger minibatches, fewer epochs, or workers that learn",
    "the driver's messages": "longer fragments, or more environments per worker",
    "the link": "longer fragments, compressed gradients, or a faster link",
    "the workers": "more workers",
    "workers wait for learning": "collection=overlapped, an asynchronous strategy, or a smaller "
    "learning time",
    "the slowest worker": "an asynchronous strategy, longer fragments, or fraction_workers below 1",
}


def simulate(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXAMPLE_OR_CONFIG",
            help="A tuned example or a preset (see `polopt list`), or a YAML or Python file.",
        ),
    ],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Changes to the config.")
    ] = None,
    workers: Annotated[
        str, typer.Option(metavar="N1,N2", help="Numbers of workers to simulate.")
    ] = "1,2,4,8,16,32,64",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    cores: Annotated[
        float | None,
        typer.Option(min=0.1, help="Cores of each node. Default: the cores of this machine."),
    ] = None,
    latency: Annotated[
        float, typer.Option(min=0.0, metavar="MS", help="Latency between nodes in milliseconds.")
    ] = 0.0,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="MBIT", help="Bandwidth between nodes in megabits per s."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="About the duration of the calibration, without starts.")
    ] = 40.0,
    repeats: Annotated[
        int, typer.Option(min=2, help="Simulations for each number of workers.")
    ] = 5,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the predictions here.")
    ] = None,
) -> None:
    """Predict how fast an experiment runs with other numbers of workers."""
    with bad_input():
        from polopt.command_line.examples import apply_changes, load_example
        from polopt.command_line.names import import_from
        from polopt.simulation.predict_function import predict

        import_from(Path.cwd())
        _, options = apply_changes(load_example(experiment), changes or [])
        say("calibrating. The machine should do nothing else meanwhile")
        forecast = predict(
            experiment,
            options,
            workers=numbers(workers),
            nodes=nodes,
            cores=cores,
            latency_s=latency / 1e3,
            bandwidth=math.inf if bandwidth is None else bandwidth * 1e6 / 8,
            seconds=seconds,
            repeats=repeats,
        )
    predictions, machines = forecast.predictions, forecast.machines
    for line in table(predictions):
        say(line)
    for line in findings(predictions, machines):
        say(line)
    if json_file is not None:
        json_file.write_text(json.dumps(report(experiment, machines, predictions), indent=1) + "\n")


def numbers(text: str) -> list[int]:
    """Returns the numbers of a list such as `1,2,4`.

    Raises:
        ConfigError: a part is not a whole number of 1 or more.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not part.isdecimal() or int(part) < 1]
    if wrong:
        raise ConfigError(
            f"--workers: got {wrong[0]!r}. Allowed: numbers of 1 or more, as in 1,2,4"
        )
    return [int(part) for part in parts]


def table(predictions: Sequence[Any]) -> list[str]:
    """Returns the lines of a table, one prediction a line."""
    lines = [
        f"{'workers':>7} {'steps/s':>10} {'from':>10} {'to':>10} {'efficiency':>10} "
        f"{'lag':>7} {'driver':>7} {'cores':>6}  bottleneck"
    ]
    for one in predictions:
        lines.append(
            f"{one.workers:>7} {one.env_steps_per_s:>10,.0f} {one.low:>10,.0f} {one.high:>10,.0f} "
            f"{one.efficiency:>10.0%} {one.policy_lag:>7.1f} {one.driver_busy:>7.0%} "
            f"{one.cores_busy:>6.0%}  {one.bottleneck}"
        )
    return lines


def findings(predictions: Sequence[Any], machines: Any) -> list[str]:
    """Returns what follows from the predictions: where the rate saturates, what would move it,
    and whether cores are oversubscribed."""
    from polopt.simulation.predictions import saturation

    last = max(predictions, key=lambda one: one.workers)
    points = [saturation(predictions, field) for field in ("env_steps_per_s", "low", "high")]
    if len(predictions) == 1:
        lines = ["for the number of workers at which the rate saturates, give several --workers"]
    elif points[0] is None:
        lines = [f"the rate still grows at {last.workers} workers"]
    else:
        known = sorted(point for point in points if point is not None)
        lines = [
            f"the rate saturates at about {points[0]:.0f} workers ({known[0]:.0f} to "
            f"{known[-1]:.0f}). The bottleneck is then: {last.bottleneck}"
        ]
    lines.append(f"what moves the rate at {last.workers} workers: {ADVICE[last.bottleneck]}")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(last.phases.items()))
    lines.append(f"time of a worker at {last.workers} workers: {shares}")
    crowded = [one for one in predictions if one.oversubscribed]
    if crowded:
        first = crowded[0]
        lines.append(
            f"cores are oversubscribed from {first.workers} workers on: there are "
            f"{first.oversubscribed:.1f} processes for each of {machines.cores:g} cores. They push "
            "each other's data out of the caches. Intervals are wider there, because this costs "
            "some work more than other work"
        )
    lines.append(f"all workers are up after about {last.start_up_s:.0f} s")
    return lines


def report(experiment: str, machines: Any, predictions: Sequence[Any]) -> dict[str, Any]:
    """Returns the content of the file of `--json`."""
    from polopt.simulation.predictions import saturation

    own = machines._asdict()
    own["bandwidth"] = None if math.isinf(machines.bandwidth) else machines.bandwidth
    return {
        "experiment": experiment,
        "machines": own,
        "saturates_at": saturation(predictions),
        "predictions": [dataclasses.asdict(one) for one in predictions],
    }
