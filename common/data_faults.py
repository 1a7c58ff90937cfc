"""What went wrong while a fragment was sampled, and did not keep it from being sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class DataFaults(NamedTuple):
    """Faults of the environments of one worker within one fragment; travels with it.

    Attributes:
        env_faults: exceptions that environments raised; each cost an episode and at most one row.
        env_index: which environment of the worker raised the last of them.
        traceback: of the last of them, from the environment's own code on.
        non_finite: what is not finite in the fragment, or in what was made of it, and where;
            empty if all is. Such a fragment must not be learned from.
    """

    env_faults: int = 0
    env_index: int = 0
    traceback: str = ""
    non_finite: str = ""

    @classmethod
    def concat(cls, parts: Iterable[DataFaults]) -> DataFaults:
        """The faults of several fragments, in the order given."""
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


#: The faults of a fragment in which nothing went wrong.
NO_FAULTS = DataFaults()
