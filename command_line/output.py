"""Prints the lines and errors of the commands, and defines the exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from polopt.common.config import ConfigError
from polopt.common.files import printable

RESULTS_DIR = Path("~/ray_results/polopt")
#: Exit codes after a failed run and after bad input. After a signal, the exit code is 128 plus the
#: number of the signal.
FAILED, BAD_INPUT = 1, 2


@contextmanager
def bad_input() -> Iterator[None]:
    """Catches an error that a wrong config or a bad checkpoint has caused in the block. Prints the
    error in one line, and ends the command."""
    try:
        yield
    except (ConfigError, RuntimeError) as error:
        from polopt.trainers.checkpoints import CheckpointError

        if not isinstance(error, ConfigError | CheckpointError):
            raise
        fail(str(error), BAD_INPUT)


def fail(message: str, code: int) -> NoReturn:
    """Prints an error in one line, and ends the command.

    This function and `say` escape control characters, because names of files may come from an
    untrusted user.
    """
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise typer.Exit(code)


def say(line: str) -> None:
    """Prints one line."""
    print(printable(line), flush=True)


def say_findings(findings: Iterable[tuple[str, str]]) -> None:
    """Prints each finding of a diagnosis: a problem, and a change that may help."""
    for problem, change in findings:
        say(f"diagnosis   {problem}")
        say(f"            -> {change}")
