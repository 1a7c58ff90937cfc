"""Makes environments, checks their results, replaces failed environments, and saves their state."""
