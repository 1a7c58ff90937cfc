"""`polopt.rerun`: repeats a recorded run bit for bit."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polopt.common.config import ConfigError, canonical, differ, shown
from polopt.common.plain_data import DecodeError, argument_for, decode
from polopt.common.plain_data import described as described_values
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.recording.arrival_log import (
    PATTERN,
    Departure,
    RecordEnded,
    Rerun,
    RerunDifference,
    described,
    read_log,
)
from polopt.recording.run_record import this_machine
from polopt.rollouts.envs.env_sources import env_name
from polopt.trainers.find_checkpoint import checkpoint_path
from polopt.trainers.flat_config import aliases_for
from polopt.trainers.saved_experiment import argument_of, is_given, refuse_imports
from polopt.trainers.trainer import PolicyOptimizerTrainer
from polopt.trainers.trainer_config import merged_options

_REGISTRIES = {"optimizer": OPTIMIZERS, "policy": POLICIES}
#: Places of code that the record only names.
_CODE = ("env", "evaluation_config.env", "callbacks", "policy.model.custom")
#: Types of the values in the header of a record that `polopt.rerun` needs.
_HEADER = {"trainer": str, "config": dict, "unsaved": dict, "made_by": dict}


def rerun(
    trial: Any,
    *,
    until: int | None = None,
    start: Any = None,
    before: Callable[[int], None] | None = None,
    **changes: Any,
) -> Iterator[PolicyOptimizerTrainer]:
    """Repeats a recorded run, and compares it with its record.

        for trainer in polopt.rerun("~/ray_results/my_run/A3C_CartPole-v1_00000"):
            print(trainer.iteration, trainer.optimizer.metrics.lag.in_updates.report())

    The rerun starts real workers. The driver takes their replies in the recorded order, repeats the
    deaths of workers, and reads the recorded clock. Weights, returns and counts are therefore the
    same as in the recorded run, and so are durations of training. The use of CPU and memory, Tune's
    own fields and the durations of evaluation are measured again. If a program changed the trainer
    between two results, for example with `trainer.workers.add_workers(1)`, the loop over the rerun
    has to make the same change.

    Args:
        trial: directory of a trial that was trained with `record_arrivals: true`. It may also be
            the directory of an experiment with one such trial, a result of Tune, or a file of the
            record.
        until: index of the last iteration of the rerun. `None` means that the rerun ends at the end
            of the record.
        start: a checkpoint from which the recorded run was restored. The rerun begins at this
            checkpoint. `None` means that the rerun begins with the first file of the record.
        before: a function that is called with the index of each event before the event is repeated.
            In each file of the record, the first event has the index 0.
        changes: values of the config that the record lacks, such as a callable `env`. Nested dicts
            are merged. A value that the record has cannot be changed, except `env`. Also give each
            option that names a module, because a name in the record alone does not import the
            module. `policy` and `optimizer` may be classes. `network` is the class of a custom
            network.

    Yields:
        the trainer after each result.

    Raises:
        ConfigError: the record is missing or damaged, `trial` has the records of several trials, a
            value of the config is missing, or `changes` differ from the record. Also raised if the
            recorded run was never restored from `start`, or if the record names a module that
            `changes` do not name.
        CheckpointError: a checkpoint in the record cannot be restored.
        RerunDifference: the rerun differs from the record. Raised at the first difference.
    """
    paths = find_records(trial)
    if start is not None:
        paths = _from_checkpoint(paths, checkpoint_path(start))
    for path in paths:
        header, recorded = read_log(path)
        config = _config_of(header, path, changes)
        for trainer in _rerun_one(header, recorded, config, changes, path, before):
            yield trainer
            if until is not None and trainer.iteration >= until:
                return


def find_records(trial: Any) -> list[Path]:
    """Returns the files of a trial's record in chronological order.

    Raises:
        ConfigError: the directory contains no record, or the records of several trials.
    """
    path = Path(getattr(trial, "path", trial)).expanduser()
    if path.is_file():
        return [path]
    found = sorted(path.glob(PATTERN))
    if not found:
        below = sorted(path.rglob(PATTERN))
        folders = sorted({one.parent for one in below})
        if len(folders) > 1:
            names = ", ".join(str(one.relative_to(path)) for one in folders[:6])
            raise ConfigError(
                f"{path} contains the records of {len(folders)} trials. Give one trial: {names}"
            )
        found = below
    if not found:
        raise ConfigError(
            f"{path} contains no record of a run (arrivals_000000.jsonl.gz). To record a run, set "
            "record_arrivals: true"
        )
    return found


def _from_checkpoint(paths: list[Path], checkpoint: Path) -> list[Path]:
    """Returns the files of the record, beginning with the file whose run was restored from the
    checkpoint.

    Raises:
        ConfigError: no file begins with a restore of the checkpoint.
    """
    begun = [_restored(path) for path in paths]
    for number, restored in enumerate(begun):
        if restored is not None and Path(restored).resolve() == checkpoint.resolve():
            return paths[number:]
    known = ", ".join(restored for restored in begun if restored is not None) or "none"
    raise ConfigError(
        f"the recorded run was never restored from checkpoint {checkpoint}. A rerun can begin only "
        f"at a checkpoint from which the recorded run was restored. Allowed: {known}"
    )


def _restored(path: Path) -> str | None:
    """Returns the checkpoint from which the run of a file was restored before training. Returns
    None if the run was not restored."""
    for kind, *values in read_log(path)[1]["events"]:
        if kind == "restore":
            return str(values[0])
        if kind == "train":
            break
    return None


def _config_of(header: Mapping[str, Any], path: Path, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of a recorded run with the user's changes.

    Raises:
        ConfigError: a value is missing, or the record names a module that `changes` do not name.
    """
    for key, kind in _HEADER.items():
        if not isinstance(header.get(key), kind):
            raise ConfigError(
                f"{str(path)!r} is damaged: key {key!r} of the header: got "
                f"{shown(header.get(key))}. Allowed: a value of type {kind.__name__}"
            )
    if not header["trainer"].isidentifier():
        raise ConfigError(f"{str(path)!r} is damaged: key 'trainer' of the header is not a name")
    if not all(isinstance(kind, str) for kind in header["unsaved"].values()):
        raise ConfigError(f"{str(path)!r} is damaged: key 'unsaved' of the header has no types")
    try:
        config = decode(header["config"], {}, "config")
    except RecursionError:
        raise ConfigError(f"{str(path)!r} is damaged: its config is nested too deeply") from None
    except DecodeError as error:
        raise ConfigError(f"{str(path)!r} is damaged: {error}") from None
    given = dict(changes)
    network = given.pop("network", None)
    for plugin in _REGISTRIES:
        if isinstance(given.get(plugin), type | str):
            given[plugin] = {"name": given[plugin]}
    if network is not None:
        given = merged_options(given, {"policy": {"model": {"custom": network}}})
    missing = {
        place: kind
        for place, kind in header["unsaved"].items()
        if not is_given(given, argument_for(place).split("."))
    }
    for plugin, registry in _REGISTRIES.items():
        name = _options(config, plugin).get("name")
        unknown = isinstance(name, str) and ":" not in name and name not in registry.names()
        if unknown and not is_given(given, (plugin, "name")):
            missing[plugin] = f"the class {name}"
    if missing:
        raise ConfigError(
            f"{path} does not contain {described_values(missing)}. Give the missing values with "
            "polopt.rerun(trial, KEY=VALUE), or on the command line with --env, --policy, "
            "--optimizer, --network or --callbacks"
        )
    given = _refuse_changes(config, given, header["unsaved"])
    config = merged_options(config, given)
    refuse_imports(config, given, str(path), _argument_of)
    return config


