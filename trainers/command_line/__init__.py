"""What the command line runs: experiments in files, Tune, terminal output, evaluation."""
