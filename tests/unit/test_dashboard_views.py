"""Figures and tables of each view, and the report, over small generated results."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_results import PHASES, write_examples, write_trial

pytest.importorskip("plotly", reason="the extra polopt[dashboard] is not installed")

from polopt.common.config import ConfigError
from polopt.dashboards import report
from polopt.dashboards.data.results import RETURN, ResultsDirectory
from polopt.dashboards.data.selection import Filters, Selection, differing_keys, make_runs
from polopt.dashboards.views import allreduce, compare, experiments, fault_tab, gradients
from polopt.dashboards.views.drawing import Panel
from polopt.dashboards.views.tabs import TABS, tabs_of

HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "results"


def select(results: Path, **options: Any) -> Selection:
    directory = ResultsDirectory(results)
    directory.refresh()
    return Selection(make_runs(directory.trials), **options)


def by_key(panels: list[Panel]) -> dict[str, Panel]:
    assert len({panel.key for panel in panels}) == len(panels)
    return {panel.key: panel for panel in panels}


def curves(panel: Panel) -> dict[str, Any]:
    assert panel.figure is not None, panel.missing
    return {trace.name: trace for trace in panel.figure.data}


def test_every_panel_has_data_with_all_keys(results: Path) -> None:
    write_examples(results, seeds=5, iterations=12)
    write_trial(
        results, "decentralized_allreduce", 0, 12, num_workers=1, env_faults=(3,), deaths=(2,)
    )
    selection = select(results)
    empty = {
        (tab.key, panel.key): panel.missing
        for tab in tabs_of(list(selection.runs))
        for panel in tab.panels(selection)
        if panel.figure is None and not panel.columns
    }
    # Twelve iterations of the generator contain none of these.
    assert set(empty) == {
        ("faults", "non-finite-data"),
        ("faults", "skipped-updates"),
        ("faults", "broken-rounds"),
    }


@pytest.mark.parametrize("optimizer", PHASES)
def test_missing_keys_are_named(results: Path, optimizer: str) -> None:
    write_trial(results, optimizer, 0, 5, new_keys=False)
    selection = select(results)
    for tab in tabs_of(list(selection.runs)):
        missing = [panel.missing for panel in tab.panels(selection) if panel.figure is None]
        if tab.optimizers:
            assert "Not in these results: optimizer/driver/share" in missing


def test_results_without_rows_are_drawn_empty(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 1)
    (folder / "result.json").write_text("")
    selection = select(results)
    for tab in TABS:
        for panel in tab.panels(selection):
            assert panel.figure is not None or panel.columns or panel.missing


def test_returns_that_are_all_nan_are_left_out(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 1)
    write_trial(results, "async_gradients", 0, 9)
    panel = by_key(compare.panels(select(results)))["return-steps"]
    assert {name for name in curves(panel) if "n=" in name} == {"A3C (n=1)"}


def test_single_runs_below_five_seeds_and_a_band_above(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 6)
    for seed in range(4):
        write_trial(results, "async_gradients", seed, 6)
    panel = by_key(compare.panels(select(results)))["return-steps"]
    assert panel.figure is not None
    lines = [t for t in panel.figure.data if t.mode == "lines"]
    assert [t.name for t in lines if t.fill == "toself"] == ["SyncPPO (n=5), band"]
    assert sum(t.legendgroup == "A3C (n=4)" for t in lines) == 4


def test_band_holds_finished_runs_and_ends_with_others(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 10 + seed)
        write_trial(results, "async_gradients", seed, 10 + seed, finished=seed > 0)
    drawn = curves(by_key(compare.panels(select(results)))["return-steps"])
    assert max(drawn["SyncPPO (n=5)"].x) == 14_000
    assert max(drawn["A3C (n=5)"].x) == 9_000  # of the run that continues


def test_target_counts_runs_that_reach_it(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 60, level=200.0)
    write_trial(results, "sync_samples", 1, 60, level=480.0)
    panels = by_key(compare.panels(select(results, target=300.0)))
    ((group, reached, steps, seconds),) = panels["target-table"].rows
    assert (group, reached) == ("SyncPPO", "1 of 2")
    assert 20_000 < float(steps.replace(",", "")) < 40_000
    assert float(seconds) == pytest.approx(float(steps.replace(",", "")) / 2000)


def test_several_tasks_are_normalised(results: Path) -> None:
    for optimizer in ("sync_samples", "async_gradients"):
        for env, level in (("CartPole-v1", 500.0), ("Pendulum-v1", 20_000.0)):
            write_trial(results, optimizer, 0, 20, level=level, params={"env": env})
    panels = by_key(compare.panels(select(results)))
    drawn = curves(panels["return-steps"])
    assert max(np.nanmax(trace.y) for trace in drawn.values() if trace.mode == "lines") == 1.0
    assert "Normalised" in panels["return-steps"].help


def test_groups_differ_by_config_and_not_by_seed(results: Path) -> None:
    for seed in range(2):
        for lr in (0.1, 0.2):
            params = {"lr": lr, "model": {"fcnet_hiddens": [32] if lr == 0.1 else [64]}}
            write_trial(results, "sync_samples", seed, 3, params=params)
    selection = select(results)
    assert sorted(selection.groups) == ["SyncPPO, lr 0.1", "SyncPPO, lr 0.2"]
    trials = [run.trial for run in selection.runs]
    assert set(differing_keys(trials)) == {"lr", "model.fcnet_hiddens", "seed"}
    table = by_key(compare.panels(selection))["config-differences"]
    assert ["model.fcnet_hiddens", "[32]", "[64]"] in table.rows


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


def test_faults_are_marked_where_counters_rise(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 20, deaths=(5, 5, 12))
    panels = by_key(gradients.panels(select(results)))
    for key in ("driver-shares", "gradient-lag", "workers-rate", "bytes"):
        marks = curves(panels[key])["worker restarts"]
        assert list(marks.x) == [2.5, 6.0]  # seconds
        assert marks.text[0].startswith("2 worker restarts, A3C, CartPole-v1, seed 0")


def test_restored_counter_is_no_fault(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 10, deaths=(2,), finished=False)
    write_trial(results, "async_gradients", 0, 5, first=11)  # the counter restarts
    selection = select(results)
    marks = curves(by_key(gradients.panels(selection))["bytes"])["worker restarts"]
    assert list(marks.x) == [1.0]
    assert fault_tab.total_faults(selection.runs[0]) == 1


def test_lag_map_has_the_limit_and_sums_to_one(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 9, params={"max_policy_lag": 5})
    panel = by_key(gradients.panels(select(results)))["gradient-lag"]
    assert panel.figure is not None
    np.testing.assert_allclose(np.sum(panel.figure.data[0].z, axis=0), 1.0, atol=1e-3)
    (line,) = panel.figure.layout.shapes
    assert line.y0 == 5


def test_shares_of_a_result_sum_to_one(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 9)
    areas = curves(by_key(gradients.panels(select(results)))["driver-shares"])
    phases = ("wait", "apply", "dispatch", "report", "other")
    shares = np.sum([areas[name].y for name in phases], axis=0)
    np.testing.assert_allclose(shares, 1.0)


def test_efficiency_is_relative_to_one_rank(results: Path) -> None:
    write_trial(results, "decentralized_allreduce", 0, 9, num_workers=1)
    selection = select(results)
    assert by_key(allreduce.panels(selection))["efficiency"].figure is not None
    write_trial(results, "decentralized_allreduce", 1, 9, num_workers=4)
    points = by_key(allreduce.panels(select(results)))["efficiency"].figure
    assert points is not None
    # The generator's runs have equal rates, whatever their number of ranks.
    found = {trace.x[0]: trace.y[0] for trace in points.data}
    assert found == {1: pytest.approx(1.0), 4: pytest.approx(0.25)}


def test_experiments_table_has_a_row_for_each_trial(results: Path) -> None:
    write_trial(results / "one", "sync_samples", 3, 9, deaths=(4,))
    (results / "two" / "A3C_12345_00000").mkdir(parents=True)
    (results / "two" / "A3C_12345_00000" / "params.json").write_text("{")
    panels = by_key(experiments.panels(select(results)))
    rows = {row[-1]: row for row in panels["trials"].rows}
    assert rows["A3C_12345_00000"][0] == "no results"
    (finished,) = [row for row in rows.values() if row[0] == "finished"]
    assert finished[3] == "3"
    assert finished[9] == 1
    assert panels["unreadable"].rows[0][1] == "A3C_12345_00000"


def test_figures_hold_no_html_of_results(results: Path) -> None:
    for seed in range(2):
        params = {"env": HOSTILE, "lr": HOSTILE if seed else 0.1, "max_policy_lag": 3}
        write_trial(results, "async_gradients", seed, 5, deaths=(2,), params=params)
        write_trial(results, "decentralized_allreduce", seed, 5, params=params, num_workers=1)
    selection = select(results)
    texts = [
        json.dumps(panel.figure.to_dict(), default=str)
        for tab in tabs_of(list(selection.runs))
        for panel in tab.panels(selection)
        if panel.figure is not None
    ]
    assert any("&lt;img" in text for text in texts)
    assert not any("<img" in text or "<script" in text for text in texts)


def test_report_holds_everything_and_escapes(results: Path, tmp_path: Path) -> None:
    for seed in range(2):
        write_trial(results, "async_gradients", seed, 5, params={"env": HOSTILE, "lr": seed})
    folder = write_trial(results, "sync_samples", 0, 5, params={HOSTILE: HOSTILE})
    lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    lines[-1]["fault_tolerance"] |= {"last_death": HOSTILE, "num_remote_worker_restarts": 1}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "report.html"
    assert report.write_report(results, output) == []
    text = output.read_text()
    assert "<img" not in text.replace(_plotly(), "")
    assert "</script><script>alert" not in text
    assert "&lt;img src=x" in text
    assert text.count("<html") == 1
    for attribute in ('src="', 'href="http', "@import"):
        assert attribute not in text.replace(_plotly(), "")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_report_writes_csv_of_each_plot(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_examples(results, seeds=1, iterations=4)

    def without_browser(*_: Any, **__: Any) -> None:
        raise RuntimeError("Kaleido requires Google Chrome")

    monkeypatch.setattr("plotly.io.write_images", without_browser)
    figures = tmp_path / "figures"
    (note,) = report.write_report(results, tmp_path / "report.html", figures)
    assert "Kaleido requires Google Chrome" in note
    with (figures / "compare-return-steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["curve"] for row in rows} >= {"A3C (n=1)", "SyncPPO (n=1)"}
    trial = next(run.trial for run in select(results).runs if run.group == "A3C")
    returns = trial.values(RETURN)
    assert returns is not None
    found = [float(row["y"]) for row in rows if row["curve"] == "A3C (n=1)"]
    np.testing.assert_allclose(found, returns[1:])
    with (figures / "async-gradients-gradient-lag.csv").open() as file:
        assert {*csv.DictReader(file).fieldnames} == {"curve", "x", "y", "z"}  # type: ignore[misc]


def test_report_refuses_what_it_cannot_use(results: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        report.write_report(results, tmp_path / "report.html")
    results.mkdir()
    with pytest.raises(ConfigError, match="no trials"):
        report.write_report(results, tmp_path / "report.html")
    write_trial(results, "sync_samples", 0, 2)
    with pytest.raises(ConfigError, match=r"cannot write .*missing"):
        report.write_report(results, tmp_path / "missing" / "report.html")


def test_runs_without_a_preset_are_named_by_optimizer(results: Path) -> None:
    for optimizer in ("async_gradients", "sync_samples"):
        params = {"optimizer": optimizer}
        write_trial(results, optimizer, 0, 3, preset="PolicyOptimizerTrainer", params=params)
    assert set(select(results).groups) == {"async_gradients", "sync_samples"}
