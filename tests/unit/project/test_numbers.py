"""A number that is declared once is in results, in Prometheus, and in the report. Results and
declarations fit each other."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray
from declared_numbers import differences
from metrics_page import number_table

import polopt
from polopt.common import add_ons
from polopt.dashboards import prometheus_exporter
from polopt.dashboards.data.plots import TABS
from polopt.dashboards.data.run_results import COLUMNS
from polopt.metrics.number import Number, declare, declared, find
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.optimizers.sync_samples import SyncSamples
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.numbers import numbers_of

SMALL: dict[str, Any] = {
    "env": "CartPole-v1",
    "num_workers": 0,
    "rollout_fragment_length": 8,
    "min_sample_timesteps_per_iteration": 16,
    "model": {"fcnet_hiddens": [8]},
    "seed": 1,
}


class Bandit(SyncSamples):
    """Counts its pulls. The declaration and the count are all that it adds."""

    name = "bandit"
    numbers = (
        Number("num_pulls", "pulls", "arms that were pulled so far", "counter"),
        Number("regret", "return", "mean regret in the interval", title="Regret of the bandit"),
        Number("arm", "", "name of the best arm", "text"),
    )
    pulls = 0

    def step(self) -> polopt.StepResult:
        self.pulls += 3
        return super().step()

    def extra_stats(self) -> dict[str, Any]:
        return {**super().extra_stats(), "num_pulls": self.pulls, "regret": 0.5, "arm": "left"}


class Noted(A2CPolicy):
    """Computes a statistic of its own."""

    numbers = (Number("surprise", "nats", "how unlikely the actions were"),)

    def loss(self, rows: Any) -> Any:
        loss, stats = super().loss(rows)
        return loss, {**stats, "surprise": stats["entropy"]}


class Clock(polopt.AddOn):
    """Adds a number to results."""

    numbers = (Number("clock/ticks", "ticks", "ticks of the clock", "total"),)

    def follow(self, trainer: Any) -> polopt.RunListener:
        class Ticks(polopt.RunListener):
            def extend(self, result: dict[str, Any]) -> None:
                result["clock"] = {"ticks": 7}

        return Ticks()


class Series:
    """A fake of the classes of `ray.util.metrics`, which writes lines as Prometheus shows them."""

    lines: list[str]

    def __init__(self, name: str, text: str, *arguments: Any) -> None:
        self.name = name
        self.lines.append(f"# HELP {name} {text}")

    def set(self, value: float, tags: dict[str, str]) -> None:
        tags = {key: tag for key, tag in tags.items() if key not in ("trial", "optimizer")}
        self.lines.append(f"{self.name}{tags or ''} {value:g}")

    inc = observe = set


@pytest.fixture
def bandit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the toys, as a plugin does."""
    monkeypatch.setattr(add_ons, "_registered", [Clock()])
    for registry, name, cls in ((OPTIMIZERS, "bandit", Bandit), (POLICIES, "noted", Noted)):
        monkeypatch.setattr(registry, "_known", {**registry._known, name: cls})


@pytest.fixture
def prometheus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    Series.lines = []
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(prometheus_exporter, "PERIOD_S", 0.0)
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_exporter, kind, Series)
    return Series.lines


@pytest.mark.usefixtures("bandit")
def test_a_declared_number_is_everywhere(prometheus: list[str], tmp_path: Path) -> None:
    trainer = polopt.PolicyOptimizerTrainer(
        {**SMALL, "optimizer": "bandit", "policy": "noted"},
        log_dir=tmp_path / "results" / "trial",
        evaluation_interval=1,
        evaluation_num_workers=0,
        evaluation_duration=1,
    )
    results = [trainer.train() for _ in range(3)]
    trainer.stop()
    numbers = numbers_of(Bandit, Noted)
    # In results.
    assert results[-1]["optimizer"]["num_pulls"] >= 9
    assert math.isfinite(results[-1]["learners"]["default_policy"]["surprise"])
    assert results[-1]["clock"]["ticks"] == 7
    assert differences(numbers, results) == []
    # In Prometheus, with the meaning as help.
    for line in (
        "# HELP polopt_pulls Arms that were pulled so far.",
        "polopt_regret 0.5",
        "polopt_clock_ticks 7",
    ):
        assert line in prometheus
    (learner,) = [line for line in prometheus if line.startswith("# HELP polopt_learner ")]
    assert "surprise: How unlikely the actions were." in learner
    assert any(line.startswith("polopt_learner{'statistic': 'surprise'}") for line in prometheus)
    assert not any("arm " in line for line in prometheus), "a text has no metric"
    # In a table like those of docs/metrics.md.
    row = "| `num_pulls` | pulls | arms that were pulled so far |"
    assert row in number_table(numbers).splitlines()
    # In the report.
    report = pytest.importorskip("polopt.dashboards.report")
    report.write_report(tmp_path / "results", tmp_path / "report.html", None)
    page = (tmp_path / "report.html").read_text()
    for text in ("Pulls", "Arms that were pulled so far.", "pulls\\u002fs", "Regret of the bandit"):
        assert text in page
    assert "How unlikely the actions were." in page


