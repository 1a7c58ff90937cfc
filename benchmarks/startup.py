"""Seconds from `polopt train cartpole_a3c` to the first gradient, and where they go.

    .venv/bin/python benchmarks/startup.py [--repeats 5] [--example cartpole_a3c]

Each repeat is a new command, with a Ray of its own, that ends after one iteration. Milestones come
from within its processes (see `startup_hook.py`); work goes on side by side, so each is given as
seconds since the command was started. Processor time is read when the first gradient has been
applied. Prints Markdown, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from about import about

GOAL_S = 6.0
TIMEOUT_S = 120.0
#: Milestone: what a process has to have told. Of those of `WORKERS` the last worker's counts.
MILESTONES = {
    "command line imported": "polopt.trainers.running imported",
    "Ray is being started": "init begins",
    "Ray is up": "init ends",
    "workers' processes are started": "process begins",
    "training begins its setup": "_train begins",
    "workers begin theirs": "__init__ begins",
    "workers are up": "__init__ ends",
    "first gradient applied": "apply_gradients ends",
}
WORKERS = {"process begins", "__init__ begins", "__init__ ends"}
LAST = "apply_gradients ends"
#: Part of a command line to whose process it is; the first that fits counts. Raylet's comes first,
#: for it names those of the processes that it starts.
KINDS = {
    "raylet/raylet ": "Ray: raylet",
    "ray::IDLE": "idle workers of Ray",
    "ray::Rollout": "rollout workers",
    "default_worker.py": "idle workers of Ray",
    "gcs_server": "Ray: gcs_server",
    "dashboard/agent.py": "Ray: dashboard agent",
    "ray::DashboardAgent": "Ray: dashboard agent",
    "dashboard.py": "Ray: dashboard head",
    "runtime_env": "Ray: runtime environment agent",
    "ray::RuntimeEnvAgent": "Ray: runtime environment agent",
    "log_monitor": "Ray: log monitor",
    "_private/monitor.py": "Ray: autoscaler's monitor",
    "/polopt ": "driver (the command)",
}


def processes_below(root: int) -> dict[int, tuple[str, float]]:
    """Command line and processor seconds of a process and of all that it has started, directly or
    not."""
    parents, found = {}, {}
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile, or is not ours to read
        parents[int(folder.name)] = int(stat[1])
        found[int(folder.name)] = (command, (int(stat[11]) + int(stat[12])) / ticks_per_s)

    def is_below(pid: int) -> bool:
        return pid == root or (pid in parents and is_below(parents[pid]))

    return {pid: process for pid, process in found.items() if is_below(pid)}


def cpu_by_kind(processes: dict[int, tuple[str, float]]) -> dict[str, float]:
    """Processor seconds by kind of process."""
    seconds: dict[str, float] = defaultdict(float)
    for command, used_s in processes.values():
        kind = next((kind for part, kind in KINDS.items() if part in command), "other")
        seconds[kind] += used_s
    return dict(seconds)


def run_once(example: str, folder: Path) -> tuple[dict[str, float], dict[str, float]]:
    """One start. Milestones in seconds since the command began, and processor time by kind.

    Raises:
        RuntimeError: if there was no gradient within the time limit.
    """
    shutil.copy(Path(__file__).with_name("startup_hook.py"), folder / "sitecustomize.py")
    address = str(folder / "milestones")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "STARTUP_SOCKET": address}
    polopt = Path(sys.executable).with_name("polopt")
    stop = ["stop.training_iteration=1", "--results-dir", str(folder), "--checkpoint-every", "0"]
    events: list[tuple[float, int, str]] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as milestones:
        milestones.bind(address)
        began_s = time.time()
        command = subprocess.Popen(
            [str(polopt), "train", example, *stop],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while not events or events[-1][2] != LAST:
                milestones.settimeout(max(0.001, began_s + TIMEOUT_S - time.time()))
                at_s, pid, event = milestones.recv(1024).decode().split(" ", 2)
                events.append((float(at_s) - began_s, int(pid), event))
            used = cpu_by_kind(processes_below(command.pid))
            command.wait(TIMEOUT_S)
        except TimeoutError as error:
            raise RuntimeError(f"no gradient within {TIMEOUT_S:g} s; told: {events}") from error
        finally:
            if command.poll() is None:
                command.kill()
                command.wait()
    return reached(events), used


def reached(events: list[tuple[float, int, str]]) -> dict[str, float]:
    """When each milestone was reached, from `(seconds, process, what it told)`."""
    workers = {pid for _, pid, event in events if event == "__init__ begins"}
    at = {}
    for name, wanted in MILESTONES.items():
        ofs = [(s, pid) for s, pid, event in events if event == wanted]
        at[name] = max(s for s, p in ofs if p in workers) if wanted in WORKERS else ofs[0][0]
    return at


def print_tables(runs: list[tuple[dict[str, float], dict[str, float]]]) -> None:
    """Medians and ranges."""
    print("| milestone | seconds since the command began, median (range) |\n|---|---:|")
    for name in MILESTONES:
        values = [at[name] for at, _ in runs]
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(f"| {name} | {statistics.median(values):.2f} ({spread}) |")
    kinds = sorted({kind for _, used in runs for kind in used})
    median = {k: statistics.median([used.get(k, 0.0) for _, used in runs]) for k in kinds}
    print("\n| processes | processor seconds until then, median |\n|---|---:|")
    for kind in sorted(kinds, key=lambda k: -median[k]):
        print(f"| {kind} | {median[kind]:.2f} |")
    print(f"| all | {statistics.median([sum(used.values()) for _, used in runs]):.2f} |")
    first = statistics.median([at["first gradient applied"] for at, _ in runs])
    print(f"\nFirst gradient after {first:.2f} s; goal: under {GOAL_S:g} s.")


def main() -> None:
    """Measures, prints tables, writes JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--example", default="cartpole_a3c", help="a tuned example of A3C")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/startup.json"))
    args = parser.parse_args()
    runs = []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_once(args.example, Path(folder)))
    print_tables(runs)
    where = about()
    print(f"\n{', '.join(f'{key} {value}' for key, value in where.items())}.")
    print(f"Command: `{' '.join(['python', *sys.argv])}`")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = [{"reached_s": at, "processor_s": used} for at, used in runs]
    args.out.write_text(json.dumps({"about": where, "runs": kept}, indent=1))


if __name__ == "__main__":
    main()
