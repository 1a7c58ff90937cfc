"""The wait of `InFlight` where calls go through Ray and over ZeroMQ."""

from __future__ import annotations

import time
from typing import Any

import ray

from polopt.rollouts.transport.rpc_client import RpcClient
from polopt.rollouts.transport.rpc_future import RpcFuture


def wait_any(rpc: RpcClient, calls: list[Any], timeout_s: float) -> list[Any]:
    """The first of `calls`, in their order, that has ended; none after the timeout.

    Args:
        rpc: client that made the RPC futures among them.
        calls: each an `RpcFuture` or a `ray.ObjectRef`.
        timeout_s: 0: no wait.
    """
    until_s = time.monotonic() + timeout_s
    refs = [call for call in calls if not isinstance(call, RpcFuture)]
    for ref in refs:
        rpc.watch(ref)
    polled = False
    while True:
        ended = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        for call in calls:
            if call.done if isinstance(call, RpcFuture) else call in ended:
                return [call]
        remaining_s = max(0.0, until_s - time.monotonic())
        if polled and not remaining_s:
            return []
        rpc.poll(remaining_s)
        polled = True
