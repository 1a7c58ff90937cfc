"""Sampling fragments from a vector of environments."""
