"""Runs the seeds of a comparison with Tune, until all pairs are decided."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.search import Searcher

from polopt.command_line.signals import StopSignals
from polopt.command_line.tune_run import Search
from polopt.command_line.tune_run import run as run_trials
from polopt.comparison.comparison_plan import SECONDS, STEPS, ComparisonPlan, common
from polopt.comparison.records import ComparisonFiles, decisions_of, record_of
from polopt.trainers.results import look_up

_TRIAL_CONFIG = "params.json"


def run_seeds(
    plan: ComparisonPlan,
    files: ComparisonFiles,
    signals: StopSignals,
    report: Callable[[], None],
    *,
    add_seeds: int = 0,
    verbose: bool = False,
) -> str:
    """Trains seeds until no variant needs more. Seeds that have a record are not trained again. A
    seed that was running when an earlier process was killed begins again, and its incomplete
    results are deleted.

    Args:
        plan: the plan.
        files: the files of the comparison.
        signals: see `tune_run.run`.
        report: called at the end, and after a signal.
        add_seeds: number of further seeds of each variant, which do not change the decisions.
        verbose: whether to show the output of Ray and of the workers.

    Returns:
        The error that ended the comparison early, or an empty string.
    """
    seeds = Seeds(plan, files, add_seeds, lambda: bool(signals.number))
    if not seeds.wanted():
        report()
        return ""
    _delete_incomplete(files)
    assert plan.trained is not None
    most = len(plan.names) * (plan.rules.looks[-1] + add_seeds)
    search = Search(seeds, _Recorder(seeds), files.folder, most, report)
    error = run_trials(plan.trained, files.folder, signals, 0, verbose, search)
    return "" if not seeds.wanted() else error


def _delete_incomplete(files: ComparisonFiles) -> None:
    (files.folder / "stop").unlink(missing_ok=True)  # asks trials to end early
    known = {one.trial for one in files.records}
    for config in files.folder.glob(f"*/{_TRIAL_CONFIG}"):
        if config.parent.name not in known:
            shutil.rmtree(config.parent)


class Seeds(Searcher):
    """Chooses the next seed of a comparison, and records the seeds that end.

    At each look, the seeds of all variants that are not decided are trained. The next look begins
    when all of them have ended.

    Args:
        plan: the plan.
        files: the files of the comparison.
        add_seeds: see `run_seeds`.
        is_stopping: returns whether no more seeds may start.
    """

    def __init__(
        self,
        plan: ComparisonPlan,
        files: ComparisonFiles,
        add_seeds: int,
        is_stopping: Callable[[], bool],
    ) -> None:
        super().__init__()
        self._plan, self._files = plan, files
        self._is_stopping = is_stopping
        self._running: dict[str, tuple[str, int]] = {}  # variant and number, by trial
        self._curves: dict[str, list[tuple[float, float, float]]] = {}
        self._add_seeds, self._until = add_seeds, dict.fromkeys(plan.names, 0)
        self._needed: tuple[int, Mapping[str, int]] = (-1, {})
        same = common(plan.variants)
        self._options = {
            one.name: {key: value for key, value in one.config.items() if key not in same}
            for one in plan.variants
        }

    def wanted(self) -> list[tuple[int, str]]:
        """Returns the seeds that have no record yet: number and variant. First come those with the
        lowest numbers."""
        num_ended = len(self._files.records)
        if self._needed[0] != num_ended:
            needed = decisions_of(self._files).needed
            if not needed and self._add_seeds:
                ended = {name: len(self._files.of(name)) for name in self._plan.names}
                self._until = {name: n + self._add_seeds for name, n in ended.items()}
                self._add_seeds = 0
            self._needed = num_ended, needed or self._until
        known = {(one.number, one.variant) for one in self._files.records}
        until = self._needed[1].items()
        return sorted({(n, name) for name, last in until for n in range(last)} - known)

    def suggest(self, trial_id: str) -> Any:
        """Returns the options of the next seed. Tune calls this method."""
        wanted = self.wanted()
        if not wanted:
            return Searcher.FINISHED
        running = set(self._running.values())
        waiting = [(number, name) for number, name in wanted if (name, number) not in running]
        if not waiting or self._is_stopping():
            return None
        number, name = waiting[0]
        self._running[trial_id] = name, number
        return {**self._options[name], "seed": self._plan.first_seed + number}

    def add_result(self, trial: Any, result: Mapping[str, Any]) -> None:
        """Notes a result of a seed."""
        steps, seconds = look_up(result, STEPS), look_up(result, SECONDS)
        value = look_up(result, self._plan.settings.metric)
        self._curves.setdefault(trial.trial_id, []).append((steps, seconds, value))

    def end(self, trial: Any, error: str) -> None:
        """Records a seed that has ended. A seed that a signal has ended is not recorded, and begins
        again when the comparison is continued."""
        name, number = self._running.pop(trial.trial_id)
        curve = self._curves.pop(trial.trial_id, [])
        axis = int(self._plan.budget_key == SECONDS)
        reached = bool(curve) and curve[-1][axis] >= self._plan.budget
        if not reached and self._is_stopping():
            return
        if not reached and not error:
            error = "the run ended before its budget"
        record = record_of(
            curve,
            axis,
            self._plan.budget,
            error,
            variant=name,
            number=number,
            seed=self._plan.first_seed + number,
            total_s=float((trial.last_result or {}).get("time_total_s", 0.0)),
            trial=Path(trial.local_path).name,
            added=number < self._until[name],
        )
        self._files.add(record)

    def on_trial_complete(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing. `end` is called instead, because it needs the trial."""

    def save(self, checkpoint_path: str) -> None:
        """Saves nothing, because the records hold everything."""

    def restore(self, checkpoint_path: str) -> None:
        """Restores nothing. See `save`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Searcher, ()  # Tune pickles it with the experiment, and nobody reads the pickle


class _Recorder(tune.Callback):
    """Passes results and ends of trials on."""

    def __init__(self, seeds: Seeds | None = None) -> None:
        self._seeds = seeds

    def __reduce__(self) -> tuple[Any, ...]:
        return _Recorder, ()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Passes a result on. Tune calls this method."""
        if self._seeds is not None:
            self._seeds.add_result(trial, result)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Records a seed. Tune calls this method when a trial has ended."""
        if self._seeds is not None:
            self._seeds.end(trial, "")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Records a seed. Tune calls this method when a trial has failed."""
        if self._seeds is not None:
            text = Path(trial.error_file).read_text() if trial.error_file else "crashed"
            self._seeds.end(trial, text.strip().rpartition("\n")[2].strip() or "crashed")
