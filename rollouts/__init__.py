"""Sampling: vector environments, rollout workers, and the calls to them that are under way."""
