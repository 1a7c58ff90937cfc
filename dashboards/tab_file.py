"""Writes the description of an optimizer's dashboard tab to the trial's directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from pyarrow import fs

from polopt.dashboards.data.plots import TABS
from polopt.dashboards.data.tab import TAB_FILE, OptimizerTab, Tab, undeclared
from polopt.metrics.number import find
from polopt.optimizers.optimizer_config import OptimizerConfig
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.trainers.numbers import own_numbers

logger = logging.getLogger("polopt")


def declared_tab(cls: type[PolicyOptimizer]) -> Tab:
    """Returns the tab of an optimizer's class: its attribute `tab`, or the tab of the built-in
    optimizer from which it inherits."""
    for base in cls.__mro__:
        own = vars(base).get("tab")
        if isinstance(own, Tab):
            return own
        if base.__module__.startswith("polopt.optimizers.") and vars(base).get("name") in TABS:
            return TABS[vars(base)["name"]]
    return Tab()


def tab_of(
    cls: type[PolicyOptimizer],
    extra_stats: Mapping[str, Any] | None = None,
    config: OptimizerConfig | None = None,
    policy: type[Policy] = Policy,
) -> OptimizerTab:
    """Returns the description of an optimizer's dashboard tab.

    Args:
        cls: the class of the optimizer.
        extra_stats: the return value of the optimizer's method `extra_stats`, which may have
            numbers that the optimizer does not declare.
        config: the config of the optimizer, with the numbers that plots draw as limits. `None`
            means that the description has no limits.
        policy: the class of the policy.
    """
    tab, numbers = declared_tab(cls), [*own_numbers(cls, policy)]
    for key in _numbers(extra_stats or {}):
        if find(numbers, f"optimizer/{key}") is None:
            numbers.append(undeclared(f"optimizer/{key}"))
    limits = {plot.limit: getattr(config, plot.limit, None) for plot in tab.plots if plot.limit}
    return OptimizerTab(
        name=cls.name or cls.__name__,
        title=cls.__name__,
        phases=tuple(cls.phases),
        numbers=tuple(numbers),
        tab=tab,
        limits=_numbers(limits),
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def write_tab(optimizer: PolicyOptimizer, filesystem: fs.FileSystem, folder: str) -> None:
    """Writes the description of the tab. Only warns if the file cannot be written, because training
    does not need this file.

    Args:
        optimizer: the optimizer of the trial.
        filesystem: file system of the trial's results. It may be cloud storage.
        folder: directory of the trial's results in this file system. Under Tune, this differs from
            the `logdir` of the trainable, which Tune copies only on request.
    """
    policy = type(optimizer.policy)
    tab = tab_of(type(optimizer), optimizer.extra_stats(), optimizer.config, policy)
    path = f"{folder}/{TAB_FILE}"
    try:
        filesystem.create_dir(folder, recursive=True)
        with filesystem.open_output_stream(path) as file:
            file.write(tab.to_json().encode())
    except OSError as error:
        logger.warning("%s was not written: %s", path, error)
