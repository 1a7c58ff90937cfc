"""Lines and errors that the commands print, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from polopt.common.config import ConfigError
from polopt.common.files import printable

if TYPE_CHECKING:
    from polopt.metrics.diagnosis import Finding

RESULTS_DIR = Path("~/ray_results/polopt")
#: Exit codes of a run that failed and of bad input. After a signal it is 128 plus its number.
FAILED, BAD_INPUT = 1, 2


@contextmanager
def bad_input() -> Iterator[None]:
    """Reports errors of configs and checkpoints in one line."""
    try:
        yield
    except (ConfigError, RuntimeError) as error:
        from polopt.trainers.checkpoints import CheckpointError

        if not isinstance(error, ConfigError | CheckpointError):
            raise
        fail(str(error), BAD_INPUT)


def fail(message: str, code: int) -> NoReturn:
    """Ends the command with an error of one line. Names of files may be another user's, so control
    characters are escaped here and in `say`."""
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise typer.Exit(code)


def say(line: str) -> None:
    """Prints one line."""
    print(printable(line), flush=True)


def say_findings(findings: Iterable[Finding]) -> None:
    """Prints what the diagnosis found, each with the change that may help."""
    for finding in findings:
        say(f"diagnosis   {finding.text}")
        say(f"            -> {finding.change}")
