"""AsyncReplay with several policies, with simulated samplers and shards: training intensity,
priorities and failures of each policy."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from agent_envs import Matrix
from fakes import FakeTransport, FakeWorkerSet, make_optimizer
from simulated_channel import shuffled_by
from simulated_replay import BATCH, GAMMA, OPTIONS

from polopt.optimizers import replay_shards
from polopt.optimizers.async_replay import AsyncReplay, sample_with_priorities
from polopt.optimizers.replay_shards import Report
from polopt.policies.dqn import DQNPolicy
from polopt.replay.n_step import windows_of
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.rollouts.sampling.worker_sampler import join_in_time
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.rollout_worker import RolloutWorker
from polopt.rollouts.workers.worker_config import WorkerConfig, make_worker_config


def often_first(agent_id: str, rng: np.random.Generator) -> str:
    """The row player is `often`. The column player has one of three policies."""
    return "often" if agent_id == "row" else ("often", "seldom", "frozen")[rng.integers(3)]


def config_of(**rollout: Any) -> WorkerConfig:
    options: dict[str, Any] = {
        "env": Matrix,
        "num_workers": 3,
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 5,
        "policies": {"often": {"n_step": 1}, "seldom": {}, "frozen": {}},
        "policies_to_train": ["often", "seldom"],
        "policy_mapping_fn": often_first,
        "max_consecutive_failures": 1000,
        "seed": 0,
        **rollout,
    }
    policy = DQNPolicy.config_class.parse(
        {"model": {"fcnet_hiddens": (4,)}, "n_step": 3, "gamma": GAMMA}
    )
    return make_worker_config(RolloutConfig.parse(options), DQNPolicy, policy)


def make(script: Any, **options: Any) -> Any:
    transport = FakeTransport()
    transport.script = script
    return make_optimizer(AsyncReplay, FakeWorkerSet(config_of(), transport), **OPTIONS | options)


def shards_of(optimizer: Any) -> list[Any]:
    return [one.channel for one in optimizer.shards.remote if one.up and one.channel.alive]


def check_credits(optimizer: Any) -> None:
    """Each policy has learned its training intensity times the rows that its limiter has counted,
    up to `error_buffer`."""
    intensity = Fraction(optimizer.config.training_intensity).limit_denominator(10**6)
    for name, limiter in optimizer.limiter.limiters.items():
        learned = BATCH * optimizer.policy.policies[name].version
        assert learned == limiter.num_learned
        assert 0 <= intensity * limiter.num_counted - learned <= limiter.error_buffer


def test_each_policy_learns_at_its_own_training_intensity() -> None:
    intensity = 2.0
    optimizer = make(shuffled_by(1), training_intensity=intensity, buffer_size=20_000)
    for _ in range(600):
        optimizer.step()
        check_credits(optimizer)
    stored = {name: optimizer.shards.num_rows(name) for name in ("often", "seldom")}
    assert stored["often"] > 3 * stored["seldom"] > 300
    limiters = optimizer.limiter.limiters
    assert {name: one.num_counted for name, one in limiters.items()} == {
        name: rows - OPTIONS["learning_starts"] for name, rows in stored.items()
    }
    for one in limiters.values():
        assert one.delivered == pytest.approx(intensity, rel=0.3)
    versions = {name: one.version for name, one in optimizer.policy.policies.items()}
    assert versions["often"] > versions["seldom"] > versions["frozen"] == 0
    stats = optimizer.stats()
    assert stats["training_intensity"] == pytest.approx(intensity, rel=0.3)
    assert stats["buffer_rows"] == sum(stored.values())
    assert (stats["num_batches_lost"], stats["num_gaps"]) == (0, 0)
    assert {name for c in shards_of(optimizer) for name in c.target.buffers} == set(stored)


def test_priorities_flow_back_to_the_buffer_of_the_policy() -> None:
    optimizer = make(shuffled_by(2))
    while optimizer.policy.policies["seldom"].version < 20:
        optimizer.step()
    for shard in shards_of(optimizer):
        drawn = [value for value in shard.values if isinstance(value, replay_shards.Batch)]
        asked = [args[0] for called, args in shard.calls if called == "draw"]
        given = [args for called, args in shard.calls if called == "set_priorities"]
        assert {name for name, *_ in given} == {"often", "seldom"}
        for name, (policy, indices, *_), batch in zip(asked, given, drawn, strict=False):
            assert name == policy
            np.testing.assert_array_equal(batch.rows.indices, indices)
        for name in ("often", "seldom"):
            *_, (_, indices, errors, version) = (args for args in given if args[0] == name)
            buffer = shard.target.buffers[name]
            for index, error in dict(zip(indices.tolist(), errors.tolist(), strict=True)).items():
                place = index % buffer.capacity
                leaf = buffer._priorities.tree.leaves[place]
                assert leaf == pytest.approx((error + 1e-6) ** 0.6, rel=1e-5)
                assert shard.target.priority_versions[name][place] == version


def test_shards_are_drawn_from_in_proportion_to_the_priorities_of_the_policy() -> None:
    optimizer = make(shuffled_by(0))
    one, two = optimizer.shards.up()
    optimizer.shards.note(one, {"often": Report(weight=9.0), "seldom": Report(weight=1.0)})
    optimizer.shards.note(two, {"often": Report(weight=1.0), "seldom": Report(weight=3.0)})
    for name, expected in (("often", {1: 36, 2: 4}), ("seldom", {1: 10, 2: 30})):
        drawn = Counter(optimizer.shards.next_to_draw(name).index for _ in range(40))
        assert drawn == expected


def test_policies_wait_until_dead_shards_have_enough_rows_again() -> None:
    optimizer = make(shuffled_by(0))
    while optimizer.policy.policies["seldom"].version < 5:
        optimizer.step()
    for shard in shards_of(optimizer):
        shard.die(LostProcessError("killed"))
    while optimizer.shards.num_rows("often"):  # until the driver has noticed
        optimizer.step()
    for name, limiter in optimizer.limiter.limiters.items():
        assert limiter.missing >= OPTIONS["learning_starts"] - optimizer.shards.num_rows(name) > 0
    versions = {name: optimizer.policy.policies[name].version for name in ("often", "seldom")}
    while any(optimizer.policy.policies[name].version == old for name, old in versions.items()):
        optimizer.step()


def test_sampler_computes_the_first_priorities_with_the_policy_of_the_row() -> None:
    """With its own `n_step`, across fragments."""
    policies_of_run = {"often": {"n_step": 1}, "seldom": {}}
    config = config_of(
        policies=policies_of_run,
        policies_to_train=None,
        policy_mapping_fn={"row": "often", "*": "seldom"},
    )
    worker = RolloutWorker(config, 1)
    policies = worker.policy.policies  # type: ignore[attr-defined]
    policies["seldom"].flat.params.data += 0.1
    made = [sample_with_priorities(worker, None, True) for _ in range(3)]
    for name in ("often", "seldom"):
        fragments = [one[name] for one in made]
        batch = fragments[0].batch
        for one in fragments[1:]:
            batch = join_in_time(batch, one.batch)
        policy: Any = policies[name]
        windows = windows_of(batch, GAMMA, policy.config.n_step)
        found = np.full(batch.shape, np.nan)
        begin = 0
        for one in fragments:
            length = one.batch.shape[0]
            begin += length
            known = ~np.isnan(one.priorities)
            found[begin - len(one.priorities) : begin][known] = one.priorities[known]
        expected = policy.td_errors(windows.rows)
        np.testing.assert_allclose(found[windows.complete], expected, rtol=1e-6)


def test_failures_of_samplers_and_shards_leave_all_counts_exact() -> None:
    optimizer = make(shuffled_by(3), training_intensity=1.0)
    killed = Counter[str]()
    for i in range(420):
        optimizer.step()
        check_credits(optimizer)
        who = "shard" if i % 200 > 100 else "worker"
        group = optimizer.shards if who == "shard" else optimizer.workers
        busy = [one.channel for one in group.remote if one.channel.under_way]
        if i > 150 and busy and killed[who] <= i // 200:
            busy[0].die(LostProcessError("killed"))
            killed[who] += 1
    stats = optimizer.stats()
    assert stats["num_replay_shard_restarts"] == killed["shard"]
    assert stats["num_rows_lost"] > 0
    assert optimizer.workers.faults.num_restarts == killed["worker"]
    assert min(killed["shard"], killed["worker"]) >= 2
    before = {name: one.version for name, one in optimizer.policy.policies.items()}
    state = optimizer.get_state()
    again = make(shuffled_by(4), training_intensity=1.0)
    again.set_state(state)
    for name, limiter in again.limiter.limiters.items():
        assert limiter.num_learned == optimizer.limiter.limiters[name].num_learned
    while any(
        again.policy.policies[name].version < before[name] + 5 for name in again.limiter.limiters
    ):
        again.step()
    for name, limiter in again.limiter.limiters.items():
        assert 0 <= limiter.credit <= limiter.error_buffer, name
