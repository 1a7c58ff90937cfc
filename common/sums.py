"""`SUMS`: how many sums over a group of processes the current call of this process has made."""

from __future__ import annotations


class SumCount:
    """Counts the all-reduces of a call, and ends a group where a rerun says so.

    The death of a rank breaks the sums of the others. After how many sums a survivor notices that
    depends on timing, so a record of a run has the number, and a rerun imposes it.

    Attributes:
        done: sums of this call that were completed. Joining a group counts as one.
        broken: a sum of this call failed.
        limit: number of sums that succeed before one fails. None: no sum is made to fail.
    """

    def __init__(self) -> None:
        self.done = 0
        self.broken = False
        self.limit: int | None = None

    def begin(self, limit: int | None = None) -> None:
        """Begins a call."""
        self.done, self.broken, self.limit = 0, False, limit

    def completed(self) -> bool:
        """Counts a sum. Returns whether it may be used. This process takes part in the sum that has
        to fail, because others may have completed it."""
        if self.limit is not None and self.done >= self.limit:
            return False
        self.done += 1
        return True


#: The counter of this process, which runs one call at a time.
SUMS = SumCount()
