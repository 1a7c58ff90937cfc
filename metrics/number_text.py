"""`number_text`: writes a number for people, in sentences and tables."""

from __future__ import annotations

import math


def number_text(value: float) -> str:
    """Returns a number with four significant digits, and with all digits before the decimal point.

    Numbers from 1e9 have an exponent. Examples: `0.0001234`, `8.5`, `60,140`, `1.3e+09`.
    """
    whole = math.isfinite(value) and 999.95 <= abs(value) < 1e9
    return f"{value:,.0f}" if whole else f"{value:.4g}"
