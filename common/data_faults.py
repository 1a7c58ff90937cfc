"""`DataFaults`: faults that occurred while a fragment was sampled, but did not stop sampling."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class DataFaults(NamedTuple):
    """The faults of one worker's environments within one fragment. The batch of the fragment
    contains them.

    Attributes:
        env_faults: the number of exceptions that environments raised. Exceptions while a failed
            environment is replaced also count.
        env_index: the index of the environment that raised the last exception, within its worker.
            -1 if a whole vector environment raised.
        traceback: the traceback of the last exception. It does not begin with polopt's own frames.
        non_finite: a description of the non-finite values in the fragment, or in values that were
            computed from the fragment. Empty if all values are finite. A learner must not use a
            batch with non-finite values.
        discarded: a description of the non-finite values of environments whose rows are therefore
            not `valid`. A learner may use the other rows. Empty if no environment has such values.
        discarded_rows: the number of rows that are therefore not `valid`.
    """

    env_faults: int = 0
    env_index: int = 0
    traceback: str = ""
    non_finite: str = ""
    discarded: str = ""
    discarded_rows: int = 0

    @classmethod
    def concat(cls, parts: Iterable[DataFaults]) -> DataFaults:
        """Combines the faults of several fragments. `env_index` and `traceback` come from the last
        fragment with an exception. `non_finite` and `discarded` come from the last fragment with
        such values."""
        total = cls()
        for part in parts:
            if part.env_faults:
                total = total._replace(
                    env_faults=total.env_faults + part.env_faults,
                    env_index=part.env_index,
                    traceback=part.traceback,
                )
            if part.discarded:
                rows = total.discarded_rows + part.discarded_rows
                total = total._replace(discarded=part.discarded, discarded_rows=rows)
            if part.non_finite:
                total = total._replace(non_finite=part.non_finite)
        return total


#: The value for a fragment without faults.
NO_FAULTS = DataFaults()
