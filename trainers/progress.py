"""What a terminal shows of a run: a table that renews itself, or plain lines where output goes to a
file or a pipe."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_logger = logging.getLogger("polopt")
#: What a run does first.
STARTING_RAY = "starting Ray"
#: Rows of the table: enough to see where it is going.
_ROWS = 10
_COLUMNS = ("iteration", "env steps", "return", "steps/s", "lag", "seconds")


class Progress(logging.Handler):
    """Shows each result of a run as one row, and what is logged meanwhile, such as the failure of a
    worker, as one line.

    Use as a context manager, so that the terminal is given back whatever happens.

    Args:
        console: of standard output.
        title: what runs.

    Attributes:
        state: what is happening now, in a few words.
    """

    def __init__(self, console: Console, title: str) -> None:
        super().__init__(logging.WARNING)
        self._console = console
        self._title = title
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_ROWS)
        self.state = STARTING_RAY
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        _logger.addHandler(self)
        if self._console.is_terminal:
            self._live = Live(
                self._view(running=True),
                console=self._console,
                refresh_per_second=8,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            self._console.print(self._title, highlight=False, markup=False, soft_wrap=True)
        return self

    def __exit__(self, *_: object) -> None:
        _logger.removeHandler(self)
        if self._live is not None:
            self._live.update(self._view(running=False))
            self._live.stop()

    def say(self, state: str) -> None:
        """What is happening now, in a few words."""
        self.state = state
        if self._live is not None:
            self._live.update(self._view(running=True))
        else:
            self._line(state)

    def show(self, result: Mapping[str, Any]) -> None:
        """A result."""
        self._rows.append(_row(result))
        if self._live is not None:
            if self.state.startswith("starting"):
                self.state = "training; Ctrl-C stops and saves"
            self._live.update(self._view(running=True))
        else:
            self._line("  ".join(f"{k} {v}" for k, v in zip(_COLUMNS, _row(result), strict=True)))

    def emit(self, record: logging.LogRecord) -> None:
        """A message of polopt's."""
        self._line(" ".join(record.getMessage().split()))

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _view(self, running: bool) -> Group:
        table = Table(*_COLUMNS, title=Text(self._title, style="bold"), title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for row in self._rows:
            table.add_row(*row)
        parts: list[Any] = [table] if self._rows else [Text(self._title, style="bold")]
        if running:
            parts.append(Spinner("dots", Text(self.state, style="dim")))
        return Group(*parts)


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    mean = result["env_runners"]["episode_return_mean"]
    return (
        str(result["training_iteration"]),
        f"{result['num_env_steps_sampled_lifetime']:,}",
        "-" if math.isnan(mean) else f"{mean:.2f}",
        f"{result['num_env_steps_sampled_per_second']:,.0f}",
        f"{result['optimizer']['policy_lag']['mean']:.2f}",
        f"{result['time_total_s']:.1f}",
    )
