"""Reads result files as columns, groups runs, and computes statistics over the groups."""
