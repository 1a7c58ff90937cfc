"""The command `polopt compare`."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Any

import typer

from polopt.command_line.output import FAILED, RESULTS_DIR, bad_input, fail, say
from polopt.common.config import ConfigError


def compare(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="EXAMPLE_OR_CONFIG",
            help="A tuned example or a preset (see `polopt list`), or a YAML or Python file, which "
            "may have settings of the comparison under the key `compare`.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Changes to the config of all variants."),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2",
            help="An option and its values, for example preset=A3C,A2C or lr=0.001,0.01. Given "
            "several times, each combination is a variant.",
        ),
    ] = None,
    runs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="Compare finished runs instead: a directory of results, or a .csv or .jsonl file "
            "with the columns variant, score, and if known seed, steps, seconds. May be given "
            "several times.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Environment steps of each run, or a time of training such as 90s, 10m or 2h."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Result key to compare. Default: the mean return."),
    ] = None,
    mode: Annotated[
        str | None, typer.Option(metavar="max|min", help="Whether a higher metric is better.")
    ] = None,
    level: Annotated[
        float | None,
        typer.Option(
            help="Largest chance of a wrong decision, over all pairs and looks. Default: 0.05."
        ),
    ] = None,
    looks: Annotated[
        str | None,
        typer.Option(
            metavar="N1,N2",
            help="Numbers of seeds of each variant at which the results are looked at. Default: "
            "every 5 seeds, and --max-seeds.",
        ),
    ] = None,
    max_seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds of each variant at the last look. Default: 20."),
    ] = None,
    equal_within: Annotated[
        float | None,
        typer.Option(metavar="M", help="The largest difference of means that counts as equal."),
    ] = None,
    failed: Annotated[
        float | None,
        typer.Option(
            metavar="SCORE",
            help="Score of a seed that crashed or diverged. Default: the worst score.",
        ),
    ] = None,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided/--fixed",
            help="Stop at the look that decides, or train --max-seeds seeds and look once.",
        ),
    ] = True,
    results_dir: Annotated[
        Path, typer.Option(help="Directory in which a directory for the comparison is made.")
    ] = RESULTS_DIR,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--continue",
            metavar="DIR",
            help="Continue the comparison in this directory. Further options make a second plan, "
            "which is marked.",
        ),
    ] = None,
    add_seeds: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="After the end of the plan, train N further seeds of each variant. They are "
            "marked, and do not change the decisions.",
        ),
    ] = 0,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the output of Ray and of the workers.")
    ] = False,
) -> None:
    """Train seeds of variants of an experiment until each pair is decided."""
    from polopt.command_line.signals import Stopped, StopSignals

    signals = StopSignals()
    with signals.installed():
        error = ""
        with bad_input():
            given = _given(
                vary=vary, budget=budget, metric=metric, mode=mode, level=level, looks=looks,
                max_seeds=max_seeds, equal_within=equal_within, failed=failed,
            )  # fmt: skip
            try:
                with signals.raising():
                    signals.check()
                    gc.disable()  # imports allocate many objects, but leave no garbage to collect
                    compare_function = _functions()
                    gc.enable()
                    from polopt.command_line.names import import_from
                    from polopt.comparison.runs import run_seeds

                    import_from(Path.cwd())
                    if not until_decided:
                        if "looks" in given:
                            raise ConfigError("--fixed: there is one look. Give only --max-seeds")
                        given["looks"] = [given.pop("max_seeds", 20)]
                    folder = None if resume is None else resume.expanduser().resolve()
                    if runs is not None:
                        if experiment is not None or vary is not None or resume is not None:
                            raise ConfigError(
                                "--runs: finished runs already have their options. Give neither "
                                "an experiment nor --vary or --continue"
                            )
                        plan, files = compare_function.prepare_finished(
                            runs, given, None, results_dir
                        )
                    else:
                        if resume is not None and experiment is not None:
                            raise ConfigError(
                                "--continue: the experiment is in the plan. Give only options of "
                                "the comparison"
                            )
                        plan, files = compare_function.prepare(
                            experiment, changes or [], given, folder, results_dir
                        )
                signals.install()
                with files.locked():
                    if runs is not None:
                        compare_function.say_report(files)
                    else:
                        say(f"plan        {files.folder / 'plan.json'} ({files.plans[-1]['hash']})")
                        error = run_seeds(
                            plan,
                            files,
                            signals,
                            lambda: compare_function.say_report(files),
                            add_seeds=add_seeds,
                            verbose=verbose,
                        )
            except Stopped:
                say("stopped before the first result. Nothing was saved")
        if signals.number:
            signals.leave()
        if error:
            fail(error, FAILED)


def _functions() -> Any:
    try:
        from polopt.comparison import compare_function
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("polopt.dashboards"):
            raise
        raise ConfigError("polopt compare needs the folder `dashboards` of polopt") from None
    return compare_function


def _given(
    *, vary: list[str] | None, looks: str | None, budget: str | None, **others: Any
) -> dict[str, Any]:
    """Returns the settings that were given on the command line."""
    given = {key: value for key, value in others.items() if value is not None}
    if budget is not None:
        given["budget"] = budget
    if looks is not None:
        try:
            given["looks"] = [int(look) for look in looks.split(",")]
        except ValueError:
            raise ConfigError(f"--looks {looks}. Allowed: numbers, such as 5,10,20") from None
    if vary is not None:
        from polopt.command_line.examples import read_yaml

        given["vary"] = {}
        for text in vary:
            key, equals, values = text.partition("=")
            if not (equals and all(key.split(".")) and values):
                raise ConfigError(f"--vary {text}. Allowed: KEY=V1,V2, such as preset=A3C,A2C")
            if key in given["vary"]:
                raise ConfigError(f"--vary {text}: key {key!r} is given twice")
            given["vary"][key] = read_yaml(f"[{values}]", f"--vary {text}")
    return given
