"""Networks that are written for RLlib train in polopt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from flat_configs import flat
from gymnasium import spaces
from masked_env import Masked
from torch import Tensor, nn

import polopt
from polopt.common.config import ConfigError
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.model_config import NETWORKS, ModelConfig
from polopt.rllib import (
    A2CConfig,
    DQNConfig,
    FullyConnectedNetwork,
    ModelCatalog,
    PPOConfig,
    RecurrentNetwork,
    SACConfig,
    TFModelV2,
    TorchModelV2,
)
from polopt.rllib.custom_models import (
    AppendBiasLayer,
    DQNTorchModel,
    Network,
    SlimConv2d,
    as_network,
    normc_initializer,
)

BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)


class Custom(TorchModelV2, nn.Module):
    """As RLlib's example `custom_torch_policy`: a network around a `FullyConnectedNetwork`."""

    def __init__(
        self, obs_space: Any, action_space: Any, num_outputs: int, model_config: Any, name: str
    ) -> None:
        TorchModelV2.__init__(self, obs_space, action_space, num_outputs, model_config, name)
        nn.Module.__init__(self)
        self.inner = FullyConnectedNetwork(obs_space, action_space, num_outputs, model_config, name)

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        assert input_dict["obs_flat"].shape == input_dict["obs"].flatten(1).shape
        input_dict["obs"] = input_dict["obs"].float()
        out, _ = self.inner(input_dict, state, seq_lens)
        return out, []

    def value_function(self) -> Any:
        return torch.reshape(self.inner.value_function(), [-1])


