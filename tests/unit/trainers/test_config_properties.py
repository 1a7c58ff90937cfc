"""Each random config either trains, or raises one `ConfigError` before any actor starts."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_envs import Drift

from polopt.command_line.plan import plan
from polopt.common.config import ConfigError
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer

#: A config whose iterations take milliseconds.
SMALL: dict[str, Any] = {
    "env": Drift,
    "num_workers": 0,
    "num_envs_per_worker": 2,
    "rollout_fragment_length": 5,
    "min_sample_timesteps_per_iteration": 10,
    "num_sgd_iter": 1,
    "sgd_minibatch_size": 6,
    "model": {"fcnet_hiddens": [4]},
    "seed": 1,
}
#: Configs with larger values are checked, but the test does not train them, because this would take
#: long.
LARGEST = {
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 64,
    "min_sample_timesteps_per_iteration": 200,
    "min_time_s_per_iteration": 0.01,
    "num_sgd_iter": 4,
    "train_batch_size": 500,
    "num_workers": 0,
}

numbers = st.one_of(
    st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 0.5, 1e-3, -0.0, 1e-300, 1e30, 2**31, 2**64, 10**400]),
    st.sampled_from([math.nan, math.inf, -math.inf, "1e-3", "12", "nan", np.float32(0.3)]),
    st.integers(-3, 40),
    st.floats(-2.0, 60.0),
    st.floats(),
    st.integers(),
)
junk = st.one_of(
    st.none(),
    st.booleans(),
    st.text(max_size=6),
    st.lists(numbers, max_size=3),
    st.lists(st.tuples(numbers, numbers), max_size=3),
    st.dictionaries(st.text(max_size=4), numbers, max_size=2),
    st.sampled_from([b"x", object(), int, Drift, (1, 2), {1}, np.zeros(2), print, 3 + 4j]),
)
names = st.sampled_from(
    [
        "tanh",
        "relu",
        "sync",
        "async",
        "vector_entry_point",
        "next_step",
        "same_step",
        "disabled",
        "ppo",
        "a2c",
        "a3c",
        "scale",
        "sync_samples",
        "async_gradients",
        "decentralized_allreduce",
        "gloo",
        "nccl",
        "CartPole-v1",
        "CartPole-v9",
        "Pendulum-v1",
        "nosuchmodule:Env-v0",
    ]
)
MODEL_KEYS = list(Experiment.parse(SMALL, {}).policy.model.keys())
PARTS = ("trainer", "rollout", "policy", "optimizer")
KEYS = [key for part in PARTS for key in getattr(Experiment.parse(SMALL, {}), part).to_dict()]
KEYS += [
    "optimizer",
    "policy",
    "backend",
    "grads_per_step",
    "num_env_runners",
    "lr_schedule",
    "zzz",
]
plausible = st.one_of(
    st.integers(0, 8),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1e6, allow_subnormal=True),
    st.booleans(),
    names,
    st.lists(st.tuples(st.integers(0, 9), st.floats(0.0, 1.0)), min_size=1, max_size=2),
)
keys = st.sampled_from(KEYS + [f"model.{key}" for key in MODEL_KEYS])
mutations = st.one_of(
    st.dictionaries(keys, plausible, min_size=1, max_size=2),
    st.dictionaries(keys, plausible, min_size=1, max_size=2),
    st.dictionaries(keys, st.one_of(numbers, junk, names), min_size=1, max_size=2),
)
quietly = settings(
    deadline=None,
    derandomize=True,  # reproducible examples. The `slow` test draws new examples.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def mutated(changes: dict[str, Any], base: dict[str, Any] = SMALL) -> dict[str, Any]:
    config = {**base, "model": dict(base["model"])}
    for key, value in changes.items():
        if key.startswith("model.") and isinstance(config["model"], dict):
            config["model"][key.removeprefix("model.")] = value
        else:
            config[key] = value
    return config


def check_message(message: str) -> None:
    lines = message.split("\n")
    assert len(set(lines)) == len(lines), "one line for each wrong key"
    assert all(0 < len(line) < 1000 for line in lines)


def is_small(experiment: Experiment) -> bool:
    options: dict[str, Any] = {}
    for part in (experiment.trainer, experiment.rollout, experiment.policy, experiment.optimizer):
        options |= part.to_dict()
    quick = all((options.get(key) or 0) <= most for key, most in LARGEST.items())
    return quick and options["vectorization_mode"] != "async"


def trains_or_raises_config_error(config: dict[str, Any]) -> bool:
    """Returns whether the config trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for example, warnings about outdated environments
        try:
            experiment = Experiment.parse(config, {})
            experiment.make_worker_config()
            if not is_small(experiment):
                return False
            trainer = PolicyOptimizerTrainer(config)
        except ConfigError as error:
            check_message(str(error))
            return False
        try:
            result = trainer.train()
            assert result["num_env_steps_sampled_lifetime"] > 0
            assert np.isfinite(trainer.get_policy().get_weights().flat).all()
        finally:
            trainer.stop()
    return True