def test_differences_are_found() -> None:
    numbers = [
        Number("optimizer/num_pulls", "pulls", "", "counter"),
        Number("optimizer/share/<phase>", "share", ""),
        Number("optimizer/lag", "updates", "", "histogram"),
    ]
    good = {"optimizer": {"num_pulls": 2, "share": {"wait": 0.5}, "lag": [1]}, "pid": 1}
    assert differences(numbers, [good, good]) == []

    def of(**block: Any) -> Counter[str]:
        result = {"optimizer": {**good["optimizer"], **block}}  # type: ignore[dict-item]
        lines = differences(numbers, [good, result])
        return Counter(line.split(" is ")[-1].split(" after")[0] for line in lines)

    assert of(other=1) == {"not declared": 1}
    assert of(num_pulls=1) == {"1": 1}, "a counter falls"
    assert of(num_pulls="3") == {"'3'": 1}
    assert of(share={"wait": 1.5}) == {"1.5": 1}
    assert of(lag=3) == {"3": 1}
    missing = {"optimizer": {"num_pulls": 2, "lag": [1]}}
    assert differences(numbers, [missing]) == ["no result has optimizer/share/<phase>"]


def test_dashboards_read_declared_numbers() -> None:
    numbers = [n for name in OPTIMIZERS.names() for n in numbers_of(OPTIMIZERS.get(name))]
    assert [path for path in COLUMNS.values() if find(numbers, path) is None] == []
    plots = [plot for tab in TABS.values() for plot in tab.plots]
    keys = {key for plot in plots for key in plot.keys.values()}
    assert [key for key in keys if find(numbers, key) is None] == []


def test_table_has_a_number_in_each_entry() -> None:
    assert declare("""
        num_wins (pulls, total, metric=wins{of=all}, title=Pulls that won): arms (of many) that
            won: all of them
        name (text): a name
        odd (): without a unit
    """) == (
        Number(
            "num_wins",
            "pulls",
            "arms (of many) that won: all of them",
            "total",
            "wins{of=all}",
            "Pulls that won",
        ),
        Number("name", "", "a name", "text"),
        Number("odd", "", "without a unit"),
    )
    with pytest.raises(ValueError, match="got 'num_wins: no parentheses'"):
        declare("num_wins: no parentheses")
    with pytest.raises(TypeError, match="unit_of"):
        declare("num_wins (unit_of=pulls): an unknown field")


def test_a_key_comes_before_a_pattern() -> None:
    pattern, exact = Number("share/<phase>", "", ""), Number("share/wait", "", "")
    assert find([pattern, exact], "share/wait") == exact
    assert find([pattern, exact], "share/learn") == pattern
    assert find([pattern, exact], "share/learn/more") is None
    assert pattern.match("share/learn") == {"phase": "learn"}


def test_a_subclass_may_declare_a_number_again() -> None:
    class Again(Bandit):
        numbers = (Number("regret", "wins", "another regret"),)

    assert [n.unit for n in declared(Again) if n.key == "regret"] == ["wins"]
    assert {n.key for n in declared(Again)} == {n.key for n in declared(Bandit)}


def test_numbers_say_what_they_are() -> None:
    for optimizer in OPTIMIZERS.names():
        numbers = numbers_of(OPTIMIZERS.get(optimizer))
        assert len({number.key for number in numbers}) == len(numbers)
        for number in numbers:
            assert number.meaning
            assert not number.meaning.endswith("."), number
