"""Seeds of environments, actions, spaces and global generators."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sampling_helpers import assert_same, rollout, worker
from toy_envs import (
    Clock,
    Drift,
    GlobalRandom,
)

import polopt
from polopt.policies.a2c import A2CPolicy
from polopt.rollouts.envs.env_sources import EnvContext
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.seeds import seed_global_generators, worker_seeds
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig


def test_every_environment_has_its_own_seed() -> None:
    every = [
        worker_seeds(seed, index, restart_count, num_envs=4)
        for seed in (0, 1)
        for index in range(4)
        for restart_count in range(3)
    ]
    env_seeds = [seed for seeds in every for seed in seeds.envs]
    assert len(set(env_seeds)) == len(env_seeds) == 2 * 4 * 3 * 4
    assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in env_seeds)
    draws = {np.random.default_rng(seeds.actions).integers(2**62) for seeds in every}
    assert len(draws) == len(every)
    assert len({seeds.shuffle for seeds in every}) == len(every)


def test_seeds_do_not_depend_on_number_of_envs() -> None:
    one, same = worker_seeds(3, 1, 0, 4), worker_seeds(3, 1, 0, 4)
    assert (one.envs, one.shuffle) == (same.envs, same.shuffle)
    assert one.actions.generate_state(4).tolist() == same.actions.generate_state(4).tolist()
    # With more environments, the seeds of the first environments and all other seeds stay equal.
    more = worker_seeds(3, 1, 0, 9)
    assert more.envs[:4] == one.envs
    assert more.actions.generate_state(4).tolist() == one.actions.generate_state(4).tolist()


def test_same_seed_gives_equal_batches() -> None:
    one, same = worker(), worker()
    for _ in range(3):
        assert_same(one.sample(), same.sample())


def test_batches_do_not_depend_on_global_generators() -> None:
    first = worker().sample()
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    assert_same(worker().sample(), first)


@pytest.mark.parametrize(
    "other", [{"index": 2}, {"seed": 1}, {"restart_count": 1}], ids=lambda o: next(iter(o))
)
def test_observations_and_actions_differ_between_workers(other: dict[str, int]) -> None:
    one, another = worker(rollout_fragment_length=40), worker(rollout_fragment_length=40, **other)
    another.set_weights(one.get_weights())  # both workers use the same policy
    batches = [each.sample() for each in (one, another)]
    assert not np.isclose(batches[0].all_obs[0], batches[1].all_obs[0]).any()
    assert not np.array_equal(batches[0]["actions"], batches[1]["actions"])


def test_action_noise_differs_between_workers() -> None:
    # All clocks have the same observations, so only the action noise differs.
    def clocks(config: EnvContext) -> Clock:
        return Clock(100)

    options = {"env": clocks, "rollout_fragment_length": 30}
    batches = [worker(restart_count=i, **options).sample() for i in range(3)]
    actions = [batch["actions"] for batch in batches]
    assert not np.array_equal(actions[0], actions[1])
    assert not np.array_equal(actions[1], actions[2])
    assert not np.array_equal(actions[0][:, 0], actions[0][:, 1])


def test_environments_are_reset_with_their_seeds() -> None:
    sampler = worker(index=2, seed=7).sampler
    assert sampler is not None
    given = worker_seeds(7, 2, 0, 3).envs
    assert list(sampler.env.get_attr("np_random_seed")) == given  # type: ignore[attr-defined]


def test_environments_of_a_worker_differ() -> None:
    first = worker().sample().all_obs[0]
    assert len(np.unique(first.round(4))) == first.size


def test_workers_start_from_the_same_weights() -> None:
    np.testing.assert_array_equal(
        worker(index=1).get_weights().flat, worker(index=3, restart_count=2).get_weights().flat
    )


def global_random(**options: Any) -> RolloutWorker:
    return worker(env=GlobalRandom, rollout_fragment_length=20, **options)


def test_seed_covers_global_generators_and_spaces() -> None:
    one = global_random()
    first = [one.sample() for _ in range(2)]
    same = global_random()
    for batch in first:
        assert_same(same.sample(), batch)


@pytest.mark.parametrize(
    "other", [{"index": 2}, {"seed": 1}, {"restart_count": 1}], ids=lambda o: next(iter(o))
)
def test_global_generators_differ_between_workers(other: dict[str, int]) -> None:
    one, another = (global_random(**options).sample().all_obs for options in ({}, other))
    assert not np.isclose(one, another).any()


def test_set_seed_covers_global_generators_and_spaces() -> None:
    one = global_random()
    batches = []
    for _ in range(2):
        one.set_seed([5, 6, 7])
        batches.append(one.sample())
    layout = 4  # the constructor draws the layout, and does not run again
    np.testing.assert_array_equal(
        batches[0].all_obs[..., :layout], batches[1].all_obs[..., :layout]
    )


@pytest.mark.parametrize("seed", [None, 3])
def test_driver_process_is_seeded_only_by_an_explicit_seed(seed: int | None) -> None:
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    config = rollout(Drift, num_workers=0, seed=seed)
    policy = A2CPolicy.config_class.parse({})
    RolloutWorker(
        WorkerConfig(config, Drift, A2CPolicy, policy, *probe_env(Drift, config)[:2], seed=3), 0
    )
    assert (np.random.random() == expected) == (seed is None)  # noqa: NPY002


def test_driver_without_environments_is_not_seeded() -> None:
    np.random.seed(0)  # noqa: NPY002
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    worker(index=0, num_workers=2)
    assert np.random.random() == expected  # noqa: NPY002


class DrawsGlobally(gymnasium.Env[Any, Any]):
    """Draws its observations from the global generators of the process."""

    observation_space = gymnasium.spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, config: Any = None) -> None:
        self.steps = 0

    def _observation(self) -> Any:
        drawn = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
        return np.float32(drawn)

    def reset(self, **options: Any) -> Any:
        self.steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observation(), random.random(), False, self.steps == 7, {}


def own_run(seed: int | None = 3) -> Any:
    return polopt.A2C(
        env=DrawsGlobally,
        seed=seed,
        num_workers=0,
        rollout_fragment_length=10,
        min_sample_timesteps_per_iteration=100,
        model={"fcnet_hiddens": [8]},
    )


def test_other_users_of_global_generators_do_not_change_a_run() -> None:
    trainer = own_run()
    for _ in range(3):
        trainer.train()
    expected = trainer.get_policy().get_weights().flat
    trainer.stop()

    trainer = own_run()
    trainer.train()
    policy = trainer.get_policy()
    other = own_run(seed=4)
    trainer.train()
    other.train()
    trainer.evaluate(2)
    np.random.seed(0)  # noqa: NPY002
    trainer.train()
    np.testing.assert_array_equal(policy.get_weights().flat, expected)
    assert not np.array_equal(other.get_policy().get_weights().flat, expected)
    trainer.stop()
    other.stop()


def test_a_seeded_run_leaves_the_global_generators_of_the_process_unchanged() -> None:
    seed_global_generators(5)
    expected = random.random(), np.random.rand(), float(torch.rand(()))  # noqa: NPY002
    seed_global_generators(5)
    trainer = own_run()
    trainer.train()
    trainer.stop()
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected  # noqa: NPY002
