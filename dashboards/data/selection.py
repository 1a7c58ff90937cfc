"""Which runs are shown, and how they are grouped: by preset and by config keys that differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polopt.dashboards.data.colors import Look, looks_of
from polopt.dashboards.data.rows import NOT_SET
from polopt.dashboards.data.trials import RETURN, STARTUP_S, STEPS, TRAINING_S, Trial

#: Config keys that tell runs of one group apart.
SEED_KEY, TASK_KEY = "seed", "env"
_NO_PRESET = "PolicyOptimizerTrainer"
_LONGEST_LABEL, _SHORTEST_KEY = 48, 6
_CLASS_OR_FUNCTION = re.compile(r"<(?:class '|function )(?:[^'<> ]*\.)?(?P<name>\w+)\b[^<>]*>$")


@dataclass(frozen=True)
class Run:
    """One trial as views draw it.

    Attributes:
        trial: its results.
        group: label of its group. Runs of one group differ by seed and task only.
        look: of its group.
        task: its environment.
        seed: its seed as text.
    """

    trial: Trial
    group: str
    look: Look
    task: str
    seed: str

    @property
    def color(self) -> str:
        """Color of its group."""
        return self.look.color

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
        startup: whether seconds, rates and shares contain the start-up of the runs. They begin with
            the first result of a worker otherwise.
        targets: return whose first reach is compared, by task. The page chooses the missing ones.
        budget: environment steps at which groups are ranked. None: chosen.
        focus: directory of the trial whose shares and histograms an optimizer's tab draws.
        pinned: labels of groups that come first, and that no list of the best leaves out.
        smoothing: weight of the moving average of curves of single runs. 0: none.
        log: whether curves have a logarithmic y axis where no value is below 0.
        robust: whether runs with far larger values than the others may leave the range of curves.
    """

    runs: Sequence[Run]
    x: str = "seconds"
    startup: bool = False
    targets: Mapping[str, float] = field(default_factory=dict)
    budget: float | None = None
    focus: str = ""
    pinned: frozenset[str] = frozenset()
    smoothing: float = 0.0
    log: bool = False
    robust: bool = True

    @property
    def groups(self) -> dict[str, list[Run]]:
        """Runs by the label of their group."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups

    @property
    def tasks(self) -> list[str]:
        """Environments of the runs, in order."""
        return sorted({run.task for run in self.runs})

    @property
    def x_title(self) -> str:
        """Title of the axis with its unit."""
        return self.seconds_title if self.x == "seconds" else "environment steps"

    @property
    def seconds_title(self) -> str:
        """Title of an axis of seconds."""
        return "seconds, with start-up" if self.startup else "seconds since the first result"

    @property
    def since(self) -> str:
        """A sentence on whether start-up is contained."""
        return "With start-up." if self.startup else "Since the first result, without start-up."

    def with_runs(self, runs: Iterable[Run]) -> Selection:
        """The same selection with other runs, pinned groups first."""
        return replace(self, runs=sorted(runs, key=lambda run: run.group not in self.pinned))

    def of(self, optimizers: Iterable[str]) -> Selection:
        """The same selection with the runs of these optimizers only."""
        wanted = set(optimizers)
        runs = [run for run in self.runs if run.trial.optimizer in wanted]
        return replace(self, runs=runs)

    def focused(self) -> Run | None:
        """The run whose shares and histograms are drawn: the first run if none is chosen."""
        chosen = (run for run in self.runs if str(run.trial.folder) == self.focus)
        return next(chosen, self.runs[0] if self.runs else None)

    def x_of(self, run: Run) -> np.ndarray[Any, Any] | None:
        """Values of the axis for each row of a run, shape `[R]`."""
        return self.seconds_of(run) if self.x == "seconds" else run.trial.values(STEPS)

    def seconds_of(self, run: Run) -> np.ndarray[Any, Any] | None:
        """Wall time at each row of a run, shape `[R]`."""
        training_s, startup_s = run.trial.values(TRAINING_S), run.trial.values(STARTUP_S)
        if training_s is None or startup_s is None or not self.startup:
            return training_s
        return training_s + startup_s

    def rate_of(self, run: Run) -> float:
        """Environment steps per second over the whole run. NaN without results."""
        seconds = run.trial.last(TRAINING_S)
        seconds += run.trial.last(STARTUP_S) if self.startup else 0.0
        return run.trial.last(STEPS) / seconds if seconds > 0 else float("nan")


@dataclass(frozen=True)
class Filters:
    """What a user chose. An empty choice lets everything through.

    Attributes:
        experiments: names of experiments.
        optimizers: names of optimizers.
        config: for each config key the texts of the values that are shown.
        hidden: labels of groups that are not shown.
    """

    experiments: frozenset[str] = frozenset()
    optimizers: frozenset[str] = frozenset()
    config: Mapping[str, frozenset[str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    def passes(self, trial: Trial) -> bool:
        """Whether a trial is shown."""
        if self.experiments and trial.experiment not in self.experiments:
            return False
        if self.optimizers and trial.optimizer not in self.optimizers:
            return False
        values = trial.settings
        return all(
            values.get(key, NOT_SET) in allowed for key, allowed in self.config.items() if allowed
        )

    def shown(self, runs: Iterable[Run]) -> list[Run]:
        """The runs that are shown."""
        return [run for run in runs if self.passes(run.trial) and run.group not in self.hidden]


def last_return(run: Run) -> float:
    """The last mean return that is a number, or minus infinity."""
    value = run.trial.last(RETURN)
    return value if np.isfinite(value) else -np.inf


def differing_keys(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Config keys whose values differ between trials, each with its values in order."""
    return _differing([trial.settings for trial in trials])


