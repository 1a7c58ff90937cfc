"""Measures the frames per second of Collector and of TorchRL's RayCollector.

    python benchmarks/collectors.py [--env ~/.cache/polopt-bench] [--repeats 3]

TorchRL runs in its own virtual environment, which the first run makes. Each system is one process
(`collectors_serving.py`) that collects on request. So the systems alternate (A B C A B C), and
changes of the machine's speed affect all of them. All systems have two collectors, an MLP of 64x64
tanh units whose actions are sampled, one thread per process, and the same frames per batch. Rates
are measured in steady state over whole batches. Prints Markdown.

- *polopt*: the policy `a2c`, which also computes values and advantages.
- *polopt, module*: the same MLP as a `torch.nn.Module`, without values, as in TorchRL.
- *TorchRL*: `ProbabilisticActor`. Several environments of a collector are in a `SerialEnv`, which
  is TorchRL's fastest option.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from about import about
from environments import CACHE, make_environment

ROOT = Path(__file__).parent.parent
SYSTEMS = ("polopt", "polopt, module", "TorchRL")


class Server:
    """A process that makes collectors of one system and measures them on request."""

    def __init__(self, python: Path | str, system: str) -> None:
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # open while the process runs
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "benchmarks" / "collectors_serving.py"), system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **threads},
        )
        self.versions = self._answer()

    def call(self, **request: Any) -> Any:
        """Sends a request and returns the answer."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self._log.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._log.read()[-3000:]}")

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60.0)


def measure(servers: dict[str, Server], case: dict[str, Any], args: Any) -> dict[str, list[float]]:
    """Returns the frames per second of each system, measured `args.repeats` times."""
    for server in servers.values():
        server.call(make=case)
    rates: dict[str, list[float]] = {system: [] for system in servers}
    for _ in range(args.repeats):
        for system, server in servers.items():
            rates[system].append(server.call(seconds=args.seconds))
    return rates


def cell(rates: list[float]) -> str:
    """Formats the median and range for a table."""
    return f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", type=Path, default=CACHE, help="folder for TorchRL's environment")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, at least")
    parser.add_argument("--frames", type=int, default=2000, help="of one batch")
    args = parser.parse_args()
    python = make_environment("torchrl", args.env)
    servers = {name: Server(python if name == "TorchRL" else sys.executable, name)
               for name in SYSTEMS}  # fmt: skip
    print("| environment | environments each | mode |", " | ".join(SYSTEMS), "| faster |")
    print("|---" * 3 + "|---:" * (len(SYSTEMS) + 1) + "|", flush=True)
    environments = ("CartPole-v1", "Pendulum-v1")
    for env, envs, sync in itertools.product(environments, (1, 8), (True, False)):
        case = {"env": env, "envs": envs, "sync": sync, "frames": args.frames}
        rates = measure(servers, case, args)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        factors = [medians[name] / medians["TorchRL"] for name in SYSTEMS[:-1]]
        cells = [env, str(envs), "sync" if sync else "async", *map(cell, rates.values())]
        print("|", " | ".join([*cells, " / ".join(f"{f:.1f}x" for f in factors)]), "|", flush=True)
    versions = {**about(), **servers["TorchRL"].versions}
    for server in servers.values():
        server.stop()
    print("\nFrames per second: median (range) of", args.repeats, "runs of at least", end=" ")
    print(f"{args.seconds} s. {', '.join(f'{k} {v}' for k, v in versions.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")


if __name__ == "__main__":
    main()
