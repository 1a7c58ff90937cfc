"""Connecting this process to Ray: to a running cluster, or to one that is started here. And what a
run requests of it, checked before it waits for what never comes."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import psutil
import ray

from polopt.common.config import ConfigError

_logger = logging.getLogger(__name__)
#: Memory that a worker process needs at least, in bytes. With CartPole-v1 and PPO it is 185 MB.
_WORKER_BYTES = 100_000_000
#: Limit of a connection attempt, and of the wait for the first bytes of an answer, in seconds each.
#: Ray itself tries for 23 s and longer.
_CONNECT_S = 5.0
#: Opens a connection of HTTP/2, which is the protocol below gRPC (RFC 9113, section 3.4): the
#: preface of a client, and a frame of settings (type 4, on stream 0) without any.
_HTTP2_OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
#: Bytes of the header of a frame: length (3), type (1), flags (1), stream (4).
_FRAME_HEADER_BYTES = 9
#: An equal warning is not repeated within this time, in seconds: Tune asks once for each trial.
_REPEAT_S = 60.0
_warned_at: dict[str, float] = {}


def attach_or_start(
    num_cpus: float,
    num_processes: int,
    init_config: Mapping[str, Any] | None = None,
    *,
    evaluation_cpus: float = 0.0,
) -> bool:
    """Connects this process to Ray, unless it is connected already.

    Args:
        num_cpus: logical CPUs that the run needs. Ray that is started here has at least as many.
            They only limit scheduling, and the machine may have fewer. If another Ray has fewer, a
            warning says so.
        num_processes: worker processes of the run.
        init_config: arguments of `ray.init`, which are then the only ones. None: attach to a
            running cluster if there is one, else start Ray here.
        evaluation_cpus: the part of `num_cpus` that only evaluation needs. Training starts without.

    Returns:
        True if this call connected. `ray.shutdown()` then stops what the call started. A cluster
        that was running continues.

    Raises:
        ConfigError: Ray's address does not answer, or this machine has no memory for the workers.
    """
    connected = ray.is_initialized()
    if not connected:
        address = str((init_config or {}).get("address") or os.environ.get("RAY_ADDRESS") or "")
        check_address(address)
        if address in ("", "local"):
            check_memory(num_processes)
        _connect(num_cpus, init_config)
    if ray.util.get_current_placement_group() is None:  # else a trial of Tune, which has asked
        lacking = num_cpus - ray.cluster_resources().get("CPU", 0.0)
        if lacking <= evaluation_cpus:
            warn_if_larger(
                "the run with its evaluation workers",
                {"CPU": num_cpus},
                f"training goes on, but no evaluation ends until Ray has {lacking:g} CPU more. To "
                "evaluate now",
            )
        else:
            warn_if_larger("the run", {"CPU": num_cpus})
    return not connected


def _connect(num_cpus: float, init_config: Mapping[str, Any] | None) -> None:
    if init_config is not None:
        ray.init(**init_config)
        return
    # Without `address`, Ray attaches only to a cluster from RAY_ADDRESS or `ray start`. With
    # address="auto" it would also attach to one that another program has started for itself.
    cpus = max(os.cpu_count() or 1, int(num_cpus) + 1)
    try:
        ray.init(num_cpus=cpus, include_dashboard=False)
    except ValueError:  # `num_cpus` is not allowed for a cluster that is running already
        ray.init()


def check_address(address: str) -> None:
    """Tries to connect to the address of a cluster. Ray would try for longer, and print its log.

    The listener must also answer in HTTP/2, as Ray's gRPC servers do. With `RAY_USE_TLS=1` only
    the connection is tried.

    Args:
        address: `HOST:PORT`, also after `ray://`. Others, such as `auto`, pass.

    Raises:
        ConfigError: nothing listens there, or something that is not Ray.
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
    """What shows that the other side does not speak HTTP/2. Empty if it does.

    Raises:
        OSError: the connection ended with an error.
    """
    connection.sendall(_HTTP2_OPENING)
    answer, until_s = b"", time.monotonic() + _CONNECT_S
    while len(answer) < _FRAME_HEADER_BYTES:
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        try:
            received = connection.recv(_FRAME_HEADER_BYTES - len(answer))
        except TimeoutError:
            return f"something accepts connections there, but said nothing for {_CONNECT_S:g} s"
        if not received:
            return "something accepts connections there and closes them"
        answer += received
    is_settings = answer[3] == 4 and answer[5:] == bytes(4)
    return "" if is_settings else f"something else answers there, with {answer!r}"


def check_memory(num_processes: int) -> None:
    """Checks that this machine can hold worker processes. More of them than cores is fine.

    Raises:
        ConfigError: its memory is too small, whatever the environment.
    """
    total = psutil.virtual_memory().total
    most = total // _WORKER_BYTES
    if num_processes > most:
        raise ConfigError(
            f"{num_processes:,} worker processes need at least "
            f"{num_processes * _WORKER_BYTES / 1e9:,.0f} GB of memory, and this machine has "
            f"{total / 1e9:,.0f} GB. Allowed: at most {most:,} workers here, or RAY_ADDRESS with "
            "the address of a larger cluster"
        )


def warn_if_larger(
    who: str,
    request: Mapping[str, float],
    effect: str = "it starts once Ray has more. To start it now",
) -> None:
    """Warns if Ray, to which this process is connected, has less than is requested of it. Ray waits
    for more nodes then, which come in a cluster that grows by itself, and otherwise never.

    Args:
        who: requests it.
        request: amounts by the name of the resource.
        effect: of the lack, and what requesting less is for, as text.
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
    now_s = time.monotonic()
    if now_s - _warned_at.get(warning, -_REPEAT_S) >= _REPEAT_S:
        _warned_at[warning] = now_s
        _logger.warning(warning)
