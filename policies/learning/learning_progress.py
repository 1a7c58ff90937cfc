"""`LearningProgress`: counts of the updates of one policy object."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class LearningProgress:
    """Counts the updates that a policy object makes, and the gradients that it does not apply.

    They are of this object: they are neither sent with weights nor saved.

    Attributes:
        gradient_rows: rows, of all learners, that the gradient in `flat.grads` is the mean over.
            `Policy.apply_gradients` and `reduce_gradient` set it, and each update sets it to 0.
        rows_applied: sum of `gradient_rows` over the updates.
        skipped_updates: gradients that were not applied because they were not finite.
        non_finite_gradients: gradients computed here that were not finite, while several learners
            cooperate. Of these only the learner that computed one knows whose it was.
    """

    gradient_rows: int = 0
    rows_applied: int = 0
    skipped_updates: int = 0
    non_finite_gradients: int = 0

    def count_update(self, applied: bool) -> None:
        """Counts an update with a gradient over `gradient_rows` rows, or that it was skipped."""
        rows, self.gradient_rows = self.gradient_rows, 0
        if applied:
            self.rows_applied += rows
        else:
            self.skipped_updates += 1
