"""Colors of groups and phases: stable by name, and apart for readers with color blindness."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from polopt.dashboards.data.colors import PALETTE, PHASE_COLORS, looks_of

# Matrices from linear RGB to the linear RGB that a reader with full color blindness sees (Machado,
# Oliveira, Fernandes, 2009).
SIGHT = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]
    ),
    "protanopia": np.array(
        [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]
    ),
    "tritanopia": np.array(
        [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]
    ),
}
#: The matrix from linear RGB to CIE XYZ.
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
#: The dark backgrounds of the report and of Streamlit.
DARK = ("#0e1117", "#171614")
#: The phases that each kind of plot shows.
TOGETHER = (
    ("wait", "apply", "dispatch", "report", "evaluation", "startup", "other"),
    ("broadcast", "sample", "learn", "report", "evaluation", "startup", "other"),
    (
        *("broadcast", "sample", "insert", "draw", "learn"),
        *("report", "evaluation", "startup", "other"),
    ),
    ("group", "sample", "learn", "report", "evaluation", "startup", "other"),
    ("sample", "gradient", "learn", "allreduce", "skew", "idle"),
)


def linear(color: str) -> Any:
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(color: str, sight: str) -> Any:
    """Returns the CIELAB coordinates of a color as a reader sees it."""
    seen = np.clip(SIGHT[sight] @ linear(color), 0.0, 1.0)
    ratio = XYZ @ seen / np.array([0.9505, 1.0, 1.0888])
    f = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def least_distance(colors: Any, sight: str) -> float:
    pairs = itertools.combinations(colors, 2)
    return min(float(np.linalg.norm(lab(a, sight) - lab(b, sight))) for a, b in pairs)


@pytest.mark.parametrize("sight", SIGHT)
def test_colors_in_one_plot_are_apart(sight: str) -> None:
    # 2.3 is a just noticeable difference.
    assert least_distance(PALETTE, sight) > 15.0
    for phases in TOGETHER:
        assert least_distance([PHASE_COLORS[phase] for phase in phases], sight) > 15.0


def contrast(color: str, background: str) -> float:
    """Returns the contrast ratio of WCAG 2.2, from 1 to 21."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted([weights @ linear(color), weights @ linear(background)])
    return float((high + 0.05) / (low + 0.05))


def test_colors_are_visible_on_light_and_dark_pages() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    for color in {*PALETTE, *PHASE_COLORS.values()}:
        for background in DARK:
            # WCAG 2.2 asks for 3:1. Some colors of Okabe and Ito have less on white.
            assert contrast(color, background) >= 3.0, (color, background)
    for color in PALETTE:
        assert contrast(color, "#ffffff") > 1.9, color


def test_group_that_arrives_changes_no_other() -> None:
    names = [f"A3C, lr {number}" for number in range(30)]
    random.Random(0).shuffle(names)
    before: dict[str, Any] = {}
    for count in range(1, len(names) + 1):
        looks = looks_of(names[:count])
        assert {name: looks[name] for name in before} == before
        before = looks
    assert len(set(before.values())) == 30


def test_first_groups_have_different_colors() -> None:
    looks = looks_of(["A3C", "A2C", "SyncPPO", "DDPPO", "IMPALA", "DPPO"])
    assert len({look.color for look in looks.values()}) == 6


def test_lines_of_later_colors_are_dashed() -> None:
    looks = looks_of([str(number) for number in range(9)])
    dashes = {look.color: (look.dash, look.symbol) for look in looks.values()}
    assert {dashes[color] for color in PALETTE[:6]} == {("solid", "circle")}
    assert {dashes[color] for color in PALETTE[6:]} == {("dash", "square")}


def test_looks_repeat_after_36_groups() -> None:
    looks = looks_of([str(number) for number in range(100)])
    assert len(looks) == 100
    assert len(set(looks.values())) == 36
