"""The suite's arithmetic, and what it makes of a peer that fails. No peer is installed for it."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import environments
import pytest
import spread
import suite
from environments import PeerError
from suite_cases import CASES, Case, Opponent
from verdicts import Spread, floor_row, learn_rows, markdown, rate_row

CASE = Case("a", "what", "ours", (Opponent("peer", ("slow", "fast"), 2.0),))


def rates(*values: float) -> dict[int, dict[str, Any]]:
    return {turn: {"rate": value} for turn, value in enumerate(values)}


def goals(*seconds: float, startup: float = 4.0) -> dict[int, dict[str, Any]]:
    """Infinite: never."""
    return {
        turn: {"seconds_to_goal": took, "startup_s": startup, "reached": not math.isinf(took)}
        for turn, took in enumerate(seconds)
    }


def test_rates_are_compared_turn_by_turn() -> None:
    # The machine is three times as fast in the second turn, and nothing else happens. The ratio of
    # medians would be 100 / 10; paired turns say 4 in each.
    row = rate_row(CASE, "peer", 2.0, rates(40.0, 120.0, 40.0), rates(10.0, 30.0, 10.0))
    assert row.ratio == Spread(4.0, 4.0, 4.0)
    assert row.ours == Spread(40.0, 40.0, 120.0)
    uneven = rate_row(CASE, "peer", 2.0, rates(10.0, 90.0, 20.0), rates(10.0, 30.0, 10.0))
    assert uneven.ratio == Spread(2.0, 1.0, 3.0)
    # A turn that one of them lacks is left out.
    assert rate_row(CASE, "peer", 2.0, rates(1.0, 8.0), {1: {"rate": 2.0}}).ratio == (4, 4, 4)
    assert rate_row(CASE, "peer", 2.0, rates(1.0), {}).reached is None


@pytest.mark.parametrize(
    ("goal", "reached"), [(1.9, True), (2.0, True), (2.1, False), (None, None)]
)
def test_goals_are_met_by_the_median(goal: float | None, reached: bool | None) -> None:
    row = rate_row(CASE, "peer", goal, rates(10.0, 20.0, 90.0), rates(10.0, 10.0, 10.0))
    assert row.reached is reached
    if goal is not None:
        floor = Case("a", "what", "ours", (), floor=10 * goal)
        assert floor_row(floor, rates(10.0, 20.0, 90.0)).reached is reached


def test_learning_is_compared_by_medians_with_and_without_startup() -> None:
    apart, whole = learn_rows(CASE, "peer", 3.0, goals(2.0, 3.0, 9.0), goals(9.0, 1.0, 12.0))
    assert apart.ratio == (3.0, 3.0, 3.0)
    assert apart.reached is True
    assert whole.ratio is not None
    assert whole.ratio.median == pytest.approx((9.0 + 4.0) / (3.0 + 4.0))
    assert whole.goal == 1.0
    assert whole.reached is True


def test_who_never_learns_is_never_better() -> None:
    never = math.inf
    apart, _ = learn_rows(CASE, "peer", 3.0, goals(3.0, 3.0, never), goals(never, never, 5.0))
    assert apart.ratio is not None
    assert apart.ratio.median == math.inf
    assert apart.reached is True
    for theirs in (goals(9.0, 9.0, 9.0), goals(never, never, never)):
        apart, whole = learn_rows(CASE, "peer", 3.0, goals(never, never, 3.0), theirs)
        assert (apart.reached, whole.reached) == (False, False)
        assert apart.ratio == (0.0, 0.0, 0.0)  # not infinity over infinity
    assert "never" in markdown([apart])


def in_place_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Any:
    """A runner whose peers are these scripts; `sys.argv[1]` is the case."""
    for peer, script in scripts.items():
        folder = tmp_path / peer
        folder.mkdir()
        (folder / "run.py").write_text(f"import json, sys, time\ncase = sys.argv[1]\n{script}\n")
        (folder / "requirements.txt").write_text("")
    monkeypatch.setattr(suite, "PEERS", tmp_path)
    monkeypatch.setattr(environments, "PEERS", tmp_path)
    monkeypatch.setattr(suite, "make_environment", lambda *_: Path(sys.executable))
    options = {"seconds": 0.1, "learning_seconds": 0.1, "env": tmp_path, "python37": "python3.7"}
    return suite.Runner(argparse.Namespace(**options))


OURS = "print('warm'); print(json.dumps({'rate': 100.0}))"


def test_the_faster_setting_of_a_peer_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "print(json.dumps({'rate': {'slow': 10.0, 'fast': 40.0}[case]}))"
    runner = in_place_of_peers(tmp_path, monkeypatch, polopt=OURS, peer=script)
    (row,) = suite.measure(CASE, 2, runner)
    assert row.peer == "peer fast"
    assert row.ratio == (2.5, 2.5, 2.5)
    assert row.reached is True


def test_a_peer_that_fails_is_a_row_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = "print('no result'); raise OSError('no such game')"
    fine = "print(json.dumps({'rate': 50.0}))"
    runner = in_place_of_peers(tmp_path, monkeypatch, polopt=OURS, broken=broken, fine=fine)
    opponents = (Opponent("broken", ("x",), 2.0), Opponent("fine", ("x",), 2.0))
    failed, went_on = suite.measure(Case("a", "what", "ours", opponents), 2, runner)
    assert failed.reached is None
    assert failed.note == "broken: exit status 1: OSError: no such game"
    assert "not measured: broken: exit status 1: OSError: no such game" in markdown([failed])
    assert went_on.reached is True
    assert went_on.ratio == (2.0, 2.0, 2.0)


def test_what_does_not_end_is_ended_with_all_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    script = f"sleep 60 & echo $! > {told}; sleep 60"
    with pytest.raises(PeerError, match="did not end within 1 s"):
        suite.run(["sh", "-c", script], 0.6)
    child = Path(f"/proc/{told.read_text().strip()}")
    give_up_s = time.monotonic() + 5.0
    while child.exists() and "State:\tZ" not in (child / "status").read_text():
        assert time.monotonic() < give_up_s, "what it started is still there"
        time.sleep(0.01)
    with pytest.raises(PeerError, match="its last line is no result: hello"):
        suite.run([sys.executable, "-c", "print('hello')"], 30.0)


def test_a_peer_that_can_not_be_installed_says_why(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"no Python that runs as 'python0\.1'"):
        environments.make_environment("rllib085", tmp_path, "python0.1")


def test_the_table_names_what_is_there() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        for opponent in case.opponents:
            script = (environments.PEERS / opponent.peer / "run.py").read_text()
            assert all(f'"{name}"' in script for name in opponent.cases), opponent
        assert f'"{case.ours}"' in (environments.PEERS / "polopt" / "run.py").read_text()


def test_the_table_goes_between_the_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{suite.BEGIN}\nold\n{suite.END}\nafter\n")
    suite.write_into(page, "new")
    assert page.read_text() == f"before\n{suite.BEGIN}\n\nnew\n{suite.END}\nafter\n"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match="for the table"):
        suite.write_into(page, "new")


def test_two_runs_side_by_side() -> None:
    def run(**figures: Any) -> dict[str, Any]:
        rows = [
            {"what": "a", "peer": "sb3 16", "ratio": [4.0, 3.5, 4.25], "ours": None, "goal": 5.0},
            {"what": "a", "peer": "sb3 20", "ratio": [2.0, 2.0, 2.0], "ours": None, "goal": None},
            {"what": "a", "peer": "rllib x", "ratio": [9.0, 9.0, 9.0], "ours": None, "goal": None},
            {"what": "b", "peer": "", "ratio": None, "ours": [4e5, 3e5, 5e5], "goal": 250_000.0},
            {"what": "c", "peer": "cleanrl", "ratio": None, "ours": None, "goal": None},
        ]
        for row in rows:
            row.update(figures.get(str(row["peer"]).replace(" ", ""), {}))
        return {"rows": rows}

    second = run(
        sb316={"peer": "sb3 8", "ratio": [4.5, 4.0, 5.0]}, rllibx={"ratio": [8.0, 7.0, 9.0]}
    )
    assert spread.table(run(), second).splitlines()[2:] == [
        "| a | sb3 16 | 4.0 (3.5 to 4.2) | 4.5 (4.0 to 5.0) | 5 |",
        "| a | sb3 20 | 2.0 | 2.0 |  |",
        "| a | rllib x | 9.0 | 8.0 (7.0 to 9.0) |  |",
        "| b |  | 400,000 (300,000 to 500,000) | 400,000 (300,000 to 500,000) | 250,000 |",
    ]
