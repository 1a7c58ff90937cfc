"""Policies: networks, action distributions and losses. Uses torch and NumPy, but not Ray.

Import each module by its name, such as `polopt.policies.ppo`. Then a process imports only the
modules that it uses.
"""
