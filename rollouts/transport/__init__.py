"""Channels and transports, which carry calls and their answers between processes."""
