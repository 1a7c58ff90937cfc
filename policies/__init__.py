"""Networks, losses and action distributions. Plain torch and NumPy: nothing here knows of Ray.

The modules are imported by name (`polopt.policies.ppo`), so that a process pays only for what it
uses.
"""
