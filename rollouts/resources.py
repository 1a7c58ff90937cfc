"""Amounts of Ray resources, as Ray takes them."""

from __future__ import annotations

from typing import Annotated

import pydantic

#: What Ray has options of their own for.
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


#: Of one resource.
Amount = Annotated[float, pydantic.Field(ge=0.0, le=1e6), pydantic.AfterValidator(_whole_above_one)]
#: Of custom resources, by name.
Resources = Annotated[dict[str, Amount], pydantic.AfterValidator(_custom)]
