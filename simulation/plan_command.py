"""The command `polopt plan`: ranks strategies by their predicted rates and lags."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from polopt.command_line.output import FAILED, bad_input, fail, say
from polopt.common.config import ConfigError

#: The presets that are tried, in this order.
CANDIDATES = ("SyncPPO", "IMPALA", "A3C", "A2C", "DDPPO", "ApexDQN", "DQN", "SAC")
#: The environments of each worker that are tried.
ENVS = (1, 4, 16)
#: The fragments of the best number of environments are also tried with this factor.
LONGER = 4
#: By default, this number of workers for each core are tried. More would take long to start, and
#: each of them needs some hundred megabytes.
WORKERS_PER_CORE = 8
#: Rates within this share of the highest rate count as equal. The lag then decides.
EQUAL = 0.05


class Choice(NamedTuple):
    """One way to train.

    Attributes:
        preset: name of the preset.
        changes: options, as `key=value`.
        workers: number of workers.
        rate: predicted environment steps per second.
        low, high: bounds of the interval of the rate.
        lag: predicted mean policy lag.
        bottleneck: what limits the rate.
    """

    preset: str
    changes: tuple[str, ...]
    workers: int
    rate: float
    low: float
    high: float
    lag: float
    bottleneck: str

    def command(self, env: str) -> str:
        """Returns the command line that trains in this way."""
        options = " ".join((f"env={env}", *self.changes, f"num_workers={self.workers}"))
        return f"polopt train {self.preset} {options}"


def plan(
    env: Annotated[
        str, typer.Argument(metavar="ENV", help="An environment, as the value of the option `env`.")
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of all runs, such as env_config.size=8."),
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="About the duration.")] = 2.0,
    cores: Annotated[
        float | None,
        typer.Option(min=0.1, help="Cores of the machine. Default: the cores of this machine."),
    ] = None,
    most_workers: Annotated[
        int | None,
        typer.Option(min=1, help="The most workers to try. Default: 8 for each core."),
    ] = None,
) -> None:
    """Rank strategies for an environment by predicted rate and lag, not by return."""
    with bad_input():
        from polopt.command_line.names import import_from

        import_from(Path.cwd())
        own = cores or float(os.cpu_count() or 1)
        most = most_workers or max(1, round(WORKERS_PER_CORE * own))
        choices, refused, left = choices_for(env, changes or [], minutes * 60.0, own, most)
    if not choices:
        fail("no strategy fits this environment:\n" + "\n".join(refused), FAILED)
    ranked = rank(choices)
    say("ranked by predicted steps per second. Equal rates (5%) are ranked by policy lag.")
    say("This says nothing about the return. Which strategy learns best, `polopt compare` shows.")
    head = f"{'':>3} {'preset':<9} {'workers':>7} {'steps/s':>9} {'from':>9} {'to':>9} {'lag':>6}"
    say(f"{head}  reason")
    for place, one in enumerate(ranked, start=1):
        say(
            f"{place:>3} {one.preset:<9} {one.workers:>7} {one.rate:>9,.0f} {one.low:>9,.0f} "
            f"{one.high:>9,.0f} {one.lag:>6.1f}  {reason(one, ranked[0])}"
        )
    for text in (*refused, *left):
        say(f"    {text}")
    say(ranked[0].command(env))


def choices_for(
    env: str, changes: Sequence[str], seconds: float, cores: float, most_workers: int
) -> tuple[list[Choice], list[str], list[str]]:
    """Calibrates and simulates the candidates, for about `seconds`.

    Returns:
        the best choice of each preset, the reasons why presets were refused, and what was not
        tried because the time was over.
    """
    from polopt.command_line.plan import plan as read
    from polopt.simulation.calibration import calibrate

    began_s, refused = time.monotonic(), []
    choices: list[Choice] = []
    left: list[str] = []
    fitting: list[tuple[str, Any]] = []
    for preset in CANDIDATES:
        try:
            fitting.append((preset, read(preset, [f"env={env}", *changes])))
        except ConfigError as error:
            refused.append(f"{preset}: {str(error).splitlines()[0][:120]}")
    messages: Any = None
    for number, (preset, planned) in enumerate(fitting):
        own_s = (seconds - (time.monotonic() - began_s)) / (len(fitting) - number)
        until_s = time.monotonic() + own_s
        share_s = max(0.5, own_s / (len(ENVS) + 2))  # for each variant, and for the last repeats
        length = planned.experiment.rollout.rollout_fragment_length
        tried: list[tuple[str, ...]] = [(f"num_envs_per_worker={count}",) for count in ENVS]
        best: list[tuple[Choice, Any]] = []
        while tried:
            own = tried.pop(0)
            if best and time.monotonic() > until_s - share_s:
                left.append(f"{preset} {' '.join(own)}: not tried, because the time was over")
                continue
            try:
                variant = read(preset, [f"env={env}", *changes, *own])
                calibration = calibrate(
                    variant.experiment, share_s / 2, messages=messages, sharing=most_workers / cores
                )
                if messages is None:  # the start of the first workers is not its time
                    until_s = time.monotonic() + own_s
                if messages is None or calibration.costs.exchange_s:
                    messages = calibration.costs
                best += [
                    (one, calibration)
                    for one in grown(preset, own, calibration, cores, share_s / 2, most_workers)
                ]
            except ConfigError as error:
                left.append(f"{preset} {' '.join(own)}: {str(error).splitlines()[0][:100]}")
            if not tried and best and len(own) == 1:
                top = max(best, key=lambda pair: pair[0].rate)[0]
                tried.append((*top.changes, f"rollout_fragment_length={LONGER * length}"))
        if best:
            first = rank([one for one, _ in best])[0]
            calibration = next(used for one, used in best if one is first)
            choices.append(_repeated(first, calibration, cores, share_s))
    return choices, refused, left


def grown(
    preset: str,
    own: tuple[str, ...],
    calibration: Any,
    cores: float,
    seconds: float,
    most_workers: int,
) -> list[Choice]:
    """Simulates a calibrated variant with 1, 2, 4 and more workers, up to `most_workers`, until
    more workers gain less than a tenth. Returns what was simulated."""
    from polopt.simulation.predictions import Machines, simulate

    found: list[Choice] = []
    for power in range(8):
        count = 2**power
        if count > most_workers:
            break
        try:
            one = simulate(calibration, count, Machines(1, cores), budget_s=seconds / 8)
        except ConfigError:  # such as fewer workers than shards
            continue
        rate, lag = one.env_steps_per_s, one.policy_lag
        found.append(Choice(preset, own, count, rate, rate, rate, lag, ""))
        if len(found) > 1 and rate < 1.1 * found[-2].rate:
            break
    return found


def _repeated(choice: Choice, calibration: Any, cores: float, seconds: float) -> Choice:
    """Simulates a choice several times, for its interval and its bottleneck."""
    from polopt.simulation.predictions import Machines, predict_with

    machines = Machines(1, cores)
    (one,) = predict_with(calibration, [choice.workers], machines, 3, seconds / 12)
    return choice._replace(
        rate=one.env_steps_per_s,
        low=one.low,
        high=one.high,
        lag=one.policy_lag,
        bottleneck=one.bottleneck,
    )


def rank(choices: Sequence[Choice]) -> list[Choice]:
    """Orders choices: the highest rate first. Among rates that are equal within `EQUAL`, the
    smallest lag first, and then the fewest workers."""
    left, ranked = list(choices), []
    while left:
        highest = max(one.rate for one in left)
        equal = [one for one in left if one.rate >= highest * (1.0 - EQUAL)]
        first = min(equal, key=lambda one: (round(one.lag, 1), one.workers, -one.rate))
        ranked.append(first)
        left.remove(first)
    return ranked


def reason(one: Choice, first: Choice) -> str:
    """Returns the reason of a choice's place, as text."""
    options = ", ".join(one.changes)
    if one is first:
        return f"highest rate, limited by {one.bottleneck} ({options})"
    if one.rate >= first.rate * (1.0 - EQUAL):
        return f"as fast, but with a higher lag or more workers ({options})"
    return f"{one.rate / first.rate:.0%} of the first, limited by {one.bottleneck} ({options})"
