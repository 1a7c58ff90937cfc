"""Weights convert from RLlib's modules to polopt's policies, and back. Requires `polopt[rllib]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flat_configs import flat
from gymnasium.spaces import Box, Discrete

from polopt import ConfigError
from polopt.policies.ppo import PPOConfig, PPOPolicy
from polopt.rllib import cnn_modules, from_rllib, load_rl_module, to_rl_module
from polopt.rllib.rl_modules import policy_of

pytest.importorskip("ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module")

from ray.rllib.algorithms.ppo import PPOConfig as TheirPPOConfig
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

OBSERVATIONS = Box(-1.0, 1.0, (4,), np.float32)
ACTIONS = {"discrete": Discrete(3), "box": Box(-1.0, 1.0, (2,), np.float32)}
NETWORKS: dict[str, dict[str, Any]] = {
    "shared": {"fcnet_hiddens": [8, 16], "vf_share_layers": True},
    "two": {"fcnet_hiddens": [8], "vf_share_layers": False, "fcnet_activation": "relu"},
    "free": {"fcnet_hiddens": [8], "free_log_std": True},
    "lstm": {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 6},
    "two lstm": {"fcnet_hiddens": [8, 5], "use_lstm": True, "vf_share_layers": False},
}


def make_module(network: str, actions: str = "discrete", **options: Any) -> Any:
    config = vars(DefaultModelConfig(**{**NETWORKS[network], **options}))
    return DefaultPPOTorchRLModule(
        observation_space=OBSERVATIONS,
        action_space=ACTIONS[actions],
        model_config=config,
        catalog_class=PPOCatalog,
    )


def outputs_of(module: Any, steps: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parameters and values that RLlib's module computes for one sequence of
    observations `[T, 4]`."""
    batch: dict[str, Any] = {"obs": steps}
    if module.is_stateful():
        state = module.get_initial_state()
        batch = {"obs": steps[None], "state_in": _of_one(state)}
    with torch.no_grad():
        out = module.forward_train(batch)
        params, values = out["action_dist_inputs"], module.compute_values(batch)
    if module.is_stateful():
        params, values = params[0], values[0]
    return params.numpy(), values.numpy()


def _of_one(state: Any) -> Any:
    """Returns the state for a batch of one sequence. With two encoders, each has its own state."""
    if isinstance(state, dict):
        return {key: _of_one(value) for key, value in state.items()}
    return torch.as_tensor(state)[None]


