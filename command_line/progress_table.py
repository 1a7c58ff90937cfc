"""`Progress`: shows the progress of a run as a live table on a terminal, or as labelled lines."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ray import tune
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from polopt.common.add_ons import add_ons
from polopt.common.files import printable

_logger = logging.getLogger("polopt")
#: Number of rows in the table.
_ROWS = 8
#: Number of environment steps between two checks of whether the policy learns, and number of
#: seconds between two lines while the workers start.
_REMARK_STEPS, _STARTING_S = 100_000, 30.0
#: Number of policies whose returns are shown.
_POLICIES = 2
#: Shown instead of a missing number.
_NONE = "-"
#: Name of the column with the mean return of evaluations. Runs without evaluation lack this column.
EVALUATION = "evaluation"
#: Stop keys whose values grow at a known rate.
_COUNTED = (
    "num_env_steps_sampled_lifetime",
    "timesteps_total",
    "training_iteration",
    "time_total_s",
)
_BAR_WIDTH = 40
COLUMNS = ("return", "steps", "steps/s", "left", "workers", "lag", "longest phase")


def time_left_s(result: Mapping[str, Any], limits: Mapping[str, float]) -> float:
    """Returns the estimated seconds until the run reaches the first of its limits on steps,
    iterations or seconds. The estimate assumes the current rates. Returns NaN without such a
    limit."""
    steps_per_s = result["num_env_steps_sampled_per_second"]
    iterations_per_s = 1.0 / max(result["time_this_iter_s"], 1e-9)
    rates = dict(zip(_COUNTED, (steps_per_s, steps_per_s, iterations_per_s, 1.0), strict=True))
    left = [
        (limit - result[key]) / max(rates[key], 1e-9)
        for key, limit in limits.items()
        if key in rates
    ]
    return max(0.0, min(left)) if left else math.nan


def share_done(result: Mapping[str, Any], limits: Mapping[str, float]) -> float:
    """Returns the share of the run that is done, from 0 to 1. The run ends at the first of its
    limits on steps, iterations or seconds. Returns NaN without such a limit."""
    shares = [
        min(1.0, result[key] / limit) if limit > 0 else 1.0
        for key, limit in limits.items()
        if key in _COUNTED
    ]
    return max(shares) if shares else math.nan


def longest_phase(result: Mapping[str, Any]) -> str:
    """Returns the phase with the largest share of the driver's time, and that share."""
    share = result["optimizer"]["driver"]["share"]
    name = max(share, key=lambda phase: share[phase])
    return f"{name} {share[name]:.0%}"


def cells(result: Mapping[str, Any], limits: Mapping[str, float]) -> dict[str, str]:
    """Returns one row of the table: a dict from the name of each column to the text in its cell.

    In a run with evaluation, the row also has the mean return of the evaluation that has ended in
    this iteration. The text is `-` if no evaluation has ended in this iteration.
    """
    config, up = result["config"], result["fault_tolerance"]["num_healthy_workers"]
    wanted = config.get("num_workers", config.get("num_env_runners"))
    values = (
        _mean_return(result),
        f"{result['num_env_steps_sampled_lifetime']:,}",
        f"{result['num_env_steps_sampled_per_second']:,.0f}",
        duration(time_left_s(result, limits)),
        "-" if wanted == 0 else f"{up}" if wanted is None else f"{up}/{wanted}",
        f"{result['optimizer']['policy_lag']['mean']:.1f}",
        longest_phase(result),
    )
    row = dict(zip(COLUMNS, values, strict=True))
    if EVALUATION in result:
        row[EVALUATION] = _mean_return(result[EVALUATION])
    return row


def _mean_return(result: Mapping[str, Any]) -> str:
    """Returns the mean return. With several policies, it is the sum over all agents, and the mean
    returns of the first policies follow in brackets."""
    found = result["env_runners"]
    mean, of_policies = found["episode_return_mean"], found.get("module_episode_returns_mean", {})
    if math.isnan(mean):
        return _NONE
    if len(of_policies) < 2:
        return f"{mean:.1f}"
    shown = [f"{name} {value:.1f}" for name, value in of_policies.items()][:_POLICIES]
    more = ["..."] * (len(of_policies) > _POLICIES)
    return f"{mean:.1f} ({', '.join(shown + more)})"


def line(row: Mapping[str, str]) -> str:
    """Returns a row as labelled text of at most about 100 characters."""
    up, _, wanted = row["workers"].partition("/")
    shown = ["return", EVALUATION, "steps", "steps/s"]
    shown += ["left"] if row["left"] != "-" else []
    shown += ["workers"] if up not in (wanted, "-") else []
    labels = [f"{key} {row[key]}" for key in shown if key in row]
    return "  ".join([*labels, f"lag {row['lag']} updates", f"driver: {row['longest phase']}"])


