"""`EpisodeWindow`: running statistics over the last episodes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from polopt.common.episodes import EpisodeStats
from polopt.metrics.number import Number, declare

#: Percentiles of returns and lengths in the results, with keys such as `episode_return_p5`.
PERCENTILES = (5, 25, 50, 75, 95)
#: Number of bins in the histograms of returns and lengths. Bins have equal width from the minimum
#: to the maximum.
HISTOGRAM_BINS = 20
#: Number of episodes in the window.
WINDOW = 100


def _numbers_of(name: str, unit: str, what: str) -> tuple[Number, ...]:
    last = f"of the last {WINDOW} episodes. NaN before the first episode has ended"
    mean = "episode_return" if name == "episode_return" else ""
    percentiles = (
        Number(f"{name}_p{p}", unit, f"{p}th percentile of the {what} {last}", metric="")
        for p in PERCENTILES
    )
    return (
        *declare(f"""
            {name}_mean ({unit}, metric={mean}): mean {what} {last}
            {name}_min ({unit}, metric=): smallest {what} {last}
            {name}_max ({unit}, metric=): largest {what} {last}
        """),
        *percentiles,
        *declare(f"""
            {name}_histogram (episodes, histogram): how many of the last {WINDOW} episodes are in
                each of {HISTOGRAM_BINS} bins of equal width from the minimum to the maximum
        """),
    )


#: The numbers of `EpisodeWindow.report`.
NUMBERS = (
    *_numbers_of("episode_return", "return", "undiscounted return"),
    *_numbers_of("episode_len", "environment steps", "length"),
    *declare("""
        episode_return_mean_since_report (return, metric=): mean return of the episodes that ended
            since the last result. NaN if none ended
        num_episodes (episodes, metric=): episodes that ended since the last result
        num_episodes_lifetime (episodes, counter, metric=): episodes since training began
    """),
)
#: The numbers of `EpisodeWindow.report` in environments with several agents.
AGENT_NUMBERS = declare(f"""
    agent_episode_returns_mean/<agent> (return, metric=): mean return of the agent in the last
        {WINDOW} episodes in which it took part
    module_episode_returns_mean/<policy> (return, metric=): mean return of the policy in the last
        {WINDOW} episodes in which it took part. Its return is the sum over its agents
""")


class EpisodeWindow:
    """Distribution of returns and lengths over the last `window` episodes, and episode counts.

    The mean is taken over the window, so it does not jump when only few episodes end between two
    reports. The mean is NaN until the first episode ends.

    Args:
        window: number of episodes in the window.

    Attributes:
        lifetime: number of episodes since the start of the run.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)
        # By the first part of the result key, and by agent or policy.
        self._parts: dict[str, dict[str, deque[float]]] = {"agent": {}, "module": {}}
        self._sum_since_report, self._count_since_report = 0.0, 0
        self.lifetime = 0

    def add(self, episodes: EpisodeStats) -> None:
        """Adds the episodes of one call to a worker."""
        returns = episodes.returns
        self._returns.extend(returns)
        self._lengths.extend(episodes.lengths)
        self._sum_since_report += sum(returns)
        self._count_since_report += len(returns)
        self.lifetime += len(returns)
        for kind, of_episodes in (("agent", episodes.agents), ("module", episodes.policies)):
            windows = self._parts[kind]
            for one in of_episodes:
                for name, total in one.items():
                    window = windows.setdefault(str(name), deque(maxlen=self._returns.maxlen))
                    window.append(total)

    def report(self) -> dict[str, Any]:
        """Returns the statistics, and resets the statistics since the last report.

        The keys for mean, minimum, maximum and counts are RLlib's keys in `env_runners/`. Further
        keys are for percentiles, for histograms, and for the mean since the last report. A
        histogram is a list of `HISTOGRAM_BINS` counts.
        """
        total, count = self._sum_since_report, self._count_since_report
        self._sum_since_report, self._count_since_report = 0.0, 0
        return {
            **_distribution("episode_return", self._returns),
            **_distribution("episode_len", self._lengths),
            "episode_return_mean_since_report": total / count if count else math.nan,
            "num_episodes": count,
            "num_episodes_lifetime": self.lifetime,
            **self.report_agents(),
        }

    def report_agents(self) -> dict[str, dict[str, float]]:
        """Returns the means of `AGENT_NUMBERS`. Empty in environments with one agent."""
        return {
            f"{kind}_episode_returns_mean": {
                name: sum(window) / len(window) for name, window in windows.items()
            }
            for kind, windows in self._parts.items()
            if windows
        }

    def keep_policies(self, names: Collection[str]) -> None:
        """Drops the returns of all policies except these."""
        kept = self._parts["module"]
        self._parts["module"] = {name: kept[name] for name in names if name in kept}

    def get_state(self) -> dict[str, object]:
        """Returns the window and the number of episodes of the run, serialisable as JSON."""
        return {
            "returns": list(self._returns),
            "lengths": list(self._lengths),
            "lifetime": self.lifetime,
            "agents": {name: list(window) for name, window in self._parts["agent"].items()},
            "policies": {name: list(window) for name, window in self._parts["module"].items()},
        }

    def set_state(self, state: dict[str, object]) -> None:
        """Restores a state from `get_state`."""
        self._returns.clear()
        self._lengths.clear()
        self._returns.extend(state["returns"])  # type: ignore[arg-type]
        self._lengths.extend(state["lengths"])  # type: ignore[arg-type]
        self.lifetime = int(state["lifetime"])  # type: ignore[call-overload]
        for kind, key in (("agent", "agents"), ("module", "policies")):
            saved: Any = state.get(key, {})  # not in older states
            self._parts[kind] = {
                name: deque(window, maxlen=self._returns.maxlen) for name, window in saved.items()
            }


@np.errstate(all="ignore")
def _distribution(name: str, window: Iterable[float]) -> dict[str, Any]:
    values = np.array([*window], dtype=np.float64)
    if len(values):
        low, high = float(values.min()), float(values.max())
        mean, percentiles = float(values.mean()), np.percentile(values, PERCENTILES).tolist()
        # `np.histogram` raises if the values differ only by rounding errors.
        place = (values - low) / (high - low) if high > low else np.zeros(len(values))
        bins = np.minimum(place * HISTOGRAM_BINS, HISTOGRAM_BINS - 1).astype(np.int64)
        counts = np.bincount(bins, minlength=HISTOGRAM_BINS).tolist()
    else:
        low = high = mean = math.nan
        percentiles, counts = [math.nan] * len(PERCENTILES), [0] * HISTOGRAM_BINS
    quantiles = {f"{name}_p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)}
    return {
        f"{name}_mean": mean,
        f"{name}_min": low,
        f"{name}_max": high,
        **quantiles,
        f"{name}_histogram": counts,
    }
