"""Collecting batches from several workers."""
