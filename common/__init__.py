"""The types that all layers share, such as configs, sample batches, weights and gradients."""
