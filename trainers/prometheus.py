"""`PrometheusExporter`: records results through `ray.util.metrics`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from polopt.metrics.prometheus import LAG_BOUNDARIES, METRICS, Metric

#: Values of one result in a histogram, before the count of each bin is rounded up; bounds the time
#: that a result costs.
_MAX_OBSERVED = 256


class PrometheusExporter:
    """Records each result of one trial as the metrics of `polopt.metrics.prometheus.METRICS`.

    Ray's agent on the node exports them. Without Ray, nothing is recorded.

    Args:
        restored: the trial continues from a checkpoint; counters then begin with what the second
            result adds, because the first one holds counts from before.
    """

    def __init__(self, restored: bool = False) -> None:
        self._restored = restored
        self._series = cache(_make)
        self._known: set[str] = set()  # paths in results so far
        self._recorders: list[tuple[str, Callable[[Any], None]]] = []  # by path in the result

    def record(self, result: Mapping[str, Any], trial: str) -> None:
        """Records a result.

        Args:
            result: as `make_result` returns it.
            trial: Tune's id of the trial.
        """
        if not ray.is_initialized():
            return
        values = _flat(result)
        if new := values.keys() - self._known:
            tags = {"optimizer": result["optimizer"]["name"], "trial": trial}
            self._recorders += [
                (path, self._recorder(metric, self._series(metric), {**tags, **tag}, values[path]))
                for metric in METRICS
                for path, tag in metric.match(new)
            ]
            self._known |= new
        for path, recorder in self._recorders:
            if path in values:
                recorder(values[path])

    def _recorder(
        self, metric: Metric, series: Any, tags: dict[str, str], first: Any
    ) -> Callable[[Any], None]:
        """Returns the function that records the value of one path."""
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
    """Observes each integer as often as it was counted, or proportionally less often."""
    every = max(1.0, sum(counts) / _MAX_OBSERVED)
    for value, count in enumerate(counts):
        for _ in range(math.ceil(count / every)):
            series.observe(value, tags)


def _flat(result: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Numbers and lists of a nested result by path."""
    flat: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}/")
        elif isinstance(value, int | float | list):
            flat[prefix + key] = value
    return flat