def duration(seconds: float) -> str:
    """Formats seconds as `45s`, `12m05s` or `3h07m`. Returns `-` for NaN."""
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def trial_label(trial: Any) -> str:
    """Returns a label of a Tune trial with the values of the options that the sweep varies, such as
    `preset=A3C seed=0`. If the sweep varies no option, returns the identifier of the trial."""
    searched = trial.evaluated_params or {}
    values = {key.rpartition("/")[2]: value for key, value in searched.items()}
    return " ".join(f"{key}={_short(value)}" for key, value in values.items()) or trial.trial_id


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "name" in value:
        value = value["name"]
    if isinstance(value, type):
        return value.__name__
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass
class SweepTrial:
    """The progress of one trial in a sweep.

    Attributes:
        label: the trial's values of the options that the sweep varies.
        group: the label without the seed.
        folder: name of the trial's directory in the results.
        is_running: whether the trial has started and has not ended.
        row: the trial's row of the table, from its last result. The row is empty before the first
            result.
        mean_return: mean return in the last result. It is NaN before the first result, and while no
            episode has ended.
        steps: number of environment steps so far.
    """

    label: str
    group: str
    folder: str
    is_running: bool = True
    row: dict[str, str] = field(default_factory=dict)
    mean_return: float = math.nan
    steps: int = 0


