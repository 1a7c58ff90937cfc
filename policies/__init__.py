"""Policies: networks, action distributions and losses. Uses torch and NumPy, but not Ray.

Modules are imported by name (`polopt.policies.ppo`), so that a process imports only what it uses.
"""
