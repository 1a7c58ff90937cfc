"""`SUMS`: counts the sums (all-reduces) with other processes in the driver's current call to this
process."""

from __future__ import annotations


class SumCount:
    """Counts the sums of a call, so that a repeated run can repeat the failure of a sum.

    When a rank (a process that takes part in the sums) dies, the sums of the other ranks fail. The
    number of sums that a surviving rank completes before it notices the failure depends on timing.
    A transport that records a run therefore keeps this number, and makes the same sum fail when it
    repeats the run.

    Attributes:
        done: the number of completed sums in this call. Joining a group of ranks counts as a sum.
        broken: whether a sum of this call failed.
        limit: in a repeated run, the number of sums that succeed before a sum must fail. `None`
            means that no sum must fail.
    """

    def __init__(self) -> None:
        self.done = 0
        self.broken = False
        self.limit: int | None = None

    def begin(self, limit: int | None = None) -> None:
        """Resets the counter at the beginning of a call."""
        self.done, self.broken, self.limit = 0, False, limit

    def completed(self) -> bool:
        """Counts a completed sum. Returns False if the caller must treat this sum as failed. This
        process takes part even in such a sum, because other ranks may have completed it."""
        if self.limit is not None and self.done >= self.limit:
            return False
        self.done += 1
        return True


#: The counter of this process. A process runs one call at a time.
SUMS = SumCount()
