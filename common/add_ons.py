"""`AddOn`: everything that a folder on top of the core can attach to the core.

The core trains without any add-on, and names none. It asks all add-ons at the places that the
methods of `AddOn` describe. A user's program has the same rights:

    class Printer(polopt.AddOn):
        def follow(self, trainer):
            return PrintResults()          # a RunListener

    polopt.register_add_on(Printer())

An add-on of polopt is a folder beside the core with the file `add_on.py`, which defines `ADD_ON`.
Delete the folder, and everything else still trains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from polopt.common.checks import Checks

if TYPE_CHECKING:
    from polopt.common.config import Config


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
        config_class: the options of the add-on. In a config, they stand beside all other options.
            The add-on reads them with `experiment.add_on(config_class)`.
        files: patterns of the files that the add-on writes to the directory of a run, such as
            `trace.json`. A run that replaces an earlier run in its directory deletes them.
    """

    config_class: ClassVar[type[Config] | None] = None
    files: ClassVar[tuple[str, ...]] = ()

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


_registered: list[AddOn] = []


def register_add_on(add_on: AddOn) -> None:
    """Attaches an add-on of the user to the trainers that this process makes from now on."""
    _registered.append(add_on)


def add_ons() -> tuple[AddOn, ...]:
    """Returns the add-ons of polopt in order of their names, and then the user's."""
    return (*_found(), *_registered)


@functools.cache
def _found() -> tuple[AddOn, ...]:
    import polopt

    files = (path for folder in polopt.__path__ for path in Path(folder).glob("*/add_on.py"))
    names = sorted({path.parent.name for path in files})
    return tuple(import_module(f"polopt.{name}.add_on").ADD_ON for name in names)