@given(mutations)
@settings(quietly, max_examples=150)
def test_mutated_config_trains_or_is_a_config_error(changes: dict[str, Any]) -> None:
    trains_or_raises_config_error(mutated(changes))


@given(st.sampled_from(sorted(PRESETS)), mutations)
@settings(quietly, max_examples=150)
def test_every_preset_checks_its_config(preset: str, changes: dict[str, Any]) -> None:
    try:
        Experiment.parse(mutated(changes, {**SMALL, "num_workers": 1}), {}).make_worker_config()
        Experiment.parse(mutated(changes, {**SMALL, "num_workers": 1}), PRESETS[preset].preset)
    except ConfigError as error:
        check_message(str(error))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(mutations)
@settings(quietly, max_examples=3000, derandomize=False)
def test_many_mutated_configs(changes: dict[str, Any]) -> None:
    trains_or_raises_config_error(mutated(changes))


# ---- files and the command line ---------------------------------------------------------------

EXAMPLE = {
    "run": "A2C",
    "config": {"env": "CartPole-v1", "num_workers": 1, "lr": 1e-3, "model": {"fcnet_hiddens": [4]}},
    "stop": {"training_iteration": 3},
}
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


def planned(path: Path, arguments: list[str]) -> None:
    try:
        plan(str(path), arguments)
    except ConfigError as error:
        check_message(" ".join(str(error).split()))  # the command line shows it on one line


@given(
    st.dictionaries(st.sampled_from(["run", "config", "stop", "goal", "extra"]), plain, max_size=2),
    st.dictionaries(st.sampled_from(KEYS), plain, max_size=2),
)
@settings(quietly, max_examples=80)
def test_yaml_of_any_shape(tmp_path: Path, top: dict[str, Any], config: dict[str, Any]) -> None:
    path = tmp_path / "experiment.yaml"
    described = {**EXAMPLE, "config": {**EXAMPLE["config"], **config}, **top}
    path.write_text(yaml.safe_dump(described), encoding="utf-8", errors="surrogatepass")
    planned(path, [])


@given(st.integers(0, 120), st.binary(min_size=1, max_size=4))
@settings(quietly, max_examples=100)
def test_yaml_with_bytes_overwritten(tmp_path: Path, at: int, noise: bytes) -> None:
    path = tmp_path / "experiment.yaml"
    text = bytearray(yaml.safe_dump(EXAMPLE).encode())
    text[at : at + len(noise)] = noise
    path.write_bytes(bytes(text))
    planned(path, [])


@given(
    st.lists(
        st.one_of(
            st.text(max_size=12),
            st.sampled_from(
                [
                    "lr=",
                    "=3",
                    "lr=[",
                    "stop.=1",
                    "stop.x=2",
                    "stop.training_iteration=a",
                    "run=",
                    "run=A2",
                    "model.=3",
                    "model.fcnet_hiddens.x=1",
                    "config=3",
                    "seed={a: 1}",
                    "lr=!!python/none",
                ]
            ),
        ),
        max_size=2,
    )
)
@settings(quietly, max_examples=80)
def test_arguments_of_any_shape(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(EXAMPLE))
    planned(path, arguments)
