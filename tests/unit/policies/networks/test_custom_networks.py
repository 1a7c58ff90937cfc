"""Custom networks of users: inputs, buffers, checkpoints and errors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_helpers import SMALL
from gymnasium import Space, spaces
from learner_threads import learn_together, uneven_batches
from policy_helpers import FakeEnv, every_policy
from ray.tune import register_env
from torch import Tensor, nn
from toy_envs import make_policy, random_batch

import polopt
from polopt.common.config import ConfigError
from polopt.policies.a2c import A2CPolicy
from polopt.policies.learning.reducer import LocalReducer
from polopt.policies.networks.model_config import NETWORKS
from polopt.policies.networks.observations import split
from polopt.policies.policy import Policy, reduce_gradient
from polopt.policies.spaces import ObservationEncoder
from polopt.trainers.checkpoints import CheckpointError
from polopt.trainers.trainer import PolicyOptimizerTrainer

BOX, THREE = spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(3)


class Base(nn.Module):
    """Linear heads over the outputs of `body`."""

    def __init__(self, observations: Any, actions: Any, num_params: int, width: int = 8) -> None:
        super().__init__()
        self.seen = observations, actions
        self.body = self.make_body(width)
        self.policy, self.value = nn.Linear(width, num_params), nn.Linear(width, 1)

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.Tanh())

    def forward(self, obs: Any) -> Any:
        hidden = self.body(obs)
        return self.policy(hidden), self.value(hidden)[:, 0]


class Normalised(Base):
    """Has the running statistics of batch normalisation."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh())


