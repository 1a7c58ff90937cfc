"""`Fault`: one form of a failure, from the place where it happens to the number in the result.

    FaultTolerantEnv -> infos -> SamplerFaults -> SampleBatch.faults
    SampleBatch.faults, gradients of a worker  -> Record.faults      -> FaultLog -> result
    Supervisor, ProcessGroup                   -> Call.failure       -> FaultLog -> result

The code that notices a failure makes the `Fault`, and all other code only hands it over. If several
faults of one kind travel together, the last one travels, with the sum of the counts
(`one_per_kind`). The `FaultLog` of the driver counts each fault once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "raised",
    "bad_rows",
    "non_finite",
    "death",
    "hang",
    "exception",
    "environment",
    "reference",
    "preemption",
]


@dataclass(frozen=True, slots=True)
class Fault:
    """Describes a failure of an environment, of data, or of a process.

    A frozen dataclass and no tuple, because an array of infos must hold it as one object.

    Attributes:
        kind: the kind of failure. In environments and data:
            `raised`: an environment raised, and was replaced.
            `bad_rows`: values of an environment were not finite. Its rows in the fragment are not
            `valid`. A learner may use the other rows.
            `non_finite`: values were not finite in a whole fragment, a gradient or an update. A
            learner must not use these data.
            In processes:
            `death`: the process died, or its connection ended.
            `hang`: the process made no progress within the time limit, or missed a deadline that
            progress does not extend.
            `exception`: a call or the start of the process raised, or an answer cannot be used.
            `environment`: an environment cannot be made, or failed repeatedly.
            `reference`: an argument of the call is lost, because the process that made it died. The
            called process itself has not failed.
            `preemption`: the process has left because its node or the process itself announced its
            end, or Ray says that its node was preempted. It does not count as a failure.
        message: says where the failure happened and why. If code raised, the message contains the
            traceback. The traceback does not begin with polopt's own frames.
        env_index: the index of the environment within its worker. -1 if a whole vector environment
            raised, or if the fault does not belong to one environment.
        count: how often this happened. For `raised`, the number of exceptions until an environment
            worked again.
        rows: the number of valid rows that are not used because of this fault.
        at_start: whether this happened at a start. For `raised`: `__init__` or `reset` raised
            before an episode began. Otherwise `step` raised, so this step gives no transition, and
            the episode does not count in statistics. For a process: its constructor or a set-up
            call raised.
    """

    kind: FaultKind
    message: str
    env_index: int = -1
    count: int = 1
    rows: int = 0
    at_start: bool = False


#: Faults of one fragment or one call. At most one of each kind, see `one_per_kind`.
Faults = Mapping[FaultKind, Fault]


def one_per_kind(faults: Iterable[Fault]) -> dict[FaultKind, Fault]:
    """Returns the last fault of each kind, with the sums of `count` and `rows` over all faults of
    this kind. So the size of a message does not grow with the number of faults."""
    last: dict[FaultKind, Fault] = {}
    for fault in faults:
        earlier = last.get(fault.kind)
        if earlier is not None:
            count, rows = earlier.count + fault.count, earlier.rows + fault.rows
            fault = dataclasses.replace(fault, count=count, rows=rows)
        last[fault.kind] = fault
    return last


def non_finite_values(faults: Faults) -> str:
    """Returns the text that says which values of a fragment were not finite. Empty if all values
    were finite."""
    bad = faults.get("non_finite") or faults.get("bad_rows")
    return bad.message if bad else ""
