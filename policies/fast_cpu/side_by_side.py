"""`side_by_side`: runs independent pieces of a computation at the same time, in threads.

NumPy releases Python's lock in products of matrices and in arithmetic on whole arrays, so threads
use several cores. Each piece computes the same as without threads, with one BLAS thread. So the
results are the same bit for bit, whatever the number of threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from polopt.common.threads import limit_this_thread, thread_limit

#: Pieces with fewer multiplications run one after another, because the start of a piece in another
#: thread would take about as long as the piece. DQN with 128 rows and 256x256 units, whose pieces
#: have 9 million, does not gain from a second thread (`make bench ARGS='--only loop-dqn*'`).
MIN_WORK = 12_000_000
#: The pieces that wait for other threads, by the number of threads. A process has one queue,
#: because it has one learner.
_QUEUES: dict[int, SimpleQueue[_Piece]] = {}
_HERE = threading.local()


class _Piece:
    """A piece that another thread may run.

    Two locks take less time than a `Future` of the standard library.

    Args:
        compute: computes the result.
    """

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self._begun, self._runs = threading.Lock(), threading.Lock()
        self._runs.acquire()
        self._result: Any = None
        self._error: BaseException | None = None

    def begins(self) -> bool:
        """Whether the caller is the first one to begin the piece. It must then call `run`."""
        return self._begun.acquire(blocking=False)

    def run(self) -> None:
        """Computes the result, or catches the error."""
        try:
            self._result = self._compute()
        except BaseException as error:
            self._error = error
        finally:
            self._runs.release()

    def end(self) -> None:
        """Waits until the piece has ended. Runs it in this thread if no other one has begun."""
        if self.begins():
            self.run()
        self._runs.acquire()

    def result(self) -> Any:
        """Returns the result of a piece that has ended, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._result


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
    queue = _QUEUES.get(threads)
    if queue is None:
        queue = _QUEUES[threads] = SimpleQueue()
        for i in range(threads - 1):
            name = f"polopt-learner_{i}"
            threading.Thread(target=_serve, args=(queue,), name=name, daemon=True).start()
    others = [_Piece(piece) for piece in pieces[1:]]
    for other in others:
        if queue.qsize() < threads:  # otherwise the other threads have no time
            queue.put(other)
    try:
        first = pieces[0]()
    finally:
        for other in others:
            other.end()
    return [first, *(other.result() for other in others)]


def pays(work: int) -> bool:
    """Whether pieces of this number of multiplications run at the same time: this process may use
    several threads (`limit_threads`), and the pieces are long enough."""
    return work >= MIN_WORK and thread_limit() > 1 and not getattr(_HERE, "in_piece", False)


def _serve(queue: SimpleQueue[_Piece]) -> None:
    """Runs pieces. NumPy's error state belongs to a thread."""
    limit_this_thread()
    _HERE.in_piece = True
    with np.errstate(all="ignore"):
        while True:
            piece = queue.get()
            if piece.begins():
                piece.run()
            del piece  # and its arrays


# The threads of a process do not exist in a copy of the process.
os.register_at_fork(after_in_child=_QUEUES.clear)
