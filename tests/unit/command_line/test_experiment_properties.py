"""Experiments of any shape, in files and as arguments, are accepted or are one `ConfigError`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import (
    KEYS,
    check_message,
    quietly,
)

from polopt.command_line.plan import plan
from polopt.common.config import ConfigError

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
