"""The validation of configs. Error messages name the key and the allowed values."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pydantic
import pytest
import torch
from ray import tune

from polopt.common.config import Config, ConfigError, canonical, differ, nearest
from polopt.policies.actor_critic import ActorCriticConfig
from polopt.policies.ppo import PPOConfig
from polopt.trainers.experiment import Experiment


def message(options: Any, where: str = "config") -> str:
    """Returns the error message for `options`."""
    with pytest.raises(ConfigError) as error:
        PPOConfig.parse(options, where)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- unknown keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gama", "gamma"),
        ("clip_parm", "clip_param"),
        ("LR", "lr"),
        ("xyz", None),
    ],
)
def test_unknown_key_lists_nearest_and_allowed_keys(given: str, meant: str | None) -> None:
    text = message({given: 1}, where="policy 'ppo'")
    assert text.startswith(f"policy 'ppo': unknown key {given!r}")
    assert (f"did you mean {meant!r}?" in text) == (meant is not None)
    similar, _, rest = text.partition("Similar: ")[2].partition(" (of ")
    shown = similar.split(", ") if similar else []
    assert set(shown) < set(PPOConfig.keys())
    assert len(shown) <= 6
    if meant is None:
        assert text.endswith(f"None of the {len(PPOConfig.keys())} names is similar")
    elif meant in PPOConfig.keys():  # noqa: SIM118 - a classmethod of Config, not of a dict
        assert rest == f"{len(PPOConfig.keys())} names)"
        assert meant == shown[0]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("clip", ["clip_param", "clip_rewards", "grad_clip"]),
        ("normalise_obs", ["normalize_observations"]),
        ("learning_momentum", []),
    ],
)
def test_only_names_like_the_given_one_are_shown(given: str, shown: list[str]) -> None:
    text = message({given: 1})
    similar = text.partition("Similar: ")[2].partition(" (of ")[0]
    assert set(shown) <= set(similar.split(", "))
    assert bool(shown) == bool(similar)


def test_unknown_nested_key_lists_nearest() -> None:
    text = message({"model": {"fcnet_hidden": [3]}})
    assert "'model.fcnet_hidden'" in text
    assert "did you mean 'fcnet_hiddens'?" in text
    assert "post_fcnet_hiddens" in text.partition("Similar:")[2]


def test_non_string_key_is_unknown() -> None:
    assert "unknown key 5" in message({5: 1})


def test_no_suggestion_without_similar_key() -> None:
    assert nearest("xyzzy", ["gamma", "lr"]) == ""


# ---- wrong values -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"gamma": "high"}, "number"),
        ({"gamma": [0.9]}, "number"),
        ({"gamma": None}, "number"),
        ({"gamma": 1.5}, "less than or equal to 1"),
        ({"gamma": -0.1}, "greater than or equal to 0"),
        ({"gamma": math.nan}, "finite"),
        ({"grad_clip": math.inf}, "finite"),
        ({"grad_clip": 0.0}, "greater than 0"),
        ({"num_sgd_iter": 2.5}, "a whole number"),
        ({"num_sgd_iter": 0}, "greater than or equal to 1"),
        ({"sgd_minibatch_size": -1}, "greater than or equal to 0"),
        ({"standardize_advantages": "maybe"}, "True or False"),
        ({"model": 3}, "a dict of options"),
    ],
    ids=str,
)
def test_wrong_value_error_has_allowed_values(options: dict[str, Any], allowed: str) -> None:
    ((key, value),) = options.items()
    text = message(options)
    assert text.startswith(f"config: key {key!r}: got {value!r}; allowed: ")
    assert allowed in text.partition("allowed:")[2]
    assert "valid" not in text


def test_one_error_names_every_wrong_key() -> None:
    """A script ported from Stable-Baselines3 took one start for each of its options."""
    given = {
        "learning_rate": 3e-4,
        "n_steps": 128,
        "batch_size": 64,
        "framework": "tf",
        "gamma": "x",
        "lr": 20.0,
        "num_workers": -1,
        "buffer_size": 3,
        "clip_range": 0.2,
        "model": {"fcnet_hidden": [3], "use_lstm": "always", "fcnet_hiddens": ["x", "y"]},
        "optimizer": {"name": "sync_samples", "n_epochs": 3, "trainbatch_size": 5},
    }
    with pytest.raises(ConfigError) as caught:
        Experiment.parse(given, {})
    named = re.findall(r"key '([\w.]+)'", str(caught.value))
    options = [key for key in given if key not in ("model", "optimizer")]
    inner = ["model.fcnet_hidden", "model.use_lstm", "model.fcnet_hiddens.0"]
    assert sorted(named) == sorted([*options, *inner, "n_epochs", "trainbatch_size", "env"])
    assert len(str(caught.value).splitlines()) == len(named)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": lambda progress: 1e-3}, "a number from 0 to 10, or a schedule [[environment steps"),
        ({"lr": 20.0}, "a number from 0 to 10, or a schedule [[environment steps, number], ...]"),
        ({"lr": tune.loguniform(1e-4, 1e-2)}, "Search spaces need `tune.Tuner` or a file for"),
        ({"gamma": {"grid_search": [0.9]}}, "a number. Search spaces need `tune.Tuner` or a file"),
        ({"policy": "dqn", "target_network_update_freq": 0}, "With 1, the target networks move"),
        (
            {"policy": "dqn", "training_intensity": None},
            "n environment steps, train_batch_size / n",
        ),
    ],
)
def test_allowed_values_are_complete(options: dict[str, Any], said: str) -> None:
    """The error for a learning rate allowed only a number, although a schedule is allowed."""
    if "policy" in options:
        options = {**options, "optimizer": "sync_replay"}
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"env": "CartPole-v1", **options}, {})
    assert said in str(caught.value).partition("allowed: ")[2]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"fcnet_hiddens": 64}, "fcnet_hiddens': got 64; allowed: a list of the widths of layers"),
        ({"fcnet_hiddens": [1] * 101}, "such as [64, 64], at most 100"),
        ({"fcnet_hiddens": ["x"]}, "'model.fcnet_hiddens.0': got 'x'; allowed: a whole number"),
        ({"post_fcnet_hiddens": 64}, "got 64; allowed: a list of the widths of layers, such as ["),
        ({"conv_filters": 3}, "got 3; allowed: a list of [channels, kernel, stride], such as [[16"),
        ({"conv_filters": [[16, 4]]}, "got [16, 4]; allowed: a list of [channels, kernel, stride]"),
        ({"custom_options": 3}, "'model.custom_options': got 3; allowed: a dict"),
        ({"use_lstm": "always"}, "'model.use_lstm': got 'always'; allowed: True or False"),
    ],
)
def test_wrong_value_of_the_network_is_told_in_plain_words(
    model: dict[str, Any], said: str
) -> None:
    assert said in message({"model": model})


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"fcnet_activation": "swish"}, "model.fcnet_activation"),
        ({"fcnet_hiddens": [64, 0]}, "model.fcnet_hiddens.1"),
        ({"fcnet_hiddens": 64}, "model.fcnet_hiddens"),
        ({"initial_log_std": math.nan}, "model.initial_log_std"),
    ],
)
def test_wrong_nested_value_error_has_path(model: dict[str, Any], key: str) -> None:
    assert f"key {key!r}: got " in message({"model": model})


@pytest.mark.parametrize(
    "key", ["gamma", "lambda", "grad_clip", "num_sgd_iter", "kl_stop", "lr", "entropy_coeff"]
)
def test_bool_is_not_a_number(key: str) -> None:
    text = message({key: True})
    assert f"key {key!r}: got True" in text
    assert "number" in text.partition("allowed:")[2]


def test_options_must_be_a_mapping() -> None:
    assert "got [1, 2]; allowed: a mapping" in message([1, 2])


# ---- values that are right --------------------------------------------------------------------


def test_numpy_and_yaml_numbers_are_accepted() -> None:
    # Tune samples NumPy numbers, and YAML 1.1 reads 1e-3 as a string.
    config = PPOConfig.parse(
        {"lr": "1e-3", "gamma": np.float32(0.5), "num_sgd_iter": np.int64(3), "kl_target": 1}
    )
    assert (config.lr, config.gamma, config.num_sgd_iter, config.kl_target) == (0.001, 0.5, 3, 1.0)


def test_none_disables_optional_features() -> None:
    config = PPOConfig.parse({"grad_clip": None, "vf_clip_param": None})
    assert config.grad_clip is None
    assert config.vf_clip_param is None


def test_subclass_overrides_defaults() -> None:
    base, ppo = ActorCriticConfig.parse({}), PPOConfig.parse({})
    assert (base.lambda_, ppo.lambda_) == (1.0, 0.95)
    assert base.gamma == ppo.gamma == 0.99


def test_config_is_frozen() -> None:
    config = PPOConfig.parse({})
    with pytest.raises(pydantic.ValidationError):
        config.gamma = 0.5  # type: ignore[misc]


def test_options_survive_json() -> None:
    given = {"lambda": 0.5, "lr": [[0, 0.1], [10, 0.0]], "model": {"fcnet_hiddens": [8]}}
    config = PPOConfig.parse(given)
    options = config.to_dict()
    assert options["lambda"] == 0.5
    assert "lambda_" not in options
    assert PPOConfig.parse(options) == config
    assert PPOConfig.parse(json.loads(json.dumps(options))) == config


# ---- names ------------------------------------------------------------------------------------


def test_two_names_of_a_key() -> None:
    assert PPOConfig.parse({"lambda_": 1}).lambda_ == 1
    assert PPOConfig.parse({"lambda_": 1, "lambda": 1}).lambda_ == 1
    text = message({"lambda_": 1, "lambda": 0.5})
    assert "'lambda_' and 'lambda' are two names of 'lambda'" in text
    assert "values 1 and 0.5" in text


def test_canonical_keeps_unknown_keys() -> None:
    assert canonical({"a": 1, "b": 2}, {"a": "c"}) == {"c": 1, "b": 2}


@pytest.mark.parametrize("make", [np.zeros, torch.zeros])
def test_arrays_differ_unless_they_are_one_object(make: Any) -> None:
    array = make(2)
    assert not differ(array, array)
    assert differ(array, make(2))
    assert differ(array, make(3))
    assert differ(array, None)


def test_error_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_message_of_model_validator_is_unchanged() -> None:
    class Range(Config):
        low: int = 0
        high: int = 1

        @pydantic.model_validator(mode="after")
        def _ordered(self) -> Range:
            if self.low > self.high:
                raise ValueError(f"key 'low': got {self.low}; allowed: at most 'high'")
            return self

    with pytest.raises(ConfigError, match=r"^range: key 'low': got 5; allowed: at most 'high'$"):
        Range.parse({"low": 5}, "range")


# ---- schedules --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [],
        [0.1],
        [0, 0.1],
        [[0]],
        [[0, 0.1, 2]],
        [[0, 0.1], 5],
        [[0, None]],
        [[None, 0.1]],
        [["early", 0.1]],
        [[0, "big"]],
        [[0, math.nan]],
        [[0, 0.1], [math.inf, 0.0]],
        [[0, True]],
        [[-1, 0.1]],
        [[0, 0.1], [0, 0.2]],
        [[10, 0.1], [5, 0.2]],
        [[0, -0.1]],
        {0: 0.1},
        "soon",
        -0.1,
        None,
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["lr", "entropy_coeff"])
def test_malformed_schedule_raises_config_error(key: str, value: Any) -> None:
    text = message({key: value})
    assert text.startswith(f"config: key {key!r}: got ")
    assert "allowed: " in text


def test_schedule_is_converted() -> None:
    config = PPOConfig.parse({"lr": [[0, 1], (100, "1e-3")], "entropy_coeff": [[5, 0.0]]})
    assert config.lr == [(0, 1.0), (100, 0.001)]
    assert config.entropy_coeff == [(5, 0.0)]
