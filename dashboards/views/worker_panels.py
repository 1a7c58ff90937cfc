"""Panels of the rates, idle shares and traffic of workers, for the tabs of all optimizers."""

from __future__ import annotations

import numpy as np

from polopt.dashboards.data.downsample import Array, downsample_rows
from polopt.dashboards.data.run_results import PER_WORKER
from polopt.dashboards.data.selection import Run, Selection
from polopt.dashboards.data.tab import Plot
from polopt.dashboards.data.trials import TRAINING_S
from polopt.dashboards.views.charts import plot_lines, run_lines
from polopt.dashboards.views.drawing import Panel, add_heat_map, new_figure, not_in_results
from polopt.dashboards.views.fault_marks import add_fault_marks
from polopt.dashboards.views.time_shares import INTERVAL_S, rise_per


def worker_panels(selection: Selection, run: Run) -> list[Panel]:
    """Returns panels of each worker's speed and idle share, of processes, and of traffic."""
    speed = (
        "workers-speed",
        "Steps/s of each worker while it samples",
        "Environment steps per second of sampling. This rate reveals a slow environment, even if "
        "all workers have the same overall rate because they wait for each other.",
    )
    idle = (
        "workers-idle",
        "Idle share of each worker",
        "The share of time in which a worker waits for the driver or for other workers. A single "
        "dark row in a light map is the slow worker for which all other workers wait.",
    )
    plots = (_PROCESSORS, _MEMORY, *([_GPU] if _uses_gpu(run) else []), _REQUESTS)
    return [
        _per_worker(speed, selection, run, "env_steps_per_sampling_s", "steps/s", ",.3s"),
        _per_worker(idle, selection, run, "idle_share", "idle share", ".0%"),
        *(plot_lines(selection, run, plot) for plot in plots),
        run_lines(
            (
                "bytes",
                "Bytes sent and received by the driver",
                "Bytes of weights, gradients and batches, per second of training time.",
            ),
            selection,
            "optimizer/num_bytes_sent",
            "bytes/s",
            transform=_bytes_per_s,
            from_zero=True,
        ),
    ]


def _of_processes(key: str) -> dict[str, str]:
    """Returns the lines of a plot of one statistic of the driver's and the workers' processes."""
    return {
        "driver": f"optimizer/machine/driver_{key}",
        "worker, mean": f"optimizer/workers/{key}/mean",
        "worker, maximum": f"optimizer/workers/{key}/max",
    }


_PROCESSORS = Plot(
    "cpus",
    "Processors in use",
    "The mean number of processors that the driver's process and a worker's process use. A worker "
    "that samples all the time uses about one processor. If cores are free, more workers can use "
    "them.",
    "",
    _of_processes("cpus"),
)
_MEMORY = Plot(
    "memory",
    "Memory of driver and workers",
    "The resident memory of each process. A line that never stops rising is a memory leak.",
    "",
    _of_processes("memory_bytes"),
)
_GPU = Plot(
    "gpu",
    "Share of time in which GPUs are busy",
    "The share of time in which the GPU of the driver or of a worker is busy with work of any "
    "process. If the share is low on the GPU of a learner, use larger minibatches, or more "
    "environments per update.",
    "",
    _of_processes("gpu_share"),
)
_REQUESTS = Plot(
    "requests-in-flight",
    "Requests in flight",
    "The number of pending calls at the end of each call, including this call. For an asynchronous "
    "optimizer, a mean below the number of workers means that some workers have no work. A "
    "synchronous optimizer starts N calls at the same time, so its mean is (N + 1) / 2.",
    "requests",
    {"mean": "optimizer/requests_in_flight/mean", "maximum": "optimizer/requests_in_flight/max"},
)
_GPU_MEMORY = (
    "optimizer/machine/driver_gpu_memory_bytes",
    "optimizer/workers/gpu_memory_bytes/max",
)


def _uses_gpu(run: Run) -> bool:
    held = [run.trial.values(key) for key in _GPU_MEMORY]
    return any(values is not None and np.any(values > 0.0) for values in held)


def _per_worker(
    panel: tuple[str, str, str], selection: Selection, run: Run, key: str, unit: str, form: str
) -> Panel:
    """Draws one statistic of each worker of a run over time, as a heat map.

    The title names the worker with the lowest median over the last two thirds of the results.

    Args:
        panel: key, title and help of the panel.
        selection: gives the x axis.
        run: the run.
        key: key of the statistic in `workers/per_worker` of the results.
        unit: unit of the statistic.
        form: format of the statistic, in the format language of d3.
    """
    x, interval_s = selection.x_of(run), run.trial.values(INTERVAL_S)
    names = [f"{PER_WORKER}/{number}/{key}" for number in range(run.trial.num_workers)]
    columns = run.trial.rows.columns(names)
    if x is None or interval_s is None or len(columns) != len(names) or not names:
        return not_in_results(*panel, f"{PER_WORKER}/<worker>/{key}")
    indices = [int(run.trial.last(f"{PER_WORKER}/{n}/index")) for n in range(len(names))]
    if indices == [0]:
        return Panel(*panel, missing="This run samples in the driver (num_workers=0)")
    values = np.stack(list(columns.values()), axis=1)
    at, means = downsample_rows(x, values, interval_s)
    figure = new_figure(selection.x_title, "")
    labels = [f"worker {index}" for index in indices]
    add_heat_map(
        figure, at, labels, means, title=unit, form=form, hover=f"%{{y}}: %{{z:{form}}}",
        colors="Cividis", greatest=1.0 if "%" in form else None,
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed", dtick=max(1, len(labels) // 12))
    add_fault_marks(figure, selection, [run])
    late = np.nan_to_num(values[len(values) // 3 :])
    medians = np.median(late, axis=0)
    least = int(np.argmin(medians))
    others = float(np.median(np.delete(medians, least))) if len(labels) > 1 else np.nan
    least_text, others_text = (
        f"{value:.0%}" if "%" in form else f"{value:,.0f}" for value in (medians[least], others)
    )
    title = f"{panel[1]}: lowest {least_text}, {labels[least]}"
    if len(labels) > 1:
        title += f". Median of the others: {others_text}"
    return Panel(panel[0], title, panel[2], figure=figure, run=run.label)


def _bytes_per_s(run: Run, sent: Array) -> Array:
    received = run.trial.values("optimizer/num_bytes_received")
    return rise_per(run, sent if received is None else sent + received, TRAINING_S)
