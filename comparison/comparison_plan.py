"""The plan of a comparison: what is compared and how it is decided, written before the first seed.

    run: A3C
    config: {env: CartPole-v1, num_workers: 1}
    compare:
      vary: {preset: [A3C, A2C, APPO]}
      budget: 20_000
      max_seeds: 10

The keys of `compare` are the attributes of `ComparisonConfig`. The command and `polopt.compare`
take the same keys.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from polopt.command_line.examples import Example, merge
from polopt.command_line.plan import Plan, plan_of
from polopt.command_line.sweep import is_search, with_searches
from polopt.common.config import Config, ConfigError, shown
from polopt.comparison.decisions import MOST_VARIANTS, DecisionRules
from polopt.trainers.results import check_stop_key
from polopt.trainers.trainer import PolicyOptimizerTrainer

METRIC = "env_runners/episode_return_mean"
STEPS, SECONDS = "num_env_steps_sampled_lifetime", "optimizer/training_s"
#: The number of seeds between two looks, if the looks are not given.
_LOOK_EVERY = 5
#: Number of results of each run, unless the experiment sets the length of an iteration.
_RESULTS = 50
_DURATION = re.compile(r"\s*([0-9.eE+]+)\s*(s|m|h)\s*")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PRESET_KEYS = ("preset", "run")
#: The part of the plan that says how the seeds are run. A second plan for the same seeds may not
#: change it.
_FIXED = ("variants", "metric", "mode", "budget", "first_seed", "runs")


class ComparisonConfig(Config):
    """What is compared, and how it is decided.

    Attributes:
        vary: maps each varied option to its values. Each combination of values is a variant.
        variants: maps the name of each variant to its options. Use it instead of `vary` for
            variants that differ in several options.
        metric: key of the result that is compared. Its value at the budget, interpolated between
            two results, is the score of a seed. If it is not finite, the last finite value counts.
        mode: `max` if a higher metric is better, or `min`.
        budget: length of each run: environment steps, or seconds, minutes or hours of training,
            such as `90s`, `10m` or `2h`. None means the limit of the experiment on
            `num_env_steps_sampled_lifetime`, or for finished runs the steps of the shortest run.
        level: largest chance of a wrong decision. It holds for all pairs and all looks together.
        looks: numbers of seeds of each variant at which the results are looked at, increasing. None
            means after every 5 seeds and at `max_seeds`.
        max_seeds: number of seeds of each variant at the last look.
        equal_within: the largest difference of means that counts as equal, in the unit of the
            metric. None means that no pair is called equal.
        failed: score of a seed that crashed or diverged. None means the worst score of all variants
            until the look of this seed.
    """

    vary: Mapping[str, Sequence[Any]] = pydantic.Field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = pydantic.Field(default_factory=dict)
    metric: str = METRIC
    mode: Literal["max", "min"] = "max"
    budget: int | float | str | None = None
    level: float = pydantic.Field(default=0.05, gt=0.0, le=0.5)
    looks: tuple[Annotated[int, pydantic.Field(ge=1, le=100)], ...] | None = None
    max_seeds: int = pydantic.Field(default=20, ge=2, le=100)
    equal_within: float | None = pydantic.Field(default=None, gt=0.0, allow_inf_nan=False)
    failed: float | None = pydantic.Field(default=None, allow_inf_nan=False)

    def rules(self, num_variants: int) -> DecisionRules:
        """Returns the rules of the decisions.

        Raises:
            ConfigError: the looks do not increase or do not end at `max_seeds`, or no result could
                decide anything at the last look.
        """
        looks = self.looks or (*range(_LOOK_EVERY, self.max_seeds, _LOOK_EVERY), self.max_seeds)
        if any(b <= a for a, b in itertools.pairwise(looks)):
            raise ConfigError(f"key 'looks': got {list(looks)}. Allowed: increasing numbers")
        if self.looks and "max_seeds" in self.model_fields_set and looks[-1] != self.max_seeds:
            raise ConfigError(
                f"key 'max_seeds': got {self.max_seeds}, but the last of the looks {list(looks)} "
                f"is {looks[-1]}. Give only one of them"
            )
        rules = DecisionRules(tuple(looks), self.level, self.equal_within)
        num_pairs = num_variants * (num_variants - 1) // 2
        needed = rules.level_of_look / num_pairs
        if rules.smallest_p() > needed:
            raise ConfigError(
                f"key 'max_seeds': with {looks[-1]} seeds of each variant, the smallest possible "
                f"p-value is {rules.smallest_p():.3g}. The level {self.level:g}, divided over "
                f"looks ({len(looks)}) and pairs ({num_pairs}), needs {needed:.3g}, so nothing "
                "could be decided. Allowed: more seeds, fewer looks, or a higher level"
            )
        return rules


@dataclass(frozen=True)
class Variant:
    """A variant, as it is trained.

    Attributes:
        name: its name.
        config: the options of its trials, without `seed`.
    """

    name: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class ComparisonPlan:
    """A checked plan.

    Attributes:
        settings: what is compared, and how.
        rules: how pairs are decided.
        budget_key: result key of the budget.
        budget: value of this key at which a run ends.
        names: names of the variants.
        variants: the variants. It is empty for finished runs.
        first_seed: the seed of the first run of each variant.
        trained: the experiment with all variants, for `tune_run.run`. None for finished runs.
        experiment: the arguments that named the experiment, so that the command can read it again.
    """

    settings: ComparisonConfig
    rules: DecisionRules
    budget_key: str
    budget: float
    names: tuple[str, ...]
    variants: tuple[Variant, ...] = ()
    first_seed: int = 0
    trained: Plan | None = None
    experiment: tuple[str, tuple[str, ...]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        settings = self.settings
        return {
            "variants": {one.name: _plain(one.config) for one in self.variants}
            or dict.fromkeys(self.names, "finished runs"),
            "metric": settings.metric,
            "mode": settings.mode,
            "budget": {self.budget_key: self.budget},
            "first_seed": self.first_seed,
            "level": settings.level,
            "looks": list(self.rules.looks),
            "equal_within": settings.equal_within,
            "failed": "worst" if settings.failed is None else settings.failed,
            "draw_seed": self.rules.draw_seed,
            "test": "permutation test of the difference of means; the level is divided over the "
            "looks, and over the pairs by a closed test; for equality, two one-sided tests, with "
            "the level divided over looks and pairs",
            "settings": _plain({k: getattr(settings, k) for k in settings.model_fields_set}),
            "experiment": self.experiment,
        }


def hash_of(plan: Mapping[str, Any]) -> str:
    """Returns the first characters of the SHA-256 of a plan. Ignores how the plan was given."""
    essential = {k: v for k, v in plan.items() if k not in ("settings", "experiment")}
    return hashlib.sha256(json.dumps(essential, sort_keys=True).encode()).hexdigest()[:12]


def check_same_runs(plan: Mapping[str, Any], earlier: Mapping[str, Any], folder: Path) -> None:
    """Raises a ConfigError if the seeds of an earlier plan do not fit a plan."""
    for key in _FIXED:
        if plan.get(key) != earlier.get(key):
            raise ConfigError(
                f"{folder} holds a comparison with {key} {shown(earlier.get(key))}, and not "
                f"{shown(plan.get(key))}. Allowed: another directory, or a change of level, looks, "
                "max_seeds, equal_within or failed"
            )


def plan_comparison(
    name: str,
    example: Example,
    changes: Mapping[str, Any],
    settings: ComparisonConfig,
    *,
    folder: Path | None = None,
    experiment: tuple[str, tuple[str, ...]] | None = None,
) -> ComparisonPlan:
    """Checks a comparison and all its variants. Starts no process.

    Args:
        name: name of the experiment.
        example: the experiment.
        changes: options that replace options of the experiment, for all variants.
        settings: what is compared, and how.
        folder: see `Plan`.
        experiment: see `ComparisonPlan`.

    Raises:
        ConfigError: a key of the comparison or an option of a variant is wrong.
    """
    combined = _variants(settings)
    rules = settings.rules(len(combined))
    budget_key, budget = _budget(settings.budget, example.stop)
    try:
        check_stop_key(settings.metric)
    except ConfigError as error:
        raise ConfigError(str(error).replace("stop", "key 'metric'", 1)) from None
    if example.seeds is not None or example.num_samples > 1:
        raise ConfigError("keys 'seeds' and 'num_samples': polopt compare chooses the seeds itself")
    if is_search(with_searches({"run": example.run, **example.config, **changes})):
        raise ConfigError(
            "the experiment has a grid or a distribution. Allowed: fixed options, and the values "
            "to compare in 'vary'"
        )
    # So many results that the runs end close to the budget
    often: dict[str, Any] = {"min_time_s_per_iteration": 0.0}
    if budget_key == STEPS:
        often["min_sample_timesteps_per_iteration"] = max(1, round(budget / _RESULTS))
    else:
        often["min_time_s_per_iteration"] = budget / _RESULTS
    example = Example.parse({**vars(example), "config": {**often, **example.config}}, name)
    plans = {}
    for variant, options in combined.items():
        run = next((options[key] for key in _PRESET_KEYS if key in options), example.run)
        rest = {key: value for key, value in options.items() if key not in _PRESET_KEYS}
        described = {**vars(example), "run": run, "stop": {budget_key: budget}}
        try:
            example_of_variant = Example.parse(described, name)
            plans[variant] = plan_of(name, example_of_variant, merge(changes, rest), folder=folder)
        except ConfigError as error:
            raise ConfigError(f"variant {variant!r}: {error}") from None
    variants = tuple(
        Variant(variant, {"preset": plan.example.run, **_without(plan.config, "seed")})
        for variant, plan in plans.items()
    )
    for one, other in itertools.combinations(variants, 2):
        if _plain(one.config) == _plain(other.config):
            raise ConfigError(f"variants {one.name!r} and {other.name!r} have the same options")
    first = next(iter(plans.values()))
    trained = Plan(
        name,
        folder,
        first.example,
        PolicyOptimizerTrainer,
        common(variants),
        [experiment for plan in plans.values() for experiment in plan.experiments],
        None,
    )
    seed = first.config.get("seed") or 0
    names = tuple(plans)
    return ComparisonPlan(
        settings, rules, budget_key, budget, names, variants, seed, trained, experiment
    )


def plan_of_runs(
    names: Sequence[str], num_seeds: int, least_steps: float, settings: ComparisonConfig
) -> ComparisonPlan:
    """Returns the plan of a comparison of finished runs. It has one look at all seeds.

    Args:
        names: names of the variants.
        num_seeds: number of runs of each variant.
        least_steps: the budget if the settings have none.
        settings: how the runs are compared.

    Raises:
        ConfigError: see `plan_comparison`.
    """
    _check_number(names)
    if settings.vary or settings.variants:
        raise ConfigError("keys 'vary' and 'variants': finished runs already have their options")
    if settings.looks is not None or "max_seeds" in settings.model_fields_set:
        raise ConfigError("keys 'looks' and 'max_seeds': finished runs are looked at once")
    if num_seeds < 2:
        raise ConfigError("a variant has one run only. Allowed: at least 2 runs of each variant")
    whole = settings.model_copy(update={"looks": (num_seeds,), "max_seeds": num_seeds})
    key, budget = _budget(settings.budget, {STEPS: least_steps})
    return ComparisonPlan(whole, whole.rules(len(names)), key, budget, tuple(names))


def common(variants: Sequence[Variant]) -> dict[str, Any]:
    """Returns the options that have the same value in all variants."""
    first, *others = (one.config for one in variants)
    return {
        key: value
        for key, value in first.items()
        if all(key in one and _plain(one[key]) == _plain(value) for one in others)
    }


def _variants(settings: ComparisonConfig) -> dict[str, dict[str, Any]]:
    """Returns the options of each variant, by its name."""
    if bool(settings.vary) == bool(settings.variants):
        raise ConfigError(
            "nothing to compare. Give 'vary', such as --vary preset=A3C,A2C, or 'variants'"
            if not settings.vary
            else "keys 'vary' and 'variants': give only one of them"
        )
    given = settings.variants or {
        ", ".join(
            _part(key, value) for key, value in zip(settings.vary, values, strict=True)
        ): dict(zip(settings.vary, values, strict=True))
        for values in itertools.product(*settings.vary.values())
    }
    _check_number(list(given))
    found: dict[str, dict[str, Any]] = {}
    for name, options in given.items():
        found[name] = {}
        for key, value in options.items():
            if key == "seed":
                raise ConfigError("key 'seed' cannot be varied, because seeds repeat each variant")
            for part in reversed(key.split(".")):
                value = {part: value}
            found[name] = merge(found[name], value)
    return found


def _check_number(names: Sequence[str]) -> None:
    if not 2 <= len(names) <= MOST_VARIANTS:
        listed = f": {', '.join(names)}" if names else ""
        raise ConfigError(
            f"got {len(names)} {'variant' if len(names) == 1 else 'variants'}{listed}. "
            f"Allowed: 2 to {MOST_VARIANTS} different variants"
        )


def _part(key: str, value: Any) -> str:
    return str(value) if key in _PRESET_KEYS else f"{key}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(_plain(value))


def _budget(budget: float | str | None, stop: Mapping[str, float]) -> tuple[str, float]:
    """Returns the result key of a budget, and its value."""
    if budget is None:
        if STEPS not in stop:
            raise ConfigError(
                "key 'budget' is missing. Allowed: environment steps of each run, such as 100000, "
                "or a time of training, such as 90s, 10m or 2h"
            )
        return STEPS, float(stop[STEPS])
    key, value = STEPS, 0.0
    try:
        if isinstance(budget, str) and (match := _DURATION.fullmatch(budget)):
            key, value = SECONDS, float(match[1]) * _SECONDS[match[2]]
        else:
            value = float(budget)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ConfigError(
            f"key 'budget': got {shown(budget)}. Allowed: environment steps of each run, such as "
            "100000, or a time of training, such as 90s, 10m or 2h"
        )
    return key, value


def _without(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != key}


def _plain(value: Any) -> Any:
    """Returns a value as JSON values. Classes and functions become their names."""
    return json.loads(json.dumps(value, default=_name))


def _name(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    name = getattr(value, "__qualname__", None)
    return (
        f"{value.__module__}.{name}"
        if name
        else f"{type(value).__module__}.{type(value).__qualname__}"
    )
