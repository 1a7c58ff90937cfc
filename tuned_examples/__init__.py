"""One YAML file for each preset and environment, with its goal."""
