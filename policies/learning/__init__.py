"""Updates of a policy's weights: minibatches, reduction over learners, clipping, torch.optim."""
