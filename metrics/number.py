"""`Number`: the declaration of one number of a result.

Each module of polopt declares its numbers beside the code that measures them. Results,
`docs/metrics.md`, Prometheus and the dashboards take names, units and meanings from there.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

Kind = Literal["counter", "total", "gauge", "histogram", "list", "text"]
_KINDS = get_args(Kind)
_NAME = re.compile(r"<(\w+)>")


class Number(NamedTuple):
    """The declaration of one number of a result.

        class Bandit(polopt.PolicyOptimizer):
            numbers = (polopt.Number("num_pulls", "pulls", "arms that were pulled", "counter"),)

            def extra_stats(self):
                return {**super().extra_stats(), "num_pulls": self.num_pulls}

    Attributes:
        key: path of the number in the block of its owner, such as `driver/share/<phase>`. A name in
            angle brackets stands for any text without `/`.
        unit: unit of the value, such as `updates` or `ms`. A `share` is between 0 and 1.
        meaning: what the number says, in one plain sentence without its period. Further sentences
            may say how to read the number.
        kind: `counter` is a number that never falls within a run, and whose rate is of interest.
            `total` never falls either, but its value is of interest. `gauge` is any other number.
            `histogram` is a list of counts, `list` is another list, and `text` is text.
        metric: name of the metric in Prometheus, without the prefix `polopt_`. Labels may follow in
            braces, as in `bytes{direction=sent}`. `None` takes the key without `num_`, for numbers
            that are no list and no text. Empty: the number is not exported.
        title: title of the plots of this number. Empty: the last part of the key.
    """

    key: str
    unit: str
    meaning: str
    kind: Kind = "gauge"
    metric: str | None = None
    title: str = ""

    def match(self, path: str) -> dict[str, str] | None:
        """Returns the texts for the names in angle brackets, if the number has this path in some
        result. Returns None otherwise."""
        found = _pattern(self.key).fullmatch(path)
        return found.groupdict() if found else None

    @property
    def sentence(self) -> str:
        """The meaning as plain text, which begins with a capital letter and ends with a period."""
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.meaning)
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def heading(self) -> str:
        """The title of plots."""
        last = self.key.rsplit("/", 1)[-1].removeprefix("num_").replace("_", " ")
        return self.title or last.capitalize()


@functools.cache
def _pattern(key: str) -> re.Pattern[str]:
    parts = _NAME.split(key)  # texts and names alternate
    texts = (
        re.escape(part) if at % 2 == 0 else f"(?P<{part}>[^/]+)" for at, part in enumerate(parts)
    )
    return re.compile("".join(texts))


def declare(table: str) -> tuple[Number, ...]:
    """Returns the numbers of a table:

        num_pulls (pulls, counter): arms that were pulled
        num_wins (pulls, total, metric=wins, title=Pulls that won): further lines of a meaning are
            indented
        regret (return, metric=): a gauge that is not exported

    In parentheses are the unit, the kind, the metric and the title. Each of them may be missing.

    Raises:
        ValueError: a line does not have this form.
    """
    entries = re.sub(r"\n +", " ", textwrap.dedent(table).strip()).splitlines()
    return tuple(map(_declared_in, entries))


def _declared_in(entry: str) -> Number:
    found = re.fullmatch(r"(\S+) \(([^)]*)\): (.+)", entry)
    if found is None:
        raise ValueError(f"expected 'key (unit, kind, metric=, title=): meaning'; got {entry!r}")
    given = {"unit": ""}
    for field in filter(None, found[2].split(", ")):
        name, is_named, value = field.partition("=")
        given |= {name: value} if is_named else {"kind" if field in _KINDS else "unit": field}
    return Number(key=found[1], meaning=found[3], **given)  # type: ignore[arg-type]


def within(block: str, numbers: Iterable[Number]) -> tuple[Number, ...]:
    """Returns the numbers with their paths in a larger block of the result, such as
    `optimizer/machine`."""
    return tuple(number._replace(key=f"{block}/{number.key}") for number in numbers)


def declared(cls: type) -> tuple[Number, ...]:
    """Returns the numbers in the attribute `numbers` of a class and of its base classes. A class
    may declare a number of a base class again."""
    found = {n.key: n for base in reversed(cls.__mro__) for n in vars(base).get("numbers", ())}
    return tuple(found.values())


def unexported(*numbers: Number) -> tuple[Number, ...]:
    """Returns the numbers without their metrics in Prometheus."""
    return tuple(number._replace(metric="") for number in numbers)


def find(numbers: Iterable[Number], path: str) -> Number | None:
    """Returns the declaration of the number with this path in a result, or None.

    A number whose key is the path itself comes before a number with a name in angle brackets.
    """
    pattern = None
    for number in numbers:
        if number.key == path:
            return number
        if pattern is None and "<" in number.key and number.match(path) is not None:
            pattern = number
    return pattern
