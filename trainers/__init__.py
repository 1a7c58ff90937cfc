"""The Tune trainable, its config, presets, checkpoints and the command line."""
