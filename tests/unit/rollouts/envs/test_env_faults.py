"""Environments that raise or violate Gymnasium's API. They are replaced and counted, and errors
name them."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from faulty_envs import (
    CRASH_AT,
    BadReset,
    CrashingVector,
    NeverMade,
    NeverResets,
    NeverSteps,
    Spoiled,
    check_row_before_a_crash_is_bootstrapped,
    crash_batches,
    crashed,
    crashing_cartpole,
    num_faults,
    sample_often,
    worker,
)
from gymnasium.wrappers import NormalizeObservation
from toy_envs import AUTORESET, Clock, make_policy, make_sampler

from polopt.common.faults import Fault, FaultKind, one_per_kind
from polopt.common.sample_batch import SampleBatch
from polopt.metrics.record import Record
from polopt.policies import gae
from polopt.rollouts.envs.env_errors import EnvironmentAPIError, EnvironmentFailedError
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.fault_tolerant_env import EnvPlace, FaultTolerantEnv
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.sampling.sampler_faults import SamplerFaults
from polopt.rollouts.seeds import worker_seeds
from polopt.rollouts.workers.fault_log import FaultLog
from polopt.rollouts.workers.rollout_worker import RolloutWorker

every_mode = pytest.mark.parametrize("mode", AUTORESET)


@every_mode
@pytest.mark.parametrize("fragment", [1, 4, 5, 30])
def test_crash_invalidates_one_row(mode: str, fragment: int) -> None:
    batches = crash_batches(mode, fragment)
    check_row_before_a_crash_is_bootstrapped(batches)
    valid = np.concatenate([crashed(batch, "valid") for batch in batches])
    period = CRASH_AT + 1  # `CRASH_AT` steps, and the step that raised
    np.testing.assert_array_equal(~valid, np.arange(len(valid)) % period == CRASH_AT)
    lost = sum(num_faults(batch.faults, "raised") for batch in batches)
    assert lost == np.count_nonzero(~valid)
    # The episodes of the first clock are discarded. The episodes of the second clock are complete.
    lengths = np.concatenate([batch.episodes.lengths for batch in batches])
    assert set(lengths.tolist()) == {7}
    rewards = np.concatenate([crashed(batch, "rewards") for batch in batches])
    np.testing.assert_array_equal(rewards, valid.astype(np.float32))
    fault = next(batch.faults["raised"] for batch in batches if batch.faults)
    assert fault.env_index == 0
    first, *_, last = fault.message.splitlines()
    assert first == "environment 'toy' (number 0 of worker 1) in step() at step 4 of its episode:"
    assert last == "RuntimeError: simulated crash of the clock"
    assert "toy_envs.py" in fault.message or "faulty_envs.py" in fault.message
    assert "gymnasium/vector" not in fault.message


def test_crash_row_counted_as_valid_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    note = SamplerFaults.note
    monkeypatch.setattr(SamplerFaults, "note", lambda self, infos: np.zeros_like(note(self, infos)))
    with pytest.raises(AssertionError):
        check_row_before_a_crash_is_bootstrapped(crash_batches("same_step", 30))


def test_crash_treated_as_termination_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gae.next_values

    def wrong(batch: SampleBatch, *values: np.ndarray) -> np.ndarray:
        following = right(batch, *values)
        following[:-1][~batch["valid"][1:]] = 0.0
        return following

    monkeypatch.setattr(gae, "next_values", wrong)
    with pytest.raises(AssertionError):
        check_row_before_a_crash_is_bootstrapped(crash_batches("same_step", 30))


# ---- workers ----------------------------------------------------------------------------------


def test_random_crashes_in_step_and_reset() -> None:
    made = worker(crashing_cartpole, env_config={"p_crash": 0.05, "p_crash_reset": 0.2})
    batches = [made.sample() for _ in range(40)]
    faults = sum(num_faults(batch.faults, "raised") for batch in batches)
    lost = sum(np.count_nonzero(~batch["valid"]) for batch in batches)
    rows = sum(len(batch) for batch in batches)
    # A crash in `step` invalidates one row. A crash in `reset` invalidates no row. The replacement
    # may fail several times.
    assert 0.03 * rows < lost < 0.07 * rows
    assert lost < faults < 3 * lost
    assert all(batch["rewards"][batch["valid"]].min() == 1.0 for batch in batches)
    assert {kind for batch in batches for kind in batch.faults} == {"raised"}


def test_fault_travels_unchanged_from_the_environment_to_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Fault] = []
    replace = FaultTolerantEnv._replace

    def noted(self: FaultTolerantEnv, *args: Any) -> Any:
        fault, observation = replace(self, *args)
        sent.append(fault)
        return fault, observation

    monkeypatch.setattr(FaultTolerantEnv, "_replace", noted)
    made = worker(crashing_cartpole, env_config={"p_crash": 0.02})
    log = FaultLog(max_consecutive_failures=3)
    for _ in range(20):
        sent.clear()
        before = log.counts["raised"]
        record = made.run(1, sample_one).record
        log.add(3, record)
        assert log.counts["raised"] - before == sum(fault.count for fault in sent)
        if len(sent) == 1:
            assert record.faults["raised"] is sent[0]
            assert log.stats()["last_env_fault"] == sent[0].message[-2000:]
            break
    else:
        pytest.fail("no fragment had exactly one fault")


def sample_one(made: RolloutWorker) -> None:
    made.sample()


def test_crashes_are_reproducible_without_repeated_episodes() -> None:
    options = {"p_crash": 0.05}
    one, other = (worker(crashing_cartpole, env_config=options) for _ in range(2))
    first, second = one.sample(), other.sample()
    assert num_faults(first.faults, "raised") > 0
    np.testing.assert_array_equal(first.all_obs, second.all_obs)
    crashes = np.argwhere(~first["valid"])
    for t, n in crashes:  # the new environment starts in a different state
        assert not np.array_equal(first.all_obs[t + 1, n], first.all_obs[0, n])


def test_wrapper_statistics_survive_a_crash() -> None:
    made = worker(lambda config: NormalizeObservation(crashing_cartpole({"p_crash": 0.1})))
    assert sum(num_faults(made.sample().faults, "raised") for _ in range(4)) > 0
    counts = [learned["count"] for [learned] in made.get_statistics()["envs"]]
    assert min(counts) > 5 * 20  # more than the number of steps since the last crash


@pytest.mark.parametrize(
    ("env", "method", "said"),
    [
        (NeverResets, "reset", "OSError: no display"),
        (NeverSteps, "step", "OSError: no simulator"),
        (NeverMade, "__init__", "OSError: no licence"),
    ],
)
def test_permanent_failure_is_one_error_with_traceback(env: Any, method: str, said: str) -> None:
    made = worker(env, max_consecutive_env_faults=3)
    with pytest.raises(EnvironmentFailedError) as caught:
        made.sample()
    message = str(caught.value)
    assert f"{env.__name__!r}" in message
    assert "of worker 3" in message
    assert said in message
    assert "faulty_envs.py" in message
    assert f"in {method}" in message
    assert "rollouts/" not in message.split("\n", 1)[1]  # the traceback has no frames of polopt


def test_replacement_that_cannot_be_made_is_named_and_nothing_is_closed_twice() -> None:
    class MadeOnce(Clock):
        made = closed = 0

        def __init__(self) -> None:
            super().__init__(length=5)
            MadeOnce.made += 1
            if MadeOnce.made > 1:
                raise OSError("no second licence")

        def step(self, action: Any) -> Any:
            raise OSError("connection lost")

        def close(self) -> None:
            MadeOnce.closed += 1

    env = FaultTolerantEnv(MadeOnce, EnvPlace("toy", 1, 0), 4)
    env.reset(seed=0)
    with pytest.raises(EnvironmentFailedError, match=r"in __init__\(\) .*no second licence"):
        env.step(0)
    assert (MadeOnce.made, MadeOnce.closed) == (4, 1)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wrong shape", r"observation of shape \(3,\); got shape \(2,\)"),
        ("list of wrong length", r"observation of shape \(3,\); got shape \(2,\)"),
        ("wrong dtype", r"observation of dtype float32; got dtype complex128"),
        ("no array", r"observation of (shape|dtype)"),
        ("four-tuple", r"must return five values .*; got a tuple of 4"),
        ("nothing", r"must return five values .*; got None \(NoneType\)"),
        ("word for a reward", r"a number as reward; got 'much' \(str\)"),
        ("none for a reward", r"a number as reward; got None"),
        ("vector for a reward", r"a number as reward; got array"),
        ("word for an end", r"a boolean as terminated; got 'no' \(str\)"),
        ("list for info", r"a dict as info; got \[\] \(list\)"),
    ],
)
@pytest.mark.parametrize("after", [0, 40])
def test_api_violation_is_one_error_that_names_it(what: str, said: str, after: int) -> None:
    made = worker(
        Spoiled,
        env_config={"what": what, "after": after},
        autoreset_mode="same_step",
        max_consecutive_env_faults=4,
    )
    with pytest.raises(EnvironmentAPIError, match=said) as caught:
        sample_often(made)
    message = str(caught.value)
    assert "environment 'Spoiled' (number " in message
    assert "of worker 3)" in message
    assert "at step " in message
    assert 'faulty_envs.py", line' in message


class Imprecise(Clock):
    """A clock with an integer observation space. After two steps, its observations are floats."""

    def __init__(self) -> None:
        super().__init__(6)

    def step(self, action: int) -> Any:
        time, *rest = super().step(action)
        return time if time < 3 else time - 0.5, *rest


def test_api_violation_within_an_episode() -> None:
    made = worker(lambda: Imprecise(), max_consecutive_env_faults=4)
    with pytest.raises(EnvironmentAPIError, match="of dtype int64; got dtype float64") as caught:
        sample_often(made)
    assert "at step 3 of its episode" in str(caught.value)


def test_api_violation_in_reset() -> None:
    made = worker(BadReset)
    with pytest.raises(EnvironmentAPIError, match=r"reset\(\) must return a pair .*; got array"):
        made.sample()


# ---- vector implementations of the environment's own ------------------------------------------


@pytest.mark.parametrize("when", ["step", "reset"])
def test_own_vector_is_replaced_after_exception(when: str) -> None:
    made = []

    def make() -> CrashingVector:
        made.append(CrashingVector(3, crash_at=10, when=when, crashes=len(made) < 2))
        return made[-1]

    env = make()
    policy = make_policy("a2c", env, model={"fcnet_hiddens": [4]})
    faults = SamplerFaults(make, max_failures=5, place="vector environment 'V' (of worker 2)")
    sampler = VectorSampler(env, policy, 12, worker_seeds(0, 1, 0, 3), faults)
    batches = [policy.postprocess(sampler.sample()) for _ in range(4)]
    assert len(made) == 3
    assert sum(num_faults(batch.faults, "raised") for batch in batches) == 2
    found = one_per_kind(batch.faults["raised"] for batch in batches if batch.faults)["raised"]
    assert found.env_index == -1, "the whole vector"
    first, *_, last = found.message.splitlines()
    assert first.startswith("vector environment 'V' (of worker 2) raised at step ")
    assert last == "RuntimeError: simulated crash of the vector"
    lost = sum(np.count_nonzero(~batch["valid"] & batch["truncated"]) for batch in batches)
    assert lost == (2 * 3 if when == "step" else 0)
    assert all(env.was_closed for env in made[:-1])
    assert len({env.seed for env in made}) == 3


def test_permanent_failure_of_own_vector() -> None:
    def make() -> CrashingVector:
        return CrashingVector(3, crash_at=0, when="step", crashes=True)

    env = make()
    policy = make_policy("a2c", env, model={"fcnet_hiddens": [4]})
    faults = SamplerFaults(make, max_failures=5, place="vector environment 'V' (of worker 2)")
    sampler = VectorSampler(env, policy, 12, worker_seeds(0, 1, 0, 3), faults)
    with pytest.raises(EnvironmentFailedError, match=r"'V' \(of worker 2\) failed 5 times") as err:
        sampler.sample()
    assert str(err.value).endswith("RuntimeError: simulated crash of the vector")


def test_guard_does_not_change_batches() -> None:
    config = RolloutConfig.parse({"env": "CartPole-v1", "vectorization_mode": "sync"})
    guarded_env = make_vector_env(resolve_env("CartPole-v1"), config, 1)
    plain = gymnasium.make_vec(
        "CartPole-v1",
        config.num_envs_per_worker,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": guarded_env.autoreset_mode},
    )
    policy = make_policy("a2c", plain, model={"fcnet_hiddens": [4]})
    one, other = (make_sampler(env, policy, 200) for env in (guarded_env, plain))
    for _ in range(2):
        first, second = one.sample(), other.sample()
        np.testing.assert_array_equal(first.all_obs, second.all_obs)
        np.testing.assert_array_equal(first.successor_obs, second.successor_obs)
        for name in first.columns:
            np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize("kind", ["non_finite", "bad_rows", "raised"])
def test_frequent_faults_in_data_share_a_line(
    kind: FaultKind, caplog: pytest.LogCaptureFixture
) -> None:
    """After three lines, ten faults per second make one line in 10 s, which says how many faults
    there were."""
    now_s = 0.0
    log = FaultLog(max_consecutive_failures=3, clock=lambda: now_s)
    for _ in range(250):
        record = Record()
        record.add_faults([Fault(kind, "what happened")])
        log.add(1, record)
        now_s += 0.1
    assert len(caplog.messages) in (5, 6)
    assert "100 times since the last such line" in caplog.messages[-1]
