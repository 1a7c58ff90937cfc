"""Random configs, and the examples that Hypothesis draws for them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from toy_envs import Drift

from polopt.trainers.experiment import Experiment

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
KEYS += ["optimizer", "policy", "backend", "grads_per_step"]
KEYS += ["num_env_runners", "lr_schedule", "zzz"]
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
