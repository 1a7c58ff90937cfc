"""Rollout workers: the local worker, and Ray actors with health checks and replacement."""
