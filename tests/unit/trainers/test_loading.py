"""Tests that `polopt.load` returns a policy that acts as in training, without Ray and without an
environment."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_helpers import SMALL, rewrite
from gymnasium import Space, spaces
from torch import nn
from trained_policies import (
    ACTIONS,
    BOX,
    OBSERVATIONS,
    OPTIONS,
    Own,
    OwnMemory,
    trained,
)

import polopt
from polopt.common.config import ConfigError
from polopt.common.plain_data import DecodeError
from polopt.policies.a2c import A2CPolicy
from polopt.policies.policy import Policy
from polopt.policies.policy_registry import POLICIES
from polopt.trainers.checkpoints import CheckpointError, read_checkpoint, write_checkpoint
from polopt.trainers.saved_spaces import describe_space, space_of
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: Maps policies that support only some action spaces to the keys of these spaces in `ACTIONS`.
OF_SPACES = {"dqn": {"discrete"}, "pqn": {"discrete"}}
OF_SPACES |= {name: {"box", "float32"} for name in ("crossq", "sac", "td3")}


def supports(name: str, actions: str, options: Mapping[str, Any] = {}) -> bool:
    """Returns whether a policy supports an action space, memory if the options have it, and a
    network like `Own`. The critics of `sac` and `td3` also take actions, so
    `test_continuous_policies` tests their networks."""
    network = options.get("model", {})
    if network.get("use_lstm") or network.get("custom") is OwnMemory:
        return name not in OF_SPACES
    if network.get("custom") is Own and name in ("crossq", "sac", "td3"):
        return False
    return actions in OF_SPACES.get(name, ACTIONS)


def row(batch: Any, n: int) -> Any:
    """Returns observation `n` of a batch."""
    if isinstance(batch, dict):
        return {key: row(part, n) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row(part, n) for part in batch)
    return batch[n]


def check_acts_as_in_training(
    made: PolicyOptimizerTrainer, directory: Path, network: type[nn.Module] | None = None
) -> None:
    """Checks that a loaded policy acts like the policy in training. Also checks `act_in_torch`,
    whose operations become the ONNX model."""
    made.save(str(directory))
    policy, sampler = made.get_policy(), made.workers.local.sampler
    raw: list[Any] = []
    rows = policy.encoder.rows
    policy.encoder.rows = lambda obs: raw.append(copy.deepcopy(obs)) or rows(obs)  # type: ignore[func-returns-value]
    sampler.reset()
    sampled = sampler.sample(explore=False)
    del policy.encoder.rows
    made.stop()
    loaded = polopt.load(directory, network=network)
    assert type(loaded) is type(policy)
    assert loaded is not policy
    np.testing.assert_array_equal(loaded.get_weights().flat, policy.get_weights().flat)
    assert loaded.encoder.space == policy.encoder.space
    assert loaded.action_space == policy.action_space
    after: Any = None
    for t, observations in enumerate(raw[:-1]):
        before = after
        actions, after = loaded.predict(observations, before)
        assert (after is None) == (loaded.state_size == 0)
        np.testing.assert_array_equal(actions, policy.dist.to_env(sampled["actions"][t]))
        other = policy.predict(observations, before)[0]
        np.testing.assert_array_equal(actions, other)
        assert actions.dtype == other.dtype
        params = sampled["action_dist_inputs"][t]
        memory = np.zeros((3, loaded.state_size), np.float32) if before is None else before
        encoded = loaded.encoder.encode(observations)
        np.testing.assert_array_equal(loaded.act(encoded, memory)[0], params)
        with torch.inference_mode():
            in_torch = loaded.act_in_torch(
                loaded.model, torch.as_tensor(encoded), torch.as_tensor(memory)
            )
        np.testing.assert_allclose(in_torch[0], params, rtol=1e-5, atol=1e-5)
        if loaded.state_size:
            np.testing.assert_allclose(in_torch[1], after, rtol=1e-5, atol=1e-5)
        for seed in range(3):
            drawn = [
                p.predict(observations, before, False, np.random.default_rng(seed))[0]
                for p in (loaded, policy)
            ]
            np.testing.assert_array_equal(*drawn)
        for n in range(3):  # single observations, with the rounding of a smaller batch
            one = row(observations, n)
            encoded, is_batch = loaded.encoder.some_rows(one)
            assert not is_batch
            np.testing.assert_allclose(
                loaded.act(encoded, memory[n : n + 1])[0][0], params[n], rtol=1e-5, atol=1e-5
            )
            action = loaded.predict(one, None if before is None else before[n])[0]
            assert np.shape(action) == loaded.action_space.shape
            assert loaded.action_space.contains(action)


@pytest.mark.parametrize("name", POLICIES.names())
@pytest.mark.parametrize("actions", ["discrete", "box"])
def test_policy_acts_as_in_training(name: str, actions: str, tmp_path: Path) -> None:
    if not supports(name, actions):
        pytest.skip(f"{name} has other actions")
    check_acts_as_in_training(trained("box", actions, policy=name), tmp_path / "c")


@pytest.mark.parametrize("actions", ACTIONS)
@pytest.mark.parametrize("observations", OBSERVATIONS)
def test_every_space_acts_as_in_training(observations: str, actions: str, tmp_path: Path) -> None:
    check_acts_as_in_training(trained(observations, actions), tmp_path / "c")


@pytest.mark.parametrize("name", POLICIES.names())
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_acts_as_in_training(name: str, option: str, tmp_path: Path) -> None:
    observations, actions, options = OPTIONS[option]
    if not supports(name, actions, options):
        pytest.skip(f"{name} has other actions or no memory")
    made = trained(observations, actions, policy=name, **options)
    network = options.get("model", {}).get("custom")
    check_acts_as_in_training(made, tmp_path / "c", network)


@pytest.mark.parametrize(
    "config",
    [
        {"fast_cpu": False},
        {"model": {"fcnet_hiddens": [8], "squash_actions": True, "free_log_std": False}},
        {"model": {"fcnet_hiddens": [], "vf_share_layers": True}, "torch_optimizer": "rmsprop"},
    ],
)
def test_options_act_as_in_training(config: dict[str, Any], tmp_path: Path) -> None:
    check_acts_as_in_training(trained("box", "float32", **config), tmp_path / "c")


# ---- spaces -----------------------------------------------------------------------------------


@pytest.mark.parametrize("space", [*OBSERVATIONS.values(), *ACTIONS.values()], ids=str)
def test_space_survives_a_checkpoint(space: Space[Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"space": describe_space(space)})
    found = space_of(read_checkpoint(tmp_path)["space"], "space")
    assert found == space
    assert repr(found) == repr(space)
    if isinstance(space, spaces.Dict):
        assert list(found.spaces) == list(space.spaces), "the order of the keys differs"


@pytest.mark.parametrize(
    ("description", "said"),
    [
        (3, "allowed: a mapping"),
        ({}, "KeyError: 'type'"),
        ({"type": "Text"}, "got type 'Text'"),
        ({"type": "Discrete", "n": 0, "start": 0, "dtype": "int64"}, "got 0; allowed"),
        ({"type": "Discrete", "n": 10**30, "start": 0, "dtype": "int64"}, "below 2**62"),
        ({"type": "Discrete", "n": True, "start": 0, "dtype": "int64"}, "got True"),
        ({"type": "Discrete", "n": 2, "start": 0, "dtype": "float64"}, "allowed: integers"),
        ({"type": "Discrete", "n": 2, "start": 0, "dtype": "os.system"}, "TypeError"),
        ({"type": "Box", "low": 0.0, "high": 1.0}, "allowed: an array"),
        ({"type": "Box", "low": np.zeros(2), "high": np.zeros(3)}, "the bounds are float64 (2,)"),
        (
            {"type": "Box", "low": np.ones(2), "high": np.zeros(2)},
            "is not a valid description of a space",
        ),
        (
            {"type": "MultiDiscrete", "nvec": np.ones(2), "start": np.zeros(2), "dtype": "int64"},
            "not integers",
        ),
        ({"type": "Dict", "spaces": [[[1], {"type": "Text"}]]}, "got a key [1]"),
        ({"type": "Tuple", "spaces": [{"type": "Text"}]}, "field 'spaces/x/0'"),
    ],
)
def test_malformed_descriptions_of_spaces_are_refused(description: Any, said: str) -> None:
    with pytest.raises(DecodeError) as caught:
        space_of(description, "spaces/x")
    assert said in str(caught.value)


def test_deeply_nested_space_is_one_error() -> None:
    description: dict[str, Any] = {"type": "Text"}
    for _ in range(100_000):
        description = {"type": "Tuple", "spaces": [description]}
    with pytest.raises(DecodeError, match="nested too deeply"):
        space_of(description, "spaces/x")
    while description:  # freeing the whole description would recurse too deeply
        description = description.get("spaces", [{}])[0]


# ---- observations -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = trained("dict", "discrete")
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    made.save(str(path))
    made.stop()
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda o: {"z": o["z"]}, "must have the keys ['z', 'a']"),
        (lambda o: {**o, "z": np.zeros(2, int)}, "must have the same number of rows"),
        (lambda o: {**o, "a": (np.zeros((2, 4)), np.zeros((3, 2), int))}, "['a'][1]: 3"),
        (lambda o: {**o, "a": (np.zeros(5), o["a"][1])}, "must have shape [4] or ['N', 4]"),
        (lambda o: {**o, "a": (["x"] * 4, o["a"][1])}, "must be numbers of shape [4]"),
        (lambda o: {**o, "z": 3}, "must be in the space; got 3"),
    ],
)
def test_predict_refuses_other_observations(
    checkpoint: Path, change: Callable[[Any], Any], said: str
) -> None:
    observation = {"z": 1, "a": (np.zeros(4, np.float32), np.zeros(2, np.int64))}
    policy = polopt.load(checkpoint)
    policy.predict(observation)
    with pytest.raises(ValueError, match="observation") as caught:
        policy.predict(change(observation))
    assert said in str(caught.value)


def test_predict_refuses_a_state(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="has no memory"):
        polopt.load(checkpoint).predict({}, state=np.zeros(3))


# ---- imports and classes ----------------------------------------------------------------------

LOAD = """
import sys, time
import torch
started_s = time.process_time()
import polopt
policy = polopt.load(sys.argv[1])
seconds = time.process_time() - started_s
action, state = policy.predict([0.0, 0.1, 0.0, -0.1])
import json
print(json.dumps({
    "seconds": seconds,
    "action": int(action),
    "modules": [m for m in sys.modules if m.split(".")[0] in ("ray", "pyarrow", "streamlit")
                or m.startswith(("polopt.rollouts", "polopt.optimizers"))],
}))
"""


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = PolicyOptimizerTrainer(SMALL)
    made.train()
    path = tmp_path_factory.mktemp("trained") / "checkpoint"
    made.save(str(path))
    made.stop()
    return path


def test_loading_imports_neither_ray_nor_workers(cartpole: Path, tmp_path: Path) -> None:
    runs = []
    for _ in range(3):  # repeated, because a busy machine may be slow
        done = subprocess.run(
            [sys.executable, "-c", LOAD, cartpole],
            cwd=tmp_path, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stdout))
        assert runs[-1]["modules"] == []
        if runs[-1]["seconds"] < 1.0:
            break
    assert min(run["seconds"] for run in runs) < 1.0
    assert runs[0]["action"] in (0, 1)


def test_load_takes_what_save_returned(tmp_path: Path) -> None:
    made = PolicyOptimizerTrainer(SMALL)
    weights = made.get_policy().get_weights().flat
    for given in (made.save(str(tmp_path / "c")), str(tmp_path), tmp_path / "c"):
        np.testing.assert_array_equal(polopt.load(given).get_weights().flat, weights)
    made.stop()
    with pytest.raises(CheckpointError, match="no such directory"):
        polopt.load(tmp_path / "gone")
    (tmp_path / "model.zip").touch()
    with pytest.raises(
        CheckpointError, match=r"model.zip is a file, but a checkpoint of polopt is"
    ):
        polopt.load(str(tmp_path / "model.zip"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tree: tree["config"]["policy"]["model"].update(fcnet_hiddens=[16_384] * 100),
            "describe a network of 53",
        ),
        (
            lambda tree: tree["spaces"].update(
                observation={"type": "Discrete", "n": 10**15, "start": 0, "dtype": "int64"}
            ),
            "describe a network of 16,0",
        ),
        (
            lambda tree: tree["spaces"].update(
                observation={"type": "Discrete", "n": 2**61, "start": 0, "dtype": "int64"}
            ),
            "describe a network that cannot be made",
        ),
        (lambda tree: tree.pop("spaces"), "it lacks the observation and action spaces"),
        (lambda tree: tree["spaces"].update(action={"type": "Text"}), "field 'spaces/action'"),
        (lambda tree: tree["config"]["policy"].pop("name"), "'config/policy' has no name"),
        (
            lambda tree: tree["spaces"].update(
                action={"type": "Discrete", "n": 1, "start": 0, "dtype": "int64"}
            ),
            "another network",
        ),
    ],
)
def test_changed_checkpoint_is_one_error(
    cartpole: Path, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    """`polopt.load` does not make a network that the config describes, but whose parameters are not
    in the checkpoint."""
    saved = Path(shutil.copytree(cartpole, tmp_path / "c"))
    rewrite(saved, lambda tensors, tree: change(tree))
    with pytest.raises(CheckpointError) as caught:
        polopt.load(saved)
    assert said in str(caught.value)
    assert str(saved) in str(caught.value)


def test_parameters_are_counted_without_memory() -> None:
    for name in POLICIES.names():
        cls, actions = POLICIES.get(name), ACTIONS["box" if supports(name, "box") else "discrete"]
        for observations in (OBSERVATIONS["image"], BOX):
            if name == "crossq" and observations is not BOX:
                continue  # has no convolutions
            config = cls.config_class.parse({})
            made = cls(observations, actions, config)
            found = cls.count_parameters(observations, actions, config)
            assert found == len(made.flat.grads)
    state = torch.random.get_rng_state()
    A2CPolicy.count_parameters(BOX, ACTIONS["box"], A2CPolicy.config_class.parse({}))
    assert torch.equal(torch.random.get_rng_state(), state)


class Mine(A2CPolicy):
    """A policy that is not registered."""


def test_class_that_is_not_known_is_named(tmp_path: Path) -> None:
    made = PolicyOptimizerTrainer({**SMALL, "policy": Mine})
    made.save(str(tmp_path))
    weights = made.get_policy().get_weights().flat
    made.stop()
    del POLICIES._known["Mine"]  # in another process, the class is not registered either
    with pytest.raises(ConfigError, match=r"'Mine', which is not known here.*policy_class=") as one:
        polopt.load(tmp_path)
    assert str(tmp_path) in str(one.value)
    policy: Policy = polopt.load(tmp_path, policy_class=Mine)
    del POLICIES._known["Mine"]
    assert type(policy) is Mine
    np.testing.assert_array_equal(policy.get_weights().flat, weights)
