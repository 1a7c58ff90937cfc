"""Commands that load a policy of a checkpoint, with classes that the user names."""

from __future__ import annotations

from pathlib import Path

from checkpoint_helpers import SMALL, trainer
from trained_policies import Own
from typer.testing import CliRunner

from polopt.command_line.cli import app
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.trainer import PolicyOptimizerTrainer


class Mine(A2CPolicy):
    """A policy that is not registered."""


def test_class_of_a_policy_is_given_by_its_name(tmp_path: Path) -> None:
    made = PolicyOptimizerTrainer({**SMALL, "policy": Mine})
    made.save(str(tmp_path))
    made.stop()
    del POLICIES._known["Mine"]  # in another process, the class is not registered either
    evaluate = ["evaluate", str(tmp_path), "--episodes", "1"]
    refused = CliRunner().invoke(app, evaluate)
    assert refused.exit_code == 2
    assert "--policy module:Class" in refused.stderr
    played = CliRunner().invoke(app, [*evaluate, "--policy", f"{__file__}:Mine"])
    assert played.exit_code == 0, played.output
    wrong = CliRunner().invoke(app, [*evaluate, "--policy", "math:pi"])
    assert "a subclass of polopt.policies.policy.Policy" in wrong.stderr


def test_network_is_given_by_its_name(tmp_path: Path) -> None:
    made = trainer(model={"custom": Own})
    made.train()
    made.save(str(tmp_path))
    made.stop()
    for command in (["evaluate", str(tmp_path), "--episodes", "1"], ["export", str(tmp_path), "x"]):
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 2
        assert "--network module:Class" in refused.stderr
        lacking = CliRunner().invoke(app, [*command, "--network", "math:Missing"])
        assert "--network math:Missing: math does not define 'Missing'" in lacking.stderr
        wrong = CliRunner().invoke(app, [*command, "--network", "math:pi"])
        assert "a subclass of torch.nn.modules.module.Module" in wrong.stderr
    given = ["--network", "trained_policies:Own"]
    played = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--episodes", "1", *given])
    assert played.exit_code == 0, played.output