def own_outputs(policy: Any, steps: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    with torch.no_grad():
        if policy.state_size:
            state = torch.zeros(1, policy.state_size)
            params, values, _ = policy.model.unroll(steps[:, None], state)
            return params[:, 0].numpy(), values[:, 0].numpy()
        params, values = policy.model(steps)
    return params.numpy(), values.numpy()


def assert_equal_outputs(module: Any, policy: Any) -> None:
    steps = torch.rand(7, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for theirs, ours in zip(outputs_of(module, steps), own_outputs(policy, steps), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    if not policy.state_size:  # the parameters for acting
        params = policy.action_params(steps.numpy())
        np.testing.assert_allclose(params, outputs_of(module, steps)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_policy_of_a_module_has_its_outputs(network: str, actions: str, tmp_path: Path) -> None:
    if network == "free" and actions == "discrete":
        pytest.skip("the option is of Box actions")
    module = make_module(network, actions)
    module.save_to_path(str(tmp_path))
    assert_equal_outputs(module, load_rl_module(tmp_path))


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_module_of_a_policy_has_its_outputs(network: str, actions: str) -> None:
    model = NETWORKS[network]
    if "use_lstm" in model:
        model = {**model, "free_log_std": False}
    config = PPOConfig.parse({"model": model})
    policy = PPOPolicy(OBSERVATIONS, ACTIONS[actions], config, seed=3)
    module = to_rl_module(policy)
    assert_equal_outputs(module, policy)
    again = policy_of(module)
    np.testing.assert_array_equal(again.get_weights().flat, policy.get_weights().flat)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head_fcnet_hiddens": [4]}, r"head_fcnet_hiddens=\[4\]. Allowed: \[\]"),
        ({"fcnet_activation": "linear"}, "fcnet_activation"),
    ],
)
def test_module_that_polopt_cannot_have_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        policy_of(make_module("shared", **options))


@pytest.mark.parametrize(
    "given",
    [
        {"normalize_observations": True},
        {"model": {"fcnet_hiddens": [16], "layer_norm": True}},
        {"model": NETWORKS["lstm"]},
    ],
)
def test_policy_that_rllib_cannot_have_is_refused(given: dict[str, Any]) -> None:
    """The last policy has an LSTM and `free_log_std`. In RLlib 2.60, the forward pass of such a
    module raises an error."""
    with pytest.raises(ConfigError, match="cannot be converted to a default module"):
        to_rl_module(PPOPolicy(OBSERVATIONS, ACTIONS["box"], PPOConfig.parse(given)))


# ---- convolutions -----------------------------------------------------------------------------

IMAGES = Box(-1.0, 1.0, (21, 21, 3), np.float32)
#: The paddings before and after the image are 1 and 2, 0 and 0, and 0 and 1.
FILTERS = [[4, [4, 4], 2], [6, 3, 2, "valid"], [5, 2, 1]]


def image_module(actions: str = "discrete", shape: Any = IMAGES, **options: Any) -> Any:
    config = vars(DefaultModelConfig(**{"conv_filters": FILTERS, **options}))
    return DefaultPPOTorchRLModule(
        observation_space=shape,
        action_space=ACTIONS[actions],
        model_config=config,
        catalog_class=PPOCatalog,
    )


def check_images(module: Any, policy: Any) -> None:
    shape = module.observation_space.shape
    images = torch.rand(5, *shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for theirs, ours in zip(outputs_of(module, images), own_outputs(policy, images), strict=True):
        assert np.abs(theirs).max() > 1e-3  # a thousand times the tolerance
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("actions", ACTIONS)
def test_policy_of_a_module_with_convolutions_has_its_outputs(
    shared: bool, actions: str, tmp_path: Path
) -> None:
    module = image_module(actions, vf_share_layers=shared)
    module.save_to_path(str(tmp_path))
    check_images(module, load_rl_module(tmp_path))


def test_default_convolutions_of_rllib() -> None:
    atari = Box(0.0, 1.0, (42, 42, 4), np.float32)
    module = image_module(shape=atari, conv_filters=None)
    check_images(module, policy_of(module))


def test_other_order_of_features_is_wrong() -> None:
    module = image_module()
    policy: Any = policy_of(module)
    with torch.no_grad():
        policy.model.policy_head.weight.copy_(module.pi.net.mlp[0].weight)
    with pytest.raises(AssertionError):
        check_images(module, policy)


def test_other_padding_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = cnn_modules._layers
    symmetric = lambda cnn: ((conv, 0, right) for conv, _, right in layers(cnn))  # noqa: E731
    monkeypatch.setattr(cnn_modules, "_layers", symmetric)
    module = image_module(conv_filters=[[4, 4, 2]])
    policy = policy_of(module)
    with pytest.raises(AssertionError):
        check_images(module, policy)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_lstm": True}, "an LSTM after convolutions"),
        ({"conv_activation": "tanh"}, "has Tanh among its convolutions"),
        ({"conv_filters": [[4, [4, 2], 2]]}, "padding for rows and columns"),
        ({"head_fcnet_hiddens": [4]}, "head_fcnet_hiddens"),
    ],
)
def test_convolutions_that_polopt_cannot_have_are_refused(
    options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        policy_of(image_module(**options))


def test_conversion_of_convolutions_to_rllib_is_refused() -> None:
    policy = policy_of(image_module())
    with pytest.raises(ConfigError, match="convolutions can only be loaded from RLlib"):
        to_rl_module(policy)


# ---- configs ----------------------------------------------------------------------------------


def test_config_of_rllib_becomes_a_builder(capsys: pytest.CaptureFixture[str]) -> None:
    def mapping(agent_id: Any) -> str:
        return "a"

    theirs = (
        TheirPPOConfig()
        .environment("CartPole-v1", env_config={"max_episode_steps": 100})
        .env_runners(num_env_runners=3, num_envs_per_env_runner=2)
        .training(lr=1e-3, lambda_=0.9, train_batch_size_per_learner=640, num_epochs=4)
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[32]))
        .learners(num_learners=2)
        .multi_agent(
            policies={"a", "b"}, policy_mapping_fn=mapping, policies_to_train=lambda *_: True
        )
    )
    config = from_rllib(theirs)
    assert flat(config) == {
        "env": "CartPole-v1",
        "env_config": {"max_episode_steps": 100},
        "num_workers": 3,
        "num_envs_per_worker": 2,
        "lr": 1e-3,
        "lambda": 0.9,
        "train_batch_size": 640,
        "rollout_fragment_length": 107,  # 640 rows from 6 environments
        "num_sgd_iter": 4,
        "model": {"fcnet_hiddens": [32]},
        "policies": {"a": {}, "b": {}},
        "policy_mapping_fn": mapping,
    }
    config.validate()
    printed = capsys.readouterr().out
    assert "kept     lr=0.001" in printed
    assert "renamed  num_env_runners=3: num_workers" in printed
    assert "dropped  num_learners=2: polopt always does this, or ignores the option" in printed
    assert "dropped  policies_to_train=" in printed
    assert "Allowed: a list of names" in printed
    assert len(printed.splitlines()) < 20


def test_defaults_of_rllib_are_not_taken_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert flat(from_rllib(TheirPPOConfig(), verbose=False)) == {}
    assert capsys.readouterr().out == ""


def test_algorithm_that_polopt_lacks_is_refused() -> None:
    from ray.rllib.algorithms.bc import BCConfig

    with pytest.raises(ConfigError, match="from_rllib: got BCConfig"):
        from_rllib(BCConfig())