def _differing(configs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = sorted({key for config in configs for key in config})
    values = {key: {config.get(key, NOT_SET) for config in configs} for key in keys}
    return {key: sorted(texts, key=_order) for key, texts in values.items() if len(texts) > 1}


def make_runs(trials: Sequence[Trial]) -> list[Run]:
    """Groups trials, names the groups and gives each its look.

    Called with all trials of a directory, so that filters change neither labels nor looks.
    """
    by_preset: dict[str, list[Trial]] = {}
    for trial in trials:
        # Without a preset, the optimizer tells more than the name of the trainer.
        preset = trial.optimizer if trial.trainable == _NO_PRESET else trial.trainable
        by_preset.setdefault(preset, []).append(trial)
    labels: dict[int, str] = {}
    for preset, members in by_preset.items():
        found = _group_labels(preset, [trial.settings for trial in members])
        labels |= {id(trial): label for trial, label in zip(members, found, strict=True)}
    names = sorted(set(labels.values()))
    begun: dict[str, tuple[float, str]] = {}
    for trial in trials:
        name = labels[id(trial)]
        begun[name] = min(begun.get(name, (np.inf, name)), (trial.begun_s, name))
    looks = looks_of(sorted(names, key=lambda name: begun[name]))
    shown = _shortened(names)
    runs = []
    for trial in trials:
        config = trial.settings
        name = labels[id(trial)]
        seed, task = config.get(SEED_KEY, NOT_SET), config.get(TASK_KEY, NOT_SET)
        runs.append(Run(trial, shown[name], looks[name], _short_name(task), seed))
    return sorted(runs, key=lambda run: (run.group, run.task, _order(run.seed)))


def _short_name(task: str) -> str:
    """The name of an environment that is a class or a function."""
    found = _CLASS_OR_FUNCTION.match(task)
    return found["name"] if found else task


def _group_labels(preset: str, configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The label of each config's group: the preset, and values of config keys that differ.

    A label has the keys that tell the groups apart, and as many other keys as fit into a legend in
    all labels: it says what the user varied, not only what is enough.
    Keys are cut as far as labels need it, but never to the same text.
    """
    keys = [key for key in _differing(configs) if key not in (SEED_KEY, TASK_KEY)]
    variants = [{key: config.get(key, NOT_SET) for key in keys} for config in configs]

    def labels(shown: Mapping[str, str]) -> list[str]:
        return [
            ", ".join([preset, *(f"{text} {values[key]}" for key, text in shown.items())])
            for values in variants
        ]

    def fit(shown: Mapping[str, str]) -> bool:
        return all(len(label) <= _LONGEST_LABEL for label in labels(shown))

    chosen = _telling_keys(keys, variants)
    for key in keys:
        wider = [other for other in keys if other in chosen or other == key]
        if key not in chosen and fit({other: other for other in wider}):
            chosen = wider
    for length in range(max(map(len, chosen), default=0), _SHORTEST_KEY - 1, -1):
        short = {key: key if len(key) <= length else f"{key[: length - 1]}." for key in chosen}
        if len(set(short.values())) == len(short) and fit(short):
            return labels(short)
    return labels({key: key for key in chosen})


def _telling_keys(keys: Sequence[str], variants: Sequence[Mapping[str, str]]) -> list[str]:
    """Few of the keys, enough to tell all variants apart."""
    telling: list[str] = []

    def told_apart(chosen: Sequence[str]) -> tuple[int, int]:
        texts = {tuple(values[key] for key in chosen) for values in variants}
        return len(texts), -max(sum(map(len, text)) for text in texts)  # short values first

    while told_apart(telling)[0] < told_apart(keys)[0]:
        rest = [key for key in keys if key not in telling]
        telling.append(max(rest, key=lambda key: told_apart([*telling, key])))
    return [key for key in keys if key in telling]


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Labels that fit a legend. A number tells labels with the same beginning apart."""
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
