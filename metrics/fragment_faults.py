"""What went wrong while a fragment was sampled, and did not keep it from being sampled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class FragmentFaults(NamedTuple):
    """Faults of the environments of one worker within one fragment; travels with it.

    Attributes:
        env_faults: exceptions that environments raised; each cost an episode and at most one row.
        env_index: which environment of the worker raised the last of them.
        traceback: of the last of them, from the environment's own code on.
        bad_numbers: what is not finite in the fragment, or in what was made of it, and where;
            empty if all is. Such a fragment must not be learned from.
    """

    env_faults: int = 0
    env_index: int = 0
    traceback: str = ""
    bad_numbers: str = ""

    @classmethod
    def concat(cls, parts: Iterable[FragmentFaults]) -> FragmentFaults:
        """The faults of several fragments, in the order given."""
        total = cls()
        for part in parts:
            if part.env_faults:
                total = total._replace(
                    env_faults=total.env_faults + part.env_faults,
                    env_index=part.env_index,
                    traceback=part.traceback,
                )
            if part.bad_numbers:
                total = total._replace(bad_numbers=part.bad_numbers)
        return total


#: The faults of a fragment in which nothing went wrong.
NO_FAULTS = FragmentFaults()