class Progress(tune.Callback):
    """Shows each result as one row, and each warning of polopt as one line. The warnings come from
    this process and from the trial's process.

    As a context manager, it releases the terminal at the end of the block. Tune pickles callbacks
    with the experiment. A `Progress` that was unpickled prints lines to standard output.

    Args:
        console: the console. `None` means the console of standard output.
        title: title of the table.
        limits: the stop conditions.
        log_file: file with the warnings of the trial. It may not exist yet.
        is_sweep: whether there are several trials. The table then has one row for each trial, and
            shows the `_ROWS` trials with the newest results. Without a table, each result of a
            trial is one line.

    Attributes:
        num_results: number of results so far.
        trials: the trials of a sweep, by identifier, ordered by the time of their last results.
        stop_reason: the value of `stop_reason` in the last result. It is empty if the result has
            none.
        stopping: text that is shown instead of the run's state after a request to stop. It is
            empty before a request.
    """

    def __init__(
        self,
        console: Console | None,
        title: str,
        limits: Mapping[str, float],
        log_file: Path,
        is_sweep: bool = False,
    ) -> None:
        self._arguments = (title, dict(limits), log_file, is_sweep)
        self._is_sweep = is_sweep
        self.trials: dict[str, SweepTrial] = {}
        self._console = console or Console()
        self._rows: deque[dict[str, str]] = deque(maxlen=_ROWS)
        self._share_done = math.nan
        self._live: Live | None = None
        self._state = "starting"
        self._is_starting = True
        self._begun_s = self._said_s = time.monotonic()
        self._looked_at_steps: float | None = None
        self._explain_at_steps = 0.0
        self._log_position = 0
        self._handler = _Handler(self)
        self.num_results = 0
        self._advisors = [one for add_on in add_ons() if (one := add_on.advisor()) is not None]
        self.stopping = self.stop_reason = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Progress, (None, *self._arguments)

    def __enter__(self) -> Progress:
        _logger.addHandler(self._handler)
        if self._is_live():
            self._live = Live(
                get_renderable=self._view,
                console=self._console,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        else:
            self.note(self._arguments[0])
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_live(self) -> bool:
        """Returns whether the output can be redrawn. This is true on a terminal, and in a notebook
        if `ipywidgets` is installed."""
        if self._console.is_jupyter:
            return importlib.util.find_spec("ipywidgets") is not None
        return self._console.is_terminal

    def close(self) -> None:
        """Ends the output. May be called more than once."""
        self._follow_log()
        _logger.removeHandler(self._handler)
        if self._live is not None:
            self._state = self.stopping = ""
            self._live.stop()
            self._live = None

    def say(self, state: str) -> None:
        """Shows the state of the run, for example `starting workers`."""
        self._state = state
        if self._live is None:
            self.note(state)

    def note(self, text: str) -> None:
        """Prints one line. If there is a live table, the line appears above the table."""
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Updates the output. Tune calls this method several times a second."""
        self._follow_log()
        now_s = time.monotonic()
        if self._is_starting and self._live is None and now_s - self._said_s >= _STARTING_S:
            self._said_s = now_s
            self.note(self._state_text())
        if self.stopping and self._state != self.stopping:
            self.say(self.stopping)

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows that a trial is training. Tune calls this method when the trainer has been made.
        Workers may still be starting."""
        started = f" (started in {self._elapsed()})" if self._is_starting else ""
        self._is_starting = False
        if self._is_sweep:
            label = trial_label(trial)
            group = " ".join(part for part in label.split(" ") if not part.startswith("seed="))
            self.trials[trial.trial_id] = SweepTrial(label, group, Path(trial.local_path).name)
            self._say_trials()
            return
        self.say(f"training{started}; Ctrl-C stops and saves")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows that a trial has ended. Tune calls this method."""
        self._end(trial)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows that a trial has failed. Tune calls this method."""
        self._end(trial)

    def _end(self, trial: Any) -> None:
        if trial.trial_id in self.trials:
            self.trials[trial.trial_id].is_running = False
            self._say_trials()

    def _say_trials(self) -> None:
        running = sum(trial.is_running for trial in self.trials.values())
        ended = len(self.trials) - running
        self.say(f"trials: {running} running, {ended} ended; Ctrl-C stops and saves")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Shows a result. Tune calls this method with each result."""
        if self._is_sweep:
            self._add(trial, result)
            return
        self.num_results += 1
        for advisor in self._advisors:
            advisor.add(result)
        self.stop_reason = str(result.get("stop_reason") or "")
        row = cells(result, self._arguments[1])
        if self._rows and row.get(EVALUATION) == "-":
            row[EVALUATION] = self._rows[-1].get(EVALUATION, "-")  # repeats the latest evaluation
        self._rows.append(row)
        self._share_done = share_done(result, self._arguments[1])
        if self._live is None:
            self.note(line(self._rows[-1]))
        steps = result["num_env_steps_sampled_lifetime"]
        if row["return"] == _NONE:
            self._explain_missing_return(steps)
        self._look_for_learning(steps)

    def _add(self, trial: Any, result: Mapping[str, Any]) -> None:
        """Adds a result of one trial in a sweep."""
        self.num_results += 1
        shown = self.trials.pop(trial.trial_id)
        self.trials[trial.trial_id] = shown
        shown.row = {"trial": shown.label, **cells(result, self._arguments[1])}
        shown.mean_return = result["env_runners"]["episode_return_mean"]
        shown.steps = result["num_env_steps_sampled_lifetime"]
        self._rows = deque((t.row for t in self.trials.values() if t.row), maxlen=_ROWS)
        if self._live is None:
            self.note(f"{shown.label}: {line(shown.row)}")

    def _explain_missing_return(self, steps: float) -> None:
        """Explains why the return is missing. Does so at the first result without a return, and
        again each time the number of steps has grown by a factor of 10."""
        if steps >= self._explain_at_steps:
            self._explain_at_steps = max(steps, 1) * 10
            self.note(
                f"remark: the return is {_NONE} because no episode has ended yet, after "
                f"{steps:,.0f} steps of all environments together -> max_frames_per_traj=STEPS "
                "limits the length of episodes"
            )

    def _look_for_learning(self, steps: float) -> None:
        """Shows a remark if the policy has not learned during many steps, so that the user can end
        the run early. Each remark is shown once."""
        if self._looked_at_steps is None:  # a restored run does not begin with 0 steps
            self._looked_at_steps = steps
        if steps - self._looked_at_steps < _REMARK_STEPS:
            return
        self._looked_at_steps = steps
        for advisor in self._advisors:
            for problem, change in advisor.remarks():
                self.note(f"remark: {problem} -> {change}")

    def findings(self) -> list[tuple[str, str]]:
        """Returns the advice of all add-ons at the end of a run: pairs of a problem and a change
        that may help. Of a sweep, there is none."""
        return [finding for advisor in self._advisors for finding in advisor.findings()]

    def _elapsed(self) -> str:
        return duration(time.monotonic() - self._begun_s)

    def _state_text(self) -> str:
        return f"{self._state}, {self._elapsed()}" if self._is_starting else self._state

    def _follow_log(self) -> None:
        """Prints the warnings that the trial has logged since the previous call."""
        log_file: Path = self._arguments[2]
        try:
            with log_file.open() as file:
                file.seek(self._log_position)
                text = file.read()
                self._log_position = file.tell()
        except OSError:  # the trial has not created the file yet
            return
        for message in text.splitlines():
            self.note(message)

    def _view(self) -> Group:
        title = Text(self._arguments[0], style="bold")
        columns: Iterable[str] = COLUMNS
        if self._rows:
            columns = dict.fromkeys(name for row in self._rows for name in row)
        aligned = [Column(name, justify="right") for name in columns]
        table = Table(*aligned, title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1))
        for row in self._rows:
            table.add_row(*(row.get(name, _NONE) for name in columns))
        parts: list[Any] = [table] if self._rows else [title]
        if self._rows and not math.isnan(self._share_done):
            bar = Table.grid(padding=(0, 1))
            text = f"{self._share_done:.0%}, {self._rows[-1]['left']} left"
            bar.add_row(ProgressBar(1.0, self._share_done, width=_BAR_WIDTH), Text(text))
            parts.append(bar)
        if self._state:
            parts.append(Spinner("dots", Text(self._state_text(), style="dim")))
        return Group(*parts)


class _Handler(logging.Handler):
    """Shows warnings of this process as lines of the output."""

    def __init__(self, progress: Progress) -> None:
        super().__init__(logging.WARNING)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(" ".join(record.getMessage().split()))
