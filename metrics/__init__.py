"""Timers and running statistics of a run, its episodes and its learner, in NumPy."""

from polopt.common.episodes import EpisodeStats
from polopt.common.faults import Fault
from polopt.metrics.episode_window import EpisodeWindow
from polopt.metrics.lag import LagHistogram
from polopt.metrics.learner import LearnerStats
from polopt.metrics.timers import PhaseTimer

__all__ = [
    "EpisodeStats",
    "EpisodeWindow",
    "Fault",
    "LagHistogram",
    "LearnerStats",
    "PhaseTimer",
]
