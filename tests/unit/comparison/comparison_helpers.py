"""A small comparison, and trials that stand for those of Tune."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polopt.comparison.compare_function import prepare
from polopt.comparison.comparison_plan import SECONDS, ComparisonPlan
from polopt.comparison.records import ComparisonFiles
from polopt.comparison.runs import Seeds

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 64,
    "model": {"fcnet_hiddens": [8]},
}
VARY = {"lr": [0.001, 0.01]}


def small(folder: Path | None, **settings: Any) -> tuple[ComparisonPlan, ComparisonFiles]:
    """Returns the plan and the files of a comparison of two learning rates."""
    given = {"vary": VARY, "budget": 100, **settings}
    return prepare("A2C", SMALL, given, folder)


class FakeTune:
    """Runs the seeds that a comparison asks for, at most `parallel` at a time. The one that
    started first ends first.

    Args:
        plan: the plan.
        files: the files of the comparison.
        score: returns the score of a variant and a seed. None for a crash.
        add_seeds: see `run_seeds`.
    """

    def __init__(
        self, plan: ComparisonPlan, files: ComparisonFiles, score: Any, add_seeds: int = 0
    ) -> None:
        self.is_stopping = False
        self.seeds = Seeds(plan, files, add_seeds, lambda: self.is_stopping)
        self._score, self._plan = score, plan
        self.started: list[tuple[str, int]] = []

    def run(self, parallel: int = 2, most: int = 1000) -> bool:
        """Runs seeds until none is left, or until `most` have ended. Returns whether none is
        left."""
        running: list[tuple[Any, dict[str, Any]]] = []
        for number in range(10_000):
            options = None
            if len(running) < parallel:
                trial = SimpleNamespace(trial_id=str(number), last_result={}, local_path="t")
                options = self.seeds.suggest(trial.trial_id)
            if options == Seeds.FINISHED:
                return True
            if options is not None:
                running.append((trial, options))
                self.started.append((f"lr={options['lr']:g}", options["seed"]))
                continue
            if not most:
                return False  # like a kill: what runs leaves no record
            most -= 1
            trial, options = running.pop(0)
            score = self._score(f"lr={options['lr']:g}", options["seed"])
            error = "ValueError: crashed" if score is None else ""
            if score is not None:
                self.seeds.add_result(trial, result_of(100, score))
            self.seeds.end(trial, error)
        raise AssertionError("the comparison does not end")


def result_of(steps: int, score: float, seconds: float = 1.0) -> dict[str, Any]:
    """Returns the keys of a result that a comparison reads."""
    top, _, inner = SECONDS.partition("/")
    return {
        "num_env_steps_sampled_lifetime": steps,
        top: {inner: seconds},
        "env_runners": {"episode_return_mean": score},
    }
