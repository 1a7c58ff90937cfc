"""Collects batches from several workers."""
