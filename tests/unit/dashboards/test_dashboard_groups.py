"""Groups of runs: names, filters, colors, and the tables that list them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from dashboard_helpers import by_key, curves, of_optimizer, select, write_sweep
from dashboard_results import write_examples, write_trial

from polopt.dashboards.data.selection import Filters, differing_keys
from polopt.dashboards.data.trials import RETURN
from polopt.dashboards.views import (
    compare_tab,
    experiments_tab,
    faults_tab,
)
from polopt.dashboards.views.tabs import tabs_of


def test_failed_trials_are_in_tables_and_faults(results: Path) -> None:
    write_trial(results / "exp", "sync_samples", 0, 5)
    failed = results / "exp" / "A2C_00000_00001"
    failed.mkdir()
    trace = "Traceback (most recent call last):\n" + 90 * "  File x, line 1\n" + "KeyError: 'lr'"
    (failed / "error.txt").write_text(trace)
    selection = select(results)
    trials = by_key(experiments_tab.panels(selection))["trials"]
    assert trials.title == "Trials: 1 failed, 1 finished"
    panels = by_key(faults_tab.panels(selection))
    ((_, state, error, name, end),) = panels["failed"].rows
    assert (state, error, name) == ("failed", "KeyError: 'lr'", failed.name)
    assert end.startswith("... ")
    assert end.endswith("line 1\nKeyError: 'lr'")
    assert len(end) < 700
    assert panels["environment-faults"].missing == (
        "No faults of this kind. Runs with results: 1, without results: 1"
    )


def test_config_changes_are_marked(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 6, params={"lr": 0.1})
    lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    for line in lines[3:]:
        line["config"]["lr"] = 0.2
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_trial(results, "sync_samples", 1, 6, params={"lr": 0.1})
    selection = select(results)
    assert set(selection.groups) == {"SyncPPO, lr 0.1", "SyncPPO, lr 0.1, then 0.2"}
    marks = curves(by_key(experiments_tab.panels(selection))["returns"])["config changes"]
    assert list(marks.x) == [2.0]
    assert marks.text[0].startswith("lr from 0.1 to 0.2")


def test_groups_differ_by_config_and_not_by_seed(results: Path) -> None:
    for seed in range(2):
        for lr in (0.1, 0.2):
            params = {"lr": lr, "model": {"fcnet_hiddens": [32] if lr == 0.1 else [64]}}
            write_trial(results, "sync_samples", seed, 3, params=params)
    selection = select(results)
    assert sorted(selection.groups) == [
        "SyncPPO, lr 0.1, model.fcnet_hiddens [32]",
        "SyncPPO, lr 0.2, model.fcnet_hiddens [64]",
    ]
    trials = [run.trial for run in selection.runs]
    assert set(differing_keys(trials)) == {"lr", "model.fcnet_hiddens", "seed"}
    table = by_key(compare_tab.panels(selection))["config-differences"]
    assert ["model.fcnet_hiddens", "[32]", "[64]"] in table.rows


def test_labels_say_what_was_varied(results: Path) -> None:
    write_sweep(results, 4)  # the learning rate alone distinguishes all groups
    labels = sorted(select(results).groups)
    assert labels[0] == "SyncPPO, lr 0.001, num_sgd_iter 4"
    # A key that does not fit is omitted from all labels, but the tables contain it.
    name = "a_key_with_a_name_that_is_too_long_for_a_legend"
    write_trial(results, "sync_samples", 1, 3, params={"lr": 0.5, "num_sgd_iter": 4, name: 1})
    selection = select(results)
    assert labels[0] in selection.groups
    assert "SyncPPO, lr 0.5, num_sgd_iter 4" in selection.groups
    assert name in by_key(experiments_tab.panels(selection))["best"].columns


def test_labels_cut_keys_before_values(results: Path) -> None:
    for lr in (0.0001, 0.0003):
        for length in (64, 128):
            for epochs in (4, 8):
                params = {"lr": lr, "rollout_fragment_length": length, "num_sgd_iter": epochs}
                write_trial(results, "sync_samples", 0, 3, params=params)
    labels = sorted(select(results).groups)
    assert len(labels) == 8
    assert labels[0] == "SyncPPO, lr 0.0001, num_sgd_i. 4, rollout_f. 128"
    assert max(map(len, labels)) == 48


def test_best_trials_are_listed_with_their_config(results: Path) -> None:
    write_sweep(results, 12)
    best = by_key(experiments_tab.panels(select(results)))["best"]
    assert best.title == "Highest returns: at most 10 of 12 trials"
    assert list(best.columns[:3]) == ["rank", "group", "return"]  # a narrow window has no more room
    assert list(best.columns[7:9]) == ["lr", "num_sgd_iter"]
    returns = [row[2] for row in best.rows]
    assert len(returns) == 10
    assert returns == sorted(returns, reverse=True)
    by_trial = {run.trial.name: run.trial for run in select(results).runs}
    assert max(trial.last(RETURN) for trial in by_trial.values()) == pytest.approx(
        returns[0], abs=0.01
    )
    for row in best.rows:
        config = by_trial[row[-1]].config
        assert row[7:9] == [str(config["lr"]), str(config["num_sgd_iter"])]
        lr, epochs = config["lr"], config["num_sgd_iter"]
        assert row[1] == f"SyncPPO, lr {lr}, num_sgd_iter {epochs}"


def test_large_returns_are_written_with_all_digits(results: Path) -> None:
    for lr in (0.1, 0.2):
        for seed in range(2):
            params = {"lr": lr}
            write_trial(results, "sync_samples", seed, 3, level=2e6 * lr, params=params)
    panels = by_key(compare_tab.panels(select(results)))
    shown = [panels["target-table"].title, *map(str, panels["target-table"].rows)]
    figure = panels["final-score"].figure
    assert figure is not None
    shown += [trace.hovertemplate for trace in figure.data]
    assert sum(len(re.findall(r"\d,\d{3}", text)) for text in shown) >= 4
    assert not any(re.search(r"\de[+-]?\d", text) for text in shown)


def test_best_trials_are_ranked_within_their_task(results: Path) -> None:
    for task, level in (("CartPole-v1", 400.0), ("Acrobot-v1", 50.0)):
        for lr in (0.1, 0.2):
            write_trial(results, "sync_samples", 0, 3, level=level, params={"env": task, "lr": lr})
    best = by_key(experiments_tab.panels(select(results)))["best"]
    assert [(row[3], row[0]) for row in best.rows] == [
        ("Acrobot-v1", 1), ("Acrobot-v1", 2), ("CartPole-v1", 1), ("CartPole-v1", 2)
    ]  # fmt: skip


def test_runs_of_one_config_have_no_table_of_the_best(results: Path) -> None:
    for seed in range(3):
        write_trial(results, "sync_samples", seed, 3)
    assert "best" not in by_key(experiments_tab.panels(select(results)))


def test_long_names_of_rows_are_broken_into_lines(results: Path) -> None:
    """A name of 47 characters in one line would leave less than a quarter of the width."""
    write_sweep(results, 2)
    panels = by_key(compare_tab.panels(select(results)))
    tab = of_optimizer(select(results))
    for panel in (panels["throughput"], panels["target-steps"], tab["driver-bars"]):
        assert panel.figure is not None
        axis = panel.figure.layout.yaxis
        assert any("<br>" in text for text in axis.ticktext), panel.key
        assert max(len(line) for text in axis.ticktext for line in text.split("<br>")) <= 26
        assert [text.replace("<br>", " ") for text in axis.ticktext] == list(axis.tickvals)
        assert set(axis.tickvals) == {y for trace in panel.figure.data for y in trace.y}


def test_legend_of_long_names_has_a_row_for_each(results: Path) -> None:
    write_sweep(results, 12)
    figure = by_key(compare_tab.panels(select(results)))["return-steps"].figure
    assert figure is not None
    assert figure.layout.height >= 360 + 20 * (12 - 2)


def test_plots_of_many_groups_have_room_for_their_names(results: Path) -> None:
    write_sweep(results, 30)
    panels = by_key(compare_tab.panels(select(results)))
    for key in ("throughput", "final-score", "target-steps"):
        assert panels[key].figure.layout.height >= 30 * 16 + 60, key
    table = panels["config-differences"]
    pairs = panels["probability-of-improvement"]
    assert pairs.note == "Only the first 12 of 30 groups are shown."
    assert list(table.columns) == ["group", "lr", "num_sgd_iter"]
    assert len(table.rows) == 30
    assert table.rows[0] == ["SyncPPO, lr 0.001, num_sgd_iter 4", "0.001", "4"]


def test_filters_choose_by_optimizer_config_and_seed(results: Path) -> None:
    write_examples(results, seeds=2, iterations=2)
    trials = [run.trial for run in select(results).runs]

    def passing(filters: Filters) -> int:
        return sum(filters.passes(trial) for trial in trials)

    assert passing(Filters()) == 10
    assert passing(Filters(optimizers=frozenset({"sync_samples"}))) == 2
    assert passing(Filters(config={"seed": frozenset({"1"})})) == 5
    assert passing(Filters(config={"seed": frozenset()})) == 10
    assert passing(Filters(config={"gamma": frozenset({"not set"})})) == 10


def test_experiments_table_has_a_row_for_each_trial(results: Path) -> None:
    write_trial(results / "one", "sync_samples", 3, 9, deaths=(4,))
    (results / "two" / "A3C_12345_00000").mkdir(parents=True)
    (results / "two" / "A3C_12345_00000" / "params.json").write_text("{")
    panels = by_key(experiments_tab.panels(select(results)))
    rows = {row[-1]: row for row in panels["trials"].rows}
    assert rows["A3C_12345_00000"][0] == "no results"
    (finished,) = [row for row in rows.values() if row[0] == "finished"]
    assert finished[3] == "3"
    assert finished[10] == 1
    assert panels["unreadable"].rows[0][1] == "A3C_12345_00000"


def test_pinned_groups_come_first_and_are_among_the_best(results: Path) -> None:
    for number in range(1, 14):
        params = {"lr": round(0.001 * number, 3)}
        write_trial(results, "sync_samples", 0, 3, level=1000.0 * number, params=params)
    selection, name = select(results), "SyncPPO, lr 0.002"
    assert next(iter(selection.groups)) == "SyncPPO, lr 0.001"
    pinned = replace(selection, pinned=frozenset({name})).with_runs(selection.runs)
    assert next(iter(pinned.groups)) == name
    assert len(pinned.runs) == 13
    panels = by_key(compare_tab.panels(pinned))
    assert panels["config-differences"].rows[0][0] == name
    assert panels["return-steps"].figure.data[0].name.startswith(name)  # type: ignore[union-attr]
    best = by_key(experiments_tab.panels(pinned))["best"]
    assert [row[0] for row in best.rows] == [*range(1, 11), 12]
    assert best.rows[-1][1] == name
    assert best.title.endswith("at most 10 of 13 trials, and all trials of pinned groups")


def test_hidden_groups_are_nowhere_and_colors_stay(results: Path) -> None:
    write_examples(results, seeds=2, iterations=4)
    selection = select(results)
    filters = Filters(hidden=frozenset({"SyncPPO"}))
    runs = filters.shown(selection.runs)
    assert {run.group for run in runs} == {*selection.groups} - {"SyncPPO"}
    looks = {run.group: run.look for run in selection.runs}
    assert all(run.look == looks[run.group] for run in runs)
    shown = selection.with_runs(runs)
    for tab in tabs_of(shown.runs):
        for panel in tab.panels(shown):
            assert "SyncPPO" not in str(panel.rows) + str(panel.findings)
            assert "SyncPPO" not in str(panel.figure.to_dict() if panel.figure else "")


def test_runs_without_a_preset_are_named_by_optimizer(results: Path) -> None:
    for optimizer in ("async_gradients", "sync_samples"):
        params = {"optimizer": optimizer}
        write_trial(results, optimizer, 0, 3, preset="PolicyOptimizerTrainer", params=params)
    assert set(select(results).groups) == {"async_gradients", "sync_samples"}
