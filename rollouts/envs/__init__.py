"""Makes environments, checks their results, replaces those that fail, and saves their state."""
