"""Sampling with several agents: random schedules of joining, leaving, ends, turns and faults agree
with a slow reference of lists for each agent."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from agent_schedules import AGENTS, Step, calm_slots, reference, schedule_slots
from toy_envs import make_policy

from polopt.common.sample_batch import SampleBatch
from polopt.policies import gae
from polopt.replay.n_step import windows_of
from polopt.rollouts.envs import agents_env
from polopt.rollouts.envs.agent_vector_env import AgentVectorEnv, SlotGroup
from polopt.rollouts.sampling.sampler import VectorSampler
from polopt.rollouts.seeds import worker_seeds

MODES = ["together", "turns", "random"]
GAMMA, LAMBDA = 0.9, 0.8


def sampler_of(slots: SlotGroup, length: int, **options: Any) -> VectorSampler:
    policy = make_policy("a2c", slots, **options)
    return VectorSampler(slots, policy, length, worker_seeds(3, 0, 0, len(slots.vector.envs)))


def rows_of(batch: SampleBatch, n: int) -> list[Step]:
    """The valid rows of a slot, as the rest of polopt reads them."""
    places = {int(place): i for i, place in enumerate(batch.successor_index)}
    rows = []
    for t in range(batch.shape[0]):
        if not batch["valid"][t, n]:
            continue
        place = places.get(t * batch.shape[1] + n)
        following = batch.all_obs[t + 1, n] if place is None else batch.successor_obs[place]
        rows.append(
            Step(
                batch.obs[t, n],
                int(batch["actions"][t, n]),
                float(batch["rewards"][t, n]),
                following,
                bool(batch["terminated"][t, n]),
                bool(batch["truncated"][t, n]),
            )
        )
    return rows


def assert_equal(found: Step, expected: Step) -> None:
    np.testing.assert_array_equal(found.obs, expected.obs)
    np.testing.assert_array_equal(found.next_obs, expected.next_obs)
    assert (found.action, found.reward) == (expected.action, expected.reward)
    assert (found.terminated, found.truncated) == (expected.terminated, expected.truncated)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("faults", [0.0, 0.05])
def test_rows_agree_with_the_reference(mode: str, faults: float) -> None:
    for seed in range(60):
        copies, length = 1 + seed % 3, 1 + seed % 11
        slots, logs = schedule_slots(seed, copies, mode, faults)
        sampler = sampler_of(slots, length)
        batches = [sampler.sample() for _ in range(8)]
        for k, log in enumerate(logs):
            expected = reference(log)
            for place, agent in enumerate(AGENTS):
                n = k * len(AGENTS) + place
                rows = [row for batch in batches for row in rows_of(batch, n)]
                assert len(rows) == len(expected[agent])
                for found, one in zip(rows, expected[agent], strict=True):
                    assert_equal(found, one)


def test_counts_and_returns() -> None:
    for mode, seed in itertools.product(MODES, range(10)):
        slots, [log] = schedule_slots(seed, 1, mode)
        sampler = sampler_of(slots, 7)
        batches = [sampler.sample() for _ in range(12)]
        steps = sum(batch.env_steps for batch in batches)
        assert steps == 7 * 12
        assert sum(batch.agent_steps for batch in batches) == sum(map(len, reference(log).values()))
        returns, totals, length, lengths = {}, [], 0, []
        for event, agent, *values in log:
            if event == "reset":
                returns, length = {}, 0
            elif event == "reward":
                returns[agent] = returns.get(agent, 0.0) + values[0]
            elif event == "over":
                totals.append(returns)
        found = [one for batch in batches for one in batch.episodes.agents]
        assert len(found) == len(totals)
        for one, total in zip(found, totals, strict=True):
            assert {agent: value for agent, value in one.items() if value} == {
                agent: value for agent, value in total.items() if value
            }
        sums = [value for batch in batches for value in batch.episodes.returns]
        assert sums == [sum(total.values()) for total in totals]
        del lengths, length


def steps_of(vector: AgentVectorEnv) -> tuple[list[Any], float]:
    """What the sampler sees of 150 steps, and the share of copies in which the same agents went
    on."""
    rng, seen, going = np.random.default_rng(0), [], 0
    vector.reset(range(3), None)
    for _ in range(150):
        vector.step([rng.integers(4, size=group.num_envs) for group in vector.groups])
        going += sum(env.env.continued is not None for env in vector.envs)
        for group in vector.groups:
            observations, rewards, terminated, truncated, infos = group.results()
            seen += [observations[group.acts], group.acts, group.open, group.has_row]
            seen += [rewards, terminated, truncated]
            seen += [list(infos.get("final_obs", ())), sorted(infos), *group.returns]
    seen += [(one.episode_return, one.episode_len, one.agent_returns) for one in vector.episodes]
    return [*seen, vector.num_steps], going / 450


@pytest.mark.parametrize(
    "members", [{"all": AGENTS}, {"two": (AGENTS[2], AGENTS[0]), "one": AGENTS[1:2]}]
)
def test_steps_in_which_the_same_agents_go_on_have_the_same_results(
    members: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []
    take = AgentVectorEnv._take_whole_step
    monkeypatch.setattr(
        AgentVectorEnv, "_take_whole_step", lambda *args: whole.append(take(*args)) or whole[-1]
    )
    fast = [steps_of(calm_slots(seed, members)) for seed in range(8)]
    assert 100 < sum(whole) < len(whole)
    whole.clear()
    monkeypatch.setattr(agents_env._DictAgents, "_continue", lambda self, result: None)
    for seed, (seen, going) in enumerate(fast):
        slow, none = steps_of(calm_slots(seed, members))
        assert 0.5 < going < 1.0
        assert (none, whole) == (0.0, [])
        for found, expected in zip(seen, slow, strict=True):
            np.testing.assert_equal(found, expected)


def value(obs: np.ndarray) -> np.ndarray:
    return (obs[..., 1] * 3.0 + obs[..., 2]).astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_advantages_and_n_step_returns_agree_with_the_reference(mode: str) -> None:
    for seed in range(40):
        slots, _ = schedule_slots(seed, 2, mode, faults=0.03)
        sampler = sampler_of(slots, 9)
        for _ in range(4):
            batch = sampler.sample()
            values, following = gae.state_values(batch, value)
            advantages = gae.advantages(batch, values, following, GAMMA, LAMBDA)
            windows = windows_of(batch, GAMMA, 3)
            of_row = {int(index): i for i, index in enumerate(windows.rows.indices)}
            for n in range(batch.shape[1]):
                lives = lives_of(batch, n)
                for life in lives:
                    check_life(batch, n, life, advantages, windows, of_row)


def lives_of(batch: SampleBatch, n: int) -> list[list[int]]:
    """The valid rows of a slot, divided where the next row does not continue."""
    lives: list[list[int]] = [[]]
    for t in range(batch.shape[0]):
        if batch["valid"][t, n]:
            lives[-1].append(t)
        if not batch["valid"][t, n] or batch["terminated"][t, n] or batch["truncated"][t, n]:
            lives.append([])
    return [life for life in lives if life]


def check_life(
    batch: SampleBatch, n: int, life: list[int], advantages: Any, windows: Any, of_row: Any
) -> None:
    rows = rows_of(batch, n)
    of_time = dict(zip(np.flatnonzero(batch["valid"][:, n]).tolist(), rows, strict=True))
    steps = [of_time[t] for t in life]
    later = 0.0
    for t, step in reversed(list(zip(life, steps, strict=True))):
        after = 0.0 if step.terminated else float(value(step.next_obs))
        later = step.reward + GAMMA * after - float(value(step.obs)) + GAMMA * LAMBDA * later
        assert advantages[t, n] == pytest.approx(later, abs=1e-4)
    for i, t in enumerate(life):
        window = steps[i : i + 3]
        place = of_row.get(t * batch.shape[1] + n)
        if place is None:  # it needs rows of the next fragment
            assert len(window) < 3
            assert life[-1] == batch.shape[0] - 1
            continue
        total = sum(GAMMA**j * one.reward for j, one in enumerate(window))
        discount = 0.0 if window[-1].terminated else GAMMA ** len(window)
        assert windows.rows.rewards[place] == pytest.approx(total, abs=1e-4)
        assert windows.rows.discounts[place] == pytest.approx(discount)
        if discount:
            np.testing.assert_array_equal(windows.rows.next_obs[place], window[-1].next_obs)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_and_memory_belong_to_the_action_of_the_row(mode: str) -> None:
    model = {"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [5]}
    for seed in range(8):
        slots, [log] = schedule_slots(seed, 1, mode)
        sampler = sampler_of(slots, 6, model=model)
        policy = sampler.policy
        batches = [sampler.sample() for _ in range(6)]
        for n, agent in enumerate(AGENTS):
            memory = np.zeros((1, policy.state_size), np.float32)
            steps = iter(reference(log)[agent])
            for batch in batches:
                rows = np.flatnonzero(batch["valid"][:, n])
                for t in rows:
                    step = next(steps)
                    if step.begins:
                        memory = np.zeros_like(memory)
                    if t == rows[0]:
                        np.testing.assert_allclose(batch.per_env["state"][n], memory[0], atol=1e-6)
                    params, memory = policy.act(policy.to_act_on(batch.obs[t, n][None]), memory)
                    np.testing.assert_allclose(
                        batch["action_dist_inputs"][t, n], params[0], atol=1e-5
                    )
