"""The address sets the widgets of the live page. The page ignores unknown values in an address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dashboard_results import write_trial

pytest.importorskip("streamlit", reason="the extra polopt[dashboard] is not installed")
pytest.importorskip("plotly", reason="the extra polopt[dashboard] is not installed")

from streamlit.testing.v1 import AppTest

from polopt.dashboards.data.selection import Selection
from polopt.dashboards.data.trials import ResultsDirectory
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import Tab


def _script(folder: str) -> None:
    from polopt.dashboards.page import main

    main(folder)


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for seed in range(3):
        write_trial(tmp_path / "results" / "one", "async_gradients", seed, 4)
        write_trial(tmp_path / "results" / "two", "sync_samples", seed, 4, params={"lr": 0.1})
    return tmp_path / "results"


def opened(results: Path, **address: Any) -> AppTest:
    page = AppTest.from_function(_script, args=(str(results),), default_timeout=60)
    for key, value in address.items():
        page.query_params[key] = value
    page.run()
    assert not page.exception
    return page


def shown(page: AppTest) -> dict[str, Any]:
    """Returns the values of the widgets by key."""
    widgets = [
        *page.multiselect, *page.number_input, *page.toggle, *page.selectbox, *page.button_group,
        *page.slider,
    ]  # fmt: skip
    return {widget.key: widget.value for widget in widgets}


def titles(page: AppTest) -> set[str]:
    """Returns the titles of the panels in the open tab."""
    return {text.value.strip("*") for text in page.markdown}


ADDRESS = {
    "tab": "AsyncGradients",
    "experiment": ["one", "two"],
    "optimizer": "async_gradients",
    "seed": ["1", "2"],
    "keys": "lr",
    "config-lr": "0.002",
    "axis": "steps",
    "startup": "true",
    "hide": "SyncPPO",
    "pin": "A3C",
    "log": "true",
    "robust": "false",
    "smoothing": "0.6",
    "refresh": "false",
    "budget": "2000",
    "target-CartPole-v1": "12.5",
}


def test_address_opens_the_page_as_it_was(results: Path) -> None:
    page = opened(results, **ADDRESS)
    focus = page.query_params["focus-async-gradients"]
    assert shown(page) == {
        "experiment": ["one", "two"],
        "optimizer": ["async_gradients"],
        "seed": ["1", "2"],
        "keys": ["lr"],
        "config-lr": ["0.002"],
        "axis": "steps",
        "startup": True,
        "hide": ["SyncPPO"],
        "pin": ["A3C"],
        "log": True,
        "robust": False,
        "smoothing": 0.6,
        "refresh": False,
        "budget": 2000.0,
        "target-CartPole-v1": 12.5,
        "select-focus-async-gradients": focus,
    }
    assert "Gradient lag" in titles(page)
    assert page.caption[-1].value.startswith("2 trials")


def test_focus_of_the_address_is_kept_when_labels_change(results: Path) -> None:
    page = opened(results, tab="AsyncGradients")
    page.selectbox[0].select_index(2).run()
    chosen = page.query_params["focus-async-gradients"]
    assert chosen.startswith("one/A3C_")
    page.run()
    assert page.selectbox[0].value == chosen
    # The label of the run's group now contains the learning rate, and there are four runs.
    write_trial(results / "three", "async_gradients", 9, 4, params={"lr": 0.5})
    again = opened(results, **{"tab": "AsyncGradients", "focus-async-gradients": chosen})
    assert again.selectbox[0].value == chosen
    assert "lr 0.002" in again.selectbox[0].options[again.selectbox[0].index]


HOSTILE = "<script>window.attacked=1</script>"


@pytest.mark.parametrize(
    "address",
    [
        {"tab": HOSTILE, "optimizer": [HOSTILE, "../../etc/passwd"], "experiment": "three"},
        {"tab": ["Compare", HOSTILE], "seed": "17", "keys": ["__class__", HOSTILE]},
        {"config-lr": "0.1", "axis": HOSTILE, "startup": "maybe", "refresh": "7"},
        {"budget": "nan", "target-CartPole-v1": "inf", "target-Other-v1": "5", HOSTILE: HOSTILE},
        {"budget": "-1", "target-CartPole-v1": "1e999"},
        {"budget": "many", "target-CartPole-v1": ["1", HOSTILE]},
        {"hide": HOSTILE, "pin": ["SyncPPO, lr 7", ""], "log": "maybe", "robust": HOSTILE},
        {"smoothing": "nan"},
        {"smoothing": "1.0"},
        {"smoothing": ["0.5", HOSTILE]},
    ],
)
def test_unknown_values_of_an_address_are_ignored(results: Path, address: dict[str, Any]) -> None:
    usual, page = opened(results), opened(results, **address)
    assert shown(page) == shown(usual)
    assert titles(page) == titles(usual)


@pytest.mark.parametrize("value", ["../../../etc", "/etc/passwd", HOSTILE, ""])
def test_focus_that_is_no_run_is_the_first_run(results: Path, value: str) -> None:
    page = opened(results, **{"tab": "AsyncGradients", "focus-async-gradients": value})
    assert page.selectbox[0].index == 0
    assert page.query_params["focus-async-gradients"] == page.selectbox[0].value


def test_hidden_group_is_left_out_of_all_tabs_and_counted(results: Path) -> None:
    page = opened(results, hide="SyncPPO")
    assert page.caption[-1].value.startswith("3 trials, 0 running, 3 not shown.")
    assert {tab.label for tab in page.tabs} == {tab.label for tab in opened(results).tabs} - {
        "SyncSamples"
    }
    trials = opened(results, hide=["SyncPPO", "A3C"])
    assert "hidden group" in trials.info[-1].value


def test_pinned_group_is_the_first_of_the_trials(results: Path) -> None:
    for pinned in ("A3C", "SyncPPO"):
        page = opened(results, pin=pinned)
        trials = page.dataframe[-1].value
        assert trials["group"].iloc[0] == pinned
        assert len(trials) == 6


def test_known_values_remain_beside_unknown_ones(results: Path) -> None:
    page = opened(results, optimizer=["sync_samples", HOSTILE])
    assert shown(page)["optimizer"] == ["sync_samples"]


def test_plots_are_made_once_until_results_change(
    results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    panels = Tab.panels

    def counted(tab: Tab, selection: Selection) -> list[Panel]:
        made.append(tab.key)
        return panels(tab, selection)

    monkeypatch.setattr(Tab, "panels", counted)
    page = opened(results, tab="Compare")
    page.run()
    opened(results, tab="Faults")
    opened(results, tab="Compare")  # another browser
    assert made == ["compare", "faults"]
    opened(results, tab="Compare", pin="SyncPPO")
    write_trial(results / "one", "async_gradients", 9, 4)
    opened(results, tab="Compare")
    assert made == ["compare", "faults", "compare", "compare"]


def test_new_experiment_reaches_the_side_bar_and_the_tabs(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page reads results once for the side bar, and once at each refresh of the tabs."""
    refresh, folder = ResultsDirectory.refresh, tmp_path / "empty"
    folder.mkdir()
    calls = []

    def refreshed(directory: ResultsDirectory, *arguments: Any) -> None:
        calls.append(directory)
        if len(calls) in (2, 4):
            name = f"experiment-{len(calls)}"
            write_trial(folder / name, "sync_samples", len(calls), 4)
        refresh(directory, *arguments)

    page = opened(folder)
    assert "no results yet" in page.info[0].value
    assert len(page.info) == 1
    monkeypatch.setattr(ResultsDirectory, "refresh", refreshed)
    page.run()
    assert not page.info
    assert page.caption[-1].value.startswith("2 trials")
    assert page.multiselect(key="experiment").options == ["experiment-2", "experiment-4"]
