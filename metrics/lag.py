"""Policy lag: how many updates old the weights were that made a gradient or a batch."""

from __future__ import annotations

from collections import deque

import numpy as np


class LagHistogram:
    """Distribution of policy lag since the last report and over the whole run.

    Lag is counted in updates: the learner's version when a gradient or batch is used, less the
    version of the weights it was made with. Bin `i` counts lag `i`; the last bin holds all larger
    ones, so that the shape of what is reported never changes.

    Args:
        bins: number of bins, the last one open.
    """

    def __init__(self, bins: int = 17) -> None:
        self._recent = np.zeros(bins, dtype=np.int64)  # [bins]
        self.lifetime = np.zeros(bins, dtype=np.int64)  # [bins]
        self._sum = 0
        self._count = 0
        self._max = 0

    def add(self, lag: int) -> None:
        """Counts one gradient or batch that was `lag` updates old.

        Raises:
            ValueError: if `lag` is negative: a version from the future is a bug, not a lag.
        """
        if lag < 0:
            raise ValueError(f"policy lag can not be negative; got {lag}")
        self._recent[min(lag, len(self._recent) - 1)] += 1
        self.lifetime[min(lag, len(self.lifetime) - 1)] += 1
        self._sum += lag
        self._count += 1
        self._max = max(self._max, lag)

    def report(self) -> dict[str, object]:
        """`{mean, max, histogram}` of what was added since the last report, then starts anew."""
        report = {
            "mean": self._sum / self._count if self._count else 0.0,
            "max": self._max,
            "histogram": self._recent.tolist(),
        }
        self._recent[:] = 0
        self._sum = self._count = self._max = 0
        return report


class LagMeter:
    """How old what is learned from is, in updates and in rollouts.

    Lag in updates alone misleads where a rollout is gone through in several minibatches: each is
    an update, so that 4 epochs of 4 of them end 15 updates after the weights that acted, with
    nothing stale about it. In rollouts, lag counts those that had been learned from in between.

    Attributes:
        in_updates: its histogram.
        in_rollouts: its histogram.
    """

    def __init__(self) -> None:
        self.in_updates = LagHistogram()
        self.in_rollouts = LagHistogram()

    def add(self, version: int, now: int, clock: RolloutClock) -> None:
        """Counts what was made by weights of `version` and is used at version `now`."""
        self.in_updates.add(now - version)
        self.in_rollouts.add(clock.since(version))


class RolloutClock:
    """The versions at which rollouts had been learned from.

    Args:
        memory: rollouts remembered; lag is not counted beyond.
    """

    def __init__(self, memory: int = 1024) -> None:
        self._ends: deque[int] = deque(maxlen=memory)

    def tick(self, version: int) -> None:
        """A rollout has been gone through, which led to `version`."""
        if self._ends and version < self._ends[-1]:
            self.clear()
        self._ends.append(version)

    def since(self, version: int) -> int:
        """How many rollouts have been gone through since the weights were of `version`."""
        count = 0
        for end in reversed(self._ends):
            if end <= version:
                break
            count += 1
        return count

    def clear(self) -> None:
        """Forgets all, when versions begin anew."""
        self._ends.clear()
