"""A Collector with arbitrary options either collects, or raises one `ConfigError` before any actor
starts."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_configs import check_message, junk, names, numbers, plausible, quietly
from toy_envs import Drift

from polopt import Collector
from polopt.collectors.collector_arguments import CollectorArguments
from polopt.collectors.collector_config import CollectorConfig
from polopt.common.config import ConfigError

SMALL: dict[str, Any] = {"frames_per_batch": 8, "num_collectors": 0, "num_envs": 2, "seed": 1}
#: Options with larger values are checked, but the test does not collect with them. Collecting would
#: take long or would need other processes.
LARGEST = {"frames_per_batch": 200, "num_collectors": 0, "num_envs": 8}
#: Options that need other processes.
ELSEWHERE = {"num_workers_per_collector", "ray_init_config"}

keys = st.sampled_from([*sorted(set(CollectorConfig.model_fields) - ELSEWHERE), "num_envz"])
mutations = st.one_of(
    st.dictionaries(keys, plausible, min_size=1, max_size=3),
    st.dictionaries(keys, st.one_of(numbers, junk, names), min_size=1, max_size=3),
)


def is_small(config: CollectorConfig) -> bool:
    quick = all((getattr(config, key) or 0) <= most for key, most in LARGEST.items())
    return quick and config.num_collectors == 0 and config.vectorization_mode != "async"


def either_collects_or_says_why(options: dict[str, Any]) -> bool:
    """Checks that a Collector with these options collects or raises one `ConfigError`. Returns
    whether it collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = CollectorConfig.parse(options, "Collector")
            if not is_small(config):
                CollectorArguments(Drift, None, config)
                return False
            collector = Collector(Drift, None, **options)
        except ConfigError as error:
            check_message(str(error))
            return False
        with collector:
            # `postproc` may be any callable. If it does not return a SampleBatch, the error is not
            # a `ConfigError`.
            if config.postproc is None:
                batch = next(collector, None)
                if isinstance(batch, list):
                    batch = batch[0]
                assert (batch is None) == (config.total_frames == 0)
                assert batch is None or np.isfinite(batch["rewards"]).all()
    return True


@given(mutations)
@settings(quietly, max_examples=150)
def test_mutated_options_collect_or_are_a_config_error(changes: dict[str, Any]) -> None:
    either_collects_or_says_why({**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "collects"),
    [({}, True), ({"num_envs": 4}, True), ({"frames_per_batch": math.nan}, False),
     ({"total_frames": 2**64}, False), ({"num_envz": 2}, False)],
)  # fmt: skip
def test_some_options_collect_and_others_raise(changes: dict[str, Any], collects: bool) -> None:
    assert either_collects_or_says_why({**SMALL, **changes}) == collects


@pytest.mark.slow
@given(mutations)
@settings(quietly, max_examples=3000, derandomize=False)
def test_many_mutated_options(changes: dict[str, Any]) -> None:
    either_collects_or_says_why({**SMALL, **changes})
