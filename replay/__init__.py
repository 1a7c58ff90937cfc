"""Replay buffers, priorities and the rate limiter, in NumPy. No Ray and no torch.

Modules are imported by name (`polopt.replay.replay_buffer`).
"""
