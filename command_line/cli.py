"""The command line: `polopt train`, `evaluate`, `export`, `rerun`, `list`, and the commands that
show results.

Each command imports its modules when it runs. `--help` therefore loads neither Ray nor torch.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polopt import __version__
from polopt.command_line.output import FAILED, RESULTS_DIR, bad_input, fail, say
from polopt.command_line.reproduce import reproduce
from polopt.common.add_ons import add_ons
from polopt.common.config import ConfigError
from polopt.common.ray_names import QUIET_ENVIRONMENT

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_Checkpoint = Annotated[
    Path, typer.Argument(help="A checkpoint, or a directory whose newest checkpoint is used.")
]
_POLICY_OPTION = typer.Option(
    metavar="CLASS",
    help="Class of the policy, as module:Class or FILE.py:Class. Required if the policy is neither "
    "built in nor installed.",
)
_NETWORK_OPTION = typer.Option(
    metavar="CLASS",
    help="Class of the custom network, as module:Class or FILE.py:Class. Required if the network "
    "is not installed.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"polopt {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Show the version and exit.",
            callback=_show_version,
            is_eager=True,  # then the option also works without a command
        ),
    ] = False,
) -> None:
    """Distributed reinforcement learning with interchangeable policy optimizers on Ray."""


@app.command()
def train(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="EXAMPLE_OR_CONFIG",
            help="A tuned example or a preset (see `polopt list`), or a YAML or Python file. "
            "Without this argument, --restore uses the config of the checkpoint.",
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the config, for example lr=0.001, model.fcnet_hiddens=[32,32] or "
            "stop.training_iteration=10.",
        ),
    ] = None,
    results_dir: Annotated[
        Path, typer.Option(help="Directory of results and checkpoints.")
    ] = RESULTS_DIR,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Number of iterations between checkpoints. With 0, a checkpoint is saved only at "
            "the end of the run.",
        ),
    ] = 20,
    restore: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Start from this checkpoint, or from the newest checkpoint below this directory.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Train each trial with N seeds: 0, 1, and so on. With seed=K, the seeds are K, "
            "K+1, and so on.",
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Draw N values from each distribution in the config, for example from "
            "lr='tune.loguniform(1e-4, 1e-2)'. Each point of a grid, such as lr='{grid_search: "
            "[1e-3, 1e-4]}', runs N times.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Show the output of Ray and of the workers.")
    ] = False,
) -> None:
    """Train an experiment. After Ctrl-C, SIGTERM or SIGHUP, save a checkpoint and stop."""
    from polopt.command_line.signals import Stopped, StopSignals

    signals = StopSignals()
    with signals.installed():
        error = ""
        with bad_input():
            try:
                with signals.raising():
                    signals.check()
                    gc.disable()  # imports allocate many objects, but leave no garbage to collect
                    from polopt.command_line import names, plan, tune_run

                    gc.enable()
                    names.import_from(Path.cwd())
                    planned = plan.plan(
                        *_experiment(experiment, changes, restore), restore, num_samples, seeds
                    )
                # Installed again, because a Python file may call `ray.init`, which replaces
                # signal handlers.
                signals.install()
                error = tune_run.run(planned, results_dir, signals, checkpoint_every, verbose)
            except Stopped:
                say("stopped before the first result. Nothing was saved")
        if signals.number:
            signals.leave()
        if error:
            fail(error, FAILED)


def _experiment(
    experiment: str | None, changes: list[str] | None, restore: Path | None
) -> tuple[str | None, list[str]]:
    """Returns the experiment and the changes to its config. With `restore`, the first argument may
    be a change."""
    if restore is not None and experiment is not None and "=" in experiment:
        return None, [experiment, *(changes or [])]
    return experiment, changes or []


@app.command()
def evaluate(
    checkpoint: _Checkpoint,
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Changes to the environment: env_config.KEY=VALUE or max_frames_per_traj=STEPS.",
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes.")] = 10,
    stochastic: Annotated[
        bool,
        typer.Option(
            "--stochastic", help="Sample actions instead of taking the mode of the distribution."
        ),
    ] = False,
    video: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Record videos of all episodes in this directory."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ENV",
            help="Environment to use instead of the environment in the checkpoint: an id, "
            "module:id, module:callable, or FILE.py:callable. A module that only the checkpoint "
            "names is not imported.",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the environment and of the actions.")
    ] = None,
    policy: Annotated[str | None, _POLICY_OPTION] = None,
    network: Annotated[str | None, _NETWORK_OPTION] = None,
) -> None:
    """Play episodes with a trained policy."""
    with bad_input():
        from polopt.command_line import evaluate_command
        from polopt.command_line.names import named_classes
        from polopt.trainers import play_episodes
        from polopt.trainers.find_checkpoint import find_checkpoint
        from polopt.trainers.play_episodes import restore_env_statistics
        from polopt.trainers.saved_policy import policy_of

        classes = named_classes(policy, network)
        found = find_checkpoint(checkpoint.expanduser())
        state, experiment = evaluate_command.load(found, env, changes or [])
        loaded = policy_of(state, found, *classes)
        with play_episodes.environment(experiment.rollout, video) as single_env:
            play_episodes.check_env_fits(loaded, single_env)
            restore_env_statistics(state, single_env)
            say(f"checkpoint  {found}")
            played = play_episodes.play(
                loaded, single_env, episodes, stochastic, seed, say, experiment.rollout
            )
    for name, key in (("return", "episode_return"), ("length", "episode_len")):
        summary = evaluate_command.summary([getattr(episode, key) for episode in played])
        say(f"{name:<11} {summary}  ({episodes} episodes)")
        if name == "return":
            evaluate_command.say_policies(played)
    if video is not None:
        say(f"video       {video}")


@app.command()
def export(
    checkpoint: _Checkpoint,
    output: Annotated[Path, typer.Argument(metavar="FILE.onnx", help="File to write.")],
    policy: Annotated[str | None, _POLICY_OPTION] = None,
    network: Annotated[str | None, _NETWORK_OPTION] = None,
    of: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the policy, if the run had several policies."),
    ] = None,
) -> None:
    """Write a trained policy as an ONNX model."""
    with bad_input():
        from polopt.command_line.names import named_classes
        from polopt.trainers.find_checkpoint import find_checkpoint
        from polopt.trainers.saved_policy import load

        policy_class, network_class = named_classes(policy, network)
        found = find_checkpoint(checkpoint.expanduser())
        load(found, policy_class, network=network_class, policy=of).export_onnx(output)
    say(f"checkpoint  {found}")
    say(f"model       {output}")


@app.command("list")
def list_(
    name: Annotated[
        str | None,
        typer.Argument(help="List the options of this preset, optimizer or policy."),
    ] = None,
) -> None:
    """List presets, optimizers, policies and tuned examples, or the options of NAME."""
    with bad_input():
        if name is not None:
            from polopt.command_line import option_list

            for line in option_list.lines(name):
                say(line)
            return
        from polopt.command_line.examples import example_names, load_example
        from polopt.optimizers.optimizer_registry import OPTIMIZERS
        from polopt.policies.policy_registry import POLICIES
        from polopt.trainers.presets import PRESETS

        listed = {
            "presets": {name: _first_sentence(cls) for name, cls in PRESETS.items()},
            "examples": {name: load_example(name).description for name in example_names()},
        }
        for kind, registry in (("optimizers", OPTIMIZERS), ("policies", POLICIES)):
            listed[kind] = {}
            for name in registry.names():
                try:
                    listed[kind][name] = _first_sentence(registry.get(name))
                except ConfigError as error:  # the plugin cannot be imported
                    listed[kind][name] = f"({error})"
        for number, (kind, entries) in enumerate(listed.items()):
            if number:
                say("")
            say(kind)
            width = max(map(len, entries), default=0)
            for name, description in entries.items():
                say(f"  {name:<{width}}  {description}".rstrip())


app.command("reproduce")(reproduce)
for _add_on in add_ons():
    for _name, _command in _add_on.commands().items():
        app.command(_name)(_command)


def main() -> None:
    """Entry point of the `polopt` command."""
    os.environ.update(QUIET_ENVIRONMENT)
    sys.unraisablehook = _unraisable
    app(prog_name="polopt")


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    # If the constructor of a Gymnasium vector environment raises, `VectorEnv.__del__` raises, too.
    # This second error is not shown, because the error of the constructor is reported.
    if getattr(problem.object, "__qualname__", "") != "VectorEnv.__del__":
        sys.__unraisablehook__(problem)


def _first_sentence(cls: type) -> str:
    paragraph = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".").replace("`", "")


if __name__ == "__main__":
    main()
