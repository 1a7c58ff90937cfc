"""Colors of groups and of phases, the same in all plots and in Grafana.

Colors are apart for readers with deuteranopia, protanopia and tritanopia, too: a test simulates
them (Machado et al., 2009). The first six come from Okabe and Ito, 2008. The other three are
nearer to them, so their lines are dashed, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

PALETTE = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9"),
    *("#D55E00", "#8800ff", "#884422", "#99bb66"),
)
_NUM_SOLID = 6  # colors whose first line is solid
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross")
#: Waiting is grey in every plot, work has colors.
PHASE_COLORS = {
    "wait": "#a9b1bb",
    "idle": "#a9b1bb",
    "other": "#dfe4e9",
    "startup": "#4d4d6e",
    "report": "#884422",
    "evaluation": "#e0c060",
    "apply": "#0072B2",
    "learn": "#0072B2",
    "dispatch": "#E69F00",
    "broadcast": "#E69F00",
    "allreduce": "#E69F00",
    "sample": "#009E73",
    "gradient": "#882255",
    "draw": "#CC79A7",
    "skew": "#D55E00",
    "group": "#56B4E9",
    "insert": "#56B4E9",
}


class Look(NamedTuple):
    """How a group is drawn.

    Attributes:
        color: hex.
        dash: of lines, the second code for readers who cannot tell the color.
        symbol: of points, the second code there.
    """

    color: str
    dash: str
    symbol: str


def looks_of(names: Iterable[str]) -> dict[str, Look]:
    """Gives each group its look, by its name: a group that arrives later changes no other.

    Args:
        names: in the order in which the groups began. A look that an earlier group has is not
            given again while others are free.
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
    """The dash of evaluation's curve beside one of training with `dash`."""
    return "dashdot" if dash == "dot" else "dot"


def phase_color(name: str, number: int) -> str:
    """The color of a line: of its phase, or by its number in the plot for other names."""
    return PHASE_COLORS.get(name, PALETTE[number % len(PALETTE)])
