"""Types of config keys that hold amounts of Ray resources."""

from __future__ import annotations

from typing import Annotated

import pydantic

#: Resources for which Ray has separate options.
_OWN_OPTIONS = ("CPU", "GPU", "memory", "object_store_memory")


def _whole_above_one(amount: float) -> float:
    if amount > 1.0 and amount != int(amount):
        raise ValueError("a fraction of 1, or a whole number")
    return amount


def _custom(resources: dict[str, float]) -> dict[str, float]:
    for name in resources:
        if not name or name in _OWN_OPTIONS:
            raise ValueError(f"names of custom resources, not {name!r}")
    return resources


#: The amount of one resource: a fraction of 1, or a whole number.
Amount = Annotated[float, pydantic.Field(ge=0.0, le=1e6), pydantic.AfterValidator(_whole_above_one)]
#: Maps the names of custom resources to amounts.
Resources = Annotated[dict[str, Amount], pydantic.AfterValidator(_custom)]
