"""Gradients on a GPU, recorded as CUDA graphs.

The option `fast_gpu: False` disables everything in this folder.
"""
