"""Connects this process to a running Ray cluster, or starts Ray on this machine. Checks that the
cluster and the machine have the resources that a run requests."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import ray

from polopt.common.config import ConfigError
from polopt.metrics.memory import memory

_logger = logging.getLogger(__name__)
#: The memory in bytes that `check_memory` requires for each worker process. Workers usually use
#: more.
_WORKER_BYTES = 100_000_000
#: The time limit for a connection attempt, and the time limit for the first bytes of an answer,
#: both in seconds. Ray itself tries for longer.
_CONNECT_S = 5.0
#: The bytes that open an HTTP/2 connection, which gRPC uses (RFC 9113, section 3.4): the client's
#: preface and an empty SETTINGS frame (type 4, on stream 0).
_HTTP2_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
#: The size of a frame header in bytes: length (3), type (1), flags (1), stream (4).
_FRAME_HEADER_BYTES = 9
#: A run is crowded if it has more than this number of worker processes for each core.
_CROWDED = 4
#: The same warning is logged at most once in this number of seconds, because Tune makes the check
#: for each trial.
_REPEAT_S = 60.0
_warned_at: dict[str, float] = {}


def attach_or_start(
    num_cpus: float,
    num_processes: int,
    init_config: Mapping[str, Any] | None = None,
    *,
    evaluation_cpus: float = 0.0,
    log_to_driver: bool = True,
) -> bool:
    """Connects this process to Ray, unless the process is already connected.

    Args:
        num_cpus: the number of logical CPUs that the run needs. If this function starts Ray without
            `init_config`, Ray has at least this number of CPUs. The machine may have fewer, because
            Ray uses the number only for scheduling. If Ray has fewer CPUs, a warning is logged,
            except in a Tune trial.
        num_processes: the number of worker processes of the run.
        init_config: the arguments of `ray.init`. polopt then adds no arguments of its own. With
            `None`, this function connects to a running cluster. If no cluster is running,
            this function starts Ray on this machine.
        evaluation_cpus: the part of `num_cpus` that only evaluation needs. Training starts without
            these CPUs.
        log_to_driver: whether this process prints what nodes and workers print. Not used with
            `init_config`.

    Returns:
        whether this call connected. If True, `ray.shutdown()` stops the Ray that this call started.
        A cluster that was already running keeps running.

    Raises:
        ConfigError: if nothing answers at Ray's address, or if this machine has too little memory
            for the workers.
        Exception: any exception of `ray.init`, such as ConnectionError if the address is `auto` and
            no cluster is running.
    """
    connected = ray.is_initialized()
    if not connected:
        address = str((init_config or {}).get("address") or os.environ.get("RAY_ADDRESS") or "")
        check_address(address)
        if address in ("", "local"):
            check_memory(num_processes)
            warn_if_crowded(num_processes)
        _connect(num_cpus, init_config, log_to_driver)
    # In a trial of Tune, there is a placement group, and Tune has already requested the resources.
    if ray.util.get_current_placement_group() is None:
        lacking = num_cpus - ray.cluster_resources().get("CPU", 0.0)
        if lacking <= evaluation_cpus:
            warn_if_larger(
                "the run with its evaluation workers",
                {"CPU": num_cpus},
                f"training goes on, but no evaluation ends until Ray has {lacking:g} more CPU. To "
                "evaluate now",
            )
        else:
            warn_if_larger("the run", {"CPU": num_cpus})
    return not connected


def _connect(num_cpus: float, init_config: Mapping[str, Any] | None, log_to_driver: bool) -> None:
    if init_config is not None:
        ray.init(**init_config)
        return
    # Without `address`, Ray attaches only to a cluster from RAY_ADDRESS or `ray start`. With
    # address="auto", Ray would also attach to a cluster that another program has started for
    # itself.
    cpus = max(os.cpu_count() or 1, int(num_cpus) + 1)
    try:
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=log_to_driver)
    except ValueError:  # Ray does not allow `num_cpus` for a cluster that is already running
        ray.init(log_to_driver=log_to_driver)


def check_address(address: str) -> None:
    """Checks that Ray answers at the address of a cluster. Ray itself would try for longer, and
    would print its log.

    The server must accept the connection and answer in HTTP/2, as Ray's gRPC servers do. With
    `RAY_USE_TLS=1`, the server only needs to accept the connection.

    Args:
        address: `HOST:PORT` or `ray://HOST:PORT`. Other values, such as `auto`, are not checked.

    Raises:
        ConfigError: if no server answers at the address, or if the answer is not HTTP/2.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        with socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_CONNECT_S
        ) as connection:
            problem = "" if _ray_uses_tls() else _http2_problem(connection)
    except (OSError, OverflowError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"no Ray answers at {address!r}: {problem}. Set RAY_ADDRESS to the address that `ray "
            "start --head` prints, or unset it to start Ray here"
        )


