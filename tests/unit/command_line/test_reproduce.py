"""`polopt reproduce`: which result is run again, how, and what is said."""

from __future__ import annotations

import statistics

import pytest
from command_helpers import error_of, polopt
from scipy import stats

from polopt.command_line import reproduce as module
from polopt.command_line.examples import describe
from polopt.command_line.reproduce import Cell, cell_of, prediction_interval, published_cells, run
from polopt.trainers.presets import PRESETS

RETURNS = {"0": 10.0, "1": 12.0, "2": 14.0}


def cell(example: str = "cartpole_pqn", env_steps: int = 4000, episodes: int = 0) -> Cell:
    return Cell(example, "PQN", "CartPole-v1", env_steps, episodes, 1.0, ["abc"], RETURNS)


def test_published_results_are_of_tuned_examples() -> None:
    cells = published_cells()
    assert len(cells) > 10
    for one in cells:
        assert describe(one.example)["run"] == one.preset
        assert len(one.returns) >= 5
    assert {"A3C", "SyncPPO", "DDPPO", "IMPALA", "DQN", "SAC"} <= {one.preset for one in cells}


def test_a_preset_has_its_shortest_result_and_an_example_its_own() -> None:
    cells = published_cells()
    assert cell_of("SyncPPO", cells).example == "cartpole_ppo"
    assert cell_of("halfcheetah_ppo", cells).env_steps == 1_000_000


@pytest.mark.parametrize("count", [2, 5, 10])
def test_interval_is_that_of_one_further_seed(count: int) -> None:
    returns = [float(n * n) for n in range(count)]
    spread = statistics.stdev(returns) * (1.0 + 1.0 / count) ** 0.5
    expected = stats.t.interval(0.95, count - 1, loc=statistics.mean(returns), scale=spread)
    assert prediction_interval(returns) == pytest.approx(expected, rel=1e-3)


def test_run_trains_the_seed_up_to_the_budget() -> None:
    seen: list[int] = []
    first = run(cell(env_steps=5000), 3, seen.append)
    assert len(seen) == 2
    assert seen[0] < 5000 <= seen[1]
    assert run(cell(env_steps=5000), 4, seen.append) != first


def test_run_with_evaluation_returns_the_evaluated_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Trainer:
        preset = PRESETS["PQN"].preset

        def __init__(self, config: dict[str, object]) -> None:
            assert "evaluation_interval" not in config

        def train(self) -> dict[str, object]:
            runners = {"num_episodes_lifetime": 1, "episode_return_mean": 1.0}
            return {"env_runners": runners, "num_env_steps_sampled_lifetime": 9000}

        def evaluate(self, episodes: int, seed: int) -> object:
            asked.append((episodes, seed))
            return type("Found", (), {"episode_return_mean": 7.0})

        def stop(self) -> None:
            asked.append("stopped")

    monkeypatch.setitem(PRESETS, "PQN", Trainer)
    assert run(cell(episodes=5), 2, lambda steps: None) == 7.0
    assert asked == [(5, 1002), "stopped"]


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        (12.5, 0, "reproduced  12.5, inside the interval"),
        (90.0, 1, "not reproduced: 90.0, outside of the interval"),
        (float("nan"), 1, "not reproduced: nan, outside of the interval"),
    ],
)
def test_command_says_whether_the_interval_is_met(
    found: float, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "published_cells", lambda: [cell()])
    monkeypatch.setattr(module, "run", lambda *_: found)
    done = polopt("reproduce", "PQN", "--seed", 1)
    assert done.exit_code == code
    assert said in done.output
    assert "published   10.0, 12.0, 14.0 (commit abc)" in done.output
    assert "seed 1      published as 12.0" in done.output
    assert "2.1 to 21.9 for one further seed" in done.output


def test_command_lists_results_and_names_them_for_a_wrong_name() -> None:
    assert "halfcheetah_ddppo" in polopt("reproduce").output
    assert "did you mean 'SyncPPO'?" in error_of(polopt("reproduce", "SynPPO"))
