"""`side_by_side`: runs independent pieces of a computation at the same time, in threads.

NumPy releases Python's lock in products of matrices and in arithmetic on whole arrays, so threads
use several cores. Each piece computes the same as without threads, with one BLAS thread. So the
results are the same bit for bit, whatever the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from polopt.common.threads import limit_this_thread, thread_limit

#: Pieces with fewer multiplications run one after another, because the start of a piece in another
#: thread would take about as long as the piece. DQN with 128 rows and 256x256 units, whose pieces
#: have 9 million, does not gain from a second thread (`make bench ARGS='--only loop-dqn*'`).
MIN_WORK = 12_000_000
#: The threads, by their number. A process has one pool, because it has one learner.
_POOLS: dict[int, ThreadPoolExecutor] = {}
_HERE = threading.local()


def side_by_side(work: int, *pieces: Callable[[], Any]) -> list[Any]:
    """Calls the pieces, and returns their results in the order of the pieces.

    The pieces run at the same time if this pays. The calling thread runs the first piece, and then
    each piece that no other thread has begun. So no thread waits for a piece while the cores are
    busy with other programs.

    Args:
        work: number of multiplications in the products of one piece.
        pieces: functions. None of them may depend on the effect of another one.
    """
    if not pays(work):
        return [piece() for piece in pieces]
    threads = thread_limit()
    pool = _POOLS.get(threads)
    if pool is None:
        pool = _POOLS[threads] = ThreadPoolExecutor(
            threads - 1, "polopt-learner", limit_this_thread
        )
    others = [pool.submit(_run, piece) for piece in pieces[1:]]
    try:
        results = [pieces[0]()]
    finally:
        left = [other.cancel() for other in others]
        wait(other for other, mine in zip(others, left, strict=True) if not mine)
    for piece, other, mine in zip(pieces[1:], others, left, strict=True):
        results.append(piece() if mine else other.result())
    return results


def pays(work: int) -> bool:
    """Whether pieces of this number of multiplications run at the same time: this process may use
    several threads (`limit_threads`), and the pieces are long enough."""
    return work >= MIN_WORK and thread_limit() > 1 and not getattr(_HERE, "in_piece", False)


def _run(piece: Callable[[], Any]) -> Any:
    """Runs a piece in a thread of the pool. NumPy's error state belongs to a thread."""
    _HERE.in_piece = True
    with np.errstate(all="ignore"):
        return piece()


# The threads of a process do not exist in a copy of the process.
os.register_at_fork(after_in_child=_POOLS.clear)
