"""`Network`: network namespaces that act as the nodes of a cluster on one Linux machine.

Each node has its own address, and sees only its own processes. So Ray's commands, such as
`ray stop`, reach only this node. Only root can make namespaces.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

#: The programs beside the interpreter, such as `ray`.
BIN = Path(sys.executable).parent
PORT = 6379
#: Numbers the networks of this process.
_MADE = itertools.count()


def problem() -> str:
    """Returns the reason why this machine cannot have such nodes. Empty if it can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "no programs `ip` and `unshare`"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    name = f"plt{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=False)
        inner = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
        made = subprocess.run(inner, capture_output=True, text=True, check=False)
    return made.stderr.strip()


class Network:
    """Nodes that are connected by a bridge. Node 0 is for the driver.

    Attributes:
        address: the address of Ray on node 0.
        folder: the temporary files of all nodes.
    """

    def __init__(self, number: int) -> None:
        own = os.getpid() + 10_000 * next(_MADE)
        self._net = f"10.{64 + own // 256 % 64}.{own % 256}"
        self._bridge = f"plt{own}b"
        self._names = [f"plt{own}n{node}" for node in range(number)]
        self.address = f"{self.ip(0)}:{PORT}"
        self._inits: dict[int, subprocess.Popen[bytes]] = {}
        self._relays: list[subprocess.Popen[str]] = []
        self._delayed: set[int] = set()
        # A path of a socket has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))

    def ip(self, node: int) -> str:
        return f"{self._net}.{node + 1}"

    def __enter__(self) -> Network:
        try:
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def _connect(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for node, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            peer = "peer", "name", f"v{node}", "netns", self._bridge
            _ip("-n", name, "link", "add", "eth0", "type", "veth", *peer)
            _ip("-n", name, "addr", "add", f"{self.ip(node)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            # Ray takes the address from which a node would reach the internet.
            _ip("-n", name, "route", "add", "default", "via", f"{self._net}.254")
            _ip("-n", self._bridge, "link", "set", f"v{node}", "master", "br0")
            self.join(node)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills all processes, and removes the namespaces and the folder."""
        for node in list(self._inits):
            self.end(node)
        for relay in self._relays:
            relay.kill()
            relay.wait(60)
        for name in (self._bridge, *self._names):
            _ip("netns", "del", name, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ---- links ----------------------------------------------------------------------------------

    def cut(self, node: int) -> None:
        """Cuts the link of a node. Its processes continue."""
        _ip("-n", self._bridge, "link", "set", f"v{node}", "down")

    def join(self, node: int) -> None:
        _ip("-n", self._bridge, "link", "set", f"v{node}", "up")

    def limit(self, node: int, rate: str) -> None:
        """Limits what the node sends to a rate such as `1mbit`."""
        shape = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        command = ["tc", "-n", self._names[node], "qdisc", "replace", "dev", "eth0", *shape]
        subprocess.run(command, check=True, timeout=30)

    def delay(self, node: int, seconds: float) -> None:
        """Delays each frame to and from a node by `seconds`: a program takes the place of the link.
        Only before a program runs on the node. `cut` and `limit` then do not work."""
        name, device = self._names[node], f"tap{node}"
        relay = Path(__file__).parent / "network_relay.py"
        _ip("-n", name, "link", "del", "eth0")  # and the other end with it
        for where in (name, self._bridge):
            _ip("-n", where, "tuntap", "add", "dev", device, "mode", "tap")
        _ip("-n", self._bridge, "link", "set", device, "master", "br0")
        _ip("-n", name, "addr", "add", f"{self.ip(node)}/24", "dev", device)
        for where in (name, self._bridge):
            _ip("-n", where, "link", "set", device, "up")
        _ip("-n", name, "route", "add", "default", "via", f"{self._net}.254")
        self._relays.append(
            subprocess.Popen(
                [sys.executable, str(relay), name, self._bridge, device, str(seconds)],
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        said = self._relays[-1].stdout
        assert said is not None
        assert said.readline() == "ready\n"
        self._delayed.add(node)

    # ---- processes ------------------------------------------------------------------------------

    def start(
        self, node: int, command: Sequence[str], env: dict[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a program on a node, with its own temporary folder."""
        own = self.folder / str(node)
        own.mkdir(exist_ok=True)
        return subprocess.Popen(
            ["nsenter", f"--target={self._init_of(node)}", "--net", "--pid", "--mount", *command],
            env={
                **os.environ,
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "TMPDIR": str(own),
                "RAY_TMPDIR": str(own),
                "RAY_USAGE_STATS_ENABLED": "0",
                # The name of this host has another address.
                "GLOO_SOCKET_IFNAME": f"tap{node}" if node in self._delayed else "eth0",
                **(env or {}),
            },
            text=True,
            **options,
        )

    def _init_of(self, node: int) -> int:
        """Returns the id of the first process of a node. If it ends, all processes of the node
        end. Starts it, if there is none."""
        if node not in self._inits:
            forever = ["bash", "-c", "while :; do sleep 60 & wait $!; done"]
            inside = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *forever]
            self._inits[node] = subprocess.Popen(
                ["ip", "netns", "exec", self._names[node], *inside]
            )
        outer = self._inits[node].pid
        children = Path(f"/proc/{outer}/task/{outer}/children")
        until_s = time.monotonic() + 60.0
        while not (found := children.read_text().split()) or not _is_bash(found[0]):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        return int(found[0])

    def start_ray(self, node: int, env: dict[str, str] | None = None, **options: Any) -> None:
        """Starts Ray on a node, and waits until it runs. Node 0 is the head node."""
        where = [f"--address={self.address}"]
        if node == 0:
            where = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        resources = {"num-cpus": 2, "object-store-memory": 100_000_000, **options}
        own = [f"--node-ip-address={self.ip(node)}", "--block", "--disable-usage-stats"]
        words = [f"--{name}={value}" for name, value in resources.items()]
        log = self.folder / f"ray-{node}.log"
        with log.open("w") as file:
            command = ["ray", "start", *where, *own, *words]
            process = self.start(node, command, env, stdout=file, stderr=file)
        until_s = time.monotonic() + 180.0
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until_s, log.read_text()[-4000:]
            time.sleep(0.1)

    def end(self, node: int) -> None:
        """Kills all processes of a node, if it has any."""
        init = self._inits.pop(node, None)
        if init is None:
            return
        init.kill()  # `unshare --kill-child` takes all others with it
        init.wait(60)


def _is_bash(process: str) -> bool:
    return Path(f"/proc/{process}/comm").read_text().strip() == "bash"


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, timeout=30)


def wait_for_nodes(ray: Any, number: int, limit_s: float = 180.0) -> None:
    """Waits until Ray has this number of nodes that are alive."""
    until_s = time.monotonic() + limit_s
    while sum(node["Alive"] for node in ray.nodes()) != number:
        assert time.monotonic() < until_s, ray.nodes()
        time.sleep(0.2)
