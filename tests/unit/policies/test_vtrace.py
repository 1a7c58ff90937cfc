"""V-trace equals a direct double loop, and closed forms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_helpers import made_batch, split, value_of

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.policies.vtrace import VTraceConfig, vtrace, with_vtrace

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 4))
SEEDS = st.integers(0, 2**31)
MODES = st.sampled_from(["next_step", "same_step"])
UNIT = st.floats(0.0, 1.0)
BOUND = st.floats(0.1, 3.0)


def config_of(
    gamma: float = 0.9, lambda_: float = 1.0, rho: float = 1.0, pg_rho: float = 1.0
) -> VTraceConfig:
    bounds = {"vtrace_clip_rho_threshold": rho, "vtrace_clip_pg_rho_threshold": pg_rho}
    return VTraceConfig.parse({"gamma": gamma, "lambda": lambda_, **bounds})


def ratios_of(batch: SampleBatch, seed: int) -> np.ndarray:
    """Returns log ratios `[T, N]` around 0. They are NaN in rows without a transition."""
    logs = np.random.default_rng(seed).normal(scale=0.7, size=batch.shape).astype(np.float32)
    logs[~batch["valid"]] = np.nan
    return logs


def with_lost_rows(batch: SampleBatch, seed: int) -> SampleBatch:
    """Changes some rows to rows in which the environment raised an error. Such a row has no
    transition, and is the last row of its episode."""
    lost = np.random.default_rng(seed).random(batch.shape) < 0.15
    batch["valid"][lost], batch["truncated"][lost] = False, True
    batch["terminated"][lost] = False
    return batch


def fast(
    batch: SampleBatch, logs: np.ndarray, config: VTraceConfig
) -> tuple[np.ndarray, np.ndarray]:
    values, following = gae.state_values(batch, value_of)
    return vtrace(batch, logs, values.astype(np.float32), following.astype(np.float32), config)


def slow(
    batch: SampleBatch, logs: np.ndarray, config: VTraceConfig, wrong: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the sums and products in the paper's definition term by term, separately for each
    row.

    Args:
        batch: `[T, N]`.
        logs: log ratios `[T, N]`.
        config: discount factor, lambda and bounds.
        wrong: the mistake that the function makes, or an empty text for no mistake.
    """
    steps, envs = batch.shape
    apart = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
    ends = batch["terminated"] | batch["truncated"]
    if wrong == "through resets":
        ends = np.zeros_like(ends)
    rho_bar, pg_rho_bar = config.vtrace_clip_rho_threshold, config.vtrace_clip_pg_rho_threshold

    def ratio(t: int, n: int, bound: float) -> float:
        return float(np.exp(logs[t, n]) if wrong == "unbounded" else min(np.exp(logs[t, n]), bound))

    def value_after(t: int, n: int) -> float:
        cut = "terminated" if wrong != "no bootstrap" or not batch["truncated"][t, n] else "valid"
        if batch[cut][t, n] and wrong != "beyond termination":
            return 0.0
        true_next = batch.all_obs[t + 1, n]
        if wrong != "from the next episode":
            true_next = apart.get(t * envs + n, true_next)
        return float(value_of(true_next))

    def stops(t: int, n: int) -> bool:
        return t == steps - 1 or bool(ends[t, n]) or t * envs + n in apart

    def target(start: int, n: int) -> float:
        total, weight = float(value_of(batch.all_obs[start, n])), 1.0
        for t in range(start, steps):
            if not batch["valid"][t, n] and wrong not in ("unmasked", "through resets"):
                break
            error = batch["rewards"][t, n] + config.gamma * value_after(t, n)
            error -= float(value_of(batch.all_obs[t, n]))
            total += weight * ratio(t, n, rho_bar) * error
            weight *= config.gamma * ratio(t, n, 1.0)
            weight *= 1.0 if wrong == "no lambda" else config.lambda_
            if stops(t, n):
                break
        return total

    targets = np.zeros((steps, envs))
    advantages = np.zeros((steps, envs))
    for t, n in np.ndindex(steps, envs):
        value = float(value_of(batch.all_obs[t, n]))
        targets[t, n] = value
        if not batch["valid"][t, n]:
            continue
        targets[t, n] = target(t, n)
        one_step = stops(t, n) or wrong == "advantage from values"
        after = value_after(t, n) if one_step else target(t + 1, n)
        advantage = batch["rewards"][t, n] + config.gamma * after - value
        advantages[t, n] = ratio(t, n, pg_rho_bar) * advantage
    return targets, advantages


