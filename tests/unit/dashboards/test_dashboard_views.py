"""Tests of the figures of each tab, with small generated results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dashboard_helpers import by_key, curves, of_optimizer, rows_of, select, write_sweep
from dashboard_results import PHASES, write_examples, write_trial

from polopt import dashboards, metrics
from polopt.common.add_ons import AddOn
from polopt.dashboards import report
from polopt.dashboards.data.tab import OptimizerTab, Plot, Tab
from polopt.dashboards.tab_file import tab_of
from polopt.dashboards.views import (
    compare_tab,
    experiments_tab,
    faults_tab,
    learner_tab,
    tabs,
)
from polopt.dashboards.views.drawing import HEIGHT
from polopt.dashboards.views.tabs import tabs_of
from polopt.metrics.number import Number
from polopt.optimizers.optimizer_registry import OPTIMIZERS


def test_evaluation_is_drawn_where_its_weights_were_taken(results: Path) -> None:
    """The evaluation has the color of its group, and another dash."""
    evaluated = {3: (100.0, 1500), 6: (300.0, 2500)}
    write_trial(results / "e", "sync_samples", 0, 8, evaluated=evaluated)
    write_trial(results / "e", "async_gradients", 0, 8)
    panels = by_key(compare_tab.panels(select(results)))
    for key, x in (("return-steps", [1500, 2500]), ("return-seconds", [1.5, 3.0])):
        found = curves(panels[key])
        drawn = [trace for name, trace in found.items() if name.endswith("evaluation")]
        (trace,) = drawn
        np.testing.assert_array_equal(trace.x, x)
        np.testing.assert_array_equal(trace.y, [100.0, 300.0])
        training = found[next(n for n in found if trace.name.startswith(n.partition(" (n=")[0]))]
        assert trace.line.color == training.line.color
        assert trace.line.dash != training.line.dash
        assert (trace.mode, training.mode) == ("lines+markers", "lines")
    assert "evaluation" in panels["return-steps"].help


def test_every_panel_has_data_with_all_keys(results: Path) -> None:
    write_examples(results, seeds=5, iterations=12)
    write_trial(
        results, "decentralized_allreduce", 0, 12, num_workers=1, env_faults=(3,), deaths=(2,)
    )
    selection = select(results)
    empty = {
        (tab.key, panel.key): panel.missing
        for tab in tabs_of(selection.runs)
        for panel in tab.panels(selection)
        if panel.missing
    }
    # The generated results have no such faults.
    assert set(empty) == {
        ("faults", "non-finite-data"),
        ("faults", "skipped-updates"),
        ("faults", "broken-rounds"),
    }


def test_use_of_gpus_is_drawn_for_runs_that_use_one(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 6)
    panels = of_optimizer(select(results))
    assert {"cpus", "memory"} <= set(panels)
    assert "gpu" not in panels
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    for number, row in enumerate(rows):
        row["optimizer"]["machine"] |= {
            "driver_gpu_memory_bytes": 1e9,
            "driver_gpu_share": 0.1 * number,
        }
    (folder / "result.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = curves(of_optimizer(select(results))["gpu"])
    assert set(drawn) == {"driver", "worker, mean", "worker, maximum"}
    np.testing.assert_allclose(drawn["driver"].y, 0.1 * np.arange(6))


@pytest.mark.parametrize("optimizer", PHASES)
def test_missing_keys_are_named(results: Path, optimizer: str) -> None:
    write_trial(results, optimizer, 0, 5, new_keys=False)
    selection = select(results)
    for tab in tabs_of(selection.runs):
        missing = [panel.missing for panel in tab.panels(selection) if panel.figure is None]
        if tab.optimizer:
            assert "Not in these results: optimizer/driver/share" in missing


def test_results_without_rows_are_drawn_empty(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 1)
    (folder / "result.json").write_text("")
    selection = select(results)
    for tab in tabs_of(selection.runs):
        for panel in tab.panels(selection):
            assert panel.figure is not None or panel.columns or panel.findings or panel.missing


def test_returns_that_are_all_nan_are_left_out(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 1)
    write_trial(results, "async_gradients", 0, 9)
    panel = by_key(compare_tab.panels(select(results)))["return-steps"]
    assert {name for name in curves(panel) if "n=" in name} == {"A3C (n=1)"}


def test_single_runs_below_five_seeds_and_a_band_above(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 6)
    for seed in range(4):
        write_trial(results, "async_gradients", seed, 6)
    panel = by_key(compare_tab.panels(select(results)))["return-steps"]
    assert panel.figure is not None
    lines = [t for t in panel.figure.data if t.mode == "lines"]
    assert [t.name for t in lines if t.fill == "toself"] == ["SyncPPO (n=5), band"]
    assert sum(t.legendgroup == "A3C (n=4)" for t in lines) == 4


def test_band_holds_finished_runs_and_ends_with_others(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 10 + seed)
        write_trial(results, "async_gradients", seed, 10 + seed, finished=seed > 0)
    drawn = curves(by_key(compare_tab.panels(select(results)))["return-steps"])
    assert max(drawn["SyncPPO (n=5)"].x) == 14_000
    assert max(drawn["A3C (n=5)"].x) == 9_000  # the end of the run that has not finished


def test_runs_that_do_not_reach_the_return_are_counted(results: Path) -> None:
    for seed, level in enumerate((200.0, 480.0, 480.0, 480.0, 200.0)):
        write_trial(results, "sync_samples", seed, 60, level=level)
    panels = by_key(compare_tab.panels(select(results, targets={"CartPole-v1": 300.0})))
    (cells,) = panels["target-table"].rows
    group, target, count, steps, steps_interval, seconds, _ = cells
    assert (group, target, count) == ("SyncPPO", 300.0, "3 of 5")
    assert 20_000 < float(steps.replace(",", "")) < 40_000
    assert float(seconds) == pytest.approx(float(steps.replace(",", "")) / 2000, rel=1e-3)
    assert steps_interval.endswith("to not reached")
    drawn = curves(panels["target-steps"])
    (missing,) = [trace for name, trace in drawn.items() if name.endswith("not reached")]
    assert list(missing.x) == [60_000, 60_000]
    assert missing.marker.symbol.endswith("-open")
    assert list(missing.y) == ["SyncPPO (3 of 5)"] * 2


def test_median_counts_runs_that_do_not_reach_the_return(results: Path) -> None:
    for seed, level in enumerate((480.0, 200.0, 200.0)):
        write_trial(results, "sync_samples", seed, 60, level=level)
    panels = by_key(compare_tab.panels(select(results, targets={"CartPole-v1": 300.0})))
    (cells,) = panels["target-table"].rows
    assert cells[2:5] == ["1 of 3", "not reached", "too few seeds"]
    assert not any(name.endswith("median") for name in curves(panels["target-steps"]))


def test_each_task_has_its_own_return_to_reach(results: Path) -> None:
    for optimizer in ("sync_samples", "async_gradients"):
        for env, level in (("CartPole-v1", 500.0), ("Pendulum-v1", 20_000.0)):
            write_trial(results, optimizer, 0, 60, level=level, params={"env": env})
    selection = select(results, targets={"CartPole-v1": 300.0})
    rows = by_key(compare_tab.panels(selection))["target-table"].rows
    cartpole, pendulum = ([row for row in rows if env in row[0]] for env in selection.tasks)
    assert {row[0] for row in cartpole} == {"A3C, CartPole-v1", "SyncPPO, CartPole-v1"}
    assert {row[1] for row in cartpole} == {300.0}
    assert all(row[1] > 10_000 for row in pendulum)
    assert all(row[2] == "1 of 1" for row in rows)


def test_budget_is_not_that_of_a_run_that_ended_early(results: Path) -> None:
    for seed in range(3):
        write_trial(results, "sync_samples", seed, 40, finished=False)
        write_trial(results, "async_gradients", seed, 40, finished=False)
    folder = write_trial(results, "async_gradients", 3, 5, finished=False)
    (folder / "error.txt").write_text("ValueError: boom")
    panels = by_key(compare_tab.panels(select(results)))
    final = panels["final-score"]
    assert "after 36,000 environment steps" in final.title
    assert "A3C, CartPole-v1, seed 3 (failed)" in final.help
    assert set(curves(final)) == {"A3C (n=3 of 4)", "SyncPPO (n=3)"}
    chosen = by_key(compare_tab.panels(select(results, budget=4000.0)))["final-score"]
    assert "after 4,000 environment steps" in chosen.title
    assert set(curves(chosen)) == {"A3C (n=4)", "SyncPPO (n=3)"}


def test_too_few_seeds_give_no_probability(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 9)
        write_trial(results, "decentralized_allreduce", seed, 9, level=100.0)
    write_trial(results, "async_gradients", 0, 9)
    panels = by_key(compare_tab.panels(select(results)))
    pairs = panels["probability-of-improvement"].figure
    assert pairs is not None
    (cells,) = pairs.data
    texts = {(y, x): cells.text[i][j] for i, y in enumerate(cells.y) for j, x in enumerate(cells.x)}
    assert texts["SyncPPO", "DDPPO"] == "1.00"
    assert texts["A3C", "DDPPO"] == texts["SyncPPO", "A3C"] == "too<br>few<br>seeds"
    final = curves(panels["final-score"])
    assert final["A3C (n=1)"].marker.symbol.endswith("-open")
    assert not final["SyncPPO (n=5)"].marker.symbol.endswith("-open")


def test_runs_that_ended_early_do_not_cut_a_band(results: Path) -> None:
    for seed in range(5):
        write_trial(results, "sync_samples", seed, 20)
    folder = write_trial(results, "sync_samples", 5, 4, finished=False)
    (folder / "error.txt").write_text("ValueError: boom")
    panel = by_key(compare_tab.panels(select(results)))["return-steps"]
    drawn = curves(panel)
    assert max(drawn["SyncPPO (n=6)"].x) == 20_000
    assert max(drawn["SyncPPO, CartPole-v1, seed 5, failed"].x) == 4000
    assert "ended early (1)" in panel.help


def test_startup_is_left_out_of_seconds_unless_asked_for(results: Path) -> None:
    # The run makes 9,000 steps in 5 s of training, after a start-up of 45 s.
    write_trial(results, "async_gradients", 0, 10, startup_s=45.0)
    for startup, seconds, rate, share in ((False, 5.0, 1800.0, 0.0), (True, 50.0, 180.0, 0.9)):
        selection = select(results, startup=startup)
        (row,) = by_key(experiments_tab.panels(selection))["trials"].rows
        assert (row[7], row[9]) == (round(seconds), round(rate))
        panels = by_key(compare_tab.panels(selection))
        assert max(curves(panels["return-seconds"])["A3C (n=1)"].x) == seconds
        assert ("with start-up" in panels["return-seconds"].title) == startup
        assert curves(panels["throughput"])["A3C"].x[0] == rate
        bars = curves(of_optimizer(selection)["driver-bars"])
        assert sum(float(bar.x[0]) for bar in bars.values()) == pytest.approx(1.0)
        found = float(bars["startup"].x[0]) if "startup" in bars else 0.0
        assert found == pytest.approx(share)


def test_shares_of_groups_are_weighted_by_time(results: Path) -> None:
    folder = write_trial(results, "async_gradients", 0, 2)
    rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    for line, seconds, wait in zip(rows, (1.0, 9.0), (1.0, 0.0), strict=True):
        share = {"wait": wait, "apply": 1.0 - wait, "startup": 0.0}
        line["optimizer"] |= {"interval_s": seconds, "driver": {"share": share}}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in rows))
    bars = curves(of_optimizer(select(results))["driver-bars"])
    assert {name: float(bar.x[0]) for name, bar in bars.items()} == {"wait": 0.1, "apply": 0.9}


def test_messages_keep_the_exception(results: Path) -> None:
    folder = write_trial(results, "async_gradients", 0, 3, env_faults=(2,))
    lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    message = "Traceback:\n" + "  File x\n" * 200 + "ValueError: the last line"
    for line in lines[1:]:
        line["fault_tolerance"]["last_env_fault"] = message
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    selection = select(results)
    rows = by_key(faults_tab.panels(selection))["messages"].rows
    assert rows[0][2] == "ValueError: the last line"
    assert rows[0][3].endswith("File x\nValueError: the last line")
    marks = curves(by_key(experiments_tab.panels(selection))["returns"])["environment faults"]
    assert marks.text[0].endswith("ValueError: the last line")


def test_run_without_workers_has_no_healthy_workers(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 6, num_workers=0)
    panel = by_key(faults_tab.panels(select(results)))["healthy-workers"]
    assert panel.missing == "These runs sample in the driver (num_workers=0)"


def test_several_tasks_are_normalised(results: Path) -> None:
    for optimizer in ("sync_samples", "async_gradients"):
        for env, level in (("CartPole-v1", 500.0), ("Pendulum-v1", 20_000.0)):
            write_trial(results, optimizer, 0, 20, level=level, params={"env": env})
    panels = by_key(compare_tab.panels(select(results)))
    drawn = curves(panels["return-steps"])
    assert max(np.nanmax(trace.y) for trace in drawn.values() if trace.mode == "lines") == 1.0
    assert "normalised" in panels["return-steps"].help


def test_rate_of_the_start_up_is_not_in_the_throughput(results: Path) -> None:
    """The first interval contains the start-up, so its rate is not drawn."""
    write_trial(results, "async_gradients", 0, 10, startup_s=45.0)
    selection = select(results)
    rates = selection.runs[0].trial.values("optimizer/env_steps_per_s")
    (line,) = curves(by_key(compare_tab.panels(selection))["throughput-time"]).values()
    assert rates is not None
    np.testing.assert_allclose(line.y, rates[1:])


def test_pairs_of_groups_with_too_few_seeds_are_a_sentence(results: Path) -> None:
    """With many groups, the texts would not fit into the cells."""
    write_sweep(results, 12)
    panel = by_key(compare_tab.panels(select(results)))["probability-of-improvement"]
    assert panel.figure is None
    assert panel.missing == "Too few seeds: two groups need at least 5 seeds each"


def test_faults_are_marked_where_counters_rise(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 20, deaths=(5, 5, 12))
    panels = of_optimizer(select(results))
    for key in ("driver-shares", "gradient-lag", "workers-speed", "bytes"):
        marks = curves(panels[key])["worker restarts"]
        assert list(marks.x) == [2.5, 6.0]  # seconds
        assert marks.text[0].startswith("2 worker restarts, A3C, CartPole-v1, seed 0")


def test_restored_counter_is_no_fault(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 10, deaths=(2,), finished=False)
    write_trial(results, "async_gradients", 0, 5, first=11)  # the counter restarts
    selection = select(results)
    marks = curves(of_optimizer(selection)["bytes"])["worker restarts"]
    assert list(marks.x) == [1.0]
    assert faults_tab.total_faults(selection.runs[0]) == 1


def test_faults_before_and_after_a_restore_count(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 10, deaths=(2, 3, 4), finished=False)
    write_trial(results, "async_gradients", 0, 5, first=11, deaths=(1, 12))
    (run,) = select(results).runs
    assert list(run.trial.values("fault_tolerance/num_remote_worker_restarts")) == [
        *(0, 1, 2, 3, 3, 3, 3, 3, 3, 3),
        *(1, 2, 2, 2, 2),
    ]
    assert faults_tab.total_faults(run) == 5


@pytest.mark.parametrize("number", [31, 32])
def test_caption_of_actions_is_true_for_the_largest_number_of_rows(
    results: Path, number: int
) -> None:
    write_trial(results, "sync_samples", 0, 4, action_sizes=(number,))
    told = of_optimizer(select(results))["actions"].help
    assert ("With more than 32 actions, row 31 also counts" in told) == (number == 32)


def test_lag_map_has_the_limit_and_sums_to_one(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 9, params={"max_policy_lag": 5})
    panel = of_optimizer(select(results))["gradient-lag"]
    assert panel.figure is not None
    np.testing.assert_allclose(np.sum(panel.figure.data[0].z, axis=0), 1.0, atol=1e-3)
    (line,) = panel.figure.layout.shapes
    assert line.y0 == 5


def test_lag_map_has_the_limit_of_the_optimizer(results: Path) -> None:
    """The option is in the key `optimizer` of the config, or comes from a preset or a default."""
    folder = write_trial(results, "async_gradients", 0, 9)
    cls = OPTIMIZERS.get("async_gradients")
    tab = tab_of(cls, config=cls.config_class.parse({"max_policy_lag": 5}))
    (folder / "optimizer.json").write_text(tab.to_json())
    panel = of_optimizer(select(results))["gradient-lag"]
    assert panel.figure is not None
    (line,) = panel.figure.layout.shapes
    assert line.y0 == 5


def test_shares_of_a_result_sum_to_one(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 9)
    areas = curves(of_optimizer(select(results))["driver-shares"])
    phases = ("wait", "apply", "dispatch", "report", "other")
    shares = np.sum([areas[name].y for name in phases], axis=0)
    np.testing.assert_allclose(shares, 1.0)


def test_worker_phases_of_the_optimizer_are_drawn(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 9)
    lines = rows_of(folder)
    for line in lines:
        workers = line["optimizer"]["workers"]
        shares = {name: 0.75 * share for name, share in workers["share"].items()}
        workers["share"] = {**shares, "prioritize": 0.25}
        workers["p50_ms"]["prioritize"] = workers["p99_ms"]["prioritize"] = 3.0
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    panels = of_optimizer(select(results))
    areas = curves(panels["worker-shares"])
    assert list(areas)[-2:] == ["prioritize", "idle"]
    np.testing.assert_allclose(np.sum([area.y for area in areas.values()], axis=0), 1.0)
    bars = curves(panels["worker-bars"])
    np.testing.assert_allclose(bars["prioritize"].x, [0.25])
    np.testing.assert_allclose(np.sum([bar.x for bar in bars.values()], axis=0), 1.0)
    np.testing.assert_allclose(curves(panels["worker-times"])["prioritize"].y, 3.0)


def test_efficiency_is_relative_to_one_worker(results: Path) -> None:
    write_trial(results, "decentralized_allreduce", 0, 9, num_workers=1)
    assert "efficiency" in of_optimizer(select(results))
    write_trial(results, "decentralized_allreduce", 1, 9, num_workers=4)
    points = of_optimizer(select(results))["efficiency"].figure
    assert points is not None
    # All generated runs have the same rate, for every number of workers.
    found = {trace.x[0]: trace.y[0] for trace in points.data}
    assert found == {1: pytest.approx(1.0), 4: pytest.approx(0.25)}


PLUGIN = OptimizerTab(
    name="plugin",
    title="A <b>Plugin</b>",
    phases=("think", "wait", "act"),
    numbers=(
        Number("optimizer/depth", "plies", "how far the search looks", title="Depth of search"),
        Number("optimizer/num_shown", "units", "what was shown"),
        Number("optimizer/note", "", "a text", "text"),
    ),
    tab=Tab(
        driver="Think: <script>",
        plots=(
            Plot("shown", "Shown", "A help.", "units", {"one": "optimizer/num_shown"}),
            Plot("rate", "Rate", "", "1/s", {"n": "optimizer/num_updates"}, "runs", per="s"),
            Plot("not-there", "Not there", "", "", {"n": "optimizer/missing"}, "heatmap"),
        ),
    ),
)


def write_plugin(results: Path, content: str) -> None:
    """Writes a trial of an optimizer that this process does not know."""
    folder = write_trial(results, "sync_samples", 0, 6, tab=False)
    lines = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
    for number, line in enumerate(lines):
        block = line["optimizer"]
        share = {"think": 0.5, "wait": 0.3, "act": 0.1, "report": 0.1, "startup": 0.0, "other": 0.0}
        block |= {"name": "plugin", "depth": number, "num_shown": 2 * number}
        block["driver"] = {"share": share, "p50_ms": {"think": 2.0}, "p99_ms": {"think": 3.0}}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "optimizer.json").write_text(content)


def test_newest_episodes_are_bars_of_their_bins(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 4)
    block = rows_of(folder)[-1]["env_runners"]
    selection = select(results)
    for which in ("return", "len"):
        figure = of_optimizer(selection)[f"{which}-histogram"].figure
        assert figure is not None
        (bars,) = figure.data
        low, high = block[f"episode_{which}_min"], block[f"episode_{which}_max"]
        assert list(bars.y) == block[f"episode_{which}_histogram"]
        np.testing.assert_allclose(bars.x[0] - bars.width / 2, low)
        np.testing.assert_allclose(bars.x[-1] + bars.width / 2, high)
        assert bars.marker.color == selection.runs[0].color
        (line,) = figure.layout.shapes
        assert line.x0 == block[f"episode_{which}_p50"]


def test_equal_returns_are_one_bar_of_some_width(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 3)
    lines = rows_of(folder)
    same = {f"episode_return_{part}": 9.0 for part in ("min", "max", "p50")}
    lines[-1]["env_runners"] |= {**same, "episode_return_histogram": [7] + [0] * 19}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (bars,) = curves(of_optimizer(select(results))["return-histogram"]).values()
    assert (list(bars.x), list(bars.y), bars.width) == ([9.0], [7], 1.0)


def test_bands_of_episodes_hold_half_and_ninety_percent(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 5)
    blocks = [row["env_runners"] for row in rows_of(folder)][1:]  # no episode ends in the first row
    panel = of_optimizer(select(results))["return-quantiles"]
    assert panel.figure is not None
    wide, narrow, *lines = panel.figure.data
    for band, low, high in ((wide, "p5", "p95"), (narrow, "p25", "p75")):
        edges = [block[f"episode_return_{high}"] for block in blocks]
        edges += [block[f"episode_return_{low}"] for block in reversed(blocks)]
        np.testing.assert_allclose(band.y, edges)
    parts = {"median": "p50", "minimum": "min", "maximum": "max"}
    assert {line.name for line in lines} == set(parts)
    for line in lines:
        expected = [block[f"episode_return_{parts[line.name]}"] for block in blocks]
        np.testing.assert_allclose(line.y, expected)
        assert list(line.x) == [1.0, 1.5, 2.0, 2.5]


def test_episodes_are_missing_before_the_first_one(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 1)
    panels = of_optimizer(select(results))
    for key in ("return-histogram", "return-quantiles", "len-histogram", "len-quantiles"):
        assert panels[key].missing == "No episode has ended in this run"


def test_shares_of_each_part_of_an_action_sum_to_one(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 4, action_sizes=(2, 12))
    figure = of_optimizer(select(results))["actions"].figure
    assert figure is not None
    (cells,) = figure.data
    assert list(cells.y) == ["0: 0", "0: 1", *(f"1: {index}" for index in range(12))]
    shares = np.array(cells.z)
    np.testing.assert_allclose(shares[:2].sum(axis=0), 1.0, atol=1e-4)
    np.testing.assert_allclose(shares[2:].sum(axis=0), 1.0, atol=1e-4)
    # In the generated results, the share of the last category of each part rises.
    np.testing.assert_allclose(
        shares[1], [(100 + 10 * i) / (200 + 10 * i) for i in range(1, 5)], atol=1e-4
    )


def test_interval_without_actions_has_no_shares(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 3)
    lines = rows_of(folder)
    lines[1]["optimizer"]["actions"]["histogram"]["0"] = [0, 0]
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = of_optimizer(select(results))["actions"].figure
    assert figure is not None
    assert list(figure.data[0].y) == ["0", "1"]
    np.testing.assert_array_equal(np.sum(figure.data[0].z, axis=0), [1.0, 0.0, 1.0])


def test_real_actions_have_a_line_for_each_dimension(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 4, action_dimensions=11)
    panels = of_optimizer(select(results))
    assert "actions" not in panels
    for statistic in ("mean", "std"):
        drawn = curves(panels[f"action-{statistic}"])
        assert list(drawn) == [f"dimension {index}" for index in range(9)]
        assert panels[f"action-{statistic}"].help.endswith("The first 9 of 11.")
        expected = [row["optimizer"]["actions"][statistic][3] for row in rows_of(folder)]
        np.testing.assert_allclose(drawn["dimension 3"].y, expected)


def test_statistics_of_a_policy_plugin_are_drawn(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 4)
    lines = rows_of(folder)
    for number, line in enumerate(lines):
        block = line["learners"]["default_policy"]
        block |= {"quantile_spread": float(number), "never": math.nan, "entropy": math.nan}
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    panels = by_key(learner_tab.panels(select(results)))
    panel = panels["learner-quantile_spread"]
    assert panel.title == "Quantile spread"
    assert [list(curve.y) for curve in curves(panel).values()] == [[0.0, 1.0, 2.0, 3.0]]
    assert "learner-never" not in panels
    assert panels["entropy"].figure is None  # no flat line, and no empty plot


def test_agents_and_policies_have_lines(results: Path) -> None:
    folder = write_trial(results, "sync_samples", 0, 4)
    lines = rows_of(folder)
    agents = {f"agent_{index}": float(index) for index in range(4, 16)}
    for number, line in enumerate(lines):
        block = line["learners"].pop("default_policy")
        line["learners"] |= {"main": block, "<b>": {**block, "entropy": float(number)}}
        line["env_runners"] |= {
            "agent_episode_returns_mean": agents,
            "module_episode_returns_mean": {"main": -float(number)},
        }
    (folder / "result.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    selection = select(results)
    panels = of_optimizer(selection)
    assert list(curves(panels["agent-returns"])) == list(agents)[:9]
    assert panels["agent-returns"].help.endswith("The first 9 of 12.")
    assert list(curves(panels["policy-returns"])["main"].y) == [0.0, -1.0, -2.0, -3.0]
    learner = by_key(learner_tab.panels(selection))
    drawn = curves(learner["policies-entropy"])
    assert list(drawn) == ["&lt;b&gt;", "main"]
    assert list(drawn["&lt;b&gt;"].y) == [0.0, 1.0, 2.0, 3.0]
    assert learner["policies-entropy"].title == "Entropy"
    assert "rows-per-update" in learner
    assert "entropy" not in learner
    # One policy without a name.
    write_trial(results / "one", "sync_samples", 0, 4)
    alone = select(results / "one")
    assert not {"agent-returns", "policy-returns"} & of_optimizer(alone).keys()
    assert "entropy" in by_key(learner_tab.panels(alone))


def test_values_are_drawn_beside_their_targets(results: Path) -> None:
    for optimizer in ("sync_samples", "async_gradients"):
        for seed in range(2):
            folder = write_trial(results, optimizer, seed, 4)
    blocks = [row["learners"]["default_policy"] for row in rows_of(folder)]
    selection = select(results)
    panels = by_key(learner_tab.panels(selection))
    figure = panels["values"].figure
    assert figure is not None
    for run in selection.runs:
        pair = [t for t in figure.data if t.name.startswith(f"{run.group}, ")]
        assert {trace.line.color for trace in pair} == {run.color}
        dashes = {trace.name: trace.line.dash for trace in pair}
        assert len(set(dashes.values())) == 2
        assert sum(trace.showlegend for trace in pair) == 2
    predicted = next(t for t in figure.data if t.name == "A3C, predicted")
    target = next(t for t in figure.data if t.name == "A3C, target")
    np.testing.assert_allclose(predicted.y, [block["vf_predicted_mean"] for block in blocks])
    np.testing.assert_allclose(target.y, [block["vf_target_mean"] for block in blocks])
    bias = curves(panels["value-bias"])["A3C"].y
    np.testing.assert_allclose(bias, [math.sin(i) - 2.0 for i in range(1, 5)])
    rows = curves(panels["rows-per-update"])
    assert list(rows["SyncPPO"].y) == [128.0] * 4
    assert list(rows["A3C"].y) == [20.0] * 4


def test_plugin_has_a_tab_with_its_phases_and_numbers(results: Path) -> None:
    write_plugin(results, PLUGIN.to_json())
    selection = select(results)
    (tab,) = [tab for tab in tabs_of(selection.runs) if tab.optimizer]
    assert (tab.key, tab.title) == ("plugin", PLUGIN.title)
    panels = by_key(tab.panels(selection))
    areas = curves(panels["driver-shares"])
    assert set(areas) == {"think", "wait", "act", "report"}
    assert len({areas[name].line.color for name in ("think", "wait", "act")}) == 3
    assert list(curves(panels["shown"])["one"].y) == [0, 2, 4, 6, 8, 10]
    assert list(curves(panels["rate"])["SyncPPO"].y) == [80.0] * 5
    assert list(curves(panels["extra-depth"])["SyncPPO"].y) == [0, 1, 2, 3, 4, 5]
    depth = panels["extra-depth"]
    assert (depth.title, depth.help) == ("Depth of search", "How far the search looks.")
    assert depth.figure is not None
    assert depth.figure.layout.yaxis.title.text == "plies"
    assert panels["shown"].help == "What was shown. A help."
    assert not {"extra-num_shown", "extra-note"} & set(panels)
    assert panels["not-there"].missing == "Not in these results: optimizer/missing"
    assert {"worker-shares", "workers-speed", "requests-in-flight", "bytes"} <= set(panels)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": 2}', PLUGIN.to_json().replace('"lines"', '"x"')]
)
def test_unreadable_tab_leaves_the_common_panels(results: Path, content: str) -> None:
    write_plugin(results, content)
    selection = select(results)
    panels = of_optimizer(selection)
    assert set(curves(panels["driver-shares"])) == {"think", "wait", "act", "report"}
    unreadable = by_key(experiments_tab.panels(selection))["unreadable"]
    assert "optimizer.json" in unreadable.rows[0][2]


def test_page_and_metrics_name_no_optimizer() -> None:
    names = re.compile("|".join(PHASES) + "|AsyncGrad|SyncGrad|AsyncSamp|SyncSamp|Decentralized")
    pages, measures = (Path(package.__path__[0]) for package in (dashboards, metrics))
    files = [*pages.rglob("*.py"), *measures.glob("*.py")]
    assert len(files) > 20
    found = {file.name: names.findall(file.read_text()) for file in files}
    # These names occur in examples in docstrings, as alternatives that findings propose, and in
    # the table of built-in tabs.
    others = {"trials.py", "diagnosis.py", "plots.py"}
    assert {name for name, hits in found.items() if hits} <= others


def test_percentile_is_switched_with_its_phase(results: Path) -> None:
    write_trial(results, "async_gradients", 0, 9)
    panel = of_optimizer(select(results))["driver-times"]
    drawn = curves(panel)
    half, most = drawn["wait"], drawn["wait, p99"]
    assert (half.legendgroup, most.legendgroup) == ("wait", "wait")
    assert (half.showlegend, most.showlegend) == (True, False)
    assert (half.line.dash, most.line.dash) == ("solid", "dot")
    assert half.line.color == most.line.color
    assert panel.figure is not None
    assert panel.figure.layout.height == HEIGHT  # no room for entries that are not in the legend


def test_slowest_worker_is_named_over_its_heat_map(results: Path) -> None:
    write_trial(results, "sync_samples", 0, 9, num_workers=4, slow=1.0)
    panels = of_optimizer(select(results))
    speed, idle = panels["workers-speed"], panels["workers-idle"]
    assert re.search(r"lowest [12]\d\d, worker 1. Median of the others: 9\d\d$", speed.title)
    assert speed.figure is not None
    (cells,) = speed.figure.data
    assert list(cells.y) == ["worker 1", "worker 2", "worker 3", "worker 4"]
    assert cells.z.shape == (4, 9)
    assert np.all(cells.z[0] < cells.z[1:] / 3)
    assert re.search(r"lowest \d+%, worker \d. Median of the others: \d+%$", idle.title)


@pytest.mark.parametrize("name", ["/evil", "../../evil", "a/b", "x" * 900, "\x00", ".."])
def test_names_in_results_do_not_choose_the_folder_of_figures(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("plotly.io.write_images", lambda *_, **__: None)
    folder = write_trial(results, "sync_samples", 1, 4)
    name = f"{tmp_path}{name}" if name.startswith("/") else name
    text = (folder / "result.json").read_text().replace('"sync_samples"', json.dumps(name))
    (folder / "result.json").write_text(text)
    keys = {"updates": "optimizer/num_updates"}
    # Two keys that differ only in characters that file names cannot contain.
    plots = tuple(Plot(f"{name}{end}", "t", "h", "u", keys) for end in ("/1", "?1"))
    declared = OptimizerTab(
        name, "Title", numbers=(Number(name, name, name),), tab=Tab(plots=plots)
    )
    (folder / "optimizer.json").write_text(declared.to_json())
    figures = tmp_path / "a" / "b" / "figures"
    report.write_report(results, tmp_path / "report.html", figures)
    written = set(tmp_path.rglob("*.csv"))
    assert {path.parent for path in written} == {figures}
    num_plots = (tmp_path / "report.html").read_text().count("draw('p")
    assert len(written) >= num_plots > 20


def test_add_on_of_a_user_adds_a_tab(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(AddOn):
        def tabs(self, runs: Any) -> list[Any]:
            return [tabs.Tab("own", f"Own {len(runs)}", lambda selection: [])]

    monkeypatch.setattr("polopt.common.add_ons._registered", [Own()])
    assert [tab.title for tab in tabs.tabs_of([])] == [
        "Experiments", "Compare", "Own 0", "Faults", "Learner"
    ]  # fmt: skip
