"""`AddOn`: everything that a folder on top of the core can attach to the core.

The core trains without any add-on, and names none. It asks all add-ons at the places that the
methods of `AddOn` describe. A user's program has the same rights:

    class Printer(polopt.AddOn):
        def follow(self, trainer):
            return PrintResults()          # a RunListener

    polopt.register_add_on(Printer())

An add-on of polopt is a folder with the file `add_on.py`, which defines `ADD_ON`. The folder is
beside the core, or is a folder of faster code in `policies/`. Delete the folder, and everything
else still trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from polopt.common.checks import Checks
from polopt.common.overrides import Replacement


class RunListener:
    """Follows one run in the driver. `AddOn.follow` returns a listener, and the trainer calls its
    methods.

    An exception of a listener ends the run. A listener whose work is not needed for training
    catches its own exceptions, and warns.
    """

    def adapt(self, config: Any) -> Any:
        """Returns the `WorkerConfig` of the training workers, changed as the add-on needs it. The
        add-on can set `wrap_transport` to see every message of the run."""
        return config

    def begin(self) -> None:
        """The workers and the optimizer were made. Called again if Tune reuses the trainer."""

    def begin_iteration(self) -> None:
        """A training iteration begins."""

    def before_step(self) -> None:
        """The optimizer is about to make a step."""

    def after_step(self) -> None:
        """The optimizer has made a step."""

    def extend(self, result: dict[str, Any]) -> None:
        """Adds keys to the result of an iteration, before the user's callbacks see it."""

    def result(self, result: dict[str, Any]) -> None:
        """An iteration has ended with this result. The user's callbacks have seen it."""

    def saving(self) -> None:
        """A checkpoint is about to be saved. Pending calls are not drained yet."""

    def saved(self, checkpoint: str) -> None:
        """A checkpoint was written to this directory, from which Tune may move it."""

    def restoring(self, checkpoint: str) -> None:
        """The checkpoint with this path is about to be restored."""

    def restored(self) -> None:
        """A checkpoint was restored."""

    def end(self) -> None:
        """The run ends. The workers still run."""


class Advisor:
    """Reads the results of a run where the user started it, and gives advice. `AddOn.advisor`
    returns one. Each piece of advice is a pair of texts: the problem, and a change that may
    help."""

    def add(self, result: Mapping[str, Any]) -> None:
        """Adds a result, in the order in which results arrive."""

    def remarks(self) -> list[tuple[str, str]]:
        """Returns new advice for which it is worth interrupting the run."""
        return []

    def findings(self) -> list[tuple[str, str]]:
        """Returns all advice at the end of the run."""
        return []


