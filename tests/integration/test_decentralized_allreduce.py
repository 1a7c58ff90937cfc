"""`DecentralizedAllReduce`: several learners are one, and remain so whatever happens to some."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import zmq
from fakes import (
    FAULT_FILE,
    CheckedWorker,
    OwnAdvantagesPPO,
    SlowFourthWorkerDrift,
    StallingPPO,
    UnweightedPPO,
    make_optimizer,
    pid_of,
    worker_config,
)

from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.decentralized_allreduce import (
    DecentralizedAllReduce,
    DecentralizedAllReduceConfig,
)
from polopt.policies.learning.schedules import Schedule
from polopt.policies.policy import Policy
from polopt.policies.ppo import PPOPolicy
from polopt.rollouts.config import RolloutConfig
from polopt.rollouts.sampling.requests import LearnInfo, RoundInfo
from polopt.rollouts.transport.collective import (
    SMALL_TENSOR_BYTES,
    AllReducer,
    GroupBroken,
    GroupSpec,
    start_store,
)
from polopt.rollouts.workers.in_flight import Arrival
from polopt.rollouts.workers.remote_worker import RemoteWorker
from polopt.rollouts.workers.worker_config import WorkerConfig
from polopt.rollouts.workers.worker_set import WorkerSet

Pool = Callable[[WorkerConfig], WorkerSet]
LEARNING = {"num_sgd_iter": 3, "sgd_minibatch_size": 8, "lr": 1e-2, "kl_coeff": 0.2}


def make(
    pool: Pool,
    policy: str | type = "ppo",
    env: Any = None,
    rollout: dict[str, Any] | None = None,
    learning: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    more = {} if env is None else {"env": env}
    config = worker_config(policy, **more, rollout=rollout, **{**LEARNING, **(learning or {})})
    return make_optimizer(DecentralizedAllReduce, pool(config), **options)


def on_ranks(optimizer: DecentralizedAllReduce, function: Callable[[Any], Any]) -> list[Any]:
    """What `function` gives for the `RolloutWorker` of each rank, between two rounds."""
    optimizer.drain()
    return ask(optimizer.group.ranks, function)


def ask(workers: Iterable[RemoteWorker], function: Callable[[Any], Any]) -> list[Any]:
    calls = [worker.actor.__ray_call__.remote(function) for worker in workers]
    return ray.get(calls, timeout=120.0)


def learned_state(worker: Any) -> tuple[str, int, bytes, bytes, dict[str, float]]:
    """All that ranks have to agree on."""
    state = worker.policy.get_state()
    adam = state["adam"]
    moments = (adam["exp_avg"].numpy().tobytes(), adam["exp_avg_sq"].numpy().tobytes())
    return worker.checksum(), state["version"], *moments, state["coefficients"]


def spy_on_arrivals(optimizer: DecentralizedAllReduce) -> list[Arrival]:
    """All that comes back to the driver from now on."""
    arrivals: list[Arrival] = []
    wait = optimizer.in_flight.wait

    def spy() -> Arrival:
        arrivals.append(wait())
        return arrivals[-1]

    optimizer.in_flight.wait = spy  # type: ignore[method-assign]
    return arrivals


def test_it_needs_remote_workers_and_says_so() -> None:
    with pytest.raises(ConfigError, match=r"decentralized_allreduce.*num_workers=0"):
        DecentralizedAllReduce.check(RolloutConfig(num_workers=0), DecentralizedAllReduceConfig())


# ---- several learners are one ------------------------------------------------------------


def distance_from_one_learner(pool: Pool, policy: type[Policy], rounds: int = 3) -> float:
    """How far the weights of two ranks are, after some rounds, from those of one learner on all
    they sampled. In each round the one learner begins with the weights of the ranks, so that both
    learn from the very same rows, but with its own moments of Adam."""
    # Rows lost to resets make the workers' shares unequal.
    rollout = {"rollout_fragment_length": 20, "autoreset_mode": "next_step"}
    learning = {"sgd_minibatch_size": 0, "kl_coeff": 0.2}
    optimizer = make(pool, policy, rollout=rollout, learning=learning)
    one_config = worker_config("ppo", rollout=rollout, **{**LEARNING, **learning})
    samplers = [CheckedWorker(one_config, index) for index in (1, 2)]
    one = PPOPolicy(
        one_config.observation_space, one_config.action_space, one_config.policy, one_config.seed
    )
    distance = 0.0
    for _ in range(rounds):
        one.set_weights(weights := optimizer.policy.get_weights())
        again = weights._replace(version=-1 - weights.version)  # what Adam made, it has not seen
        fragments = [sampler.sample(again) for sampler in samplers]
        rows = [fragment.env_steps for fragment in fragments]
        assert rows[0] != rows[1]
        batch = SampleBatch.concat(fragments)
        one.env_steps += batch.env_steps
        one.learn_on_batch(batch)
        result = optimizer.step()
        assert result == (sum(rows), sum(rows), 3)
        difference = optimizer.policy.get_weights().flat - one.get_weights().flat
        distance = max(distance, float(np.abs(difference).max()))
    return distance


def test_two_learners_on_split_data_are_one_learner_on_the_whole(worker_pool: Pool) -> None:
    assert distance_from_one_learner(worker_pool, PPOPolicy) < 2e-5


@pytest.mark.parametrize("wrong", [OwnAdvantagesPPO, UnweightedPPO])
def test_wrong_ways_to_split_give_other_weights(worker_pool: Pool, wrong: type[Policy]) -> None:
    assert distance_from_one_learner(worker_pool, wrong, rounds=1) > 1e-3


def test_all_ranks_stay_equal_and_unequal_ones_are_found(worker_pool: Pool) -> None:
    optimizer = make(worker_pool, checksum_interval=1)
    for _ in range(5):
        optimizer.step()
    first, second = on_ranks(optimizer, learned_state)
    assert first == second
    assert optimizer.stats()["num_checksums"] == optimizer.num_rounds == 6

    def disturb(worker: Any) -> None:
        worker.policy.flat.params.data[0] += 1e-6

    ask(optimizer.group.ranks[:1], disturb)
    with pytest.raises(RuntimeError, match="different weights in round 7"):
        optimizer.step()


def test_schedules_and_adapted_coefficients_reach_every_rank(worker_pool: Pool) -> None:
    lr, entropy = [[0, 1e-2], [400, 1e-3]], [[0, 0.1], [400, 0.0]]
    learning = {"lr": lr, "entropy_coeff": entropy, "kl_coeff": 1.0, "kl_target": 1e-6}
    optimizer = make(worker_pool, learning=learning)

    def read(worker: Any) -> tuple[Any, ...]:
        policy = worker.policy
        return policy.env_steps, policy.entropy_coeff, policy.coefficients["kl_coeff"]

    arrivals = spy_on_arrivals(optimizer)
    seen = set()
    for _ in range(3):
        optimizer.step()
        first, second = on_ranks(optimizer, read)
        assert first == second
        steps = optimizer.metrics.num_env_steps_sampled
        used = [a.value.stats["default_optimizer_learning_rate"] for a in arrivals[-2:]]
        assert used == pytest.approx([Schedule(lr)(steps)] * 2), "by each rank"
        assert first[0] == steps
        assert first[1] == pytest.approx(Schedule(entropy)(steps))
        seen.add(first[2])
        assert optimizer.policy.coefficients["kl_coeff"] == first[2]
    assert len(seen) == 3, "the KL coefficient is adapted in every round"


def test_two_workers_are_reproducible_bit_for_bit(worker_pool: Pool) -> None:
    def run() -> tuple[bytes, dict[str, Any]]:
        optimizer = make(worker_pool)
        for _ in range(4):
            optimizer.step()
        return optimizer.policy.get_weights().flat.tobytes(), optimizer.metrics.episodes.get_state()

    assert run() == run()


# ---- what passes through the driver ------------------------------------------------------


def test_local_weights_stay_in_sync_or_are_fetched_on_save(worker_pool: Pool) -> None:
    optimizer = make(worker_pool)
    optimizer.step()
    checksums = on_ranks(optimizer, lambda worker: worker.checksum())
    assert set(checksums) == {optimizer.workers.local.checksum()}

    optimizer = make(worker_pool, keep_local_weights_in_sync=False)
    before = optimizer.workers.local.checksum()
    arrivals = spy_on_arrivals(optimizer)
    for _ in range(3):
        optimizer.step()
    assert optimizer.workers.local.checksum() == before
    assert all(a.value.weights is None for a in arrivals if a.tag == "learn")
    state = optimizer.get_state()
    (expected, version, *_), _ = on_ranks(optimizer, learned_state)
    assert optimizer.workers.local.checksum() == expected
    assert state["policy"]["version"] == version == optimizer.metrics.num_updates > 0
    assert state["policy"]["adam"]["exp_avg"].abs().sum() > 0


def test_neither_data_nor_gradients_pass_through_the_driver(worker_pool: Pool) -> None:
    rollout = {"rollout_fragment_length": 200, "num_envs_per_worker": 4}
    learning = {"sgd_minibatch_size": 200, "model": {"fcnet_hiddens": (64, 64)}}
    optimizer = make(worker_pool, rollout=rollout, learning=learning)
    arrivals = spy_on_arrivals(optimizer)
    for _ in range(2):
        optimizer.step()
    weights = optimizer.policy.get_weights().flat
    assert len(arrivals) == 2 * 2 * 2, "two calls to each rank in a round"
    with_weights = 0
    for arrival in arrivals:
        value = arrival.value
        if isinstance(value, RoundInfo):
            value = value._replace(episodes=None)
        else:
            assert isinstance(value, LearnInfo)
            with_weights += value.weights is not None
            value = value._replace(weights=None)
        # A fragment is 200 * 4 rows, a gradient as long as the weights.
        assert len(ray.cloudpickle.dumps(value)) < 1000 < weights.nbytes / 10
    assert with_weights == 2, "from one rank, once a round"


# ---- stragglers --------------------------------------------------------------------------


def straggle(pool: Pool, **options: Any) -> tuple[Any, list[int], float]:
    """Two rounds of four ranks, the fourth slow: the lengths of its fragments, and the seconds of
    the faster round."""
    rollout = {"num_workers": 4, "num_envs_per_worker": 1, "rollout_fragment_length": 40}
    optimizer = make(
        pool, env=SlowFourthWorkerDrift, rollout=rollout, checksum_interval=1, **options
    )
    arrivals = spy_on_arrivals(optimizer)
    durations_s = []
    for _ in range(2):
        started_s = time.monotonic()
        result = optimizer.step()
        durations_s.append(time.monotonic() - started_s)
        assert result.env_steps_trained == result.env_steps_sampled > 0
    steps: dict[int, list[int]] = {1: [], 2: [], 3: [], 4: []}
    for arrival in arrivals:
        if arrival.tag == "sample":
            steps[arrival.worker.index].append(arrival.value.steps)
    assert optimizer.metrics.num_env_steps_trained == sum(itertools.chain(*steps.values()))
    assert steps[1] == steps[2] == steps[3] == [40, 40]
    assert len({state[0] for state in on_ranks(optimizer, learned_state)}) == 1
    return optimizer, steps[4], min(durations_s)


def test_a_straggler_is_cut_short_and_its_part_is_learned_from(worker_pool: Pool) -> None:
    optimizer, steps, _ = straggle(worker_pool, min_fragment_share=0.25)
    assert all(10 <= count < 40 for count in steps)
    assert optimizer.num_early_stopped >= 2


def test_no_rank_stops_early_by_default(worker_pool: Pool) -> None:
    optimizer, steps, duration_s = straggle(worker_pool, preemption_threshold=1.0)
    assert steps == [40, 40]
    assert optimizer.num_early_stopped == 0
    assert duration_s > 40 * 0.03


def test_a_cut_hits_only_the_round_it_is_meant_for() -> None:
    worker = CheckedWorker(worker_config("ppo"), 1)
    worker.set_weights(worker.get_weights())
    worker.version_sent = 0
    worker.stop_early(3, 2)  # comes before the round it is for
    assert worker.sample_for_learning(2).steps == 5
    assert worker.sample_for_learning(3).steps == 2
    assert worker.sample_for_learning(4).steps == 5
    worker.stop_early(4, 2)  # comes late
    assert worker.sample_for_learning(5).steps == 5
    worker.stop_early(5, 2)
    assert worker.sample().shape[0] == 5
    worker.stop_early(900, 2)  # of another optimizer, which has counted further
    assert worker.sample_for_learning(6).steps == 5


# ---- losses ------------------------------------------------------------------------------


def step_until_whole(optimizer: DecentralizedAllReduce, lost: list[RemoteWorker]) -> None:
    """Steps until others are in the place of the lost ones and have learned with the rest."""
    deadline_s = time.monotonic() + 120.0
    while set(lost) & set(optimizer.workers.remote) or (
        optimizer.group.ranks != optimizer.workers.remote
    ):
        optimizer.step()
        assert time.monotonic() < deadline_s
    assert optimizer.step().updates > 0


def test_group_continues_without_killed_rank_until_replaced(
    worker_pool: Pool,
) -> None:
    optimizer = make(worker_pool, checksum_interval=1)
    for _ in range(2):
        optimizer.step()
    victim, survivor = optimizer.group.ranks
    survivor_pid, version = pid_of(survivor), optimizer.policy.version
    os.kill(pid_of(victim), signal.SIGKILL)
    step_until_whole(optimizer, [victim])
    assert pid_of(survivor) == survivor_pid
    optimizer.step()
    first, second = on_ranks(optimizer, learned_state)
    assert first == second, "weights, version, Adam's moments, coefficients"
    assert first[1] > version
    stats = optimizer.stats() | optimizer.workers.stats()
    assert stats["num_worker_deaths"] == stats["num_remote_worker_restarts"] == 1
    assert stats["num_broken_rounds"] >= 1
    assert stats["num_ranks"] == 2


def listen(worker: Any, spec: GroupSpec, rank: int) -> str:
    """Address of a rank; its group stays at the worker."""
    worker.test_group = AllReducer(spec, rank, host="127.0.0.1")
    return worker.test_group.address


def sums_of(worker: Any, rank: int, addresses: list[str]) -> tuple[bytes, list[int], str]:
    """A rank's share in sums of numbers, of counts, and of a large tensor."""
    group = worker.test_group
    group.join(addresses)
    try:
        numbers = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
        counts = torch.tensor([rank, 1])
        group.sum_(numbers)
        group.sum_(counts)
        large = torch.full((SMALL_TENSOR_BYTES // 4 + 1,), float(rank))
        group.sum_(large)
        return numbers.numpy().tobytes(), counts.tolist(), str(large.unique().tolist())
    finally:
        group.close()


@pytest.mark.parametrize("backend", ["zmq", "gloo"])
def test_sums_are_the_same_bits_on_all_ranks(worker_pool: Pool, backend: str) -> None:
    workers = worker_pool(worker_config("ppo", rollout={"num_workers": 5})).remote
    store = start_store("127.0.0.1")
    for world in (1, 2, 3, 4, 5):
        spec = GroupSpec(1000 + world, world, backend, 20.0, 60.0)
        if backend == "gloo":
            spec = spec._replace(host="127.0.0.1", port=store.port, prefix=str(world))
        pairs = [zmq.curve_keypair() for _ in range(world)]
        spec = spec._replace(public_keys=tuple(public for public, _ in pairs))
        actors = [worker.actor for worker in workers[:world]]
        calls = [
            actor.__ray_call__.remote(listen, spec._replace(secret_key=pairs[rank][1]), rank)
            for rank, actor in enumerate(actors)
        ]
        addresses = ray.get(calls, timeout=120.0)
        calls = [
            actor.__ray_call__.remote(sums_of, rank, addresses) for rank, actor in enumerate(actors)
        ]
        results = ray.get(calls, timeout=120.0)
        assert all(result == results[0] for result in results), world
        numbers, counts, large = results[0]
        terms = [
            torch.randn(3000, generator=torch.Generator().manual_seed(r)) for r in range(world)
        ]
        total = torch.frombuffer(bytearray(numbers), dtype=torch.float32)
        torch.testing.assert_close(total, torch.stack(terms).double().sum(0).float())
        assert counts == [world * (world - 1) // 2, world]
        assert large == str([float(counts[0])])


@pytest.mark.parametrize("backend", ["zmq", "gloo"])
def test_backend_of_small_gradients_is_reported(worker_pool: Pool, backend: str) -> None:
    optimizer = make(worker_pool, backend=backend)
    assert optimizer.step().updates >= 0
    assert optimizer.stats()["allreduce_backend"] == backend


def seconds_until_broken(worker: Any) -> float:
    """Returns the seconds until a sum fails."""
    began_s = time.time()
    try:
        worker.group.reducer.sum_(torch.ones(20_000))
    except GroupBroken:
        return time.time() - began_s
    raise AssertionError("the sum succeeded without a rank")


def test_death_of_a_rank_reaches_all_waiting_ranks_at_once(worker_pool: Pool) -> None:
    # In a ring of four, one survivor waits only for others that survive.
    optimizer = make(worker_pool, rollout={"num_workers": 4})
    optimizer.step()
    optimizer.drain()
    victim, *others = optimizer.group.ranks
    pid = pid_of(victim)
    calls = [worker.actor.__ray_call__.remote(seconds_until_broken) for worker in others]
    time.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    waited_s = ray.get(calls, timeout=90.0)
    assert max(waited_s) < optimizer.config.allreduce_timeout_s / 2.0
    step_until_whole(optimizer, [victim])


def test_all_ranks_dead_group_continues_from_driver_state(
    worker_pool: Pool,
) -> None:
    optimizer = make(worker_pool)
    for _ in range(3):
        optimizer.step()
    optimizer.drain()
    version = optimizer.policy.version
    lost = optimizer.group.ranks
    for pid in [pid_of(worker) for worker in lost]:
        os.kill(pid, signal.SIGKILL)
    result = optimizer.step()
    assert result.env_steps_trained == result.updates == 0, "no update without data"
    step_until_whole(optimizer, lost)
    assert optimizer.policy.version > version
    first, second = on_ranks(optimizer, learned_state)
    assert first == second
    assert first[1] == optimizer.policy.version


def test_only_the_rank_that_stalls_in_allreduce_is_replaced(
    worker_pool: Pool,
) -> None:
    # A rank that waits in a sum for longer than `worker_timeout_s` does not count as hanging.
    rollout = {"num_workers": 2, "worker_timeout_s": 8.0}
    optimizer = make(worker_pool, StallingPPO, rollout=rollout, allreduce_timeout_s=10.0)
    optimizer.step()
    version = optimizer.policy.version
    pids = {pid_of(worker) for worker in optimizer.group.ranks}
    optimizer.drain()
    Path(FAULT_FILE).touch()
    while optimizer.num_broken_rounds == 0:
        optimizer.step()
    silent_s = float(optimizer.workers.faults.last.message.split()[-2])
    assert 10.0 < silent_s < 17.5, "after the other rank timed out, before both limits are over"
    step_until_whole(optimizer, [])
    stats = optimizer.workers.stats()
    assert stats["num_worker_hangs"] == stats["num_remote_worker_restarts"] == 1
    assert len(pids & {pid_of(worker) for worker in optimizer.group.ranks}) == 1
    assert optimizer.policy.version > version


def test_training_continues_after_a_group_did_not_form(worker_pool: Pool) -> None:
    optimizer = make(worker_pool)
    optimizer.step()
    before = on_ranks(optimizer, learned_state)
    one = optimizer.group.ranks[0]
    (key, secret), (other, _) = zmq.curve_keypair(), zmq.curve_keypair()
    alone = GroupSpec(900, 2, "zmq", 1.0, 0.3, (key, other), secret)
    address = ray.get(one.actor.listen_for_group.remote(alone, 0), timeout=120.0)
    problem = ray.get(one.actor.join_group.remote([address, address]), timeout=120.0)
    assert "could not join group 900 (zmq) within 0.3 s" in problem
    optimizer.group.broken = True
    optimizer.group.ensure()
    assert on_ranks(optimizer, learned_state) == before
    assert optimizer.step().updates > 0
    assert optimizer.workers.faults.num_restarts == 0


# ---- state -------------------------------------------------------------------------------


def test_state_is_read_from_ranks_and_restored_to_all(worker_pool: Pool) -> None:
    optimizer = make(worker_pool)
    for _ in range(2):
        optimizer.step()
    state = optimizer.get_state()
    saved = on_ranks(optimizer, learned_state)
    counts = optimizer.metrics.counts()
    for _ in range(2):
        optimizer.step()
    assert on_ranks(optimizer, learned_state)[0] != saved[0]
    optimizer.set_state(state)
    assert optimizer.metrics.counts() == counts
    optimizer.group.ensure()
    assert on_ranks(optimizer, learned_state) == saved
    assert saved[0] == saved[1]

    elsewhere = make(worker_pool)  # other processes would do the same
    elsewhere.set_state(state)
    elsewhere.group.ensure()
    assert on_ranks(elsewhere, learned_state) == saved
    elsewhere.step()
    assert elsewhere.policy.version == saved[0][1] + elsewhere.metrics.num_updates - counts[2]
