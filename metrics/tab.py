"""What the dashboards show of one optimizer, as plain data that is written beside its results.

An optimizer declares a `Tab`. The trainer writes it to the trial's directory as `TAB_FILE`, and the
page, the report and the exporter to Prometheus read it. None of them imports the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from polopt.metrics.prometheus import Metric

#: Name of the file in the trial's directory.
TAB_FILE = "optimizer.json"
_FORMAT = 1
_MOST_TEXT = 1000  # characters of one text
_MOST_ENTRIES = 100  # of one list or mapping

Kind = Literal["lines", "runs", "heatmap"]


@dataclass(frozen=True)
class Plot:
    """One plot of a tab.

    Attributes:
        key: its name in file names and addresses, unique in the tab.
        title: plain text.
        help: one or two sentences on how to read it.
        unit: of the values, on the axis.
        keys: name of each line and the result key that it shows, such as
            `{"accepted": "optimizer/num_gradients_accepted"}`. A histogram is a key whose values
            are lists.
        kind: `lines` draws all keys of one run. `runs` the only key of all runs. `heatmap` the
            histogram of the only key of one run over time.
        per: of `runs`: `s` draws how much a counter rises in a second, another result key how much
            it rises for each unit that the other counter rises. Empty: the values.
        steps: whether values hold until the next result, as a number of workers does.
        limit: of `heatmap`: config key whose number is drawn as a line. Empty: none.
    """

    key: str
    title: str
    help: str
    unit: str
    keys: Mapping[str, str]
    kind: Kind = "lines"
    per: str = ""
    steps: bool = False
    limit: str = ""


@dataclass(frozen=True)
class Tab:
    """What an optimizer declares: its class attribute `tab`.

    Every optimizer's tab shows the shares of time of driver and workers, the times of the phases,
    each worker, traffic, episodes and actions, and a plot of each number of `extra_stats` that no
    plot shows.

    Attributes:
        driver: how to read the shares of the driver's phases.
        plots: further plots, in order.
        metrics: further metrics for Prometheus, of keys that other optimizers lack.
    """

    driver: str = "Shares of the driver's wall time since the last result."
    plots: tuple[Plot, ...] = ()
    metrics: tuple[Metric, ...] = ()


@dataclass(frozen=True)
class OptimizerTab:
    """The content of a `TAB_FILE`.

    Attributes:
        name: of the optimizer, as results have it.
        title: of the tab.
        phases: of the driver, in the order of one step.
        extra_stats: names of the numbers that the optimizer adds to the block `optimizer/`.
        tab: what the optimizer declares.
    """

    name: str
    title: str
    phases: tuple[str, ...] = ()
    extra_stats: tuple[str, ...] = ()
    tab: Tab = field(default_factory=Tab)

    def to_json(self) -> str:
        """The content of the file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> OptimizerTab:
        """Reads the content of a file, which is not trusted.

        Raises:
            ValueError: it is not what `to_json` writes.
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"not a tab of format {_FORMAT}")
        declared = _mapping(content.get("tab"))
        return cls(
            name=_text(content.get("name")),
            title=_text(content.get("title")),
            phases=tuple(map(_text, _list(content.get("phases")))),
            extra_stats=tuple(map(_text, _list(content.get("extra_stats")))),
            tab=Tab(
                driver=_text(declared.get("driver")),
                plots=tuple(map(_plot, _list(declared.get("plots")))),
                metrics=tuple(map(_metric, _list(declared.get("metrics")))),
            ),
        )


def _plot(value: Any) -> Plot:
    given = _known(value, Plot)
    keys = {_text(name): _text(key) for name, key in _mapping(given.pop("keys")).items()}
    steps = given.pop("steps")
    texts = {name: _text(text) for name, text in given.items()}
    number = len(keys) if texts["kind"] == "lines" else 1
    if texts["kind"] not in get_args(Kind) or not isinstance(steps, bool) or not keys:
        raise ValueError(f"plot {texts['key']!r}: kind, steps or keys")
    if len(keys) != number:
        raise ValueError(f"plot {texts['key']!r}: {texts['kind']} takes one key; got {len(keys)}")
    return Plot(**texts, keys=keys, steps=steps)  # type: ignore[arg-type]


def _metric(value: Any) -> Metric:
    return Metric(**{name: _text(text) for name, text in _known(value, Metric).items()})


def _known(value: Any, of: type) -> dict[str, Any]:
    """A mapping that has the fields of a dataclass, and no others."""
    given = dict(_mapping(value))
    names = {each.name for each in fields(of)}
    if given.keys() != names:
        raise ValueError(f"{of.__name__}: expected {sorted(names)}; got {sorted(given)}")
    return given


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"expected text of at most {_MOST_TEXT} characters; got {value!r:.80}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise ValueError(f"expected a list of at most {_MOST_ENTRIES} entries; got {value!r:.80}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
        raise ValueError(f"expected a mapping of at most {_MOST_ENTRIES} keys; got {value!r:.80}")
    return value