class WithOptions(Custom):
    def __init__(self, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = scale

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        out, _ = super().forward(input_dict, state, seq_lens)
        return out * self.scale, state


class Memory(RecurrentNetwork, nn.Module):
    """As RLlib's example `rnn_model`, with an initial state that is not 0."""

    def __init__(
        self,
        obs_space: Any,
        action_space: Any,
        num_outputs: int,
        model_config: Any,
        name: str,
        cells: int = 6,
    ) -> None:
        nn.Module.__init__(self)
        super().__init__(obs_space, action_space, num_outputs, model_config, name)
        self.first = nn.Linear(int(np.prod(obs_space.shape)), cells)
        self.lstm = nn.LSTM(cells, cells, batch_first=True)
        self.policy, self.value = nn.Linear(cells, num_outputs), nn.Linear(cells, 1)
        self.features: Any = None

    def get_initial_state(self) -> list[Any]:
        zeros = self.first.weight.new(1, self.first.out_features).zero_().squeeze(0)
        return [zeros, zeros + 0.5]

    def value_function(self) -> Any:
        return torch.reshape(self.value(self.features), [-1])

    def forward_rnn(self, inputs: Any, state: Any, seq_lens: Any) -> Any:
        hidden = torch.relu(self.first(inputs))
        given = [torch.unsqueeze(one, 0) for one in state]
        self.features, [h, c] = self.lstm(hidden, given)
        return self.policy(self.features), [torch.squeeze(h, 0), torch.squeeze(c, 0)]


def train(builder: Any, model: dict[str, Any], env: Any = "CartPole-v1", **options: Any) -> Any:
    config = {"env": env, "num_workers": 0, "num_envs_per_worker": 4, "seed": 1, **options}
    config |= {"min_time_s_per_iteration": 0}
    algo = builder.from_dict({**config, "model": model}).build()
    before = algo.get_policy().get_weights().flat.copy()
    algo.train()
    assert not np.array_equal(before, algo.get_policy().get_weights().flat)
    return algo


@pytest.mark.parametrize("builder", [PPOConfig, A2CConfig])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_network_of_rllib_trains_and_is_saved(builder: Any, env: str, tmp_path: Path) -> None:
    ModelCatalog.register_custom_model("mine", Custom)
    model = {"custom_model": "mine", "fcnet_hiddens": [8], "vf_share_layers": False}
    options = {"min_sample_timesteps_per_iteration": 100, "rollout_fragment_length": 20}
    algo = train(builder, model, env, **options)
    policy = algo.get_policy()
    network = policy.model.module.model
    assert network.model_config["fcnet_hiddens"] == [8]
    assert network.inner._value_layers is not None
    observation, _ = gymnasium.make(env).reset(seed=3)
    action, _ = policy.predict(observation)
    algo.save(str(tmp_path / "saved"))
    algo.stop()
    again, _ = polopt.load(tmp_path / "saved").predict(observation)
    np.testing.assert_array_equal(action, again)


def test_network_of_rllib_learns_what_its_equal_learns() -> None:
    """The same layers as a network of polopt's own API give the same weights."""

    class Plain(nn.Module):
        def __init__(self, observation_space: Any, action_space: Any, num_params: int) -> None:
            super().__init__()
            self.model = Custom(observation_space, action_space, num_params, {}, "")

        def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
            out, _ = self.model({"obs": obs}, [], None)
            return out, self.model.value_function()

    ModelCatalog.register_custom_model("mine", Custom)
    weights = [
        train(PPOConfig, {"custom_model": model}, train_batch_size=64).get_policy().get_weights()
        for model in ("mine", Plain)
    ]
    np.testing.assert_array_equal(weights[0].flat, weights[1].flat)
    assert weights[0].version > 0


def test_custom_options_and_the_class_itself() -> None:
    model = {"custom_model": WithOptions, "custom_model_config": {"scale": 0.0}}
    config = ModelConfig(**flat(PPOConfig.from_dict({"model": model}))["model"])
    network = make_network(BOX, spaces.Discrete(3), None, 3, False, config)
    params, values = network(torch.ones(2, 4))
    assert (params == 0.0).all()
    assert (values != 0.0).all()


def test_memory_of_rllib_begins_with_the_initial_state() -> None:
    network = as_network(Memory)(BOX, spaces.Discrete(2), 2, cells=3)
    assert network.state_size == 6
    obs = torch.ones(2, 4)
    params, values, following = network(obs, torch.zeros(2, 6))
    model: Any = network.model
    cells = [torch.full((2, 3), number) for number in (0.0, 0.5)]
    expected, state = model({"obs": obs}, cells, torch.ones(2))
    torch.testing.assert_close(params, expected)
    torch.testing.assert_close(values, model.value_function())
    torch.testing.assert_close(following + network._initial, torch.cat(state, dim=1))
    assert not torch.equal(following, torch.cat(state, dim=1))
    ModelCatalog.register_custom_model("memory", Memory)
    train(PPOConfig, {"custom_model": "memory"}, train_batch_size=64).stop()


def test_dqn_adds_the_layers_of_rllib() -> None:
    ModelCatalog.register_custom_model("features", Custom)
    algo = train(
        DQNConfig,
        {"custom_model": "features", "fcnet_hiddens": [8, 16]},
        hiddens=[5],
        replay_buffer_config={"learning_starts": 50},
        min_sample_timesteps_per_iteration=100,
    )
    modules = algo.get_policy().model.modules()
    network = next(one for one in modules if isinstance(one, Network))
    algo.stop()
    assert network.model.num_outputs == 16
    shapes = [tuple(one.weight.shape) for one in network.modules() if isinstance(one, nn.Linear)]
    assert [one for one in shapes if one[0] in (5, 2)] == [(5, 16), (2, 5), (5, 16)]
    whole = as_network(Custom)(BOX, spaces.Discrete(2), 2, {"fcnet_hiddens": [8]}, q_hiddens=[])
    rows = torch.ones(3, 4)
    q_values, values = whole(rows)
    assert torch.equal(q_values, whole.model({"obs": rows})[0])
    assert values.tolist() == [0.0] * 3, "without hiddens, the outputs are the Q-values"
    without = flat(DQNConfig.from_dict({"hiddens": [7], "model": {"fcnet_hiddens": [9]}}))
    assert without["model"]["fcnet_hiddens"] == [9, 7]
    assert "hiddens" not in without


class ReadsMask(Custom):
    """As RLlib's `TorchActionMaskModel`."""

    def __init__(self, obs_space: Any, *args: Any, **kwargs: Any) -> None:
        original = obs_space.original_space
        assert "action_mask" in original.spaces
        flat_size = spaces.utils.flatdim(original)
        assert obs_space.shape == (flat_size,), "RLlib's preprocessor keeps the mask"
        super().__init__(original["a"], *args, **kwargs)

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        logits, _ = self.inner({"obs": input_dict["obs"]["a"]})
        mask = input_dict["obs"]["action_mask"]
        assert input_dict["obs_flat"][:, : mask.shape[1]].equal(mask)
        assert mask.shape == logits.shape
        return logits + torch.clamp(torch.log(mask), min=-3.4e38), state


def test_network_that_reads_a_mask() -> None:
    train(PPOConfig, {"custom_model": ReadsMask}, Masked, train_batch_size=64).stop()


def test_networks_that_polopt_cannot_use_are_refused() -> None:
    class OfTensorFlow(TFModelV2):
        pass

    class WithLoss(Custom):
        def custom_loss(self, policy_loss: Any, loss_inputs: Any) -> Any:
            return policy_loss

    ModelCatalog.register_custom_model("tf", OfTensorFlow)  # a script may register both
    for custom in ("tf", OfTensorFlow):
        with pytest.raises(ConfigError, match="OfTensorFlow is a network of TensorFlow"):
            flat(PPOConfig.from_dict({"model": {"custom_model": custom}}))
    with pytest.raises(ConfigError, match="WithLoss has a custom_loss, which polopt does not call"):
        ModelCatalog.register_custom_model("loss", WithLoss)
    with pytest.raises(ConfigError, match="Allowed: a class that derives from TorchModelV2"):
        ModelCatalog.register_custom_model("wrong", print)
    with pytest.raises(ConfigError, match="SAC makes critics of its network"):
        flat(SACConfig.from_dict({"model": {"custom_model": Custom}}))
    for method in ("register_custom_action_dist", "register_custom_preprocessor"):
        with pytest.raises(ConfigError, match=f"{method}.*Instead, "):
            getattr(ModelCatalog, method)("name", Custom)


def test_trial_of_tune_finds_a_registered_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial runs in another process, which has not called `register_custom_model`."""
    ModelCatalog.register_custom_model("of_driver", Custom)
    monkeypatch.delitem(NETWORKS._known, "of_driver")
    config = flat(PPOConfig.from_dict({"model": {"custom_model": "of_driver"}}))
    assert config["model"]["custom"] == "of_driver"
    assert issubclass(NETWORKS.get("of_driver"), Network)


def test_network_of_dqn_derives_from_the_class_of_rllib() -> None:
    class Mine(DQNTorchModel):
        def __init__(self, obs_space: Any, action_space: Any, *args: Any, **kw: Any) -> None:
            DQNTorchModel.__init__(self, obs_space, action_space, *args, **kw)
            self.layer = nn.Linear(4, action_space.n)

        def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
            return self.layer(input_dict["obs"]), state

    network = as_network(Mine)(BOX, spaces.Discrete(2), 2, {}, q_hiddens=[])
    rows = torch.ones(3, 4)
    assert torch.equal(network(rows)[0], network.model.layer(rows))


def test_convolution_of_rllib() -> None:
    layer = SlimConv2d(3, 5, 3, 2, 1, bias_init=-1.0)
    assert layer(torch.zeros(2, 3, 9, 9)).shape == (2, 5, 5, 5)
    assert not layer(torch.zeros(2, 3, 9, 9)).any(), "ReLU of -1"
    linear = SlimConv2d(1, 1, 3, 1, activation_fn=None, bias_init=-1.0)
    assert linear(torch.zeros(1, 1, 3, 3)).item() == -1.0


def test_bias_layer_appends_parameters() -> None:
    layer = AppendBiasLayer(2)
    out = layer(torch.ones(3, 1))
    assert out.tolist() == [[1.0, 0.0, 0.0]] * 3
    out.sum().backward()
    assert layer.log_std.grad is not None
    assert layer.log_std.grad.tolist() == [3.0, 3.0]


def test_rows_of_normc_weights_have_the_given_norm() -> None:
    weight = torch.empty(3, 5)
    normc_initializer(0.25)(weight)
    torch.testing.assert_close(weight.norm(dim=1), torch.full((3,), 0.25))
