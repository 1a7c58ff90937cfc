"""`RunContext`: what the command line passes to its trial besides the config."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunContext:
    """What the command line passes to its trial besides the config.

    Attributes:
        folder: directory of the experiment. The trainer appends its warnings to `polopt.log`
            there, and ends the current iteration early once a file `stop` exists there.
        working_dir: current directory of the command.
        restore: checkpoint to start from; None: train from scratch.
    """

    folder: Path
    working_dir: Path
    restore: Path | None = None

    @property
    def log_file(self) -> Path:
        """Warnings of the trial."""
        return self.folder / "polopt.log"

    @property
    def stop_file(self) -> Path:
        """Request to end the current iteration."""
        return self.folder / "stop"

    def enter(self) -> logging.Handler:
        """Prepares the process of the trial, which may be on another node than the command; returns
        the handler that writes the log file."""
        if self.working_dir.is_dir():
            os.chdir(self.working_dir)
            if str(self.working_dir) not in sys.path:
                sys.path.insert(0, str(self.working_dir))
        handler = logging.FileHandler(self.log_file)
        handler.setLevel(logging.WARNING)
        logging.getLogger("polopt").addHandler(handler)
        return handler
