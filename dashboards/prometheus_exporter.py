"""`PrometheusExporter`: records results with `ray.util.metrics`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from polopt.dashboards.data.prometheus import (
    LAG_BOUNDARIES,
    UNDECLARED,
    Metric,
    metrics_of,
    series_of,
)
from polopt.metrics.number import Number

#: One recording adds at most about this number of values to a histogram. The counts of the bins are
#: rounded up, so each bin may add one more value. The limit keeps recordings short.
_MAX_OBSERVED = 256
#: Minimum time between two recordings. A recording takes about 5 ms, and Ray exports metrics only
#: every 10 s.
PERIOD_S = 5.0


class PrometheusExporter:
    """Records the results of one trial as Prometheus metrics. See `Number.metric`.

    Ray's agent on the node exports the metrics. Nothing is recorded without Ray. Results that
    arrive within `PERIOD_S` are recorded together. For such results, the last number of each
    metric is recorded, and histograms are added up.
    """

    def __init__(self) -> None:
        self._series: dict[str, Any] = {}  # by name of the metric
        self._values: dict[str, Any] = {}  # values that are not recorded yet, by path in the result
        self._tags: dict[str, str] = {}
        self.restart(())

    def restart(self, numbers: Sequence[Number] | None = None, restored: bool = False) -> None:
        """Prepares for a new optimizer or a restored checkpoint, whose counts do not continue the
        counts so far. First records all results that have been added.

        Args:
            numbers: the declarations of all numbers in the results of the new optimizer. `None`
                means that the optimizer is the same.
            restored: whether a checkpoint was restored. The first result then includes counts from
                before the checkpoint. Counters therefore start to increase with the second result.
        """
        self.record()
        if numbers is not None:
            # First, because a declared pattern fits the statistics of every policy.
            self._numbers = (UNDECLARED, *numbers)
            self._metrics = metrics_of(self._numbers)
            histograms = (m for m in self._metrics.values() if m.kind == "histogram")
            self._histograms = {key for metric in histograms for key in metric.keys}
        self._recorded_s = -math.inf
        self._restored = restored
        self._known: set[str] = set()  # all paths in the results so far
        #: Pairs of a path in the result and the function that records its value.
        self._recorders: list[tuple[str, Callable[[Any], None]]] = []

    def add(self, result: Mapping[str, Any], trial: str) -> None:
        """Adds a result. The result is recorded at once or together with later results.

        Args:
            result: a result of `make_result`.
            trial: Tune's id of the trial.
        """
        if not ray.is_initialized():
            return
        values = _flat(result)
        for path in self._histograms & values.keys() & self._values.keys():
            pairs = zip(self._values[path], values[path], strict=True)
            values[path] = [before + now for before, now in pairs]
        self._values |= values
        self._tags = {"optimizer": result["optimizer"]["name"], "trial": trial}
        if time.monotonic() - self._recorded_s >= PERIOD_S:
            self.record()

    def record(self) -> None:
        """Records the results that were added since the previous recording."""
        values, self._values = self._values, {}
        if not values or not ray.is_initialized():
            return
        self._recorded_s = time.monotonic()
        if new := values.keys() - self._known:
            for path in new:
                found = series_of(self._numbers, path)
                if found is not None:
                    metric, tags = self._metrics[found[0]], {**self._tags, **found[1]}
                    if metric.name not in self._series:
                        self._series[metric.name] = _make(metric)
                    recorder = self._recorder(metric, self._series[metric.name], tags, values[path])
                    self._recorders.append((path, recorder))
            self._known |= new
        for path, recorder in self._recorders:
            if path in values:
                recorder(values[path])

    def _recorder(
        self, metric: Metric, series: Any, tags: dict[str, str], first: Any
    ) -> Callable[[Any], None]:
        """Returns a function that records the values of one path."""
        if metric.kind == "gauge":
            return lambda value: series.set(float(value), tags) if math.isfinite(value) else None
        if metric.kind == "histogram":
            return lambda counts: _observe(series, tags, counts)
        total = first if self._restored else 0

        def increase(value: float) -> None:
            nonlocal total
            if value > total:
                series.inc(float(value - total), tags)
            total = value

        return increase


def _make(metric: Metric) -> Any:
    tags = ("optimizer", "trial", *filter(None, [metric.tag]))
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.text, list(LAG_BOUNDARIES), tags)
    return {"counter": Counter, "gauge": Gauge}[metric.kind](metric.name, metric.text, tags)


def _observe(series: Histogram, tags: dict[str, str], counts: list[int]) -> None:
    """Adds each integer to the histogram as many times as it was counted. If the counts add
    up to more than `_MAX_OBSERVED`, all integers are added proportionally fewer times."""
    every = max(1.0, sum(counts) / _MAX_OBSERVED)
    for value, count in enumerate(counts):
        for _ in range(math.ceil(count / every)):
            series.observe(value, tags)


def _flat(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the numbers and lists of a nested result, by path."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float | list):
            flat[prefix + key] = value
    return flat
