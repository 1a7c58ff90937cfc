"""The memory of a machine, of a container and of a process with a limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from polopt.common.config import ConfigError
from polopt.metrics import memory as module
from polopt.metrics.memory import memory
from polopt.rollouts import ray_session

GB = 10**9
V1, V2 = "4:memory,pids:/docker/abc\n3:cpu:/docker/abc\n", "0::/user/session\n"


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(module, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write_v1(folder: Path, limit: int, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {cache}\n")


def write_v2(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")


@pytest.mark.parametrize("here", ["memory", "memory/docker", "memory/docker/abc"])
def test_limit_of_version_1(cgroups: Path, here: str) -> None:
    """In a container, often only the root folder exists, and has the limit of the container."""
    (cgroups / "own").write_text(V1)
    write_v1(cgroups / here, GB, 400_000_000, 100_000_000)
    assert memory() == (GB, 700_000_000, 700_000_000)


def test_least_limit_of_version_2(cgroups: Path) -> None:
    (cgroups / "own").write_text(V2)
    (cgroups / "memory.stat").write_text("anon 7\n")  # the root of a machine has no limit
    write_v2(cgroups / "user", str(GB), 900_000_000, 0)
    write_v2(cgroups / "user/session", "max", 1, 0)
    assert memory() == (GB, 100_000_000, 100_000_000)
    write_v2(cgroups / "user/session", str(GB // 2), 2 * GB, 0)
    assert memory() == (GB // 2, 0, 0)


def test_no_limit_is_the_memory_of_the_machine(cgroups: Path) -> None:
    total = psutil.virtual_memory().total
    for text in (V1, V2, ""):
        (cgroups / "own").write_text(text)
        assert memory().total == total
    (cgroups / "own").unlink()
    assert memory().total == total
    write_v1(cgroups / "memory", 1 << 62, 5, 0)  # without a limit, version 1 reports a large number
    (cgroups / "own").write_text(V1)
    assert memory().total == total
    assert 0 < memory().own <= memory().available <= total


def test_limit_of_the_process() -> None:
    code = (
        "import resource; limit = 3 * 10**9; "
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
        "from polopt.metrics.memory import memory; "
        "found = memory(); print(found.own < limit, found.own < found.total, found.own > 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60.0, check=True
    )
    assert done.stdout.split() == ["True"] * 3


def test_workers_must_fit_into_the_container(cgroups: Path) -> None:
    (cgroups / "own").write_text(V2)
    write_v2(cgroups, str(GB), 0, 0)
    ray_session.check_memory(10)
    with pytest.raises(ConfigError, match=r"container has 1\.0 GB\. Allowed: at most 10 workers"):
        ray_session.check_memory(11)
