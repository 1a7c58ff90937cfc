"""`PrometheusExporter`: records results through `ray.util.metrics`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from polopt.metrics.prometheus import LAG_BOUNDARIES, METRICS, Metric

#: Values of one recording in a histogram, before the count of each bin is rounded up. Bounds the
#: time that a recording costs.
_MAX_OBSERVED = 256
#: Time between two recordings. Ray reports metrics every 10 s, and a recording takes 5 ms.
PERIOD_S = 5.0


class PrometheusExporter:
    """Records results of one trial as the metrics of `polopt.metrics.prometheus.METRICS`, and those
    that the optimizer declares.

    Ray's agent on the node exports them. Without Ray, nothing is recorded. Results that follow each
    other within `PERIOD_S` are recorded together: the last numbers, and the sums of histograms.
    """

    def __init__(self) -> None:
        self._series = cache(_make)
        self._values: dict[str, Any] = {}  # not recorded yet, by path in the result
        self._tags: dict[str, str] = {}
        self.restart(())

    def restart(self, metrics: Sequence[Metric] | None = None, restored: bool = False) -> None:
        """Records what has been added. Counts begin again, in a new optimizer or at a checkpoint.

        Args:
            metrics: that the new optimizer declares. None: the same optimizer.
            restored: at a checkpoint. Counters then begin with what the second result adds, because
                the first one holds counts from before.
        """
        self.record()
        if metrics is not None:
            self._metrics = (*METRICS, *metrics)
            self._histograms = {m.key for m in self._metrics if m.kind == "histogram"}
        self._recorded_s = -math.inf
        self._restored = restored
        self._known: set[str] = set()  # paths in results so far
        self._recorders: list[tuple[str, Callable[[Any], None]]] = []  # by path in the result

    def add(self, result: Mapping[str, Any], trial: str) -> None:
        """Records a result, now or together with later ones.

        Args:
            result: as `make_result` returns it.
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
        """Records what has been added since the last recording."""
        values, self._values = self._values, {}
        if not values or not ray.is_initialized():
            return
        self._recorded_s = time.monotonic()
        if new := values.keys() - self._known:
            self._recorders += [
                (path, self._recorder(metric, self._series(metric), tag, values[path]))
                for metric in self._metrics
                for path, tag in metric.match(new)
            ]
            self._known |= new
        for path, recorder in self._recorders:
            if path in values:
                recorder(values[path])

    def _recorder(
        self, metric: Metric, series: Any, tag: dict[str, str], first: Any
    ) -> Callable[[Any], None]:
        """Returns the function that records the value of one path."""
        tags = {**self._tags, **tag}
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
