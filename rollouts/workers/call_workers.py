"""Functions that call the workers of a set outside of a strategy (the optimizer of a run).

They set workers up, save and restore the state of workers, and run functions of the user."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from polopt.rollouts.envs.env_state import merge_env_statistics
from polopt.rollouts.workers.calls import Calls
from polopt.rollouts.workers.errors import FunctionError
from polopt.rollouts.workers.worker_set import WorkerSet, call_method


def foreach_worker(
    workers: WorkerSet, fn: Callable[..., Any], *args: Any, only: int | None = None
) -> dict[int, Any]:
    """Runs `fn(worker, *args)` in the process of every remote worker that is up. `worker` is the
    `RolloutWorker` in that process.

    With `num_workers=0`, the function runs on the local worker, whose index is 0. `foreach_worker`
    is for programs outside of a strategy: results do not count the steps that `fn` samples. The
    name is RLlib's.

    Args:
        workers: the workers. `foreach_worker` first waits for workers, as `WorkerSet.up` does.
        fn: a function that cloudpickle can pickle.
        args: further arguments. Call `ray.put` once for a large argument, and pass the reference.
        only: index of the only worker to call. None means all workers that are up.

    Returns:
        the return values by worker index. The dict does not contain workers whose call failed. The
        dict is empty if the worker `only` is not up. Workers that failed are replaced, unless they
        failed too often.

    Raises:
        WorkersFailedError: workers keep failing, or too few workers remain.
        FunctionError: in this call of `foreach_worker`, the function raised before it succeeded in
            any worker. Also raised if the function, its arguments or its value cannot be pickled.
        NonFiniteError, EnvironmentAPIError, CallbackError: see `CallError`.
        TransportError: see `Channel.send`.
        Exception: with `num_workers=0`, the unchanged exception of the function.
    """
    calls = Calls(workers, "foreach_worker", after_failure="drop")
    for handle in workers.up():
        if only in (None, handle.index):
            calls.send(handle, fn, *args)
    return {reply.worker.index: reply.value for reply in calls.all()}


def call_each(
    workers: WorkerSet, method: str, args: Mapping[int, tuple[Any, ...]]
) -> dict[int, Any]:
    """Calls a method of several remote workers, and waits for all replies.

    Args:
        workers: the workers.
        method: name of the method of `RolloutWorker`.
        args: arguments of the method, by worker index. Workers that are missing here, or are not
            up, are not called.

    Returns:
        see `foreach_worker`.

    Raises:
        WorkersFailedError: see `foreach_worker`.
        FunctionError: the method raised in a worker, or its arguments or its value cannot be
            pickled.
    """
    calls = Calls(workers, f"call of {method}", is_work=False, after_failure="drop")
    for handle in workers.remote:
        if handle.up and handle.index in args:
            calls.send(handle, call_method, method, *args[handle.index])
    return {reply.worker.index: reply.value for reply in calls.all()}


def set_up_each(workers: WorkerSet, method: str, args: Mapping[int, tuple[Any, ...]]) -> None:
    """Calls a method as `call_each` does, and also in workers that are starting.

    A worker that is starting runs the method before any work. Replacements that start later do not
    run the method. So the caller must also store data that replacements need, for example in
    `workers.config`."""
    for handle in workers.remote:
        if not handle.up and handle.index in args:
            handle.set_up.append((call_method, (method, *args[handle.index])))
    call_each(workers, method, args)


def set_up_all(workers: WorkerSet, method: str, *args: Any) -> None:
    """Calls `set_up_each` for every remote worker, with the same arguments for each."""
    set_up_each(workers, method, {handle.index: args for handle in workers.remote})


def latest_statistics(workers: WorkerSet) -> dict[str, dict[str, Any]]:
    """Returns the running statistics of environment wrappers, as the driver last received them from
    each worker. The replies of a worker carry these statistics about once a second, or always if
    the run is recorded.

    Returns:
        `{"statistics": ...}` by worker index. The index is a string. The dict does not contain
        workers without such statistics.
    """
    statistics = dict(workers.env_statistics)
    statistics[0] = workers.local.get_statistics()
    return _as_saved(statistics)


def present_statistics(workers: WorkerSet) -> dict[str, dict[str, Any]]:
    """Returns the current running statistics, in the format of `latest_statistics`. Calls all
    remote workers that are up, and waits for their replies."""
    statistics = call_each(
        workers, "get_statistics", {handle.index: () for handle in workers.remote if handle.up}
    )
    statistics[0] = workers.local.get_statistics()
    return _as_saved(statistics)


def _as_saved(statistics: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(index): {"statistics": one} for index, one in statistics.items() if one}


def restore_workers(workers: WorkerSet, restore_count: int, states: Mapping[str, Any]) -> None:
    """Makes all workers continue a run that was saved. Their next calls carry the present weights
    of the driver.

    Args:
        workers: the workers. The function first waits for workers, as `WorkerSet.up` does.
        restore_count: number of times that the run had been restored when it was saved.
        states: see `restore_statistics`.

    Raises:
        ValueError: see `restore_statistics`.
        WorkersFailedError, FunctionError: see `call_each`.
    """
    workers.weights.take(force=True)
    if workers.remote:
        workers.up()
    begin_restored_run(workers, restore_count + 1)
    restore_statistics(workers, states)


def begin_restored_run(workers: WorkerSet, restore_count: int) -> None:
    """Makes all workers and later replacements begin new episodes, with random numbers that were
    not used before the restore. A local worker that the set does not own continues unchanged. See
    `RolloutWorker.begin_restored_run`."""
    workers.config = dataclasses.replace(workers.config, restore_count=restore_count)
    if workers.owns_local:
        workers.local.begin_restored_run(restore_count)
    set_up_all(workers, "begin_restored_run", restore_count)


def update_algorithm_parameter(workers: WorkerSet, name: str, value: Any) -> None:
    """Changes an option of the policy in all remote workers and later replacements. The caller has
    already changed this option in the policy of the local worker."""
    workers.config = dataclasses.replace(workers.config, policy=workers.local.policy.config)
    set_up_all(workers, "update_algorithm_parameter", name, value)


def restore_statistics(workers: WorkerSet, states: Mapping[str, Any]) -> None:
    """Restores the running statistics of the environment wrappers in all workers. A worker without
    saved statistics gets the merged statistics of all saved workers.

    Args:
        workers: the workers. A worker that is starting gets its statistics before any work.
        states: the return value of `present_statistics` or `latest_statistics`.

    Raises:
        ValueError: the wrappers of the environments do not match the saved statistics.
        WorkersFailedError: see `call_each`.
    """
    saved = {int(i): one["statistics"] for i, one in states.items() if one.get("statistics")}
    if not saved:
        return
    together = merge_env_statistics(list(saved.values()))
    own = {handle.index: saved.get(handle.index, together) for handle in workers.remote}
    workers.env_statistics = dict(own)
    try:
        set_up_each(workers, "set_statistics", {index: (one,) for index, one in own.items()})
    except FunctionError as error:
        workers.env_statistics.clear()
        raise ValueError(error.raised or str(error)) from error
    workers.local.set_statistics(saved.get(0, together))


def sampler_states(workers: WorkerSet) -> dict[str, Any]:
    """Returns the state of the environments, random numbers and running statistics of the local
    worker and of all remote workers that are up, by worker index. The index is a string.

    A run that is restored from this state continues bit for bit on two conditions. First, its
    environments must have `get_checkpoint_state` and `set_checkpoint_state` (see
    `polopt.rollouts.envs.env_state`). Without these methods, new episodes begin. Second, workers
    must not sample while the driver learns, as they do with `collection: overlapped`."""
    up = {handle.index: (False,) for handle in workers.remote if handle.up}
    states = {0: workers.local.get_state(False)} | call_each(workers, "get_state", up)
    return {str(index): saved for index, saved in states.items()}


def restore_samplers(workers: WorkerSet, states: Mapping[str, Any]) -> None:
    """Restores the state that `sampler_states` returned, except for the running statistics of
    wrappers. `restore_statistics` restores these statistics."""
    own = {
        int(index): {key: value for key, value in saved.items() if key != "statistics"}
        for index, saved in states.items()
    }
    if 0 in own:
        workers.local.set_state(own.pop(0))
    set_up_each(workers, "set_state", {index: (saved,) for index, saved in own.items()})
