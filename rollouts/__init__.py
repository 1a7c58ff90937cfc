"""Vector environments, the sampler, rollout workers, and the driver's calls to the workers."""
