"""`ControlPage`: progress and requests to stop early, between processes on one node."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from polopt.common.progress import PROGRESS
from polopt.rollouts.transport import ray_channel
from polopt.rollouts.transport.control_page import ControlAgent, ControlPage, EarlyStopRequest
from polopt.rollouts.transport.ray_channel import RayTransport
from polopt.rollouts.transport.sockets import LEFT_BEHIND_S
from polopt.rollouts.workers.call_runner import CallRunner

LIMIT_S = 60.0


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPage]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = PROGRESS.at_s
    yield ControlPage()
    PROGRESS.at_s = before


def in_child(run: Callable[[], bool]) -> bool:
    """Runs `run` in a forked process. Returns True if `run` returned True in that process."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if run() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


def test_page_works_without_another_process(page: ControlPage) -> None:
    assert page.keep_steps(7) is None
    page.request_stop(EarlyStopRequest(7, 16))
    assert page.keep_steps(7) == 16
    assert page.keep_steps(8) is None


def test_other_process_sees_requests_and_progress(page: ControlPage) -> None:
    path = page.share()

    def driver() -> bool:
        opened = ControlPage.open(path)
        PROGRESS.at_s = np.zeros(1)  # the child must not note its progress in the shared page
        opened.request_stop(EarlyStopRequest(1 << 50, 16))
        return opened.silent_s() < LIMIT_S

    PROGRESS.note()
    assert in_child(driver)
    assert page.keep_steps(1 << 50) == 16
    PROGRESS.at_s[0] -= 1000.0
    assert page.silent_s() >= 1000.0
    PROGRESS.note()
    assert page.silent_s() < LIMIT_S


def test_only_this_user_can_open_the_file_and_opening_removes_it(page: ControlPage) -> None:
    umask = os.umask(0)
    try:
        path = Path(page.share())
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o600
    opened = ControlPage.open(str(path))
    assert not path.exists()
    opened.request_stop(EarlyStopRequest(3, 1))
    assert page.keep_steps(3) == 1
    with pytest.raises(FileNotFoundError):
        ControlPage.open(str(path))


@pytest.mark.parametrize("kind", ["text", "short", "empty", "link", "of another user"])
def test_foreign_file_is_refused_and_stays(
    page: ControlPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / "polopt-control-foreign"
    if kind == "link":
        path.symlink_to(page.share())
    elif kind == "of another user":
        path = Path(page.share())
        own = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    else:
        path.write_bytes(b"notes of mine\n" * {"text": 1000, "short": 1, "empty": 0}[kind])
    kept = path.read_bytes()
    with pytest.raises((OSError, ValueError)):
        ControlPage.open(str(path))
    assert path.read_bytes() == kept


def test_page_that_nobody_opened_is_removed_later(page: ControlPage, tmp_path: Path) -> None:
    """Nobody opens the page of a process that is killed as soon as it has started."""
    assert in_child(lambda: bool(page.share()))
    (orphan,) = tmp_path.iterdir()
    young = Path(ControlPage().share())
    then_s = time.time() - LEFT_BEHIND_S - 1.0
    os.utime(orphan, (then_s, then_s))
    path = ControlPage().share()
    assert {*tmp_path.iterdir()} == {young, Path(path)}


def test_disk_that_is_full_is_an_os_error(
    page: ControlPage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        page.share()
    assert not list(tmp_path.iterdir())


# ---- requests ----------------------------------------------------------------------------------


def test_requests_for_all_pending_calls_of_a_process_are_kept(page: ControlPage) -> None:
    """`Calls.interrupt` sends a request for each pending call. The call that runs now must stop,
    and not only the call that was sent last."""
    calls = [1000 + 3 * number for number in range(8)]
    for call in calls:
        page.request_stop(EarlyStopRequest(call, call % 7 + 1))
    assert [page.keep_steps(call) for call in calls] == [call % 7 + 1 for call in calls]


def test_half_a_request_is_never_seen(page: ControlPage) -> None:
    """Another process writes requests for many calls, one after the other. The page has 509 slots,
    so the calls `509 * n + 5` all have slot 5. A request for call `509 * n + 5` keeps n steps."""
    opened = ControlPage.open(page.share())
    child = os.fork()
    if child == 0:
        for turn in itertools.count(1):
            opened.request_stop(EarlyStopRequest(509 * turn + 5, turn))
    seen, until_s = 0, time.monotonic() + 30.0
    try:
        while seen < 10_000 and time.monotonic() < until_s:
            call = page._requests[2 * 5]
            steps = page.keep_steps(call) if call else None
            assert steps in (None, call // 509)
            seen += steps is not None
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert seen > 0


def test_only_the_running_call_is_stopped() -> None:
    runner = CallRunner()
    runner.control.request_stop(EarlyStopRequest(2, 4))

    def stop_after(runner: CallRunner) -> int | None:
        return runner.stop_after()

    assert [runner.run(number, stop_after).value for number in (1, 2, 3)] == [None, 4, None]

    def nested(runner: CallRunner) -> int | None:
        return runner.run_here(7, stop_after).value  # type: ignore[no-any-return]

    assert runner.run(2, nested).value == 4, (
        "a call within call 2 must also stop, although it has another number"
    )


# ---- agents ------------------------------------------------------------------------------------


def test_agent_opens_and_forgets_pages(page: ControlPage) -> None:
    agent, path = ControlAgent(), page.share()
    agent.request_stop(path, EarlyStopRequest(3, 2))
    assert page.keep_steps(3) == 2
    assert agent.silent_s(path) < LIMIT_S
    agent.forget(path)
    agent.forget(path)
    with pytest.raises(FileNotFoundError):
        agent.silent_s(path)


def test_new_agent_opens_the_pages_of_an_agent_that_died(page: ControlPage) -> None:
    path = page.share()
    assert ControlAgent().silent_s(path) < LIMIT_S
    ControlAgent().request_stop(path, EarlyStopRequest(3, 2))
    assert page.keep_steps(3) == 2


def test_old_page_of_a_process_that_runs_stays(page: ControlPage) -> None:
    """A new agent may have to open this page."""
    path = page.share()
    os.utime(path, (0.0, 0.0))
    ControlPage().share()
    assert Path(path).exists()


def test_actor_classes_are_made_once_and_without_task_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With task events, the memory of Ray's control service would grow with each call."""
    made: list[Any] = []

    class Actor:
        def options(self, **_: Any) -> Actor:
            return self

        def remote(self) -> Actor:
            return self

    monkeypatch.setattr(
        ray, "remote", lambda **options: lambda cls: (made.append((cls, options)), Actor())[1]
    )
    monkeypatch.setattr(ray_channel, "_CLASSES", {})
    transport = RayTransport()
    for node in ("a" * 56, "b" * 56):
        transport._agent(node)
    assert made == [(ControlAgent, {"enable_task_events": False})]


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_pages_that_are_dropped_leave_no_descriptors(page: ControlPage) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(5):
        shared = ControlPage()
        opened = ControlPage.open(shared.share())
        assert count() > before
        PROGRESS.at_s = np.zeros(1)
        del shared, opened
    assert count() == before
