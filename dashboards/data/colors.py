"""Colors of groups of runs in plots, and of the phases of the driver's and the workers' time.

Grafana's stacked panels also use the colors of the phases.

Readers with deuteranopia, protanopia or tritanopia can distinguish the colors of a plot. A test
simulates these color vision deficiencies (Machado et al., 2009). The first six colors come from
Okabe and Ito, 2008. The other three colors are similar to some of the first six, so their lines are
dashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"),
    *("#D55E00", "#8800ff", "#a05030", "#99bb66"),
)
_NUM_SOLID = 6  # the first line of each of these colors is solid
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross")
#: The color of each phase is the same in all plots. `wait` and `idle` are grey.
PHASE_COLORS = {
    "wait": "#a9b1bb",
    "idle": "#a9b1bb",
    "other": "#dfe4e9",
    "startup": "#586870",
    "report": "#a05030",
    "evaluation": "#e0c060",
    "apply": "#0072B2",
    "learn": "#0072B2",
    "dispatch": "#E69F00",
    "broadcast": "#E69F00",
    "allreduce": "#E69F00",
    "sample": "#009E73",
    "gradient": "#984878",
    "draw": "#CC79A7",
    "skew": "#D55E00",
    "group": "#56B4E9",
    "insert": "#56B4E9",
}


class Look(NamedTuple):
    """The look of a group in plots.

    Attributes:
        color: color as a hex string.
        dash: dash of the group's lines. It helps readers who cannot distinguish the colors.
        symbol: symbol of the group's points, for the same purpose.
    """

    color: str
    dash: str
    symbol: str


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Assigns a look to each group.

    The look depends on the hash of the name and on earlier groups. So a group that arrives later
    does not change the looks of other groups.

    Args:
        names: names of the groups, in the order in which the groups began. A group gets a look of
            an earlier group only if no other look is free.
    """
    looks: dict[str, Look] = {}
    count = len(PALETTE) * len(_DASHES)
    taken: set[int] = set()
    colors: set[int] = set()
    for name in names:
        begin = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        tries = [(begin + i) % len(PALETTE) for i in range(len(PALETTE))]
        tries += [(begin + i) % count for i in range(count)]
        place = next(
            (t for t in tries if t not in taken and (t >= len(PALETTE) or t not in colors)),
            begin % count,
        )
        taken.add(place)
        colors.add(place % len(PALETTE))
        number, color = divmod(place, len(PALETTE))
        number = (number + (color >= _NUM_SOLID)) % len(_DASHES)
        looks[name] = Look(PALETTE[color], _DASHES[number], _SYMBOLS[number])
    return looks


def evaluation_dash(dash: str) -> str:
    """Returns the dash for evaluations of a group whose training curve has `dash`."""
    return "dashdot" if dash == "dot" else "dot"


def phase_color(name: str, number: int) -> str:
    """Returns the color of a line.

    Args:
        name: name of the line. Each phase in `PHASE_COLORS` has a fixed color.
        number: index of the line in its plot. It determines the color of a line without a fixed
            color.
    """
    return PHASE_COLORS.get(name, PALETTE[number % len(PALETTE)])
