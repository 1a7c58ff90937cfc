"""Forward and backward passes of small networks in NumPy, and closed forms of loss gradients.

The option `fast_cpu: False` disables everything in this folder.
"""