def assert_equal(
    one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray], tolerance: float
) -> None:
    for got, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=80, deadline=None)
@given(SIZES, MODES, SEEDS, UNIT, UNIT, BOUND, BOUND)
def test_vtrace_equals_the_definition(
    size: tuple[int, int],
    mode: str,
    seed: int,
    gamma: float,
    lambda_: float,
    rho: float,
    pg_rho: float,
) -> None:
    batch = with_lost_rows(made_batch(*size, mode, seed), seed)
    config = config_of(gamma, lambda_, rho, pg_rho)
    logs = ratios_of(batch, seed)
    result = fast(batch, logs, config)
    assert [part.dtype for part in result] == [np.float32, np.float32]
    assert_equal(result, slow(batch, logs, config), 2e-4)


@pytest.mark.parametrize(
    ("wrong", "mode"),
    [
        ("through resets", "next_step"),
        ("no bootstrap", "same_step"),
        ("no bootstrap", "next_step"),
        ("beyond termination", "same_step"),
        ("from the next episode", "same_step"),
        ("unmasked", "next_step"),
        ("unbounded", "same_step"),
        ("no lambda", "same_step"),
        ("advantage from values", "same_step"),
    ],
)
def test_wrong_variant_of_vtrace_differs(wrong: str, mode: str) -> None:
    batch, config = made_batch(40, 6, mode, seed=3), config_of(lambda_=0.8)
    batch["terminated"] &= ~batch["truncated"]
    batch = with_lost_rows(batch, 5)
    logs = ratios_of(batch, 4)
    result = fast(batch, logs, config)
    assert_equal(result, slow(batch, logs, config), 2e-4)
    with pytest.raises(AssertionError):
        assert_equal(result, slow(batch, np.nan_to_num(logs), config, wrong), 1e-2)


# ---- closed forms -----------------------------------------------------------------------------


def returns_of(batch: SampleBatch, gamma: float) -> np.ndarray:
    """Computes the discounted rewards up to the end of the episode or fragment, plus the discounted
    value after the end."""
    _, following = gae.state_values(batch, value_of)
    continues = gae.continuing(batch)
    result = np.zeros(batch.shape)
    ahead = following[-1]
    for t in reversed(range(batch.shape[0])):
        ahead = np.where(continues[t], ahead, following[t])
        result[t] = ahead = batch["rewards"][t] + gamma * ahead
    return result