def _ray_uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _http2_problem(connection: socket.socket) -> str:
    """Checks that a server answers in HTTP/2. Returns a description of the problem, or an empty
    string if the server answers in HTTP/2.

    Raises:
        OSError: if the connection ends with an error.
    """
    connection.sendall(_HTTP2_OPENING)
    answer, until_s = b"", time.monotonic() + _CONNECT_S
    while len(answer) < _FRAME_HEADER_BYTES:
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            received = connection.recv(_FRAME_HEADER_BYTES - len(answer))
        except TimeoutError:
            return f"a server accepts connections there, but sent nothing for {_CONNECT_S:g} s"
        if not received:
            return "a server accepts connections there and closes them"
        answer += received
    is_settings = answer[3] == 4 and answer[5:] == bytes(4)
    return "" if is_settings else f"another server answers there, with {answer!r}"


def check_memory(num_processes: int) -> None:
    """Checks that this machine, or the container, has enough memory for a number of worker
    processes. The number may be greater than the number of cores.

    Raises:
        ConfigError: if the memory is too small, even for the smallest environment.
    """
    total = memory().total
    most = total // _WORKER_BYTES
    if num_processes > most:
        raise ConfigError(
            f"{num_processes:,} worker processes need at least "
            f"{num_processes * _WORKER_BYTES / 1e9:,.0f} GB of memory, but this machine or "
            f"container has {total / 1e9:,.1f} GB. Allowed: at most {most:,} workers here, or "
            "RAY_ADDRESS with the address of a larger cluster"
        )


def warn_if_crowded(num_processes: int) -> None:
    """Warns if a run starts many more worker processes than this machine has cores. polopt's own
    Ray has a CPU for each of them, so that they all start, but they share the cores."""
    cores = os.cpu_count() or 1
    if num_processes > _CROWDED * cores:
        _warn(
            f"the run starts {num_processes} worker processes, but this machine has {cores} "
            "cores. The processes share the cores and start slowly, maybe too slowly for "
            "worker_startup_timeout_s. Use a smaller num_workers with a larger "
            "num_envs_per_worker, or RAY_ADDRESS with the address of a larger cluster"
        )


def warn_if_larger(
    who: str,
    request: Mapping[str, float],
    effect: str = "it starts once Ray has more. To start it now",
) -> None:
    """Warns if the connected Ray cluster has fewer resources than requested. Ray then waits for new
    nodes. An autoscaling cluster may add nodes. In other clusters, Ray waits until somebody adds a
    node.

    Args:
        who: the subject of the warning, such as "the run".
        request: maps the names of resources to the requested amounts.
        effect: the part of the warning between the missing resources and the advice "request less".
            It says what the lack causes, and what requesting less achieves.
    """
    total = ray.cluster_resources()
    lacking = [
        f"{amount:g} {name} while Ray has {total.get(name, 0.0):g}"
        for name, amount in request.items()
        if amount > total.get(name, 0.0)
    ]
    if not lacking:
        return
    warning = (
        f"{who} requests {' and '.join(lacking)}; {effect}, "
        "request less (fewer workers, or a fraction of a CPU for each process)"
    )
    if request.get("CPU", 0.0) > total.get("CPU", 0.0):
        warning += (
            f", or call ray.init(num_cpus={math.ceil(request['CPU'])}) first: Ray's CPUs are "
            "logical, and the machine may have fewer"
        )
    _warn(warning)


def _warn(warning: str) -> None:
    now_s = time.monotonic()
    if now_s - _warned_at.get(warning, -_REPEAT_S) >= _REPEAT_S:
        _warned_at[warning] = now_s
        _logger.warning(warning)
