"""`polopt.evaluate` and `polopt export` with several agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from agent_envs import Matrix, Race
from typer.testing import CliRunner

import polopt
from polopt.command_line.cli import app
from polopt.common.config import ConfigError
from polopt.trainers.checkpoints import CheckpointError

TWO = {"policies": ["rows", "columns"], "policy_mapping_fn": {"row": "rows", "*": "columns"}}


@pytest.mark.parametrize("two", [False, True])
def test_all_agents_play(two: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"env": Matrix, "num_workers": 0, **(TWO if two else {})}
    trainer = polopt.A2C(options)
    trainer.save(str(tmp_path))
    trainer.stop()
    played = polopt.evaluate(str(tmp_path), Matrix, 3)
    assert len(played.episodes) == 3
    for episode in played.episodes:
        assert episode.episode_len == 10
        assert sum(episode.agent_returns.values()) == episode.episode_return
    with pytest.raises(
        (CheckpointError, ConfigError), match=r"agents.*have the spaces|policy 'rows' acts for no"
    ):
        polopt.evaluate(str(tmp_path), Race, 1)


def test_export_names_the_policies(tmp_path: Path) -> None:
    trainer = polopt.A2C({"env": Matrix, "num_workers": 0, **TWO})
    trainer.save(str(tmp_path / "saved"))
    trainer.stop()
    arguments = ["export", str(tmp_path / "saved"), str(tmp_path / "one.onnx")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert "policy='rows'" in done.output


def test_module_that_only_a_checkpoint_names_is_not_imported(tmp_path: Path) -> None:
    """A mapping, the class of a policy, and a network of a policy."""
    options: dict[str, Any] = {"env": Matrix, "num_workers": 0, "policies": ["a", "b"]}
    options["policy_mapping_fn"] = "agent_envs:by_name"
    trainer = polopt.A2C(options)
    trainer.train()
    trainer.save(str(tmp_path))
    trainer.stop()
    with pytest.raises(ConfigError, match="does not import a module that only a saved config"):
        polopt.evaluate(str(tmp_path), Matrix, 1)
    with pytest.raises(ConfigError, match="policy_mapping_fn is 'agent_envs:by_name'"):
        polopt.A2C.from_checkpoint(str(tmp_path), env=Matrix)
    again = polopt.A2C.from_checkpoint(
        str(tmp_path), env=Matrix, policy_mapping_fn="agent_envs:by_name"
    )
    again.stop()
    polopt.load(str(tmp_path), policy="a")
    state = tmp_path / "state.json"
    whole = state.read_text()
    for key, value in (("policy", "evil:Policy"), ("model", {"custom": "evil:Network"})):
        edited = json.loads(whole)
        edited["config"]["policies"]["a"][key] = value
        state.write_text(json.dumps(edited))
        with pytest.raises(CheckpointError, match=r"evil|SHA|changed|checksum"):
            polopt.load(str(tmp_path), policy="a")