@pytest.mark.parametrize("lambda_", [0.0, 0.7, 1.0])
def test_targets_on_policy_equal_targets_of_gae(lambda_: float) -> None:
    batch, config = made_batch(12, 4, "same_step", 1), config_of(lambda_=lambda_)
    values, following = gae.state_values(batch, value_of)
    values, following = values.astype(np.float32), following.astype(np.float32)
    targets, advantages = fast(batch, np.zeros(batch.shape, np.float32), config)
    expected = gae.advantages(batch, values, following, 0.9, lambda_)
    np.testing.assert_allclose(targets, values + expected, rtol=1e-4, atol=1e-4)
    if lambda_ == 1.0:
        returns = returns_of(batch, 0.9)
        np.testing.assert_allclose(targets, returns, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(advantages, returns - values, rtol=1e-4, atol=1e-4)


def one_episode(rewards: list[float], **ends: bool) -> SampleBatch:
    """Returns an episode `[T, 1]`. The value of the last observation is 7. Other values are 0."""
    steps = len(rewards)
    obs = np.zeros((steps + 1, 1, 2), np.float32)
    obs[:, 0, 0] = [-0.5] * steps + [3.0]
    over = np.zeros((steps, 1), bool)
    over[-1] = True
    columns: dict[str, Any] = {
        "rewards": np.array(rewards, np.float32)[:, None],
        "terminated": over if ends.get("terminated") else np.zeros_like(over),
        "truncated": over if ends.get("truncated") else np.zeros_like(over),
        "valid": np.ones_like(over),
    }
    return SampleBatch(obs, columns, np.zeros(0, np.int64), obs[:0, 0])


@pytest.mark.parametrize("end", ["terminated", "truncated", "neither"])
def test_small_ratios_shrink_corrections(end: str) -> None:
    """The ratio is 1/2 in every row, so rho and c are 1/2."""
    last = 0.0 if end == "terminated" else 7.0
    batch = one_episode([1.0, 2.0, 3.0], **{end: True})
    targets, advantages = fast(batch, np.full((3, 1), np.log(0.5), np.float32), config_of(0.9))
    third = 0.5 * (3.0 + 0.9 * last)
    second = 0.5 * 2.0 + 0.9 * 0.5 * third
    first = 0.5 * 1.0 + 0.9 * 0.5 * second
    np.testing.assert_allclose(targets[:, 0], [first, second, third], rtol=1e-5)
    expected = [0.5 * (1.0 + 0.9 * second), 0.5 * (2.0 + 0.9 * third), third]
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(("rho", "pg_rho"), [(1.0, 1.0), (2.5, 1.0), (1.0, 2.5)])
def test_large_ratios_are_bounded(rho: float, pg_rho: float) -> None:
    """A ratio of e^200 overflows float32. Then c is 1, and the other ratios equal their bounds."""
    batch = one_episode([1.0, 2.0], truncated=True)
    config = config_of(0.9, rho=rho, pg_rho=pg_rho)
    targets, advantages = fast(batch, np.full((2, 1), 200.0, np.float32), config)
    second = rho * (2.0 + 0.9 * 7.0)
    np.testing.assert_allclose(targets[:, 0], [rho * 1.0 + 0.9 * second, second], rtol=1e-5)
    expected = [pg_rho * (1.0 + 0.9 * second), pg_rho * (2.0 + 0.9 * 7.0)]
    np.testing.assert_allclose(advantages[:, 0], expected, rtol=1e-5)


# ---- batches ----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4), MODES, SEEDS, UNIT)
def test_padding_does_not_change_vtrace(
    sizes: list[tuple[int, int]], mode: str, seed: int, lambda_: float
) -> None:
    batches = [made_batch(*size, mode, seed + i) for i, size in enumerate(sizes)]
    for i, batch in enumerate(batches):
        batch["logs"] = ratios_of(batch, seed + i)
    whole, config = SampleBatch.concat(batches), config_of(lambda_=lambda_)
    together = fast(whole, whole["logs"], config)
    for column, index in zip(together, (0, 1), strict=True):
        for batch, part in zip(batches, split(column, batches), strict=True):
            alone = fast(batch, batch["logs"], config)[index]
            np.testing.assert_allclose(part, alone, rtol=1e-4, atol=1e-4)


def test_vtrace_adds_columns_to_a_new_batch() -> None:
    batch, config = made_batch(5, 3, "same_step", 0), config_of()
    logs = ratios_of(batch, 1)
    before = replace(batch, columns={name: c.copy() for name, c in batch.columns.items()})
    result = with_vtrace(batch, logs, *gae.state_values(batch, value_of), config)
    assert batch.columns.keys() == before.columns.keys()
    for name, column in before.columns.items():
        np.testing.assert_array_equal(batch[name], column)
    targets, advantages = fast(batch, logs, config)
    np.testing.assert_allclose(result["value_targets"], targets, rtol=1e-5)
    np.testing.assert_allclose(result["advantages"], advantages, rtol=1e-5)
    np.testing.assert_allclose(result["values"], value_of(batch.obs), rtol=1e-5)
