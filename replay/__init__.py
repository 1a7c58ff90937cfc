"""Replay buffers, priorities and the rate limiter. No module of this package calls Ray or torch.

Import each module by its name, such as `polopt.replay.replay_buffer`.
"""
