"""Configs, the Tune trainable, presets, checkpoints and the command line."""
