"""`polopt rerun`: repeats a recorded run, and stops at the first difference."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from polopt.command_line.output import FAILED, bad_input, fail, say
from polopt.common.config import ConfigError


class _Here(BaseException):
    """Raised when the rerun reaches the event of `--at`."""


def rerun(
    trial: Annotated[
        Path,
        typer.Argument(
            help="Directory of a trial that was trained with record_arrivals=true, or a file of "
            "its record."
        ),
    ],
    until: Annotated[
        int | None,
        typer.Option(min=1, metavar="ITERATION", help="Stop after this iteration."),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="EVENT",
            help="Stop before the first event with this number. In each file of the record, the "
            "numbers begin at 0.",
        ),
    ] = None,
    debug: Annotated[
        bool,
        typer.Option(
            "--pdb",
            help="At the event of --at, open Python's debugger in the driver instead of stopping.",
        ),
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Begin at this checkpoint, from which the recorded run was restored.",
        ),
    ] = None,
    show: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST",
            help="Print these events of the first file of the record, and do not repeat the run.",
        ),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ENV",
            help="Environment to use instead of the environment in the record: an id, module:id, "
            "module:callable, or FILE.py:callable. A module that only the record names is not "
            "imported.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Class of the policy. Required if the policy is neither built in nor installed.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Class of the custom network. Required if the network is not installed.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS",
            help="Class of the policy optimizer. Required if the optimizer is neither built in nor "
            "installed.",
        ),
    ] = None,
    callbacks: Annotated[
        str | None,
        typer.Option(
            metavar="CLASS", help="Class of the callbacks. Required if the run has callbacks."
        ),
    ] = None,
) -> None:
    """Repeat a recorded run bit for bit. Stop with exit code 1 at the first difference."""
    with bad_input():
        if debug and at is None:
            raise ConfigError("--pdb needs --at EVENT")
        from polopt.command_line.names import import_from, named
        from polopt.recording.arrival_log import RerunDifference
        from polopt.recording.rerun import find_records
        from polopt.recording.rerun import rerun as reruns

        if show is not None:
            _show(find_records(trial)[0], show)
            return
        import_from(Path.cwd())
        classes = {"policy": policy, "network": network, "optimizer": optimizer}
        changes: dict[str, Any] = {
            key: named(name, f"--{key}") for key, name in classes.items() if name is not None
        }
        if env is not None:
            changes["env"] = named(env, "--env") if ".py:" in env else env
        if callbacks is not None:
            changes["callbacks"] = named(callbacks, "--callbacks")
        try:
            _run(reruns(trial, until=until, start=start, before=_at(at, debug), **changes))
        except RerunDifference as difference:
            fail(str(difference), FAILED)
        except _Here:
            say(f"stopped     before event {at}. The rerun is equal to the record so far")


def _run(trainers: Any) -> None:
    from polopt.metrics.number_text import number_text
    from polopt.recording.run_record import digest_of

    iterations = 0
    for trainer in trainers:
        iterations += 1
        returns = trainer.optimizer.metrics.episodes.report()["episode_return_mean"]
        digest = digest_of(trainer.get_policy())[:12]
        mean = number_text(returns)
        say(f"iteration {trainer.iteration:<5} equal   return {mean:<10} weights {digest}")
    say(f"equal       {iterations} iterations")


def _at(event: int | None, debug: bool) -> Callable[[int], None] | None:
    """Returns a function that stops the rerun, or opens the debugger, before the event with the
    index `event`. Returns None if `event` is None."""
    if event is None:
        return None

    def before(number: int) -> None:
        if number != event:
            return
        if not debug:
            raise _Here
        import pdb

        say(f"before event {event}. Repeat `up` to reach the optimizer's step. `c` continues")
        debugger = pdb.Pdb()
        here = inspect.currentframe()
        debugger.set_trace(here.f_back if here is not None else None)

    return before


def _show(path: Path, numbers: str) -> None:
    from polopt.recording.arrival_log import lines_of, read_log

    first, colon, last = numbers.partition(":")
    if not (first.isdecimal() and colon and last.isdecimal()):
        raise ConfigError(f"--show {numbers}. Allowed: FIRST:LAST, for example 1200:1250")
    _, recorded = read_log(path)
    say(f"record      {path}")
    for line in lines_of(recorded["events"], int(first), int(last)):
        say(line)
