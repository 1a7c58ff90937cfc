"""Policy optimizers: one distribution strategy in each file."""
