"""The commands of `polopt`: reading experiments from files, training with Tune, terminal output and
evaluation."""
