"""NumPy forward and backward passes of small networks, with closed-form loss gradients."""
