"""NumPy forward and backward passes of small networks, with closed-form loss gradients.

`PolicyConfig.fast_cpu = False` disables everything in this folder.
"""
