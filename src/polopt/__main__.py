"""`python -m polopt`: the command `polopt`."""

from polopt.command_line.cli import main

if __name__ == "__main__":
    main()
