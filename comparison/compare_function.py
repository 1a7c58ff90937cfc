"""`compare`: does the same as the command `polopt compare`, but in the calling process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from polopt.command_line.examples import apply_changes, describe, example_of
from polopt.command_line.output import RESULTS_DIR, say
from polopt.command_line.signals import StopSignals
from polopt.command_line.tune_run import new_folder, start_ray
from polopt.common.config import ConfigError
from polopt.comparison.comparison_plan import (
    ComparisonConfig,
    ComparisonPlan,
    check_same_runs,
    plan_comparison,
)
from polopt.comparison.comparison_report import lines, make_report, wrapped
from polopt.comparison.decisions import PairDecision
from polopt.comparison.finished_runs import read_finished
from polopt.comparison.records import ComparisonFiles, decisions_of
from polopt.comparison.runs import run_seeds
from polopt.trainers.flat_config import with_keywords


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """The return value of `polopt.compare`.

    Attributes:
        path: directory of the comparison.
        pairs: the decision about each pair of variants.
        report: the report, as in the file `decisions.json`.
    """

    path: str
    pairs: tuple[PairDecision, ...]
    report: dict[str, Any]

    @property
    def paragraph(self) -> str:
        """A paragraph for a paper, with the method and its sources."""
        return str(self.report["paragraph"])

    def __repr__(self) -> str:
        """Returns the table of the report."""
        return "\n".join(lines(self.report))


def compare(
    experiment: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    variants: Mapping[str, Mapping[str, Any]] | None = None,
    runs: Mapping[str, str | os.PathLike[str]] | None = None,
    metric: str | None = None,
    mode: str | None = None,
    budget: float | str | None = None,
    level: float | None = None,
    looks: Sequence[int] | None = None,
    max_seeds: int | None = None,
    equal_within: float | None = None,
    failed: float | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    add_seeds: int = 0,
    verbose: bool = False,
    **options: Any,
) -> ComparisonResult:
    """Trains seeds of variants of an experiment until each pair is decided, and returns the
    decisions.

        result = polopt.compare(
            "A3C", env="CartPole-v1", num_workers=1, vary={"preset": ["A3C", "A2C"]}, budget=20_000
        )
        print(result, result.paragraph)

    The plan is written before the first seed. The seeds are trials of Tune. Does the same as
    `polopt compare`, which `docs/comparisons.md` explains.

    Args:
        experiment: the name of a preset, a tuned example, or the path of a YAML or Python file. The
            file may have the settings of the comparison under the key `compare`.
        config: a dict of options of all variants.
        vary: maps each varied option to its values. Each combination of values is a variant.
        variants: maps the name of each variant to its options. Use it instead of `vary`.
        runs: maps the name of each variant to a directory or file with finished runs. Nothing is
            trained then.
        metric: key of the result that is compared. `None` means the mean return of episodes.
        mode: `max` if a higher metric is better, which is the default, or `min`.
        budget: environment steps of each run, or a time of training such as `90s`, `10m` or `2h`.
        level: largest chance of a wrong decision, over all pairs and looks. The default is 0.05.
        looks: numbers of seeds at which the results are looked at. The default is after every 5
            seeds, and at `max_seeds`.
        max_seeds: number of seeds of each variant at the last look. The default is 20.
        equal_within: the largest difference of means that counts as equal. `None` means that no
            pair is called equal.
        failed: score of a seed that crashed or diverged. `None` means the worst score.
        log_dir: directory of the comparison. `None` means a new directory in
            `~/ray_results/polopt`. A comparison in this directory is continued.
        add_seeds: number of further seeds of each variant after the end of the plan. They are
            marked, and do not change the decisions.
        verbose: whether to show the output of Ray and of the workers.
        options: further options of all variants, such as `env`.

    Raises:
        ConfigError: a setting or an option is wrong, or the directory holds another comparison.
            This error is raised before any seed starts.
        RuntimeError: Tune ended before all seeds had ended.
    """
    given = {
        "vary": vary, "variants": variants, "metric": metric, "mode": mode, "budget": budget,
        "level": level, "looks": looks, "max_seeds": max_seeds, "equal_within": equal_within,
        "failed": failed,
    }  # fmt: skip
    given = {key: value for key, value in given.items() if value is not None}
    folder = None if log_dir is None else Path(log_dir).expanduser().resolve()
    if runs is not None:
        if experiment is not None or config or options:
            raise ConfigError("finished runs already have their options. Give only 'runs'")
        plan, files = prepare_finished(
            [f"{k}={os.fspath(v)}" for k, v in runs.items()], given, folder
        )
    else:
        changes = with_keywords({} if config is None else config, options)
        plan, files = prepare(experiment, changes, given, folder)
    with files.locked():
        error = ""
        if runs is None:
            started = not ray.is_initialized()
            try:
                if started:
                    assert plan.trained is not None
                    start_ray(plan.trained, verbose)
                error = run_seeds(
                    plan, files, StopSignals(), lambda: None, add_seeds=add_seeds, verbose=verbose
                )
            finally:
                if started:
                    ray.shutdown()
        report = write_report(files)
    if error:
        raise RuntimeError(f"the comparison has not ended: {error}")
    return ComparisonResult(str(files.folder), decisions_of(files).pairs, report)


def prepare(
    experiment: str | None,
    changes: Mapping[str, Any] | Sequence[str],
    given: Mapping[str, Any],
    folder: Path | None,
    results_dir: Path = RESULTS_DIR,
) -> tuple[ComparisonPlan, ComparisonFiles]:
    """Reads, checks and writes the plan of a comparison. Starts no process.

    Args:
        experiment: see `compare`. `None` means the experiment of the comparison in `folder`.
        changes: options that replace options of the experiment, or `key=value` arguments.
        given: settings that replace settings of the experiment or of the earlier plan.
        folder: directory of the comparison, which may hold an earlier plan. `None` means a new
            directory in `results_dir`.
        results_dir: see `folder`.

    Returns:
        the plan, and the files of the comparison, to which the plan was written.

    Raises:
        ConfigError: see `compare`.
    """
    files = None if folder is None else ComparisonFiles(folder)
    earlier = files.plans[-1]["plan"] if files is not None and files.plans else None
    if earlier is not None:
        if files is not None and files.plans[0]["after_results"]:
            raise ConfigError(f"{folder} holds a comparison of finished runs, which has ended")
        if experiment is None and earlier["experiment"] is None:
            raise ConfigError(
                f"{folder}: the comparison was started by polopt.compare. Continue it with the "
                "same call, and log_dir"
            )
        if experiment is None:
            experiment, changes = earlier["experiment"]
        given = {**_settings_besides(earlier["settings"], given), **given}
    elif experiment is None:
        raise ConfigError(
            "nothing to compare. Give a tuned example, a preset or a file, and --vary, or finished "
            "runs with --runs"
            if folder is None
            else f"{folder} holds no comparison"
        )
    described = describe(experiment)
    settings: Any = {}
    if isinstance(described, Mapping) and "compare" in described:
        settings = described["compare"]
        described = {key: value for key, value in described.items() if key != "compare"}
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{experiment}: key 'compare': got {settings!r}. Allowed: a mapping")
    settings = {**_settings_besides(settings, given), **given}
    example = example_of(described, experiment)
    path = Path(experiment)
    source = None
    if isinstance(changes, Mapping):
        config_changes = dict(changes)
    else:
        source = (str(path.resolve()) if path.is_file() else experiment, tuple(changes))
        example, config_changes = apply_changes(example, changes)
    plan = plan_comparison(
        path.stem,
        example,
        config_changes,
        ComparisonConfig.parse(settings, "compare"),
        folder=path.resolve().parent if path.suffix == ".py" else None,
        experiment=source,
    )
    if files is None:
        files = ComparisonFiles(new_folder(f"compare_{path.stem}", results_dir))
    if earlier is not None:
        check_same_runs(plan.to_json(), earlier, files.folder)
    _make(files.folder)
    files.add_plan(plan.to_json())
    return plan, files


def prepare_finished(
    sources: Sequence[str],
    given: Mapping[str, Any],
    folder: Path | None,
    results_dir: Path = RESULTS_DIR,
) -> tuple[ComparisonPlan, ComparisonFiles]:
    """Reads finished runs, and writes the plan of their comparison and their records.

    Args:
        sources: see `read_finished`.
        given: the settings.
        folder: directory of the comparison. `None` means a new directory in `results_dir`.
        results_dir: see `folder`.

    Raises:
        ConfigError: a source or a setting is wrong, or the directory holds another comparison.
    """
    plan, records = read_finished(sources, ComparisonConfig.parse(given, "compare"))
    files = ComparisonFiles(folder or new_folder("compare_runs", results_dir))
    if files.records:
        check_same_runs(plan.to_json(), files.plans[0]["plan"], files.folder)
        if records != files.records:
            raise ConfigError(f"{files.folder} holds a comparison of other runs")
    _make(files.folder)
    files.add_plan(plan.to_json(), after_results=True)
    for record in records[len(files.records) :]:
        files.add(record)
    return plan, files


def write_report(files: ComparisonFiles) -> dict[str, Any]:
    """Writes the report of a comparison to its directory, and returns it."""
    report = make_report(files)
    files.write_decisions(report)
    return report


def say_report(files: ComparisonFiles) -> None:
    """Writes the report of a comparison, and prints it."""
    report = write_report(files)
    for line in lines(report):
        say(line)
    say(f"comparison  {files.folder}")
    if report["ended"]:
        say("for a paper:")
        for line in wrapped(report["paragraph"]):
            say(f"  {line}")
    else:
        say(f"next        polopt compare --continue {files.folder}")


def _settings_besides(settings: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings without those that given settings replace together with others."""
    together = ({"looks", "max_seeds"}, {"vary", "variants"})
    replaced = {key for pair in together if pair & given.keys() for key in pair}
    return {key: value for key, value in settings.items() if key not in replaced}


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from None
