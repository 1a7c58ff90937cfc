"""`LearningProgress`: counts the rows and the gradients from which a policy object learns."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LearningProgress:
    """Counts the rows from which a policy object learns, and the gradients that it skips.

    Weights and checkpoints do not contain these counts.

    Attributes:
        gradient_rows: number of rows of all learners from which the gradient in `Policy.flat` was
            computed. Each update sets this number to 0.
        rows_applied: sum of `gradient_rows` over all gradients that were applied.
        skipped_updates: number of gradients that were not applied because they were not finite or
            too large (see `WeightUpdater.apply`).
        non_finite_gradients: number of gradients of this learner that were not finite, if several
            learners learn together. Each learner counts its own gradients, because the sum over all
            learners does not show which gradient was not finite.
    """

    gradient_rows: int = 0
    rows_applied: int = 0
    skipped_updates: int = 0
    non_finite_gradients: int = 0

    def count_update(self, applied: bool) -> None:
        """Counts one update whose gradient was computed from `gradient_rows` rows.

        Args:
            applied: True if the gradient was applied, False if it was skipped.
        """
        rows, self.gradient_rows = self.gradient_rows, 0
        if applied:
            self.rows_applied += rows
        else:
            self.skipped_updates += 1
