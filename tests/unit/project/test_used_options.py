"""Each option has a use: the docs say when to set it, a tuned example sets it, or users of RLlib
0.8, TorchRL or PyTorchRL know it from these libraries."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import pytest
from source_tree import ROOT

from polopt.collectors.collector_config import CollectorConfig
from polopt.common.config import Config, ConfigError
from polopt.optimizers.decentralized_allreduce import DecentralizedAllReduceConfig
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.policy_registry import POLICIES
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.trainer_config import TrainerConfig

#: Options that neither the docs nor an example set, and the libraries that have them.
OF_OTHER_LIBRARIES = {
    "standardize_advantages": "RLlib 0.8: `standardize_fields` of its optimizers",
    "vtrace_clip_rho_threshold": "RLlib 0.8: IMPALA and APPO",
    "vtrace_clip_pg_rho_threshold": "RLlib 0.8: IMPALA and APPO",
}


def config_classes() -> Iterator[type[Config]]:
    yield from (TrainerConfig, RolloutConfig, CollectorConfig)
    for registry in (OPTIMIZERS, POLICIES):
        for name in registry.names():
            if (cls := registry.get(name)).__module__.startswith(
                "polopt."
            ):  # excludes plugins of tests
                yield cls.config_class


def keys_of(kind: type[Config]) -> Iterator[str]:
    """Returns the options of a config class, and of the config classes of its options."""
    for name, field in kind.model_fields.items():
        yield field.alias or name
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Config):
                yield from keys_of(inner)


OPTIONS = sorted({key for kind in config_classes() for key in keys_of(kind)})


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Returns the docs, except the pages with tables of all options, and the tuned examples."""
    tables = {ROOT / "docs" / "options.md", *(ROOT / "docs").glob("migration*.md")}
    docs = sorted({*(ROOT / "docs").glob("*.md")} - tables)
    examples = sorted((ROOT / "tuned_examples").glob("*.py"))
    return [path.read_text() for path in [ROOT / "README.md", *docs, *examples]]


def is_set_or_named(key: str, text: str) -> bool:
    """Returns whether a text names an option as code or sets it. The same word in English prose
    does not count."""
    name = re.escape(key)
    forms = (
        rf"`[^`\n]*(?<![\w/]){name}(?![\w/])[^`\n]*`",
        rf'"{name}"',
        rf"(?<![\w/]){name}_?\s?[=:]",
    )
    return any(re.search(form, text) for form in forms)


@pytest.mark.parametrize("key", OPTIONS)
def test_option_has_a_use(key: str, texts: list[str]) -> None:
    found = any(is_set_or_named(key, text) for text in texts)
    assert found != (key in OF_OTHER_LIBRARIES), "remove the option, or its reason in this file"


def test_reasons_are_of_options() -> None:
    assert set(OF_OTHER_LIBRARIES) <= set(OPTIONS)


def test_option_that_is_gone_says_why() -> None:
    said = "'checksum_interval' was removed: the weights of all ranks are compared every 10 rounds"
    with pytest.raises(ConfigError, match=said):
        DecentralizedAllReduceConfig.parse({"checksum_interval": 1})


def test_a_word_of_english_is_no_use() -> None:
    assert not is_set_or_named("sync", "Workers sync weights, and `sync_samples` waits.")
    assert not is_set_or_named("seed", "the result `info/seed`")
    assert is_set_or_named("seed", "`seed: 1`")
    assert is_set_or_named("sync", "Collector(make, sync=True)")
