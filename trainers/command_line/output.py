"""Lines and errors that the commands print, and their exit codes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from polopt.common.config import ConfigError

RESULTS_DIR = Path("~/ray_results/polopt")
#: Exit codes of a run that failed and of bad input. After a signal it is 128 plus its number.
FAILED, BAD_INPUT = 1, 2


@contextmanager
def bad_input() -> Iterator[None]:
    """Reports errors of configs and checkpoints in one line."""
    try:
        yield
    except ConfigError as error:
        fail(str(error), BAD_INPUT)
    except RuntimeError as error:
        from polopt.trainers.checkpoints import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        fail(str(error), BAD_INPUT)


def fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def say(line: str) -> None:
    print(line, flush=True)
