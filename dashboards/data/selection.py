"""Which runs are shown, and how they are grouped: by preset and by config keys that differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polopt.dashboards.data.results import SECONDS, STEPS, Trial

#: Config keys that tell runs of one group apart.
SEED_KEY, TASK_KEY = "seed", "env"
NOT_SET = "not set"
_NO_PRESET = "PolicyOptimizerTrainer"
_LONGEST_LABEL = 48
_PALETTE = (
    *("#2f7ed8", "#e8743b", "#19a979", "#b45ad6", "#d9a514"),
    *("#e4508f", "#13a4b4", "#7a8b2a", "#6a5acd", "#a0632b"),
)


@dataclass(frozen=True)
class Run:
    """One trial as views draw it.

    Attributes:
        trial: its results.
        group: label of its group; runs of one group differ by seed and task only.
        color: color of its group.
        task: its environment.
        seed: its seed as text.
    """

    trial: Trial
    group: str
    color: str
    task: str
    seed: str

    @property
    def label(self) -> str:
        """Group, task and seed."""
        return f"{self.group}, {self.task}, seed {self.seed}"


@dataclass(frozen=True)
class Selection:
    """The runs that are shown and the axis that curves are drawn against.

    Attributes:
        runs: in the order of their groups.
        x: `seconds` or `steps`.
        target: return whose first reach is compared; None for the highest that every group reaches.
        focus: directory of the trial whose shares and histograms an optimizer's tab draws.
    """

    runs: Sequence[Run]
    x: str = "seconds"
    target: float | None = None
    focus: str = ""

    @property
    def groups(self) -> dict[str, list[Run]]:
        """Runs by the label of their group."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups

    @property
    def x_column(self) -> str:
        """Column of the axis."""
        return SECONDS if self.x == "seconds" else STEPS

    @property
    def x_title(self) -> str:
        """Title of the axis with its unit."""
        return "training time (s)" if self.x == "seconds" else "environment steps"

    def of(self, optimizers: Iterable[str]) -> Selection:
        """The same selection with the runs of these optimizers only."""
        wanted = set(optimizers)
        runs = [run for run in self.runs if run.trial.optimizer in wanted]
        return Selection(runs, self.x, self.target, self.focus)

    def focused(self) -> Run | None:
        """The run whose shares and histograms are drawn; the first if none is chosen."""
        chosen = (run for run in self.runs if str(run.trial.folder) == self.focus)
        return next(chosen, self.runs[0] if self.runs else None)

    def x_of(self, run: Run) -> np.ndarray[Any, Any] | None:
        """Values of the axis for each row of a run, shape `[R]`."""
        return run.trial.values(self.x_column)


@dataclass(frozen=True)
class Filters:
    """What a user chose; an empty choice lets everything through.

    Attributes:
        experiments: names of experiments.
        optimizers: names of optimizers.
        config: for each config key the texts of the values that are shown.
    """

    experiments: frozenset[str] = frozenset()
    optimizers: frozenset[str] = frozenset()
    config: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def passes(self, trial: Trial) -> bool:
        """Whether a trial is shown."""
        if self.experiments and trial.experiment not in self.experiments:
            return False
        if self.optimizers and trial.optimizer not in self.optimizers:
            return False
        values = flat_config(trial.config)
        return all(
            values.get(key, NOT_SET) in allowed for key, allowed in self.config.items() if allowed
        )


def flat_config(config: Mapping[str, Any]) -> dict[str, str]:
    """Values of a config as text by their dotted keys, such as `model.fcnet_hiddens`."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{below}": text for below, text in flat_config(value).items()})
        else:
            flat[str(key)] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def differing_keys(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Config keys whose values differ between trials, each with its values in order."""
    configs = [flat_config(trial.config) for trial in trials]
    keys = sorted({key for config in configs for key in config})
    values = {key: {config.get(key, NOT_SET) for config in configs} for key in keys}
    return {key: sorted(texts, key=_order) for key, texts in values.items() if len(texts) > 1}


def make_runs(trials: Sequence[Trial]) -> list[Run]:
    """Groups trials, names the groups and gives each its color.

    Called with all trials of a directory, so that filters change neither labels nor colors.
    """
    by_preset: dict[str, list[Trial]] = {}
    for trial in trials:
        # Without a preset, the optimizer tells more than the name of the trainer.
        preset = trial.optimizer if trial.trainable == _NO_PRESET else trial.trainable
        by_preset.setdefault(preset, []).append(trial)
    labels: dict[int, str] = {}
    for preset, members in by_preset.items():
        differing = differing_keys(members)
        keys = [key for key in differing if key not in (SEED_KEY, TASK_KEY)]
        variants = {trial.folder: _values(trial, keys) for trial in members}
        telling = _telling_keys(keys, set(variants.values()))
        for trial in members:
            labels[id(trial)] = _label(preset, trial, telling)
    names = sorted(set(labels.values()))
    colors = {name: _PALETTE[index % len(_PALETTE)] for index, name in enumerate(names)}
    shown = _shortened(names)
    runs = []
    for trial in trials:
        config = flat_config(trial.config)
        name = labels[id(trial)]
        seed, task = config.get(SEED_KEY, NOT_SET), config.get(TASK_KEY, NOT_SET)
        runs.append(Run(trial, shown[name], colors[name], task, seed))
    return sorted(runs, key=lambda run: (run.group, run.task, _order(run.seed)))


def _values(trial: Trial, keys: Sequence[str]) -> tuple[str, ...]:
    config = flat_config(trial.config)
    return tuple(config.get(key, NOT_SET) for key in keys)


def _telling_keys(keys: Sequence[str], variants: set[tuple[str, ...]]) -> list[str]:
    """Few of the keys that differ, enough to tell all variants apart.

    Args:
        keys: config keys that differ.
        variants: values of these keys, one tuple for each config.
    """
    telling: list[int] = []

    def told_apart(indices: list[int]) -> tuple[int, int]:
        texts = {tuple(variant[index] for index in indices) for variant in variants}
        return len(texts), -max(sum(map(len, text)) for text in texts)  # short values first

    while told_apart(telling)[0] < len(variants):
        rest = [index for index in range(len(keys)) if index not in telling]
        telling.append(max(rest, key=lambda index: told_apart([*telling, index])))
    return [keys[index] for index in sorted(telling)]


def _label(preset: str, trial: Trial, keys: Sequence[str]) -> str:
    parts = (f"{key} {value}" for key, value in zip(keys, _values(trial, keys), strict=True))
    return ", ".join([preset, *parts])


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Labels that fit a legend; a number keeps those apart whose beginnings are the same."""
    shown: dict[str, str] = {}
    for number, name in enumerate(names, start=1):
        fits = len(name) <= _LONGEST_LABEL
        shown[name] = name if fits else f"{name[: _LONGEST_LABEL - 6]}... #{number}"
    return shown


def _order(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