def _refuse_changes(
    recorded: Mapping[str, Any], given: Mapping[str, Any], unsaved: Mapping[str, str]
) -> dict[str, Any]:
    """Refuses values that differ from the values in the record, because a rerun repeats the
    recorded run. Returns the given values in the form of the record, in which the options of the
    policy and of the optimizer are in the dicts `policy` and `optimizer`.

    The environment may differ, because its name in the record may not be the name under which it
    can be imported here. Code that the record only names may be given.

    Raises:
        ConfigError: a value differs. The message has one line for each value.
    """
    own = {plugin: _options(recorded, plugin) for plugin in _REGISTRIES}
    # A module that only the record names is not imported. `refuse_imports` refuses it later.
    names = {
        plugin: options["name"]
        for plugin, options in (merged_options(own, given)).items()
        if plugin in own
        and "name" in options
        and (":" not in str(options["name"]) or is_given(given, (plugin, "name")))
    }
    aliases = aliases_for(names, {})
    placed: dict[str, Any] = {}
    for key, value in canonical(given, aliases, "polopt.rerun").items():
        owner = next((p for p in own if key not in recorded and key in own[p]), None)
        placed = merged_options(placed, {key: value} if owner is None else {owner: {key: value}})
    places = {argument_for(place) for place in unsaved}
    problems = [
        f"polopt.rerun: key {place!r}: got {shown(value)}, but the record has {shown(before)}. A "
        "rerun repeats the recorded config. Leave the key out, or train a new run"
        for place, value, before in _changed(recorded, placed)
        if not any(place == known or place.startswith(f"{known}.") for known in (*places, *_CODE))
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return placed


def _options(config: Mapping[str, Any], plugin: str) -> Mapping[str, Any]:
    """Returns the options of the policy or the optimizer in a record."""
    options = config.get(plugin)
    return options if isinstance(options, Mapping) else {"name": options}


def _changed(
    recorded: Mapping[str, Any], given: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields `(place, given value, recorded value)` of each value that differs. The recorded value
    is None if a dict in the record lacks the key."""
    for key, value in given.items():
        if not prefix and key not in recorded:
            continue  # not an option: the trainer's config names it in its error
        before, place = recorded.get(key), f"{prefix}{key}"
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            yield from _changed(before, value, f"{place}.")
        elif isinstance(before, str) and ":" in before:
            continue  # a module that the record names, and that the user replaces
        elif differ(_plain(value), _plain(before)):
            yield place, value, before


def _plain(value: Any) -> Any:
    """A value in the form that the record has: the name of a class, and lists in place of
    tuples."""
    if isinstance(value, type):
        names = (registry.name_of(value) for registry in _REGISTRIES.values())
        return next(filter(None, names), value.__name__)
    if isinstance(value, str) and ":" in value:
        return value.rpartition(":")[2]
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _argument_of(key: str) -> str:
    option = "network" if key == "model" else key
    if option in ("network", "callbacks", "env", "optimizer", "policy"):
        return f"{option}=... to polopt.rerun, or --{option} on the command line"
    return argument_of(key)


def _rerun_one(
    header: Mapping[str, Any],
    recorded: dict[str, Any],
    config: dict[str, Any],
    changes: Mapping[str, Any],
    path: Path,
    before: Callable[[int], None] | None,
) -> Iterator[PolicyOptimizerTrainer]:
    """Reruns the events in one file of the record."""
    kind = type(header["trainer"], (PolicyOptimizerTrainer,), {"recorded": recorded})
    trainer: PolicyOptimizerTrainer | None = None
    log: Rerun | None = None
    try:
        trainer = kind(config)
        assert trainer is not None
        log = trainer.workers.transport.log
        assert isinstance(log, Rerun)
        log.before = before or log.before
        with contextlib.suppress(RecordEnded):
            while (event := log.peek()) is not None:
                match event:
                    case ["train"]:
                        trainer.train()
                        yield trainer
                    case ["save"]:
                        with tempfile.TemporaryDirectory() as folder:
                            trainer.save_checkpoint(folder)
                    case ["restore", checkpoint]:
                        trainer.load_checkpoint(_found(checkpoint, path))
                    case ["kill", _]:  # recorded when the run was stopped
                        break
                    case _:
                        log.depart(
                            log.num_events,
                            f"the record continues with {described(event)}, which a trainer does "
                            "not do by itself",
                        )
    except RecordEnded:  # the record ended while the trainer was made
        return
    except Departure as departure:
        raise RerunDifference(
            departure.event, _sentence(departure, recorded["events"], header, config, changes)
        ) from None
    finally:
        if log is not None:
            log.finish()
        if trainer is not None:
            trainer.stop()


def _found(checkpoint: str, path: Path) -> str:
    """Returns the path of a checkpoint. If the checkpoint does not exist at its recorded path,
    returns its path next to the record, because both may have been moved together."""
    beside = path.parent / Path(checkpoint).name
    return checkpoint if Path(checkpoint).exists() or not beside.exists() else str(beside)


def _sentence(
    departure: Departure,
    events: list[Any],
    header: Mapping[str, Any],
    config: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> str:
    iterations = sum(event[0] == "train" for event in events[: departure.event + 1])
    return (
        f"at event {departure.event}, in iteration {max(iterations, 1)} of this record, the rerun "
        f"differs: {departure}. A likely cause: {_cause(departure, header, config, changes)}"
    )


def _cause(
    departure: Departure,
    header: Mapping[str, Any],
    config: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> str:
    """Returns the most likely cause of a difference."""
    saved = header["config"].get("env")
    if "env" in changes and differ(_plain(changes["env"]), _plain(saved)) and saved is not None:
        return f"env={shown(changes['env'])} was given, but the record has {shown(saved)}"
    recorded, own = header["made_by"], this_machine()
    changed = [
        f"{name} {own.get(name, 'none')} (recorded with {recorded.get(name, 'none')})"
        for name in sorted({*recorded, *own})
        if recorded.get(name) != own.get(name) and name != "processor"
    ]
    if changed:
        return f"another version of a library computes differently: {', '.join(changed)}"
    if recorded.get("processor") != own["processor"]:
        return (
            f"another processor rounds differently: {own['processor']} (recorded with "
            f"{recorded.get('processor')})"
        )
    code = ", ".join(f"{key}={shown(value)}" for key, value in changes.items())
    if "answered with" in str(departure) or "the weights of" in str(departure):
        return (
            f"the environment {env_name(config['env'])!r} is not deterministic: it depends on the "
            "clock, on other processes, or on random numbers that its seed does not set"
            + (f". Or what was given differs from the recorded run: {code}" if code else "")
        )
    if code:
        return f"what was given differs from the recorded run: {code}"
    return "the program has changed since the run was recorded"
