"""`LearningProgress`: counts of the updates of one policy object."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LearningProgress:
    """Counts the updates that a policy object makes, and the gradients that it skips.

    The counts belong to this object. They are neither sent with weights nor saved.

    Attributes:
        gradient_rows: number of rows, of all learners, behind the gradient in `flat.grads`.
            `Policy.apply_gradients` and `reduce_gradient` set it, and each update sets it to 0.
        rows_applied: sum of `gradient_rows` over all updates.
        skipped_updates: gradients that were not applied because they were not finite.
        non_finite_gradients: gradients of this learner that were not finite, when several learners
            learn together. Each learner counts its own, because the sum does not show whose
            gradient it was.
    """

    gradient_rows: int = 0
    rows_applied: int = 0
    skipped_updates: int = 0
    non_finite_gradients: int = 0

    def count_update(self, applied: bool) -> None:
        """Counts one update, applied or skipped. Its gradient is over `gradient_rows` rows."""
        rows, self.gradient_rows = self.gradient_rows, 0
        if applied:
            self.rows_applied += rows
        else:
            self.skipped_updates += 1