class Counting(Base):
    """Counts the rows of calls in training mode. Each such call assigns a new tensor to the buffer
    `count`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, obs: Any) -> Any:
        if self.training:
            self.count = self.count + len(obs)
            self.calls += 1
        return super().forward(obs)

    def get_extra_state(self) -> Any:
        return {"comment": "neither sent nor saved"}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("polopt must not call this method")


def policy_with(
    network: Any, name: str = "a2c", observations: Space[Any] = BOX, **options: Any
) -> Policy:
    model = {"custom": network, "custom_options": options.pop("custom_options", {})}
    return make_policy(name, FakeEnv(observations, THREE), model=model, **options)


def batch_for(policy: Policy, seed: int = 0) -> Any:
    return random_batch(policy, 6, 4, np.random.default_rng(seed))


# ---- what a network gets ------------------------------------------------------------------------


def test_constructor_gets_spaces_and_options() -> None:
    policy = policy_with(Base, custom_options={"width": 5})
    assert policy.model.module.seen == (BOX, THREE)
    assert policy.model.module.policy.weight.shape == (3, 5)


NESTED = spaces.Dict(
    [
        ("z", spaces.Discrete(3, start=1)),
        ("image", spaces.Box(0, 255, (2, 3, 3), np.uint8)),
        ("bits", spaces.Box(0, 1, (2, 2), np.bool_)),
        ("pair", spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.MultiBinary([2, 2])])),
        ("wide", spaces.Box(-1.0, 1.0, (), np.float64)),
    ]
)


def test_observations_are_split_as_their_space() -> None:
    NESTED.seed(0)
    singles = [NESTED.sample() for _ in range(5)]
    encoder = ObservationEncoder(NESTED)
    encoded = encoder.encode(np.stack([encoder.row(single) for single in singles]))
    found = split(NESTED, torch.as_tensor(encoded))
    assert list(found) == ["z", "image", "bits", "pair", "wide"]
    kinds = {"z": torch.float32, "image": torch.uint8, "bits": torch.bool, "wide": torch.float32}
    assert {key: found[key].dtype for key in kinds} == kinds
    for n, single in enumerate(singles):
        np.testing.assert_array_equal(found["z"][n], np.eye(3)[single["z"] - 1])
        np.testing.assert_array_equal(found["image"][n], single["image"])
        np.testing.assert_array_equal(found["bits"][n], single["bits"])
        first, second = single["pair"]
        one_hot = [*np.eye(2)[first[0]], *np.eye(3)[first[1]]]
        np.testing.assert_array_equal(found["pair"][0][n], one_hot)
        np.testing.assert_array_equal(found["pair"][1][n], second)
        assert found["wide"][n] == np.float32(single["wide"])


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 255, (3, 2, 2), np.uint8), torch.uint8),
        (spaces.Box(0, 1, (3, 2, 2), np.bool_), torch.bool),
        (spaces.Box(-1.0, 1.0, (3, 2), np.float64), torch.float32),
        (spaces.Box(-5, 5, (3,), np.int16), torch.float32),
        (spaces.Discrete(3), torch.float32),
    ],
    ids=str,
)
def test_dtype_of_a_tensor_follows_the_space(space: Space[Any], dtype: torch.dtype) -> None:
    class Checked(Base):
        def forward(self, obs: Tensor) -> Any:
            assert obs.dtype == dtype
            return super().forward(obs.float().flatten(1))

        def make_body(self, width: int) -> nn.Module:
            return nn.LazyLinear(width)

    policy = policy_with(Checked, observations=space)
    assert policy.predict(space.sample())[0] in (0, 1, 2)


def test_network_input_has_no_mask() -> None:
    class OfParts(Base):
        def forward(self, obs: Any) -> Any:
            assert list(obs) == ["observations"]
            return super().forward(obs["observations"])

    space = spaces.Dict(observations=BOX, action_mask=spaces.MultiBinary(3))
    policy = policy_with(OfParts, observations=space)
    assert list(policy.model.network.module.seen[0].spaces) == ["observations"]
    for allowed in range(3):
        mask = np.eye(3, dtype=np.int8)[allowed]
        assert policy.predict({"observations": np.ones(4), "action_mask": mask})[0] == allowed


class AsBuiltIn(nn.Module):
    """Has the layers of `MLPNetwork`, in the same order."""

    def __init__(self, observations: Any, actions: Any, num_params: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.policy_head = nn.Linear(8, num_params)
        self.value_trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
        self.value_head = nn.Linear(8, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        params = self.policy_head(self.trunk(obs))
        return params, self.value_head(self.value_trunk(obs))[:, 0]


@every_policy
def test_custom_network_learns_as_the_same_built_in_one(name: str) -> None:
    custom = policy_with(AsBuiltIn, name, num_sgd_iter=2)
    built_in = make_policy(
        name, FakeEnv(BOX, THREE), model={"fcnet_hiddens": [8]}, num_sgd_iter=2, fast_cpu=False
    )
    custom.set_weights(built_in.get_weights())
    batch = batch_for(built_in)
    gradients = [p.compute_gradients(copy.deepcopy(batch)).flat for p in (custom, built_in)]
    np.testing.assert_array_equal(*gradients)
    for policy in (custom, built_in):
        policy.learn_on_batch(copy.deepcopy(batch))
    np.testing.assert_array_equal(custom.get_weights().flat, built_in.get_weights().flat)


def test_frozen_parameter_stays_and_is_sent() -> None:
    class Frozen(Base):
        def make_body(self, width: int) -> nn.Module:
            body = super().make_body(width)
            body[0].weight.requires_grad_(False)  # type: ignore[index]
            return body

    policy, other = policy_with(Frozen), policy_with(Frozen, seed=1)
    before = policy.model.module.body[0].weight.clone()
    policy.learn_on_batch(batch_for(policy))
    assert torch.equal(policy.model.module.body[0].weight, before)
    other.set_weights(policy.get_weights())
    assert torch.equal(other.model.module.body[0].weight, before)


# ---- modes and buffers --------------------------------------------------------------------------


@every_policy
def test_modules_train_only_while_they_learn(name: str) -> None:
    modes: list[bool] = []

    class Watching(Base):
        def forward(self, obs: Any) -> Any:
            modes.append(self.training)
            return super().forward(obs)

    policy = policy_with(Watching, name)
    batch = batch_for(policy)
    policy.value(np.zeros((2, 4), np.float32))
    assert not any(modes)
    policy.learn_on_batch(batch)
    assert modes.count(True) == policy.config.num_sgd_iter
    del modes[:]
    policy.action_params(np.zeros((2, 4), np.float32))
    assert modes == [False]


def test_network_of_a_subclass_begins_in_evaluation_mode() -> None:
    class Plugin(A2CPolicy):
        def make_network(self) -> Any:
            return super().make_network().train()

    policy = Plugin(BOX, THREE, Plugin.config_class.parse({}))
    assert not policy.model.training


def statistics(policy: Policy) -> list[Tensor]:
    norm = policy.model.module.body[1]
    return [norm.running_mean.clone(), norm.running_var.clone()]


@pytest.mark.parametrize("name", ["a2c", "ppo", "impala"])
def test_buffers_travel_with_weights_and_states(name: str) -> None:
    policy = policy_with(Normalised, name)
    initial = statistics(policy)
    policy.learn_on_batch(batch_for(policy))
    learned = statistics(policy)
    assert not torch.equal(learned[0], initial[0])
    sent, restored = policy_with(Normalised, name, seed=3), policy_with(Normalised, name, seed=4)
    sent.set_weights(policy.get_weights())
    restored.set_state(copy.deepcopy(policy.get_state()))
    obs = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    for other in (sent, restored):
        assert all(map(torch.equal, statistics(other), learned))
        np.testing.assert_array_equal(other.action_params(obs), policy.action_params(obs))
    with pytest.raises(ValueError, match="they belong to another network"):
        policy_with(Base, name).set_weights(policy.get_weights())


def test_buffers_have_neither_gradient_nor_moments() -> None:
    policy = policy_with(Normalised)
    parameters = sum(p.numel() for p in policy.model.parameters())
    weights = policy.get_weights().flat
    # The buffers are the mean and the variance of 8 units.
    assert len(weights) == parameters + 16
    assert len(policy.flat.grads) == parameters
    assert policy.flat.segments["network.buffers"] == slice(parameters, parameters + 16)
    np.testing.assert_array_equal(weights[parameters:], [0.0] * 8 + [1.0] * 8)
    policy.learn_on_batch(batch_for(policy))
    assert len(policy.get_state()["adam"]["network"]["exp_avg"]) == parameters


def test_replaced_buffer_is_sent_and_set() -> None:
    policy, other = policy_with(Counting), policy_with(Counting)
    policy.learn_on_batch(batch_for(policy))
    policy.learn_on_batch(batch_for(policy))
    assert policy.model.module.count == 48.0
    assert policy.get_weights().flat[-1] == 48.0
    other.learn_on_batch(batch_for(other))
    other.set_weights(policy.get_weights())
    assert other.model.module.count == 48.0
    assert other.get_state()["params"][-1] == 48.0


def test_integer_and_temporary_buffers_stay_where_they_are() -> None:
    policy, other = policy_with(Counting), policy_with(Counting)
    policy.learn_on_batch(batch_for(policy))
    policy.model.module.scratch += 7.0
    other.set_weights(policy.get_weights())
    assert policy.model.module.calls == 1
    assert other.model.module.calls == 0
    assert other.model.module.scratch.eq(0.0).all()


def test_target_network_gets_the_buffers() -> None:
    policy = policy_with(Normalised, "appo", target_network_update_freq=1)
    policy.learn_on_batch(batch_for(policy))
    target: Any = policy.segments["target"].module
    assert torch.equal(target.module.body[1].running_mean, statistics(policy)[0])
    assert policy.model.module.body[1].running_mean.abs().max() > 0.0
    state = copy.deepcopy(policy.get_state())
    state["segments"] = {k: v for k, v in state["segments"].items() if "target" not in k}
    fresh = policy_with(Normalised, "appo")
    fresh.set_state(state)  # the state of a policy without a target network
    assert torch.equal(
        fresh.segments["target"].module.module.body[1].running_var, statistics(policy)[1]
    )


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.9, 0.3), (1.0, 0.0)], ids=str)
def test_buffers_of_several_learners_are_their_mean(shares: tuple[float, ...]) -> None:
    """The mean is weighted by rows. All learners have bitwise equal buffers."""
    options = {"num_sgd_iter": 1, "sgd_minibatch_size": 0}
    single = policy_with(Normalised, **options)
    batches = uneven_batches(single, shares)
    learners = [policy_with(Normalised, **options) for _ in shares]
    weights, _ = learn_together(learners, batches)
    assert all(each.tobytes() == weights[0].tobytes() for each in weights)
    alone = []
    for batch in batches:
        one = policy_with(Normalised, **options)
        one.learn_on_batch(batch)
        alone.append(one.get_weights().flat[-16:])
    rows = np.array([batch["valid"].sum() for batch in batches])
    expected = sum(rows[i] * alone[i] for i in range(len(rows)) if rows[i]) / rows.sum()
    np.testing.assert_allclose(weights[0][-16:], expected, rtol=1e-5, atol=1e-6)


def test_buffers_of_learners_without_rows_stay() -> None:
    policy = policy_with(Normalised)
    policy.learn_on_batch(batch_for(policy))
    before = statistics(policy)
    reduce_gradient(policy, 0, {}, LocalReducer())
    assert all(map(torch.equal, statistics(policy), before))


def test_compute_gradients_refuses_networks_with_running_statistics() -> None:
    policy = policy_with(Normalised)
    with pytest.raises(ConfigError, match=r"learning changes buffers of CustomNetwork.*LayerNorm"):
        policy.compute_gradients(batch_for(policy))

    class Constant(Base):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.register_buffer("scale", torch.full((4,), 2.0))

        def forward(self, obs: Any) -> Any:
            return super().forward(obs * self.scale)

    policy = policy_with(Constant)
    assert policy.compute_gradients(batch_for(policy)).rows == 24
    assert policy.get_weights().flat[-4:].tolist() == [2.0] * 4


# ---- errors -------------------------------------------------------------------------------------


class WrongParams(Base):
    def forward(self, obs: Any) -> Any:
        params, values = super().forward(obs)
        return params[:, :2], values


class WrongValues(Base):
    def forward(self, obs: Any) -> Any:
        return self.policy(self.body(obs)), self.value(self.body(obs))


class OneOutput(Base):
    def forward(self, obs: Any) -> Any:
        return super().forward(obs)[0]


class Raising(Base):
    def forward(self, obs: Any) -> Any:
        return self.helper(obs)

    def helper(self, obs: Any) -> Any:
        raise RuntimeError("no such layer")


class RaisingInit(Base):
    def make_body(self, width: int) -> nn.Module:
        raise OSError("no file of weights")


class Halves(Base):
    def make_body(self, width: int) -> nn.Module:
        return nn.Linear(4, width, dtype=torch.float64)


class Elsewhere(Base):
    def make_body(self, width: int) -> nn.Module:
        return nn.Linear(4, width, device="meta")


class HalfBuffer(Base):
    def make_body(self, width: int) -> nn.Module:
        body = super().make_body(width)
        body.register_buffer("scale", torch.ones(4, dtype=torch.float64))
        return body


class Sharing(Base):
    def make_body(self, width: int) -> nn.Module:
        first, second = nn.Linear(4, width), nn.Linear(4, width)
        second.weight = nn.Parameter(first.weight.detach())
        return nn.Sequential(first, second)


class Without(nn.Module):
    def __init__(self, observations: Any, actions: Any, num_params: int) -> None:
        super().__init__()
        self.num_params = num_params

    def forward(self, obs: Any) -> Any:
        return torch.zeros(len(obs), self.num_params), torch.zeros(len(obs))


class Unused(Without):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layer = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        (
            WrongParams,
            r"WrongParams.forward returned .*\[2, 2\].*Allowed: action_dist_inputs \[B, 3",
        ),
        (WrongValues, r"returned .*float32 \[2, 3\], torch.float32 \[2, 1\].*values \[B\]"),
        (OneOutput, r"OneOutput.forward returned torch.float32 .*Allowed: action_dist_inputs"),
        (Raising, r"Raising.forward raised RuntimeError: no such layer(.|\n)*in helper\n"),
        (RaisingInit, r"RaisingInit\(...\) raised OSError: no file(.|\n)*in make_body\n"),
        (Halves, r"parameter 'body.weight' of Halves is torch.float64 on cpu. Allowed: float32"),
        (
            Elsewhere,
            r"'body.weight' of Elsewhere is torch.float32 on meta. Allowed: float32 on cpu",
        ),
        (HalfBuffer, r"buffer 'body.scale' of HalfBuffer is torch.float64"),
        (Sharing, r"'body.0.weight' and 'body.1.weight' of Sharing share memory"),
        (Without, r"the outputs of Without.forward do not depend on a parameter"),
        (Unused, r"the outputs of Unused.forward do not depend on a parameter"),
        (int, r"got <class 'int'>; allowed: a subclass of torch.nn.Module"),
        (nn.Linear(2, 2), r"got Linear.*allowed: a subclass of torch.nn.Module, 'module:Class'"),
        ("nobody", r"got 'nobody'; allowed: .*polopt.register_network"),
    ],
)
def test_wrong_network_is_one_error(network: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"key 'model.custom': (.|\n)*{said}"):
        policy_with(network)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"custom": Base, "custom_options": {"wdth": 3}}, "unexpected keyword argument 'wdth'"),
        ({"custom": Base, "custom_options": {"width": nn.ReLU}}, "allowed: values of JSON"),
        ({"custom_options": {"width": 3}}, "'custom_options' only together with 'custom'"),
        ({"custom": Base, "use_lstm": True}, "'use_lstm' without 'custom'"),
    ],
)
def test_wrong_options_are_one_error(model: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_policy("a2c", FakeEnv(BOX, THREE), model=model)


def test_tied_parameter_is_one_parameter() -> None:
    class Tied(Base):
        def make_body(self, width: int) -> nn.Module:
            layer = nn.Linear(4, 4)
            return nn.Sequential(layer, nn.Tanh(), layer, nn.LazyLinear(width))

    policy = policy_with(Tied)
    policy.learn_on_batch(batch_for(policy))
    first, _, again, _ = policy.model.module.body
    assert first.weight is again.weight
    assert len(policy.flat.grads) == 20 + 40 + 27 + 9  # the first layer of the body counts once


# ---- names and checkpoints ----------------------------------------------------------------------


def trained(path: Path, network: Any, **options: Any) -> np.ndarray:
    made = PolicyOptimizerTrainer(
        {**SMALL, "model": {"custom": network, "custom_options": options}}
    )
    made.train()
    made.save(str(path))
    weights = made.get_policy().get_weights().flat
    made.stop()
    return weights


def test_registered_name_selects_the_class(tmp_path: Path) -> None:
    polopt.register_network("norm", Normalised)
    assert policy_with("norm").config.model.custom is Normalised
    weights = trained(tmp_path / "c", "norm")
    assert NETWORKS.name_of(Normalised) == "norm"
    np.testing.assert_array_equal(polopt.load(tmp_path / "c").get_weights().flat, weights)
    with pytest.raises(ConfigError, match=r"a subclass of torch\.nn:Module"):
        polopt.register_network("wrong", int)
    with pytest.raises(ConfigError, match="Allowed: a name without a colon"):
        polopt.register_network("norm:v2", Normalised)


def test_name_that_only_the_driver_of_a_trial_registered_is_known() -> None:
    register_env("polopt/network/of_driver", Normalised)
    assert "of_driver" not in NETWORKS.names()
    assert policy_with("of_driver").config.model.custom is Normalised


def test_path_selects_the_class_in_a_config_but_not_in_a_checkpoint(tmp_path: Path) -> None:
    path = f"{__name__}:Mine"
    assert policy_with(path).config.model.custom is Mine
    weights = trained(tmp_path, path)
    with pytest.raises(ConfigError, match="network 'Mine', which is not known here"):
        polopt.load(tmp_path)
    loaded = polopt.load(tmp_path, network=Mine)
    np.testing.assert_array_equal(loaded.get_weights().flat, weights)


@pytest.mark.parametrize("path", ["no_such_module:Mine", f"{__name__}:Missing", "math:pi"])
def test_wrong_path_is_an_error(path: str) -> None:
    with pytest.raises(ConfigError, match=r"key 'model.custom'.*'module:Class' of one"):
        policy_with(path)


class Mine(Base):
    """A network that is not registered."""


class Renamed(Mine):
    """Has the same tensors as `Mine`."""


def test_network_that_is_not_known_is_named(tmp_path: Path) -> None:
    weights = trained(tmp_path, Mine, width=5)
    with pytest.raises(
        ConfigError, match=r"'Mine', which is not known here.*network=\.\.\."
    ) as one:
        polopt.load(tmp_path)
    assert str(tmp_path) in str(one.value)
    policy = polopt.load(tmp_path, network=Renamed)
    np.testing.assert_array_equal(policy.get_weights().flat, weights)
    assert policy.config.model.custom_options == {"width": 5}


def test_checkpoint_compares_names_and_shapes(tmp_path: Path) -> None:
    trained(tmp_path / "c", Mine)

    class Other(Mine):
        def make_body(self, width: int) -> nn.Module:
            return nn.Sequential(nn.Identity(), nn.Linear(4, width))

    with pytest.raises(CheckpointError, match="does not fit policy"):
        polopt.load(tmp_path / "c", network=Other)
    options = {"custom": Mine, "custom_options": {"width": 9}}
    made = PolicyOptimizerTrainer({**SMALL, "model": options})
    with pytest.raises(
        CheckpointError, match=r"custom_options: checkpoint {}, config {'width': 9}"
    ):
        made.restore(str(tmp_path / "c"))
    made.stop()


def test_custom_network_for_a_checkpoint_of_a_built_in_network_is_refused(tmp_path: Path) -> None:
    made = PolicyOptimizerTrainer(SMALL)
    made.save(str(tmp_path))
    made.stop()
    with pytest.raises(ConfigError, match="has no custom network"):
        polopt.load(tmp_path, network=Mine)


def test_parameters_of_a_custom_network_are_counted() -> None:
    config = A2CPolicy.config_class.parse({"model": {"custom": Base}})
    # The body, the policy head and the value head.
    assert A2CPolicy.count_parameters(BOX, THREE, config) == 40 + 27 + 9

    class Real(Base):
        def make_body(self, width: int) -> nn.Module:
            return nn.Linear(4, int(torch.full((), width).item()))

    for cls in (Real, OneLazy):
        config = A2CPolicy.config_class.parse({"model": {"custom": cls}})
        assert A2CPolicy.count_parameters(BOX, THREE, config) is None


class OneLazy(Base):
    def make_body(self, width: int) -> nn.Module:
        return nn.LazyLinear(width)


def test_option_is_changed_with_a_custom_network() -> None:
    policy = policy_with(Base)
    policy.set_option("lr", 0.5)
    assert policy.config.lr == 0.5
    assert policy.config.model.custom is Base


def test_onnx_model_of_a_custom_network_acts_as_predict(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")

    class OfParts(Base):
        def forward(self, obs: Any) -> Any:
            image = obs["image"].flatten(1).float() / 255.0
            return super().forward(torch.cat([image, obs["z"]], dim=1))

        def make_body(self, width: int) -> nn.Module:
            return nn.Sequential(nn.Linear(15, width), nn.BatchNorm1d(width))

    image = spaces.Box(0, 255, (2, 2, 3), np.uint8)
    space = spaces.Dict(image=image, z=spaces.Discrete(3))
    policy = policy_with(OfParts, observations=space)
    policy.model.module.body[1].running_mean += 0.3
    policy.export_onnx(tmp_path / "policy.onnx")
    session = runtime.InferenceSession(str(tmp_path / "policy.onnx"))
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.integers(0, 256, (7, 2, 2, 3), dtype=np.uint8),
        "z": rng.integers(3, size=7),
    }
    feed = {f"observations.{key}": value for key, value in batch.items()}
    actions, params = session.run(None, feed)
    np.testing.assert_array_equal(actions, policy.predict(batch)[0])
    expected = policy.action_params(policy.encoder.encode(batch))
    np.testing.assert_allclose(params, expected, rtol=1e-5, atol=1e-5)
