"""Calls that all workers of a set get, outside of a strategy: set-up, state, a user's functions."""

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
    """Runs `fn(worker, *args)` in the process of every remote worker that is up, where `worker` is
    the `RolloutWorker`. With `num_workers` of 0, on the local one, whose index is 0. For programs
    outside of a strategy: what the calls sample is not counted. (The name is RLlib's.)

    Args:
        workers: waits until enough of them are up for a run to begin.
        fn: a function that cloudpickle can send.
        args: further arguments. `ray.put` large ones once, and pass the reference.
        only: index of the only worker that is called. None: all are.

    Returns:
        return values by worker index. Not of workers that failed, which are replaced.

    Raises:
        WorkersFailedError: if workers keep failing.
        FunctionError: the function raised in the first call, or cannot be sent.
    """
    calls = Calls(workers, "foreach_worker", after_failure="drop")
    for worker in workers.up():
        if only in (None, worker.index):
            calls.send(worker, fn, *args)
    return {reply.worker.index: reply.value for reply in calls.all()}


def call_each(
    workers: WorkerSet, method: str, args: Mapping[int, tuple[Any, ...]]
) -> dict[int, Any]:
    """Calls a method of several remote workers that are up, and waits for all of them.

    Args:
        workers: the workers.
        method: name of the method of `RolloutWorker`.
        args: its arguments, by worker index. Workers that are missing here are not called.

    Returns and raises as `foreach_worker`.
    """
    calls = Calls(workers, f"call of {method}", is_work=False, after_failure="drop")
    for worker in workers.remote:
        if worker.up and worker.index in args:
            calls.send(worker, call_method, method, *args[worker.index])
    return {reply.worker.index: reply.value for reply in calls.all()}


def set_up_each(workers: WorkerSet, method: str, args: Mapping[int, tuple[Any, ...]]) -> None:
    """As `call_each`, also for workers that are starting: they run the call once they are up,
    before any work. Replacements that start later do not get the call: put
    what they need into the config."""
    for worker in workers.remote:
        if not worker.up and worker.index in args:
            worker.set_up.append((call_method, (method, *args[worker.index])))
    call_each(workers, method, args)


def set_up_all(workers: WorkerSet, method: str, *args: Any) -> None:
    """`set_up_each` of every remote worker, with the same arguments."""
    set_up_each(workers, method, {worker.index: args for worker in workers.remote})


def latest_statistics(workers: WorkerSet) -> dict[str, dict[str, Any]]:
    """The running statistics of the environments' wrappers, as far as the driver has them: replies
    carry them once a second. By worker index, as text, under the key `statistics`."""
    statistics = dict(workers.env_statistics)
    statistics[0] = workers.local.get_statistics()
    return _as_saved(statistics)


def present_statistics(workers: WorkerSet) -> dict[str, dict[str, Any]]:
    """As `latest_statistics`, asked of all workers that are up."""
    statistics = call_each(
        workers, "get_statistics", {worker.index: () for worker in workers.remote if worker.up}
    )
    statistics[0] = workers.local.get_statistics()
    return _as_saved(statistics)


def _as_saved(statistics: Mapping[int, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {str(index): {"statistics": one} for index, one in statistics.items() if one}


def restore_workers(workers: WorkerSet, restore_count: int, states: Mapping[str, Any]) -> None:
    """Has all workers continue a run that was saved, with the present weights of the driver, which
    come with their next calls.

    Args:
        workers: waits until enough of them are up for a run to begin.
        restore_count: how often the run had been restored when it was saved.
        states: see `restore_statistics`, which also says what is raised.
    """
    workers.weights.take(force=True)
    if workers.remote:
        workers.up()
    begin_restored_run(workers, restore_count + 1)
    restore_statistics(workers, states)


def begin_restored_run(workers: WorkerSet, restore_count: int) -> None:
    """All workers, and later replacements, begin new episodes with random numbers that were not
    used before the restore. See `RolloutWorker.begin_restored_run`."""
    workers.config = dataclasses.replace(workers.config, restore_count=restore_count)
    if workers.owns_local:
        workers.local.begin_restored_run(restore_count)
    set_up_all(workers, "begin_restored_run", restore_count)


def update_algorithm_parameter(workers: WorkerSet, name: str, value: Any) -> None:
    """Changes an option of the policy in all remote workers, which the local policy has already,
    and in later replacements."""
    workers.config = dataclasses.replace(workers.config, policy=workers.local.policy.config)
    set_up_all(workers, "update_algorithm_parameter", name, value)


def restore_statistics(workers: WorkerSet, states: Mapping[str, Any]) -> None:
    """Gives the environments of all workers their running statistics back. A worker that was not
    saved gets the merged statistics of all workers that were.

    Args:
        workers: the workers. A worker that is starting gets its statistics once it is up.
        states: as `present_statistics` returns them.

    Raises:
        ValueError: the environments have other wrappers than the saved statistics.
    """
    saved = {int(i): one["statistics"] for i, one in states.items() if one.get("statistics")}
    if not saved:
        return
    together = merge_env_statistics(list(saved.values()))
    own = {worker.index: saved.get(worker.index, together) for worker in workers.remote}
    workers.env_statistics = dict(own)
    try:
        set_up_each(workers, "set_statistics", {index: (one,) for index, one in own.items()})
    except FunctionError as error:
        workers.env_statistics.clear()
        why = str(error).strip().rpartition("\n")[2].removeprefix("ValueError: ")
        raise ValueError(why) from error
    workers.local.set_statistics(saved.get(0, together))


def sampler_states(workers: WorkerSet) -> dict[str, Any]:
    """State of the environments and random numbers of all workers, with running statistics of
    wrappers: by worker index, as text.

    A run that is restored from it continues bit for bit if its environments have
    `get_checkpoint_state` and `set_checkpoint_state` (`polopt.rollouts.envs.env_state`), and if
    nothing was sampled ahead. Otherwise episodes start again."""
    up = {worker.index: (False,) for worker in workers.remote if worker.up}
    states = {0: workers.local.get_state(False)} | call_each(workers, "get_state", up)
    return {str(index): saved for index, saved in states.items()}


def restore_samplers(workers: WorkerSet, states: Mapping[str, Any]) -> None:
    """Restores what `sampler_states` returned, except for the statistics of wrappers, which
    `restore_statistics` restores."""
    own = {
        int(index): {key: value for key, value in saved.items() if key != "statistics"}
        for index, saved in states.items()
    }
    if 0 in own:
        workers.local.set_state(own.pop(0))
    set_up_each(workers, "set_state", {index: (saved,) for index, saved in own.items()})
