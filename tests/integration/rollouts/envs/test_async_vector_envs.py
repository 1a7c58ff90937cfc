"""Environments that each run in their own process (`vectorization_mode: async`)."""

from __future__ import annotations

import subprocess
import sys

import episode_end_checks as episode_ends
import vector_env_checks as vector_envs
from faulty_envs import check_row_before_a_crash_is_bootstrapped, crash_batches, num_faults
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from sampling_helpers import assert_same, every_mode, worker
from toy_envs import Clock, Drift, GlobalRandom, make_sampler, set_value_function

from polopt.common.sample_batch import SampleBatch


def async_batches(env: type, **options: int) -> list[SampleBatch]:
    each = worker(env=env, vectorization_mode="async", num_envs_per_worker=2, **options)
    assert each.sampler is not None
    try:
        assert isinstance(each.sampler.env, AsyncVectorEnv)
        return [each.sample() for _ in range(2)]
    finally:
        each.stop()


def test_async_vector_samples_as_the_sync_one() -> None:
    sync = worker(env=Drift, num_envs_per_worker=2)
    for batch in async_batches(Drift):
        assert_same(batch, sync.sample())


def test_seed_covers_global_generators_of_env_processes() -> None:
    first = async_batches(GlobalRandom)
    for one, other in zip(first, async_batches(GlobalRandom), strict=True):
        assert_same(one, other)
    observations = first[0].all_obs  # [T + 1, N, 5]
    assert not (observations[:, 0] == observations[:, 1]).any()


def test_env_processes_differ_between_workers() -> None:
    first = async_batches(GlobalRandom)[0].all_obs
    for other in ({"index": 2}, {"restart_count": 1}):
        assert not (first == async_batches(GlobalRandom, **other)[0].all_obs).any()


def test_crash_in_an_env_process_is_repaired_there() -> None:
    batches = crash_batches("same_step", 15, AsyncVectorEnv)
    check_row_before_a_crash_is_bootstrapped(batches)
    found = sum(num_faults(batch.faults, "raised") for batch in batches)
    assert found == 7  # every fourth of 30 steps raises


@every_mode
def test_guarded_async_vector_equals_gymnasiums(mode: str) -> None:
    makers = [lambda: vector_envs.WithoutInfos(vector_envs.InfoDrift())] * vector_envs.NUM_ENVS
    plain = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])
    guarded = vector_envs.made(vector_envs.InfoDrift, mode, vectorization_mode="async")
    vector_envs.assert_same(vector_envs.history(guarded, 20), vector_envs.history(plain, 20))


@every_mode
def test_episode_ends_of_env_processes_are_exact(mode: str) -> None:
    makers = [lambda n=n: Clock(n, "truncated", longest=7) for n in episode_ends.LENGTHS]
    env = AsyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])
    policy = episode_ends.clock_policy(env)
    sampler = make_sampler(env, policy, 6)
    try:
        batches = episode_ends.batches_of(sampler, rows=24)
        set_value_function(policy, episode_ends.FOR_EVER)
        processed = [policy.postprocess(batch) for batch in batches]
        episode_ends.check_worth(processed, episode_ends.FOR_EVER)
        set_value_function(policy, 0.0)
        processed = [policy.postprocess(batch) for batch in batches]
        episode_ends.check_sums_to_the_end(processed, 1.0)
        episode_ends.check_counts(batches, resets_cost_a_row=mode == "next_step")
    finally:
        sampler.close()


# A script in which the driver's garbage contains the handle of an actor, and in which the process
# of an environment collects garbage.
COLLECTS_GARBAGE = """
import gc
import gymnasium, ray
from polopt.rollouts.envs.env_sources import resolve_env
from polopt.rollouts.envs.vector_env import make_vector_env
from polopt.rollouts.rollout_config import RolloutConfig

class Collects(gymnasium.Wrapper):
    def reset(self, **options):
        gc.collect()
        return self.env.reset(**options)

@ray.remote
class Actor:
    def ping(self):
        return 1

if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    gc.disable()
    cycle = [Actor.remote()]
    ray.get(cycle[0].ping.remote())
    cycle.append(cycle)
    del cycle
    make = lambda: Collects(gymnasium.make("CartPole-v1"))
    config = {"env": make, "num_envs_per_worker": 1, "vectorization_mode": "async"}
    env = make_vector_env(resolve_env(make), RolloutConfig.parse(config))
    env.reset(seed=1)
    env.close()
    print("nodes:", len(ray.nodes()), "collected here:", gc.collect() > 0)
    print("stored:", ray.experimental.internal_kv._internal_kv_get("nothing"))
"""


def test_garbage_of_the_driver_is_not_collected_in_env_processes() -> None:
    script = [sys.executable, "-c", COLLECTS_GARBAGE]
    done = subprocess.run(script, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "nodes: 1 collected here: True\nstored: None\n" in done.stdout
