"""Groups runs by preset and by the config keys that differ, and filters the runs to show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from polopt.dashboards.data.colors import Look, looks_of
from polopt.dashboards.data.rows import NOT_SET
from polopt.dashboards.data.trials import RETURN, STARTUP_S, STEPS, TRAINING_S, Trial

#: The config keys in which the runs of one group may differ.
SEED_KEY, TASK_KEY = "seed", "env"
_NO_PRESET = "PolicyOptimizerTrainer"
_LONGEST_LABEL, _SHORTEST_KEY = 48, 6
_CLASS_OR_FUNCTION = re.compile(r"<(?:class '|function )(?:[^'<> ]*\.)?(?P<name>\w+)\b[^<>]*>$")


@dataclass(frozen=True)
class Run:
    """A trial together with its group.

    Attributes:
        trial: the trial with its results.
        group: label of the run's group. The runs of a group differ only in seed and task.
        look: look of the group in plots.
        task: name of the environment.
        seed: the seed as text.
    """

    trial: Trial
    group: str
    look: Look
    task: str
    seed: str

    @property
    def color(self) -> str:
        """The color of the run's group."""
        return self.look.color

    @property
    def label(self) -> str:
        """A text with group, task and seed."""
        return f"{self.group}, {self.task}, seed {self.seed}"


@dataclass(frozen=True)
class Selection:
    """The runs to show, and the settings of the plots.

    Attributes:
        runs: the runs to show, in the order of their groups.
        x: the x axis of curves, `seconds` or `steps`.
        startup: whether seconds, rates and shares of time include the start-up of the runs.
            Otherwise, time begins at the end of start-up.
        targets: maps a task to the return that its runs should reach, for the plots of steps and
            seconds until this return. For tasks that are not in the mapping, the page chooses a
            return.
        budget: number of environment steps at which groups are ranked. `None` means that the page
            chooses the number.
        focus: directory of the trial whose shares and histograms the tab of an optimizer draws.
        pinned: labels of groups that come first. Lists of the best trials also contain all trials
            of these groups.
        smoothing: weight of the moving average of the curves of single runs. 0 means no smoothing.
        log: whether curves have a logarithmic y axis, if no value is below 0.
        robust: whether outliers may leave the range of the y axis. See `robust_range`.
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
        """The runs of each group, by label of the group."""
        groups: dict[str, list[Run]] = {}
        for run in self.runs:
            groups.setdefault(run.group, []).append(run)
        return groups

    @property
    def tasks(self) -> list[str]:
        """The names of the environments of the runs, sorted."""
        return sorted({run.task for run in self.runs})

    @property
    def x_title(self) -> str:
        """The title of the x axis, with its unit."""
        return self.seconds_title if self.x == "seconds" else "environment steps"

    @property
    def seconds_title(self) -> str:
        """The title of an axis of seconds."""
        return "seconds, with start-up" if self.startup else "seconds, without start-up"

    @property
    def since(self) -> str:
        """A sentence that says whether times include start-up."""
        return "Start-up is included." if self.startup else "Start-up is not included."

    def with_runs(self, runs: Iterable[Run]) -> Selection:
        """Returns a copy of the selection that shows `runs`, the runs of pinned groups first."""
        return replace(self, runs=sorted(runs, key=lambda run: run.group not in self.pinned))

    def of(self, optimizers: Iterable[str]) -> Selection:
        """Returns the selection with only the runs of these optimizers."""
        wanted = set(optimizers)
        runs = [run for run in self.runs if run.trial.optimizer in wanted]
        return replace(self, runs=runs)

    def focused(self) -> Run | None:
        """Returns the run in focus, the first run if no run is in focus, or None without runs."""
        chosen = (run for run in self.runs if str(run.trial.folder) == self.focus)
        return next(chosen, self.runs[0] if self.runs else None)

    def x_of(self, run: Run) -> np.ndarray[Any, Any] | None:
        """Returns the positions of a run's rows on the x axis, `[R]`, or None without rows."""
        return self.seconds_of(run) if self.x == "seconds" else run.trial.values(STEPS)

    def seconds_of(self, run: Run) -> np.ndarray[Any, Any] | None:
        """Returns the seconds of training at each row of a run, `[R]`, or None without rows. If
        `startup` is set, they include the start-up."""
        training_s, startup_s = run.trial.values(TRAINING_S), run.trial.values(STARTUP_S)
        if training_s is None or startup_s is None or not self.startup:
            return training_s
        return training_s + startup_s

    def rate_of(self, run: Run) -> float:
        """Returns the environment steps per second over the whole run, or NaN without results."""
        seconds = run.trial.last(TRAINING_S)
        seconds += run.trial.last(STARTUP_S) if self.startup else 0.0
        return run.trial.last(STEPS) / seconds if seconds > 0 else float("nan")


