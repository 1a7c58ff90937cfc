"""`METRICS`: the Prometheus metrics that all optimizers share.

The exporter, the Grafana dashboards and the docs read this list. Optimizers declare further metrics
in their tab (`polopt.dashboards.data.tab`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

#: Upper bounds of the buckets in histograms of lag. A lag of 0 is in the first bucket.
LAG_BOUNDARIES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric and the key of the results from which the exporter takes its value.

    Attributes:
        kind: the type of the metric. A `counter` grows by the increase of the value between two
            results. A `gauge` shows the value of the last result. A `histogram` reads a list of
            counts, such as `policy_lag/histogram`. The last bin counts all larger values.
        name: name without the prefix `ray_` and without the suffix `_total` of counters. Ray adds
            the prefix and the suffix.
        unit: unit of the value.
        key: path of the value in results. `*` stands for the values of `tag`.
        text: description of the metric.
        tag: name of the tag (a label in Prometheus) besides `optimizer` and `trial`. Empty if the
            metric does not have a further tag.
    """

    kind: str
    name: str
    unit: str
    key: str
    text: str
    tag: str = ""

    @property
    def series(self) -> str:
        """The name of the series in Prometheus. For a histogram, the series of its buckets."""
        suffix = {"counter": "_total", "gauge": "", "histogram": "_bucket"}[self.kind]
        return f"ray_{self.name}{suffix}"

    def match(self, paths: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
        """Yields each path that belongs to the metric, with the value of the tag for this path."""
        pattern = re.compile(re.escape(self.key).replace(r"\*", "([^/]+)"))
        for path in paths:
            if found := pattern.fullmatch(path):
                yield path, {self.tag: found[1]} if self.tag else {}


_counter = partial(Metric, "counter")
_gauge = partial(Metric, "gauge")
_histogram = partial(Metric, "histogram")
_STEPS, _RATE = "environment steps", "environment steps/s"
_OPT, _FAULTS, _LEARNER = "optimizer/", "fault_tolerance/", "learners/default_policy/"

METRICS = (
    _counter("polopt_env_steps", _STEPS, _OPT + "num_env_steps_sampled", "steps sampled so far"),
    _counter(
        "polopt_env_steps_trained",
        _STEPS,
        _OPT + "num_env_steps_trained",
        "steps that the learner used",
    ),
    _counter("polopt_updates", "updates", _OPT + "num_updates", "updates of the weights so far"),
    _counter(
        "polopt_bytes",
        "bytes",
        _OPT + "num_bytes_*",
        "bytes of weights, gradients and batches that the driver sent or received, or that bypassed"
        " the driver (direction `by_reference`)",
        "direction",
    ),
    _gauge(
        "polopt_episode_return",
        "return",
        "env_runners/episode_return_mean",
        "mean return of the last 100 episodes",
    ),
    _gauge(
        "polopt_evaluation_return",
        "return",
        "evaluation/env_runners/episode_return_mean",
        "mean return of the last evaluation",
    ),
    _gauge(
        "polopt_env_steps_per_s", _RATE, _OPT + "env_steps_per_s", "sampling rate in the interval"
    ),
    _gauge(
        "polopt_updates_per_s", "updates/s", _OPT + "updates_per_s", "update rate in the interval"
    ),
    _gauge(
        "polopt_driver_share",
        "share",
        _OPT + "driver/share/*",
        "share of the driver's time in a phase",
        "phase",
    ),
    _gauge(
        "polopt_driver_p50_ms",
        "ms",
        _OPT + "driver/p50_ms/*",
        "median duration of a phase of the driver",
        "phase",
    ),
    _gauge(
        "polopt_driver_p99_ms",
        "ms",
        _OPT + "driver/p99_ms/*",
        "99th percentile of the duration of a phase of the driver",
        "phase",
    ),
    _gauge(
        "polopt_workers_share",
        "share",
        _OPT + "workers/share/*",
        "share of the workers' time in a part (a phase, other or idle): mean over workers",
        "part",
    ),
    _gauge(
        "polopt_workers_p50_ms",
        "ms",
        _OPT + "workers/p50_ms/*",
        "median duration of a part (a phase, other or idle) of the workers' time",
        "part",
    ),
    _gauge(
        "polopt_workers_p99_ms",
        "ms",
        _OPT + "workers/p99_ms/*",
        "99th percentile of the duration of a part (a phase, other or idle) of the workers' time",
        "part",
    ),
    _gauge(
        "polopt_workers_env_steps_per_s",
        _RATE,
        _OPT + "workers/env_steps_per_s/*",
        "sampling rate of a worker: mean, minimum and maximum over workers",
        "over",
    ),
    _gauge(
        "polopt_workers_idle_share",
        "share",
        _OPT + "workers/idle_share/*",
        "share of a worker's time in which it is idle: mean, minimum and maximum over workers",
        "over",
    ),
    _gauge(
        "polopt_workers_cpus",
        "processors",
        _OPT + "workers/cpus/*",
        "processors in use by a worker's process: mean, minimum and maximum over workers",
        "over",
    ),
    _gauge(
        "polopt_workers_memory_bytes",
        "bytes",
        _OPT + "workers/memory_bytes/*",
        "resident memory of a worker's process: mean, minimum and maximum over workers",
        "over",
    ),
    _gauge(
        "polopt_workers_gpu_share",
        "share",
        _OPT + "workers/gpu_share/*",
        "share of the time in which a worker's GPU is busy: mean, minimum and maximum over workers",
        "over",
    ),
    _gauge(
        "polopt_driver_cpus",
        "processors",
        _OPT + "machine/driver_cpus",
        "processors in use by the driver's process",
    ),
    _gauge(
        "polopt_driver_memory_bytes",
        "bytes",
        _OPT + "machine/driver_memory_bytes",
        "resident memory of the driver's process",
    ),
    _gauge(
        "polopt_driver_gpu_share",
        "share",
        _OPT + "machine/driver_gpu_share",
        "share of the time in which the driver's GPU is busy",
    ),
    _histogram(
        "polopt_policy_lag",
        "updates",
        _OPT + "policy_lag/histogram",
        "lag of the weights that chose the actions; if the results of 5 s have more than 256 counts"
        " in total, the exporter scales the counts down to about 256",
    ),
    _gauge(
        "polopt_lag_mean",
        "updates",
        _OPT + "*_lag/mean",
        "mean of the policy lag, gradient lag or priority lag",
        "kind",
    ),
    _gauge(
        "polopt_lag_max",
        "updates",
        _OPT + "*_lag/max",
        "maximum of the policy lag, gradient lag or priority lag",
        "kind",
    ),
    _gauge(
        "polopt_lag_rollouts",
        "rollouts",
        _OPT + "policy_lag_rollouts/mean",
        "mean policy lag, counted in rollouts",
    ),
    _gauge(
        "polopt_requests_in_flight",
        "calls",
        _OPT + "requests_in_flight/mean",
        "mean number of pending calls",
    ),
    _gauge(
        "polopt_healthy_workers", "workers", _FAULTS + "num_healthy_workers", "workers that are up"
    ),
    _gauge(
        "polopt_worker_restarts",
        "restarts",
        _FAULTS + "num_remote_worker_restarts",
        "restarts of workers so far",
    ),
    _gauge(
        "polopt_worker_failures",
        "failures",
        _FAULTS + "num_worker_*",
        "failures of workers so far",
        "kind",
    ),
    _gauge(
        "polopt_env_faults", "faults", _FAULTS + "num_env_faults", "faults of environments so far"
    ),
    _gauge(
        "polopt_non_finite",
        "fragments",
        _FAULTS + "num_non_finite",
        "fragments and gradients that were not finite, so far",
    ),
    _gauge(
        "polopt_skipped_updates",
        "updates",
        _OPT + "num_skipped_updates",
        "updates skipped because the gradient was not finite or too large, so far",
    ),
    _gauge(
        "polopt_learner", "", _LEARNER + "*", "losses and statistics of the learner", "statistic"
    ),
)


def markdown_table(metrics: Iterable[Metric] = METRICS) -> str:
    """Returns a table of metrics for `docs/metrics.md`."""
    lines = ["| metric | kind | unit | tag | result key | meaning |", "|---" * 6 + "|"]
    for metric in metrics:
        tag = f"`{metric.tag}`" if metric.tag else ""
        cells = (f"`{metric.name}`", metric.kind, metric.unit, tag, f"`{metric.key}`", metric.text)
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown_table())
