"""Policy optimizers. Each file contains one distribution strategy."""
