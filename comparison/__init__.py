"""Comparisons of variants of an experiment that run seeds until they are decided."""
