"""Action distributions. Each file holds the distributions of one kind of actions."""
