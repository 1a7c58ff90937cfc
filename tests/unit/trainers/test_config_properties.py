"""Each random config either trains, or raises one `ConfigError` before any actor starts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import (
    KEYS,
    SMALL,
    check_message,
    is_small,
    mutated,
    mutations,
    quietly,
)

from polopt.command_line.plan import plan
from polopt.common.config import ConfigError
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS
from polopt.trainers.trainer import PolicyOptimizerTrainer


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