@dataclass(frozen=True)
class Filters:
    """The user's choice of trials. An empty choice includes all trials.

    Attributes:
        experiments: names of the experiments to show.
        optimizers: names of the optimizers to show.
        config: for each config key, the texts of the values to show.
        hidden: labels of the groups to hide.
    """

    experiments: frozenset[str] = frozenset()
    optimizers: frozenset[str] = frozenset()
    config: Mapping[str, frozenset[str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    def passes(self, trial: Trial) -> bool:
        """Returns whether the filters include a trial. Ignores `hidden`."""
        if self.experiments and trial.experiment not in self.experiments:
            return False
        if self.optimizers and trial.optimizer not in self.optimizers:
            return False
        values = trial.settings
        return all(
            values.get(key, NOT_SET) in allowed for key, allowed in self.config.items() if allowed
        )

    def shown(self, runs: Iterable[Run]) -> list[Run]:
        """Returns the runs to show."""
        return [run for run in runs if self.passes(run.trial) and run.group not in self.hidden]


def last_return(run: Run) -> float:
    """Returns the last finite mean return of a run, or minus infinity."""
    value = run.trial.last(RETURN)
    return value if np.isfinite(value) else -np.inf


def differing_keys(trials: Iterable[Trial]) -> dict[str, list[str]]:
    """Returns the config keys whose values differ between trials, with their sorted values."""
    return _differing([trial.settings for trial in trials])


def _differing(configs: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    keys = sorted({key for config in configs for key in config})
    values = {key: {config.get(key, NOT_SET) for config in configs} for key in keys}
    return {key: sorted(texts, key=_order) for key, texts in values.items() if len(texts) > 1}


def make_runs(trials: Sequence[Trial]) -> list[Run]:
    """Groups trials, and assigns a label and a look to each group.

    The caller passes all trials of the directory and filters the result. So filters do not change
    labels or looks.
    """
    by_preset: dict[str, list[Trial]] = {}
    for trial in trials:
        # Without a preset, the name of the optimizer says more than the name of the trainer.
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
    """Returns the name of an environment, also if `task` is the repr of a class or function."""
    found = _CLASS_OR_FUNCTION.match(task)
    return found["name"] if found else task


def _group_labels(preset: str, configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns a label for the group of each config: the preset, and config keys with their values.

    The labels contain a few keys that distinguish all groups. They also contain further keys that
    differ, as long as all labels fit into a legend, because these keys show what the user varied.
    Long keys are abbreviated if a label is too long. Different keys keep different abbreviations.
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
    """Returns a small subset of the keys whose values distinguish all variants."""
    telling: list[str] = []

    def told_apart(chosen: Sequence[str]) -> tuple[int, int]:
        texts = {tuple(values[key] for key in chosen) for values in variants}
        return len(texts), -max(sum(map(len, text)) for text in texts)  # prefers short values

    while told_apart(telling)[0] < told_apart(keys)[0]:
        rest = [key for key in keys if key not in telling]
        telling.append(max(rest, key=lambda key: told_apart([*telling, key])))
    return [key for key in keys if key in telling]


def _shortened(names: Sequence[str]) -> dict[str, str]:
    """Returns labels that fit into a legend. Shortened labels end with a unique number."""
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
