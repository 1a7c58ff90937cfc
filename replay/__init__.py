"""Replay buffers, priorities and the rate limiter. Uses NumPy, but not Ray or torch.

Import each module by its name, such as `polopt.replay.replay_buffer`.
"""
