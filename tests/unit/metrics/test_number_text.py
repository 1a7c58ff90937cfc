"""Numbers in sentences and tables."""

from __future__ import annotations

import math

import pytest

from polopt.metrics.number_text import number_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (60_140.0, "60,140"),
        (-60_140.4, "-60,140"),
        (999_999_999.0, "999,999,999"),
        (1.3e9, "1.3e+09"),
        (1234.56, "1,235"),
        (999.96, "1,000"),
        (8.5, "8.5"),
        (0.00012345, "0.0001234"),
        (0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_number_has_all_digits_before_the_point(value: float, text: str) -> None:
    assert number_text(value) == text
