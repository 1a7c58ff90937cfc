"""Simulation: predicts how fast an experiment runs, and plans workers before they are started."""
