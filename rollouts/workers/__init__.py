"""Rollout workers: local, or Ray actors with health checks and replacement."""
