"""Tests of the file with an optimizer's declaration of its dashboard tab."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from polopt.dashboards.data import plots
from polopt.dashboards.data.tab import OptimizerTab
from polopt.dashboards.tab_file import tab_of
from polopt.metrics.number import declared
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.sac import SACPolicy


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_tab_of_each_optimizer_survives_its_file(name: str) -> None:
    cls = OPTIMIZERS.get(name)
    numbers = {"num_things": 3, "backend": "socket", "flag": True, "share": 0.5}
    tab = tab_of(cls, numbers, cls.config_class.parse({}), SACPolicy)
    assert OptimizerTab.from_json(tab.to_json()) == tab
    assert (tab.name, tab.title, tab.phases) == (name, cls.__name__, cls.phases)
    own = {f"optimizer/{number.key}" for number in declared(cls)}
    added = {"optimizer/num_things", "optimizer/share", "learners/default_policy/alpha_value"}
    assert {number.key for number in tab.numbers} >= own | added
    assert tab.number("optimizer/share").meaning == "the key `optimizer/share` of the results"
    assert tab.number("optimizer/updates_per_s").unit == "updates/s"
    assert not {"optimizer/backend", "optimizer/flag"} & {number.key for number in tab.numbers}
    keys = [plot.key for plot in tab.tab.plots]
    assert len(set(keys)) == len(keys) > 0


def changed(path: tuple[Any, ...], value: Any) -> str:
    """Returns the content of an optimizer's file with one changed value."""
    number = {"num_things": 3}
    content = json.loads(tab_of(OPTIMIZERS.get("async_gradients"), number).to_json())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 0),
        (("name",), 3),
        (("title",), "x" * 2000),
        (("phases",), {"a": 1}),
        (("phases",), ["x"] * 1000),
        (("extra_stats",), [None]),
        (("numbers",), [None]),
        (("numbers", 0, "key"), None),
        (("numbers", 0, "kind"), "pie"),
        (("numbers", 0, "surprise"), "x"),
        (("numbers", 0, "meaning"), "x" * 2000),
        (("tab",), None),
        (("tab", "plots"), "text"),
        (("tab", "plots", 0, "kind"), "pie"),
        (("tab", "plots", 0, "steps"), 1),
        (("tab", "plots", 0, "keys"), {}),
        (("tab", "plots", 0, "keys"), {"a": ["b"]}),
        (("tab", "plots", 0, "keys"), {"a": "b", "c": "d"}),
        (("tab", "plots", 0, "surprise"), "x"),
        (("limits",), [8]),
        (("limits",), {"max_policy_lag": True}),
        (("limits",), {"max_policy_lag": math.nan}),
        (("limits",), {"max_policy_lag": 10**400}),
    ],
)
def test_file_that_is_no_tab_is_refused(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        OptimizerTab.from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, b"\xff\xfe"])
def test_text_that_is_no_tab_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        OptimizerTab.from_json(text)


def test_file_of_an_earlier_version_is_read() -> None:
    content = json.loads(changed(("extra_stats",), ["num_things"]))
    del content["numbers"]
    content["tab"]["metrics"] = [{"kind": "gauge"}]  # Prometheus is the trainer's business
    (number,) = OptimizerTab.from_json(json.dumps(content)).numbers
    assert number.key == "optimizer/num_things"


def test_shared_plots_have_one_key_where_they_need_one() -> None:
    for plot in vars(plots).values():
        if isinstance(plot, plots.Plot) and plot.kind != "lines":
            assert len(plot.keys) == 1
