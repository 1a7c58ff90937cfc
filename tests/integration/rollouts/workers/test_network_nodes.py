"""Training on nodes with their own addresses, processes and links: network namespaces.

The cluster requires a token. The tests are slow, and only root can run them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from network_nodes import Network, problem
from source_tree import ROOT

WHY_NOT = problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network namespaces as nodes: {WHY_NOT}"),
]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
OPTIMIZERS = (
    "async_gradients",
    "sync_gradients",
    "sync_samples",
    "async_samples",
    "decentralized_allreduce",
    "sync_replay",
    "async_replay",
)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3) as network:
        for node in range(3):
            network.start_ray(node, TOKEN)
        yield network


def run(
    network: Network,
    words: list[str],
    changes: dict[str, Callable[[], object]] | None = None,
    env: dict[str, str] = TOKEN,
) -> dict[str, Any]:
    """Runs a program of `network_script.py` on node 0, and changes the network as it asks."""
    program, *rest = words
    command = [
        sys.executable,
        str(ROOT / "tests" / "network_script.py"),
        program,
        network.address,
        *rest,
    ]
    pipe = subprocess.PIPE
    process = network.start(0, command, env, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    answer = ""
    for line in process.stdout:
        answer = line if line.startswith("{") else answer  # Ray may print, too
        if line.strip() in (changes or {}):
            changes[line.strip()]()  # type: ignore[index]
            process.stdin.write("done\n")
            process.stdin.flush()
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.wait(60) == 0, said[-4000:]
    found: dict[str, Any]
    found, _ = json.JSONDecoder().raw_decode(answer)  # Ray may print into the same line
    return found


@pytest.mark.parametrize("transport", ["auto", "ray"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_on_three_nodes(network: Network, name: str, transport: str) -> None:
    found = run(network, ["train", name, transport])
    assert len(found["nodes"]) >= 2, "the driver's node has no room for all workers"
    assert (found["deaths"], found["hangs"], found["lost_arguments"]) == (0, 0, 0)
    if found["own"] in found["nodes"] and transport == "auto":
        assert found["transport"] == "socket, ray"
    else:
        assert found["transport"] == "ray"
    if name == "decentralized_allreduce":
        assert found["backend"] == "gloo"


@pytest.mark.parametrize("name", ["async_gradients", "sync_gradients"])
def test_slow_link_is_no_failure(network: Network, name: str) -> None:
    free = {"limit": lambda: network.limit(1, "2mbit"), "free": lambda: network.limit(1, "1gbit")}
    found = run(network, ["slow_link", name], free)
    assert (found["deaths"], found["hangs"]) == (0, 0)
    if name == "sync_gradients":  # each of eight updates waits for two gradients from this node
        assert found["slow_s"] > 6 * 2 * found["num_bytes"] * 8 / 2e6


def test_trial_of_tune_on_another_node(network: Network) -> None:
    found = run(network, ["tune_trial", str(network.folder / "results")])
    assert found["ip"] in (network.ip(1), network.ip(2))
    assert found["kept"] == found["steps"] > 0


@pytest.mark.parametrize("how", ["end", "cut"])
@pytest.mark.parametrize("name", ["async_gradients", "sync_samples", "decentralized_allreduce"])
def test_node_is_lost_and_given_back(network: Network, name: str, how: str) -> None:
    lost = []

    def lose() -> None:
        lost.append(2)
        (network.end if how == "end" else network.cut)(2)

    def give_back() -> None:
        network.end(2)  # a node that was cut off has been given up by Ray, and starts again
        network.join(2)
        network.start_ray(2, TOKEN)
        lost.clear()

    try:
        found = run(network, ["lose_node", name, how], {how: lose, "give back": give_back})
    finally:
        if lost:  # the run has failed, and the next test needs all nodes
            give_back()
    assert 1 <= found["up_meanwhile"] <= 4, "four CPUs are left"
    assert len(found["nodes"]) == 3, "the workers need the node that was given back"
    assert found["deaths"] + found["hangs"] >= 1


def test_wrong_token_is_one_error(network: Network) -> None:
    wrong = {**TOKEN, "RAY_AUTH_TOKEN": "f" * 64}
    with pytest.raises(AssertionError, match=r"AuthenticationError: .*InvalidAuthToken"):
        run(network, ["train", "async_gradients", "auto"], env=wrong)


LATENCY_S = 0.1


@pytest.fixture(scope="module")
def far_network() -> Iterator[Network]:
    """Two of three nodes are far away."""
    with Network(3) as network:
        for node in (1, 2):
            network.delay(node, LATENCY_S)
        for node in range(3):
            network.start_ray(node, TOKEN)
        yield network


@pytest.mark.parametrize("name", ["sync_gradients", "decentralized_allreduce"])
def test_latency_is_no_failure(far_network: Network, name: str) -> None:
    found = run(far_network, ["rounds", name])
    assert len(found["nodes"]) >= 2
    assert (found["deaths"], found["hangs"]) == (0, 0)
    # An update of SyncGradients needs weights and a gradient, one way each. In an all-reduce, each
    # of two ranks needs the values of the other.
    ways = 2 if name == "sync_gradients" else 1
    assert found["seconds_each"] > 0.9 * ways * LATENCY_S
