"""Early stop: when enough workers have finished, the fragments of the other workers end early.

The process that waits for the fragments, such as the driver, decides which of them end early
(`Stragglers`). This process then writes a request into the worker's shared memory (a
`ControlPage`). The worker's sampler reads the request between steps. The waiting process uses the
shortened fragment.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple


class Stragglers(NamedTuple):
    """Decides which workers are stragglers, and the least length of their fragments.

    Attributes:
        fraction_workers: once this share of the workers, and at least one worker, has finished, the
            other workers are stragglers. 1 means that no worker is ever a straggler.
        fraction_samples: a straggler samples at least this share of its fragment, and at least one
            step.
    """

    fraction_workers: float = 1.0
    fraction_samples: float = 0.0

    def remain(self, num_workers: int, num_pending: int) -> bool:
        """Returns True if the `num_pending` workers that have not finished are stragglers, because
        enough of the `num_workers` workers have finished."""
        enough = _share(self.fraction_workers, num_workers)
        return 0 < num_pending <= num_workers - enough

    def keep_steps(self, steps: int) -> int:
        """Returns the least number of steps that a straggler samples of a fragment of `steps`
        steps."""
        return _share(self.fraction_samples, steps)


@functools.lru_cache  # a fraction takes several microseconds, and a run asks for few numbers
def _share(share: float, of: int) -> int:
    """Returns `share * of`, rounded up, and at least 1. The product is exact: 0.56 of 25 is 14,
    while the floating-point product is a little larger than 14."""
    return max(1, math.ceil(Fraction(str(share)) * of))
