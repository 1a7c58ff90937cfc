"""The command line: `polopt train`, `polopt evaluate` and `polopt list`.

What a command needs is imported within it, so that `--help` and `list` wait for neither Ray nor
torch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from polopt.common.config import ConfigError

app = typer.Typer(
    help="Distributed reinforcement learning with interchangeable policy optimizers on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
#: Exit codes: of a run that failed, of bad input, and of Ctrl-C as shells have it.
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130


@app.command()
def train(
    experiment: Annotated[
        str,
        typer.Argument(
            metavar="EXAMPLE_OR_CONFIG",
            help="A tuned example or a preset (see `polopt list`), or a YAML or Python file.",
        ),
    ],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to its config: lr=0.001, model.fcnet_hiddens=[32,32], "
            "stop.training_iteration=10.",
        ),
    ] = None,
    results_dir: Annotated[Path, typer.Option(help="Where results and checkpoints go.")] = Path(
        "~/ray_results/polopt"
    ),
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Iterations between checkpoints; 0: none but the last."
        ),
    ] = 20,
    restore: Annotated[
        Path | None,
        typer.Option(metavar="CHECKPOINT", help="Go on from it, or from the newest below it."),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show what Ray and the workers print.")
    ] = False,
) -> None:
    """Train an experiment; Ctrl-C stops it with a checkpoint."""
    with _bad_input():
        # Thousands of modules leave no garbage, but it is looked for again and again meanwhile.
        gc.disable()
        from polopt.trainers.planning import plan
        from polopt.trainers.running import RunOptions, run

        gc.enable()
        planned = plan(experiment, changes or [], restore)
        outcome = run(planned, RunOptions(results_dir, checkpoint_every, verbose), _console())
    if outcome.results is not None:
        _say(f"results     {outcome.results}")
    if outcome.checkpoint is not None:
        _say(f"checkpoint  {outcome.checkpoint}")
        _say(f"next        polopt evaluate {_quoted(outcome.checkpoint)}")
    if outcome.error:
        _fail(outcome.error, FAILED)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


@app.command()
def evaluate(
    checkpoint: Annotated[
        Path, typer.Argument(help="A checkpoint, or a directory with some: the newest is taken.")
    ],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 10,
    stochastic: Annotated[
        bool, typer.Option("--stochastic", help="Draw actions instead of taking the likeliest.")
    ] = False,
    video: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Record every episode there.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(metavar="ENV", help="Another environment: an id, or module:callable."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the environment and of the actions.")
    ] = None,
) -> None:
    """Play episodes with a trained policy."""
    with _bad_input():
        from polopt.trainers import evaluation

        found = evaluation.find_checkpoint(checkpoint.expanduser())
        state, experiment = evaluation.load(found, env)
        with evaluation.environment(experiment, video) as playground:
            policy = evaluation.make_policy(experiment, state, playground)
            played = evaluation.play(policy, playground, episodes, stochastic, seed)
    _say(f"checkpoint  {found}")
    for name, values in (("return", played.returns), ("length", played.lengths)):
        _say(f"{name:<11} {evaluation.summary(values)}  ({episodes} episodes)")
    if video is not None:
        _say(f"video       {video}")


@app.command("list")
def list_() -> None:
    """List presets, optimizers, policies and tuned examples."""
    from polopt.trainers.catalogue import catalogue

    with _bad_input():
        for number, (kind, entries) in enumerate(catalogue().items()):
            _say(("\n" if number else "") + kind)
            width = max((len(name) for name in entries), default=0)
            for name, description in entries.items():
                _say(f"  {name:<{width}}  {description}".rstrip())


def main() -> None:
    """Entry point of the `polopt` command."""
    sys.unraisablehook = _unraisable
    app(prog_name="polopt")


@contextmanager
def _bad_input() -> Iterator[None]:
    """Errors of configs and checkpoints are the user's to read, in one line."""
    try:
        yield
    except ConfigError as error:
        _fail(str(error), BAD_INPUT)
    except RuntimeError as error:
        from polopt.trainers.checkpoints import CheckpointError

        if not isinstance(error, CheckpointError):
            raise
        _fail(str(error), BAD_INPUT)


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    # Gymnasium's vector environments close themselves when they are collected, which those that
    # could not be made can not; the error that matters has been told.
    if getattr(problem.object, "__qualname__", "") != "VectorEnv.__del__":
        sys.__unraisablehook__(problem)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(code)


def _say(line: str) -> None:
    print(line, flush=True)


def _quoted(path: Path) -> str:
    import shlex

    return shlex.quote(str(path))


def _console() -> Any:
    from rich.console import Console

    return Console()


if __name__ == "__main__":
    main()
