"""Timers and running statistics of a run, its episodes and its learner, in NumPy."""

from polopt.common.data_faults import DataFaults
from polopt.common.episodes import EpisodeStats
from polopt.metrics.episode_window import EpisodeWindow
from polopt.metrics.lag import LagHistogram
from polopt.metrics.learner import LearnerStats
from polopt.metrics.timers import PhaseTimer

__all__ = [
    "DataFaults",
    "EpisodeStats",
    "EpisodeWindow",
    "LagHistogram",
    "LearnerStats",
    "PhaseTimer",
]
