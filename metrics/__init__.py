"""Timers, running statistics, episode and learner statistics. Imports NumPy and nothing else."""

from polopt.metrics.episodes import EpisodeStats, EpisodeWindow
from polopt.metrics.fragment_faults import FragmentFaults
from polopt.metrics.lag import LagHistogram
from polopt.metrics.learner import LearnerStats
from polopt.metrics.timers import PhaseTimer

__all__ = [
    "EpisodeStats",
    "EpisodeWindow",
    "FragmentFaults",
    "LagHistogram",
    "LearnerStats",
    "PhaseTimer",
]
