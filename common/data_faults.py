"""Faults that occurred while a fragment was sampled and did not stop the sampling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class DataFaults(NamedTuple):
    """Faults of one worker's environments within one fragment. The fragment's batch holds them.

    Attributes:
        env_faults: number of exceptions that environments raised. Each ends an episode and
            invalidates at most one row.
        env_index: index within the worker of the environment that raised the last exception.
        traceback: traceback of the last exception. It begins in the environment's own code.
        non_finite: says which values are not finite, and where: values of the fragment, or values
            computed from it. Empty if all values are finite. A learner must not use a batch with
            such values.
    """

    env_faults: int = 0
    env_index: int = 0
    traceback: str = ""
    non_finite: str = ""

    @classmethod
    def concat(cls, parts: Iterable[DataFaults]) -> DataFaults:
        """The faults of several fragments, in the given order."""
        total = cls()
        for part in parts:
            if part.env_faults:
                total = total._replace(
                    env_faults=total.env_faults + part.env_faults,
                    env_index=part.env_index,
                    traceback=part.traceback,
                )
            if part.non_finite:
                total = total._replace(non_finite=part.non_finite)
        return total


#: A fragment without faults.
NO_FAULTS = DataFaults()
