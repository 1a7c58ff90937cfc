"""Early stop: when enough workers have finished, the fragments of the others end early.

The driver decides (`Stragglers`), and writes a request into memory that it shares with the worker
(`ControlPage`). The sampler looks there between steps. Samples made until then are used.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Stragglers(NamedTuple):
    """Which workers are stragglers, and how much of their fragments they keep.

    Attributes:
        fraction_workers: once this share of the workers has finished, the others are stragglers.
            1: nobody is a straggler.
        fraction_samples: a straggler keeps at least this share of its fragment, and one step.
    """

    fraction_workers: float = 1.0
    fraction_samples: float = 0.0

    def remain(self, num_workers: int, num_pending: int) -> bool:
        """Whether enough of `num_workers` have finished, so that the `num_pending` others are
        stragglers."""
        enough = max(1, math.ceil(self.fraction_workers * num_workers))
        return 0 < num_pending <= num_workers - enough

    def keep_steps(self, steps: int) -> int:
        """Least number of steps that a straggler samples of a fragment of `steps`."""
        return max(1, math.ceil(self.fraction_samples * steps))
