"""`numbers_of`: the declarations of all numbers of a result."""

from __future__ import annotations

from polopt.common.add_ons import add_ons
from polopt.metrics import learner
from polopt.metrics.number import Number, declared, find, within
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.trainers import best_checkpoint, evaluation, results

_COMMON = (
    *results.NUMBERS,
    *within("learners/default_policy", learner.NUMBERS),
    *within("evaluation", (*evaluation.NUMBERS, *best_checkpoint.NUMBERS)),
)


def numbers_of(
    optimizer: type[PolicyOptimizer] = PolicyOptimizer, policy: type[Policy] = Policy
) -> tuple[Number, ...]:
    """Returns the declarations of the numbers in the results of a trainer, with their paths.

    Keys that Tune adds are missing.

    Args:
        optimizer: class of the optimizer. The default has the numbers of all optimizers.
        policy: class of the policy. The default has the numbers of all policies.
    """
    numbers = (*_COMMON, *own_numbers(optimizer, policy))
    return tuple({number.key: number for number in numbers}.values())


def own_numbers(optimizer: type[PolicyOptimizer], policy: type[Policy]) -> tuple[Number, ...]:
    """Returns the declarations of the numbers that the optimizer, the policy and add-ons add to the
    numbers of all results."""
    own = declared(policy)
    statistics = (
        find(own, key) or Number(key, "", f"the statistic `{key}` of the policy")
        for key in policy.statistic_keys()
        if key not in learner.LEARNER_KEYS or find(own, key)
    )
    return (
        *within("optimizer", declared(optimizer)),
        *within("learners/default_policy", statistics),
        *(number for add_on in add_ons() for number in add_on.numbers),
    )
