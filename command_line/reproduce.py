"""`polopt reproduce`: runs one seed of a published result again.

`published_cells.json` holds the returns of all seeds. `python benchmarks/results.py --page` writes
it and `docs/tasks.md` from the same raw results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from statistics import mean, stdev
from typing import Annotated, NamedTuple

import typer

from polopt.command_line.output import FAILED, bad_input, fail, say
from polopt.common.config import ConfigError, nearest_of

#: The 0.975 quantiles of Student's t distribution with 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
#: Without evaluation, the return is the mean of the last episodes, of which at least so many ended.
_EPISODES = 100
#: The seed of an evaluation is the seed of training plus this number.
_EVALUATION_SEED = 1000


class Cell(NamedTuple):
    """A published result: a tuned example that was trained with several seeds.

    Attributes:
        example: name of the tuned example.
        preset: name of the preset.
        task: heading of the section in `docs/tasks.md`.
        env_steps: environment steps of each run.
        episodes: evaluation episodes at the end. With 0, the return is the mean of the last 100
            training episodes.
        seconds: median time of a run.
        commits: the commits that were measured.
        returns: the returns, by seed.
    """

    example: str
    preset: str
    task: str
    env_steps: int
    episodes: int
    seconds: float
    commits: Sequence[str]
    returns: Mapping[str, float]


def published_cells() -> list[Cell]:
    """Returns all published results, those of short runs first."""
    text = (resources.files(__package__) / "published_cells.json").read_text()
    return sorted((Cell(**cell) for cell in json.loads(text)), key=lambda cell: cell.seconds)


def cell_of(name: str, cells: Sequence[Cell]) -> Cell:
    """Returns the result of a tuned example, or the one of a preset with the shortest runs.

    Raises:
        ConfigError: no published result has this name. The message lists the names.
    """
    for cell in cells:
        if name in (cell.example, cell.preset):
            return cell
    known = [*dict.fromkeys([cell.preset for cell in cells] + [cell.example for cell in cells])]
    raise ConfigError(
        f"no published result of {name!r}{nearest_of(name, known)}. Allowed: {', '.join(known)}"
    )


def prediction_interval(returns: Sequence[float]) -> tuple[float, float]:
    """Returns the interval in which the return of one further seed lies with a probability of 95
    percent, if returns are normally distributed. Needs 2 to 10 returns.

    Source: Hahn and Meeker, Statistical Intervals, 1991, section 4.7.
    """
    count = len(returns)
    half = _T[count - 2] * stdev(returns) * math.sqrt(1.0 + 1.0 / count)
    return mean(returns) - half, mean(returns) + half


def run(cell: Cell, seed: int, progress: Callable[[int], None]) -> float:
    """Trains one seed as it was published, and returns its return. Calls `progress` with the
    environment steps after each iteration."""
    from polopt.command_line.examples import load_example
    from polopt.trainers.presets import PRESETS

    example = load_example(cell.example)
    config = {**example.config, "seed": seed}
    if cell.episodes:  # the published runs evaluated only at the end
        config.pop("evaluation_interval", None)
        config.pop("evaluation_duration", None)
    trainer = PRESETS[example.run](config)
    try:
        known = float("nan")
        steps = 0
        while steps < cell.env_steps:
            result = trainer.train()
            runners = result["env_runners"]
            if cell.episodes or runners["num_episodes_lifetime"] >= _EPISODES:
                known = runners["episode_return_mean"]
            steps = int(result["num_env_steps_sampled_lifetime"])
            progress(steps)
        if cell.episodes:
            evaluated = trainer.evaluate(cell.episodes, seed=_EVALUATION_SEED + seed)
            known = evaluated.episode_return_mean
    finally:
        trainer.stop()
    return float(known)


def lines(cell: Cell, seed: int) -> list[str]:
    """Returns what is known before the run."""
    returns = [*cell.returns.values()]
    low, high = prediction_interval(returns)
    known = cell.returns.get(str(seed))
    what = f"mean of {cell.episodes} evaluation episodes" * bool(cell.episodes)
    return [
        f"cell        {cell.example}: {cell.preset} on {cell.task}, {cell.env_steps:,} environment "
        f"steps, about {cell.seconds:,.0f} s",
        f"return      {what or f'mean of the last {_EPISODES} training episodes'}",
        f"published   {', '.join(f'{one:,.1f}' for one in returns)} (commit "
        f"{', '.join(cell.commits)})",
        f"interval    {low:,.1f} to {high:,.1f} for one further seed, 95 percent",
        f"seed {seed:<6} " + ("not published" if known is None else f"published as {known:,.1f}"),
    ]


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="PRESET", help="A preset or a tuned example. Without it, lists all results."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the run.", min=0)] = 0,
) -> None:
    """Run one seed of a published result, and say whether it meets the published interval."""
    cells = published_cells()
    if name is None:
        for cell in cells:
            say(
                f"{cell.preset:<22} {cell.example:<24} {cell.task}, {cell.env_steps:,} steps, "
                f"about {cell.seconds:,.0f} s"
            )
        return
    with bad_input():
        cell = cell_of(name, cells)
        for line in lines(cell, seed):
            say(line)
        shown = 0

        def progress(steps: int) -> None:
            nonlocal shown
            if steps * 10 // cell.env_steps > shown:
                shown = steps * 10 // cell.env_steps
                say(f"steps       {steps:,}")

        found = run(cell, seed, progress)
    low, high = prediction_interval([*cell.returns.values()])
    verdict = f"{found:,.1f}, {{}} the interval {low:,.1f} to {high:,.1f}"
    if low <= found <= high:
        say(f"reproduced  {verdict.format('inside')}")
    else:  # also NaN
        fail(f"not reproduced: {verdict.format('outside of')}", FAILED)
