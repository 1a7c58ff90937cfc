"""Action distributions, one family per file."""
