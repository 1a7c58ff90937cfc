"""Configuration, sample batches, weights and gradients: the types that all layers share."""
