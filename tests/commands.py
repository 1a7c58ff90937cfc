"""Runs commands of polopt in tests of add-ons that work without the command line, too."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner, Result


def run_command(arguments: Sequence[str]) -> Result:
    """Runs a command in this process. Skips the test if polopt has no command line."""
    cli = pytest.importorskip("polopt.command_line.cli")
    return CliRunner().invoke(cli.app, list(arguments))
