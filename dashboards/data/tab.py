"""`Tab`: an optimizer's declaration of its plots, and the declarations of its numbers.

The trainer writes the declaration to the trial's directory as `TAB_FILE`. The dashboard page and
the report read this file, and do not import the optimizer.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from polopt.metrics import episode_window, learner
from polopt.metrics.number import Kind as NumberKind
from polopt.metrics.number import Number, find, within

#: Name of the file with the declaration in the trial's directory.
TAB_FILE = "optimizer.json"
_FORMAT = 1
_MOST_TEXT = 1000  # maximum characters of a text
_MOST_ENTRIES = 100  # maximum entries of a list or mapping


@functools.cache
def _common() -> tuple[Number, ...]:
    """The numbers of every optimizer. The import is here, because it loads torch, which the command
    line does not need."""
    from polopt.metrics import optimizer_stats

    return (
        *within("optimizer", optimizer_stats.NUMBERS),
        *within("env_runners", episode_window.NUMBERS),
        *within("learners/default_policy", learner.NUMBERS),
    )


Kind = Literal["lines", "runs", "heatmap"]


@dataclass(frozen=True)
class Plot:
    """One plot of a tab.

    Attributes:
        key: name of the plot in file names, unique in the tab.
        title: title in plain text. Empty: the title of the first number.
        help: a few sentences that explain how to read the plot. If the plot shows a single number,
            the meaning of this number stands before them.
        unit: unit of the values, which labels the axis. Empty: the unit of the first number.
        keys: maps the name of each line to a result key, such as
            `{"accepted": "optimizer/num_gradients_accepted"}`.
        kind: `lines` draws all keys of one run. `runs` draws a single key, with a line for each
            run. `heatmap` draws a single key of one run over time. The values of this key are
            lists of counts.
        per: for `runs`, the unit of a rate. `s` means the increase of a counter per second. The
            result key of another counter means the increase per unit of that counter. If empty,
            the plot shows the values themselves.
        steps: whether a value holds until the next result, such as a number of workers.
        limit: for `heatmap`, an option of the optimizer, or another key at the top level of the
            config. If the value of the option is a number, this number is drawn as a line. Empty
            for no line.
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
    """The class attribute `tab` of an optimizer: plots of several numbers, for the dashboards.

    The tabs of all optimizers show the same plots of time shares, phases, workers, traffic,
    episodes and actions. Each number that the optimizer declares (`PolicyOptimizer.numbers`) or
    that its `extra_stats` returns gets a plot automatically if no plot of the tab shows this
    number, up to a maximum number of such plots.

    Attributes:
        driver: help text that explains how to read the shares of the driver's phases.
        plots: further plots, in the order in which the tab shows them.
    """

    driver: str = "Shares of the driver's wall time since the last result."
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True)
class OptimizerTab:
    """The content of a `TAB_FILE`.

    Attributes:
        name: name of the optimizer in results.
        title: title of the tab.
        phases: the driver's phases of the optimizer's `step()`, in their order.
        numbers: declarations of the numbers of the optimizer, of the policy, and of add-ons, with
            their paths in results.
        tab: the optimizer's declaration.
        limits: the values of the options that the plots name as `limit`, if they are numbers.
    """

    name: str
    title: str
    phases: tuple[str, ...] = ()
    numbers: tuple[Number, ...] = ()
    tab: Tab = field(default_factory=Tab)
    limits: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """Returns the content of the file."""
        numbers = [number._asdict() for number in self.numbers]
        return json.dumps({"format": _FORMAT, **asdict(self), "numbers": numbers}, indent=1) + "\n"

    def number(self, key: str) -> Number:
        """Returns the declaration of the number with this path in results. If the number is not
        declared, the declaration has only the key."""
        return find((*self.numbers, *_common()), key) or undeclared(key)

    def described(self, plot: Plot) -> Plot:
        """Returns the plot with the title, unit and meaning of its first number, where the plot
        itself has none. If it shows a single number, the help begins with the meaning."""
        number = self.number(next(iter(plot.keys.values())))
        is_meant = not plot.help or (len(plot.keys) == 1 and number != undeclared(number.key))
        return replace(
            plot,
            title=plot.title or number.heading,
            help=f"{number.sentence} {plot.help}".strip() if is_meant else plot.help,
            unit=plot.unit or number.unit + ("/s" if plot.per == "s" else ""),
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> OptimizerTab:
        """Reads the content of a file. The file is not trusted, so the type and the size of every
        value are checked.

        Raises:
            ValueError: if the content does not have the form that `to_json` writes.
        """
        try:
            content = json.loads(text)
        except RecursionError as error:
            raise ValueError("nested too deeply") from error
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"not the declaration of a tab in format {_FORMAT}")
        declared = _mapping(content.get("tab"))
        return cls(
            name=_text(content.get("name")),
            title=_text(content.get("title")),
            phases=tuple(map(_text, _list(content.get("phases")))),
            numbers=tuple(_numbers(content)),
            tab=Tab(
                driver=_text(declared.get("driver")),
                plots=tuple(map(_plot, _list(declared.get("plots")))),
            ),
            limits={
                _text(name): _number(value)
                for name, value in _mapping(content.get("limits", {})).items()
            },
        )


def undeclared(key: str) -> Number:
    """Returns the declaration of a number of which only the key is known."""
    return Number(key, "", f"the key `{key}` of the results")


def _numbers(content: Mapping[str, Any]) -> Iterator[Number]:
    for name in _list(content.get("extra_stats", [])):  # in files of earlier versions
        yield undeclared(f"optimizer/{_text(name)}")
    for value in _list(content.get("numbers", [])):
        given = _known(value, Number._fields)
        texts = {name: _text(text) for name, text in given.items() if text is not None}
        if given.keys() - texts.keys() - {"metric"} or texts["kind"] not in get_args(NumberKind):
            raise ValueError(
                f"number {given['key']!r:.80}: a text is missing, or its kind is wrong"
            )
        yield Number(**texts)  # type: ignore[arg-type]


def _plot(value: Any) -> Plot:
    given = _known(value, [each.name for each in fields(Plot)])
    keys = {_text(name): _text(key) for name, key in _mapping(given.pop("keys")).items()}
    steps = given.pop("steps")
    texts = {name: _text(text) for name, text in given.items()}
    number = len(keys) if texts["kind"] == "lines" else 1
    if texts["kind"] not in get_args(Kind) or not isinstance(steps, bool) or not keys:
        raise ValueError(f"plot {texts['key']!r} has an invalid value of kind, steps or keys")
    if len(keys) != number:
        raise ValueError(
            f"plot {texts['key']!r} of kind {texts['kind']} takes one key; got {len(keys)}"
        )
    return Plot(**texts, keys=keys, steps=steps)  # type: ignore[arg-type]


def _known(value: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns `value` if it is a mapping whose keys are exactly `names`."""
    given = dict(_mapping(value))
    if given.keys() != {*names}:
        raise ValueError(f"expected {sorted(names)}; got {sorted(given)}")
    return given


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError(f"expected text of at most {_MOST_TEXT} characters; got {value!r:.80}")
    return value


def _number(value: Any) -> float:
    # NaN, infinity and integers that do not fit into a float are refused.
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= 1e300:
        raise ValueError(f"expected a number; got {value!r:.80}")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ENTRIES:
        raise ValueError(f"expected a list of at most {_MOST_ENTRIES} entries; got {value!r:.80}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_ENTRIES:
        raise ValueError(f"expected a mapping of at most {_MOST_ENTRIES} keys; got {value!r:.80}")
    return value
