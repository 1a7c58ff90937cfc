"""All names that polopt takes from Ray beyond Ray's documented interface, each with a fallback.

A release of Ray may move or remove such a name. The rest of polopt imports only the modules in
`DOCUMENTED_MODULES`. `tests/unit/project/test_source_rules.py` lists the names and checks this, and
`tests/unit/common/test_ray_names.py` runs each function without the name that it takes from Ray.
Modules of Ray are imported in functions, because `import polopt` loads neither Ray nor Tune.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

#: The modules of Ray from which each module of polopt may import public names. `ray.cloudpickle` is
#: a name in `ray`.
DOCUMENTED_MODULES = frozenset(
    {
        "ray",
        "ray.exceptions",
        "ray.tune",
        "ray.tune.logger",
        "ray.tune.schedulers",
        "ray.tune.search",
        "ray.tune.search.basic_variant",
        "ray.util.metrics",
        "ray.util.scheduling_strategies",
    }
)
#: Environment variables for commands, which are set before Ray is imported, because Ray reads some
#: of them at that time. A release of Ray that does not know one of them ignores it.
QUIET_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # also turns off the notice about usage statistics
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # avoids a FutureWarning for each actor
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # paths in `env_config` are relative to the current directory
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}
#: The environment variable with the classes of callbacks that Tune adds to each experiment, and the
#: variable that keeps Tune from changing the current directory.
CALLBACKS_VARIABLE = "RAY_TUNE_CALLBACKS"
CHDIR_VARIABLE = "RAY_CHDIR_TO_TRIAL_DIR"
#: The function of Ray that starts the control service. It waits up to 30 s for a file that the
#: service writes, and no other thread of the process can run during this wait. If no function has
#: this name, polopt does not wait for it.
START_CONTROL_SERVICE = "start_gcs_server"


def storage_folder() -> str:
    """Returns the directory in which Tune writes results by default."""
    try:
        from ray.train.constants import DEFAULT_STORAGE_PATH as FOLDER
    except ImportError:
        return os.path.expanduser("~/ray_results")
    return str(FOLDER)


def storage_of(trainable: Any) -> Any:
    """Returns the object with the paths of a trial, or None without Tune. If Ray has no such
    object, returns None."""
    return getattr(trainable, "_storage", None)


def registered(category: str, name: str) -> Callable[..., Any] | None:
    """Returns what is registered with Tune under a name. Returns None if nothing is, or if this
    process has not imported Tune. If Ray has no such registry, returns None.

    Args:
        category: `env_creator`, `trainable_class` or `rllib_model`.
        name: the registered name.
    """
    # Tune is imported in its trials, and in drivers that registered a name. Other processes find no
    # names.
    registry = getattr(sys.modules.get("ray.tune.registry"), "_global_registry", None)
    if registry is None or not registry.contains(category, name):
        return None
    value: Callable[..., Any] = registry.get(category, name)
    return value


def register_with_tune(category: str, name: str, value: Any) -> None:
    """Puts an object into Tune's registry, so that `registered` finds it in all processes of the
    cluster. If Ray has no such registry, only this process knows the object."""
    tune_registry = getattr(import_module("ray.tune.registry"), "_global_registry", None)
    if tune_registry is not None:
        tune_registry.register(category, name, value)


def accept_as_config(cls: type[Any]) -> None:
    """Makes Tune accept objects of a class, which has a method `to_dict`, as the config of an
    experiment. If Ray cannot do this, Tune accepts only the dict of `to_dict`."""
    with suppress(ImportError, AttributeError):
        from ray.tune import tune as runner

        runner._Config.register(cls)


def points(space: dict[str, Any]) -> Iterator[tuple[Mapping[tuple[Any, ...], Any], Any]]:
    """Yields the points of a search space, as Tune makes them: the values that were chosen, by
    their path, and the space with these values. If Ray has no such function, yields nothing, so
    that only the trials themselves check their configs."""
    try:
        from ray.tune.search.variant_generator import generate_variants
    except ImportError:
        return
    yield from generate_variants(space)


class Distributions(NamedTuple):
    """The classes of Tune's distributions. `any` is the base class, and `quantized` is the class of
    a sampler."""

    any: type[Any]
    categorical: type[Any]
    floating: type[Any]
    integer: type[Any]
    quantized: type[Any]


def distributions() -> Distributions:
    """Returns the classes of Tune's distributions. If Ray has moved them, returns the classes of
    the objects that the documented functions make."""
    try:
        from ray.tune.search.sample import Categorical, Domain, Float, Integer, Quantized
    except ImportError:
        from ray import tune

        quantized = tune.quniform(0.0, 1.0, 0.5)
        floating = type(quantized)
        return Distributions(
            floating.__mro__[-2],
            type(tune.choice([0])),
            floating,
            type(tune.randint(0, 2)),
            type(quantized.get_sampler()),
        )
    return Distributions(Domain, Categorical, Float, Integer, Quantized)


def in_notebook() -> bool:
    """Returns whether this process runs a notebook. If Ray has no such function, asks IPython."""
    try:
        from ray.widgets.util import in_notebook as of_ray
    except ImportError:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        return type(shell).__name__ == "ZMQInteractiveShell"
    return bool(of_ray())


def notebook_callback() -> type[Any]:
    """Returns the class of the callback that shows the progress of an experiment in a notebook. If
    Ray has no such class, returns Tune's class of callbacks, which shows nothing."""
    try:
        from ray.tune.progress_reporter import TrialProgressCallback
    except ImportError:
        from ray.tune import Callback

        return Callback
    return TrialProgressCallback


def draining_nodes(address: str) -> frozenset[str]:
    """Returns the ids of the nodes of a cluster that are draining, which means that they will end
    soon. If Ray has no such function, returns an empty set, so that workers of such a node are
    replaced when the node has ended.

    Args:
        address: the address of Ray's control service.
    """
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
    except ImportError:
        return frozenset()
    status = get_cluster_status(address)
    nodes = (*status.active_nodes, *status.idle_nodes)
    return frozenset(str(node.node_id) for node in nodes if node.node_status == "DRAINING")


def waiting_demands(address: str) -> list[tuple[dict[str, float], int]]:
    """Returns the resources that tasks and actors of a cluster wait for, each with the number of
    requests. If Ray has no such function, returns an empty list, so that a message about a start
    that waits does not name other programs.

    Args:
        address: the address of Ray's control service. It also answers without an autoscaler.
    """
    try:
        from ray.autoscaler.v2.sdk import get_cluster_status
    except ImportError:
        return []
    demands = get_cluster_status(address).resource_demands.ray_task_actor_demand
    return [
        (bundle.bundle, bundle.count) for demand in demands for bundle in demand.bundles_by_count
    ]
