"""RLlib's own examples with several agents train with polopt. Only their imports change, and the
function at their end, which would start Tune."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import polopt.rllib

pytest.importorskip("ray.rllib.examples.envs.classes.multi_agent")

#: For each example, the policies that learn.
EXAMPLES = {
    "multi_agent/multi_agent_cartpole": ["p0", "p1"],
    "multi_agent/multi_agent_pendulum": ["p0", "p1"],
    "multi_agent/different_spaces_for_agents": ["main0"],
    "multi_agent/custom_heuristic_policy": ["learnable_policy"],
    "multi_agent/rock_paper_scissors_learned_vs_learned": ["p0", "p1"],
    "envs/agents_act_in_sequence": ["player1", "player2"],
    "envs/agents_act_simultaneously": ["player1", "player2"],
}
#: Imports of names that `polopt.rllib` has, too.
_MOVED = r"from ray\.rllib\.(?:algorithms|core|policy)[\w.]* import (?=\w+(?:Config|Spec)\n)"
_UTILITIES = r"from ray\.rllib\.examples\.utils import \([^)]*\)"
_RUN = "run_rllib_example_script_experiment"


#: The others are slow tests.
USUAL = {"multi_agent/multi_agent_cartpole", "envs/agents_act_in_sequence"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in USUAL else pytest.mark.slow) for name in EXAMPLES],
)
def test_example_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray.rllib.examples

    if "rock_paper" in name:
        pytest.importorskip("pettingzoo.classic.rps_v2")
    source = (Path(ray.rllib.examples.__path__[0]) / f"{name}.py").read_text()
    source = re.sub(_MOVED, "from polopt.rllib import ", source)
    source = re.sub(
        _UTILITIES, "from ray.rllib.examples.utils import add_rllib_example_script_args", source
    )
    source = re.sub(r"get_trainable_cls\(.*?\)\s*\.get_default_config\(\)", "PPOConfig()", source)
    results: list[dict[str, Any]] = []

    def run(config: Any, arguments: Any, **others: Any) -> None:
        config.env_runners(num_env_runners=0).training(train_batch_size=256)
        algo = config.build_algo()
        results.extend(algo.train() for _ in range(2))
        algo.stop()

    monkeypatch.setattr("sys.argv", [name, "--num-agents=2"])
    names = {"__name__": "__main__", "PPOConfig": polopt.rllib.PPOConfig, _RUN: run}
    exec(compile(source, name, "exec"), names)
    first, second = results
    assert second["num_env_steps_sampled"] >= 2 * 256
    assert second["num_agent_steps_sampled"] > first["num_agent_steps_sampled"] > 128
    assert [key for key in second["learners"] if not key.startswith("__")] == EXAMPLES[name]
