"""Policy optimizers, each of which is one distribution strategy, and their shared modules."""