class AddOn(Checks):
    """What an add-on attaches to the core. Each method has a default that attaches nothing. An
    add-on adds checks of options with the methods of `Checks`.

    Attributes:
        config_class: a subclass of `Config` with the options of the add-on. A config has them
            beside all other options. The add-on reads them with `experiment.add_on(config_class)`.
        files: patterns of the files that the add-on writes to the directory of a run, such as
            `trace.json`. A run that replaces an earlier run in its directory deletes them.
        numbers: declarations (`polopt.Number`) of the keys that `RunListener.extend` adds to
            results.
    """

    config_class: ClassVar[type[Any] | None] = None
    files: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[Any, ...]] = ()

    def follow(self, trainer: Any) -> RunListener | None:
        """Returns a listener for the run of this trainer, or None. Called once for each trainer,
        before the workers start.

        Args:
            trainer: a `PolicyOptimizerTrainer`.
        """
        return None

    def worker_set(self, config: Any) -> type[Any] | None:
        """Returns the subclass of `WorkerSet` that starts the training workers of this
        `WorkerConfig`. None leaves the choice to the other add-ons and to the core."""
        return None

    def advisor(self) -> Advisor | None:
        """Returns an advisor for a run that `polopt train` or `polopt.train` starts, or None."""
        return None

    def tune_callbacks(self) -> list[Any]:
        """Returns callbacks of Tune for the runs of `polopt train`."""
        return []

    def commands(self) -> Mapping[str, Callable[..., None]]:
        """Returns subcommands of `polopt` by name. Each is a function that Typer can turn into a
        command."""
        return {}

    def tabs(self, runs: Sequence[Any]) -> list[Any]:
        """Returns further tabs of the page that shows results, which are also sections of the
        report. Each is a `Tab` of the module that makes the page.

        Args:
            runs: the runs that the page shows. Each has the directory `run.trial.folder`.
        """
        return []

    def hint(self, kind: str, name: str) -> str:
        """Returns what to use instead of a name that polopt does not know, for the error or the
        warning about this name. The text has no final full stop. The result is empty if the add-on
        does not know the name either.

        Args:
            kind: what the user meant with the name:

                - "option": a key of a config.
                - "optimizer", "policy" or "network": a registered name.
                - "preset": a preset, an algorithm, or a name of the package `polopt`.
                - "result key": a key of a result. The hint is the key to use.
                - "tune name": a name under which polopt is about to register a preset with Tune. A
                  hint becomes a warning.
                - "trainable": `module.name` of a class that Tune trains under the name `name`, if
                  it is not a preset. A hint becomes a warning.
            name: the name.
        """
        return ""

    def other_names(self, owner: type[Any]) -> Mapping[str, str]:
        """Returns further names of the options of a config class, `{other name: key}`. A config may
        use these names.

        Args:
            owner: a subclass of `Config`.
        """
        return {}

    def fixed_options(self, where: str) -> Mapping[str, tuple[Any, ...]]:
        """Returns options that polopt does not have, with the values that a config may give them.
        With these values, another library does what polopt always does. For other values, the error
        has the `hint` for the option.

        Args:
            where: "config" for the config itself, or "model" for the options of the network.
        """
        return {}

    def faster(self, policy: Any, method: str) -> Replacement | None:
        """Returns a faster implementation of a method of a policy, or a reason why there is none
        for this policy. The implementation must compute the same up to rounding. polopt asks once
        for each policy, method and network.

        Args:
            policy: a policy whose segments and flat weights exist already.
            method: the replaced method, whose arguments the implementation gets:

                - "make_backend" of `NetworkPolicy`. The implementation returns a `Backend`.
                - "network_params" of `ReplayPolicy`.
                - "backward" of `ReplayPolicy`. If the implementation returns None, the policy
                  computes this gradient in torch.

        Returns:
            None if the add-on has nothing to say about this kind of policy or device.
        """
        return None


_registered: list[AddOn] = []


def register_add_on(add_on: AddOn) -> None:
    """Attaches an add-on of the user to the trainers that this process makes from now on."""
    _registered.append(add_on)


def add_ons() -> tuple[AddOn, ...]:
    """Returns the add-ons of polopt in order of their names, and then the user's."""
    return (*_found(), *_registered)


def hint(kind: str, name: Any) -> str:
    """Returns the first hint of an add-on about a name. See `AddOn.hint`."""
    return next(filter(None, (add_on.hint(kind, str(name)) for add_on in add_ons())), "")


def other_names(owner: type[Any]) -> dict[str, str]:
    """Returns the other names of options from all add-ons. See `AddOn.other_names`."""
    return {name: key for one in add_ons() for name, key in one.other_names(owner).items()}


def fixed_options(where: str) -> dict[str, tuple[Any, ...]]:
    """Returns the fixed options from all add-ons. See `AddOn.fixed_options`."""
    return {name: values for one in add_ons() for name, values in one.fixed_options(where).items()}


def faster(policy: Any, method: str) -> Replacement:
    """Returns the faster implementation of a method of a policy. If several add-ons have one, the
    last add-on decides. If no add-on has one, the result holds a reason that an add-on gave, or no
    reason. See `AddOn.faster`."""
    found = [one for it in add_ons() if (one := it.faster(policy, method)) is not None]
    found = [Replacement(policy, type(policy), (), None), *found]
    return next((one for one in reversed(found) if one.active() is not None), found[-1])


@functools.cache
def _found() -> tuple[AddOn, ...]:
    import polopt

    folders = [Path(folder) for folder in polopt.__path__]
    names = {
        ".".join(path.relative_to(folder).parent.parts)
        for folder in folders
        for pattern in ("*/add_on.py", "policies/*/add_on.py")
        for path in folder.glob(pattern)
    }
    return tuple(import_module(f"polopt.{name}.add_on").ADD_ON for name in sorted(names))
