"""Rates, idle shares and traffic of workers: panels that all optimizers' tabs share."""

from __future__ import annotations

from typing import Any

import numpy as np

from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.views.charts import named_lines, run_lines
from polopt.dashboards.views.drawing import Panel, not_in_results
from polopt.dashboards.views.shares import per_second


def worker_panels(selection: Selection, run: Run, key: str = "gradients_per_s") -> list[Panel]:
    """Rates and idle shares of single workers, bytes and requests in flight.

    Args:
        selection: the axis.
        run: the run.
        key: rate of each worker in the results, `gradients_per_s` or `env_steps_per_s`.
    """
    rate = "gradients/s" if key == "gradients_per_s" else "env steps/s"
    return [
        per_worker(
            (
                "workers-rate",
                f"Each worker's {rate}",
                "One line far below the others is a slow worker or a slow environment.",
            ),
            selection,
            run,
            key,
            rate,
        ),
        named_lines(
            (
                "workers-idle",
                "Workers' idle share",
                "Time in which workers wait for the driver or for each other.",
            ),
            selection,
            run,
            {
                "most idle": ("optimizer/workers/idle_share/max", "#e4508f"),
                "mean": ("optimizer/workers/idle_share/mean", "#2f7ed8"),
                "least idle": ("optimizer/workers/idle_share/min", "#19a979"),
            },
            "idle share",
        ),
        *_traffic(selection, run),
    ]


def _traffic(selection: Selection, run: Run) -> list[Panel]:
    return [
        named_lines(
            (
                "requests-in-flight",
                "Requests in flight",
                "Calls that are pending whenever one ends. Asynchronous optimizers: if the mean is "
                "below the number of workers, some have no work. Synchronous ones start N calls "
                "together, so their mean is (N + 1) / 2.",
            ),
            selection,
            run,
            {
                "greatest": ("optimizer/requests_in_flight/max", "#e8743b"),
                "mean": ("optimizer/requests_in_flight/mean", "#2f7ed8"),
            },
            "requests",
        ),
        run_lines(
            (
                "bytes",
                "Bytes sent and received by the driver",
                "Weights, gradients and batches, per second of training time.",
            ),
            selection,
            ["optimizer/num_bytes_sent"],
            "bytes/s",
            transform=_bytes_per_s,
            from_zero=True,
        ),
    ]


def per_worker(
    panel: tuple[str, str, str], selection: Selection, run: Run, key: str, y_title: str
) -> Panel:
    """One line for each worker of one run."""
    prefix = "optimizer/workers/per_worker/"
    found = sorted(
        (name for name in run.trial.rows.names() if name.startswith(prefix) and name.endswith(key)),
        key=lambda name: int(name.split("/")[3]),
    )
    if not found:
        return not_in_results(*panel, f"{prefix}<worker>/{key}")
    palette = ("#2f7ed8", "#e8743b", "#19a979", "#b45ad6", "#d9a514", "#e4508f", "#13a4b4")
    lines = {
        f"worker {_index_of(run, name, number)}": (name, palette[number % len(palette)])
        for number, name in enumerate(found)
    }
    return named_lines(panel, selection, run, lines, y_title)


def _index_of(run: Run, name: str, number: int) -> int:
    index = run.trial.last(f"{name.rsplit('/', 1)[0]}/index")
    return int(index) if np.isfinite(index) else number + 1


def _bytes_per_s(run: Run, sent: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    received = run.trial.values("optimizer/num_bytes_received")
    total = sent if received is None else sent + received
    return per_second(run, total)
