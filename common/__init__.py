"""Configuration, sample batches, weights and gradients: what every layer shares."""
