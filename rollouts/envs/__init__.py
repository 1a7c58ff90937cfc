"""Environments: made, checked, guarded and saved."""
