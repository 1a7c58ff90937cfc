"""Samples fragments from a vector of environments."""
