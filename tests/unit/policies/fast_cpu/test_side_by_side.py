"""Independent pieces of a gradient run in threads, and give the same weights bit for bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from onednn import onednn_calls
from policy_helpers import make_batch, small_policy
from replay_helpers import replay_policy, transitions

import polopt
from polopt.common import threads
from polopt.policies.fast_cpu import side_by_side as module
from polopt.policies.fast_cpu.side_by_side import MIN_WORK, side_by_side

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """The test may change the limits of threads of this process."""
    before = threads._limit, torch.get_num_threads()
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield
    threads._limit = before[0]
    torch.set_num_threads(before[1])


def names(*results: Any, work: int = MIN_WORK, meet: bool = False) -> list[tuple[Any, str]]:
    """Runs a piece for each result. Each piece returns its result and the name of its thread. With
    `meet`, each piece waits until all pieces have begun."""
    barrier = threading.Barrier(len(results))

    def piece(result: Any) -> tuple[Any, str]:
        if meet:
            barrier.wait(TIMEOUT_S)
        return result, threading.current_thread().name

    return side_by_side(work, *(lambda result=result: piece(result) for result in results))


def test_pieces_run_at_the_same_time() -> None:
    threads.limit_threads(2)
    found = names("a", "b", meet=True)
    assert [result for result, _ in found] == ["a", "b"]
    assert found[0][1] == threading.current_thread().name
    assert found[1][1].startswith("polopt-learner")


@pytest.mark.parametrize(("limit", "work"), [(1, MIN_WORK), (2, MIN_WORK - 1)])
def test_one_thread_or_short_pieces_need_no_other_thread(limit: int, work: int) -> None:
    threads.limit_threads(limit)
    here = threading.current_thread().name
    assert names("a", "b", work=work) == [("a", here), ("b", here)]


def test_thread_that_is_busy_is_not_waited_for() -> None:
    threads.limit_threads(2)
    names("a", "b", meet=True)
    begun, leave = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        assert leave.wait(TIMEOUT_S)

    queue = module._QUEUES[2]
    queue.put(module._Piece(busy))
    assert begun.wait(TIMEOUT_S)
    here = threading.current_thread().name
    for _ in range(5):
        assert names("a", "b", "c") == [("a", here), ("b", here), ("c", here)]
        assert queue.qsize() <= 2  # they do not pile up
    leave.set()
    empty = threading.Event()
    queue.put(module._Piece(empty.set))
    assert empty.wait(TIMEOUT_S)
    names("a", "b", meet=True)  # the thread serves again


@pytest.mark.parametrize("place", [0, 1])
def test_error_of_a_piece_is_raised_when_no_piece_runs_any_more(place: int) -> None:
    threads.limit_threads(2)
    barrier, ended = threading.Barrier(2), []

    def fails() -> None:
        barrier.wait(TIMEOUT_S)
        raise ValueError("of the piece")

    def ends() -> None:
        barrier.wait(TIMEOUT_S)
        ended.append(True)

    pieces = [ends, ends]
    pieces[place] = fails
    with pytest.raises(ValueError, match="of the piece"):
        side_by_side(MIN_WORK, *pieces)
    assert ended == [True]


@pytest.mark.filterwarnings("error")
def test_overflow_in_another_thread_gives_no_warning() -> None:
    threads.limit_threads(2)
    barrier = threading.Barrier(2)

    def overflow() -> Any:
        barrier.wait(TIMEOUT_S)
        return np.float32([1e38]) * np.float32([1e38])

    with np.errstate(all="ignore"):
        found = side_by_side(MIN_WORK, overflow, overflow)
    assert np.isinf(found).all()


def test_piece_in_a_thread_has_no_threads_of_its_own() -> None:
    threads.limit_threads(2)
    outer = threading.Barrier(2)

    def piece() -> list[str]:
        outer.wait(TIMEOUT_S)
        return [name for _, name in names("a", "b")]

    _, inner = side_by_side(MIN_WORK, piece, piece)
    assert len(set(inner)) == 1


def test_torch_has_one_thread_in_a_piece_of_another_thread() -> None:
    """Otherwise products in oneDNN would start more threads than there are cores."""
    threads.limit_threads(2)
    barrier = threading.Barrier(2)

    def piece() -> int:
        barrier.wait(TIMEOUT_S)
        return torch.get_num_threads()

    module._QUEUES.clear()  # a new thread begins with the limit of the process
    for _ in range(2):
        assert side_by_side(MIN_WORK, piece, piece) == [2, 1]
        torch.set_num_threads(2)


def test_forked_process_makes_its_own_threads() -> None:
    threads.limit_threads(2)
    names("a", "b", meet=True)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        # A thread of the parent's pool would never run the piece.
        try:
            right = [result for result, _ in names("a", "b", meet=True)] == ["a", "b"]
            os._exit(0 if right else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


class Begun(SimpleQueue[Any]):
    """A queue of pieces for threads of its own. A piece has begun when `put` returns."""

    def __init__(self) -> None:
        self.num_pieces = 0

    def put(self, piece: Any, *_: Any, **__: Any) -> None:
        begun, compute = threading.Event(), piece._compute

        def noted() -> Any:
            begun.set()
            return compute()

        piece._compute = noted
        super().put(piece)
        assert begun.wait(TIMEOUT_S)
        self.num_pieces += 1


def weights_after(
    name: str, limit: int, count: int = 200, **options: Any
) -> tuple[np.ndarray, int]:
    """The weights after three updates, and the number of pieces that other threads computed."""
    threads.limit_threads(limit)
    queue = Begun()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_WORK", 0)
        if limit > 1:
            patch.setattr(module, "SimpleQueue", lambda: queue)
            patch.delitem(module._QUEUES, limit, raising=False)
        if name in ("crossq", "dqn", "sac", "td3"):
            policy = replay_policy(name, **options)
            rows: Any = transitions(policy, count)
        else:
            policy = small_policy(name, **options)
            rows = make_batch(policy, count)
        assert policy.learns_with == "NumPy"
        for _ in range(3):
            policy.learn_on_batch(rows)
    return policy.flat.get_params(), queue.num_pieces


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_products_in_onednn_do_not_depend_on_the_number_of_threads(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"model": {"fcnet_hiddens": [192, 192]}}
    calls = onednn_calls(monkeypatch)
    alone, _ = weights_after(name, 1, 256, **options)
    count = len(calls)
    assert count >= 12
    for limit in (2, 3):
        found, num_pieces = weights_after(name, limit, 256, **options)
        assert num_pieces >= 3
        np.testing.assert_array_equal(found, alone)
    assert len(calls) == 3 * count
    assert set(calls) == {1}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["crossq", "dqn", "sac", "td3", "ppo", "a2c", "appo"])
def test_weights_do_not_depend_on_the_number_of_threads(name: str, shared: bool) -> None:
    options = {"model": {"fcnet_hiddens": [48, 32], "vf_share_layers": shared}}
    alone, num_pieces = weights_after(name, 1, **options)
    assert num_pieces == 0
    for limit in (2, 3):
        found, num_pieces = weights_after(name, limit, **options)
        assert num_pieces >= 3
        np.testing.assert_array_equal(found, alone)


def test_weights_of_convolutions_do_not_depend_on_the_number_of_threads() -> None:
    options: dict[str, Any] = {"observation_space": spaces.Box(0, 255, (5, 6, 3), np.uint8)}
    options |= {"model": {"conv_filters": [[4, 3, 1, 1], [5, 2, 1]], "post_fcnet_hiddens": [8]}}
    alone, _ = weights_after("dqn", 1, **options)
    found, num_pieces = weights_after("dqn", 2, **options)
    assert num_pieces >= 3
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize("name", ["sac", "ppo"])
def test_first_weights_do_not_depend_on_the_number_of_threads(name: str) -> None:
    """torch makes orthogonal weights of this size with other rounding errors in two threads."""
    made = []
    for limit in (1, 2):
        threads.limit_threads(limit)
        options = {"model": {"fcnet_hiddens": [256, 256]}}
        policy = replay_policy(name, **options) if name == "sac" else small_policy(name, **options)
        assert torch.get_num_threads() == limit
        made.append(policy.flat.get_params())
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize(("fast_cpu", "limit"), [(True, 1), (False, 2)])
def test_torch_has_one_thread_if_a_run_learns_in_numpy(
    fast_cpu: bool, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle threads of torch would spin on the core of the second thread."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    trainer = polopt.DQN(env="CartPole-v1", num_workers=0, num_cpus_for_driver=2, fast_cpu=fast_cpu)
    assert torch.get_num_threads() == limit
    assert threads.thread_limit() == 2
    trainer.stop()
