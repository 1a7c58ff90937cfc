"""ONNX models of policies choose the same actions as `predict`, for batches of every size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from onnx_checks import batch_of, check_model, needs_onnx
from trained_policies import ACTIONS, OBSERVATIONS, OPTIONS, trained

from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES

SPACES = {
    **OBSERVATIONS,
    "one box": spaces.Dict(a=spaces.Box(-5.0, 5.0, (2, 3), np.float64)),
    "tuple of one box": spaces.Tuple([spaces.Box(-5.0, 5.0, (3, 2), np.float32)]),
    "clock": spaces.Dict(at=spaces.Box(1.7e9, 1.7e9 + 9, (6,), np.float64), d=spaces.Discrete(3)),
    "odd keys": spaces.Dict({"a b": spaces.Discrete(2), "a_b": spaces.Discrete(3)}),
}


def moved_policy(
    name: str, observations: str, actions: str, normalizes: bool = False, **model: Any
) -> Policy:
    cls = POLICIES.get(name)
    config = cls.config_class.parse({"model": model, "normalize_observations": normalizes})
    policy = cls(SPACES[observations], ACTIONS[actions], config)
    noise = torch.randn(policy.flat.params.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        policy.flat.params.add_(0.05 * noise)
    return policy


@needs_onnx
@pytest.mark.parametrize(
    ("name", "observations", "actions", "model"),
    [
        ("a3c", "box", "discrete", {}),
        ("a2c", "float64", "box", {"free_log_std": False}),
        ("ppo", "dict", "multi", {"vf_share_layers": True}),
        ("impala", "image", "discrete", {}),
        ("appo", "multi", "box", {"squash_actions": True}),
        ("a2c", "board", "half open", {}),
        ("ppo", "board", "half open", {"conv_filters": []}),
        ("decoupled_ppo", "discrete", "float32", {"fcnet_activation": "relu"}),
        ("ppo", "scalar", "float32", {"fcnet_hiddens": []}),
        ("ppo", "odd keys", "discrete", {}),
        ("ppo", "dict", "multi", {"use_lstm": True, "lstm_cell_size": 5}),
        ("impala", "box", "box", {"use_lstm": True, "lstm_cell_size": 5, "vf_share_layers": True}),
        ("dqn", "image", "discrete", {}),
        ("dqn", "dict", "discrete", {}),
        ("pqn", "board", "discrete", {}),
        ("sac", "dict", "box", {"fcnet_hiddens": [8]}),
        ("td3", "float64", "float32", {"fcnet_hiddens": [8]}),
    ],
)
def test_onnx_model_acts_as_predict(
    name: str, observations: str, actions: str, model: dict[str, Any], tmp_path: Path
) -> None:
    policy = moved_policy(name, observations, actions, **model)
    policy.predict(SPACES[observations].sample())  # export a policy that has acted before
    weights = policy.get_weights().flat
    policy.export_onnx(tmp_path / "policy.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["policy.onnx"]
    check_model(policy, tmp_path / "policy.onnx")
    np.testing.assert_array_equal(policy.get_weights().flat, weights)


@needs_onnx
@pytest.mark.parametrize(
    "observations", ["float64", "dict", "scalar", "one box", "tuple of one box", "clock"]
)
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_onnx_model_normalises_as_predict(name: str, observations: str, tmp_path: Path) -> None:
    policy = moved_policy(name, observations, "box", normalizes=True)
    space = policy.encoder.space
    space.seed(1)
    rows = policy.encoder.encode(batch_of(space, 50), np.float64).reshape(50, -1)
    rows = rows[:, :6] if observations == "clock" else rows * 0.3 + 0.1
    size = len(policy.get_weights().moments.mean)
    policy.add_moments(Moments.of(rows[:, -size:] if observations != "dict" else rows[:, 3:7]))
    policy.export_onnx(tmp_path / "policy.onnx")
    check_model(policy, tmp_path / "policy.onnx")


@needs_onnx
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("decoupled_ppo", "masks, normalisation and memory"),
        ("appo", "own network with memory"),
    ],
)
def test_onnx_model_acts_as_predict_with_several_options(
    name: str, option: str, tmp_path: Path
) -> None:
    observations, actions, options = OPTIONS[option]
    made = trained(observations, actions, policy=name, **options)
    policy = made.get_policy()
    made.stop()
    assert policy.get_weights().moments.rows > 0
    policy.export_onnx(tmp_path / "policy.onnx")
    check_model(policy, tmp_path / "policy.onnx")


def test_export_error_names_missing_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"onnx, onnxscript.*pip install 'polopt\[onnx\]'"):
        moved_policy("ppo", "box", "box").export_onnx(tmp_path / "p.onnx")


@needs_onnx
def test_policy_without_torch_operations_is_one_error(tmp_path: Path) -> None:
    class Opaque(POLICIES.get("ppo")):  # type: ignore[misc]
        act_in_torch = Policy.act_in_torch

    policy = Opaque(SPACES["box"], ACTIONS["box"], Opaque.config_class.parse({}))
    with pytest.raises(ConfigError, match="Opaque cannot be exported"):
        policy.export_onnx(tmp_path / "p.onnx")
    assert not list(tmp_path.iterdir())
