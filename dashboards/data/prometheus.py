"""`metrics_of`: the Prometheus metrics that export numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from polopt.metrics.number import Number, find

#: Upper bounds of the buckets in histograms of lag. A lag of 0 is in the first bucket.
LAG_BOUNDARIES = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
_LEARNER = "learners/default_policy/"
#: A statistic that a policy computes, and that it does not declare.
UNDECLARED = Number(f"{_LEARNER}<statistic>", "", "a statistic of the learner", metric="learner")
_KINDS = {"counter": "counter", "total": "gauge", "gauge": "gauge", "histogram": "histogram"}
_SUFFIXES = {"counter": "_total", "gauge": "", "histogram": "_bucket"}


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric. It may export several numbers, with one value of its tag for each.

    Attributes:
        name: name without the prefix `ray_` and without the suffix `_total` of counters. Ray adds
            the prefix and the suffix.
        kind: the type of the metric. A `counter` grows by the increase of the value between two
            results. A `gauge` shows the value of the last result. A `histogram` reads a list of
            counts, such as `policy_lag/histogram`. The last bin counts all larger values.
        unit: unit of the value. Empty if the numbers have several units.
        tag: name of the label besides `optimizer` and `trial`. Empty without such a label.
        text: the meaning of the numbers.
        keys: the keys of the numbers.
    """

    name: str
    kind: str
    unit: str
    tag: str
    text: str
    keys: tuple[str, ...]

    @property
    def series(self) -> str:
        """The name of the series in Prometheus. For a histogram, the series of its buckets."""
        return f"ray_{self.name}{_SUFFIXES[self.kind]}"


def _exported(number: Number) -> tuple[str, dict[str, str]]:
    """Returns the name of the metric of a number and its labels. The name is empty if the number is
    not exported."""
    metric = number.metric
    if metric is None and number.kind in _KINDS and number.kind != "histogram":
        if number.key.startswith(_LEARNER):
            return "polopt_learner", {"statistic": number.key.removeprefix(_LEARNER)}
        path = re.sub("/<[^/]*>|^(optimizer|fault_tolerance)/|(?<![^/])num_", "", number.key)
        metric = re.sub("[^a-zA-Z0-9_]", "_", path)
    if not metric:
        return "", {}
    name, _, labels = metric.rstrip("}").partition("{")
    return f"polopt_{name}", dict(pair.split("=") for pair in labels.split(",") if pair)


def series_of(numbers: Iterable[Number], path: str) -> tuple[str, dict[str, str]] | None:
    """Returns the name of the metric that exports the number with this path in a result, and the
    labels of its series. Returns None if the number is not exported."""
    number = find(numbers, path)
    name, labels = ("", {}) if number is None else _exported(number)
    if number is None or not name:
        return None
    return name, {**labels, **(number.match(path) or {})}


def metrics_of(numbers: Iterable[Number]) -> dict[str, Metric]:
    """Returns the metrics that export these numbers, by name."""
    groups: dict[str, list[tuple[Number, dict[str, str]]]] = {}
    for number in numbers:
        name, labels = _exported(number)
        if name:
            groups.setdefault(name, []).append((number, labels))
    return {name: _metric(name, members) for name, members in groups.items()}


def _metric(name: str, members: list[tuple[Number, dict[str, str]]]) -> Metric:
    first, labels = members[0]
    tags = [*labels, *re.findall(r"<(\w+)>", first.key)]
    units = {number.unit for number, _ in members}
    texts = [
        " ".join([*(f"{value}:" for value in labels.values()), number.sentence])
        for number, labels in members
    ]
    return Metric(
        name,
        _KINDS[first.kind],
        first.unit if len(units) == 1 else "",
        tags[0] if tags else "",
        " ".join(texts),
        tuple(number.key for number, _ in members),
    )
