"""`Collector`: the contents of batches, their number, and the versions of their weights. The tests
use fake workers, whose calls end in an order that the test decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collector_toys import fake_collector, local_collector, update
from fakes import (
    in_order,
)
from gymnasium import spaces
from policy_helpers import BOTH
from simulated_channel import shuffled_by
from toy_envs import NESTED, Samples

from polopt.collectors.collector import Collector
from polopt.common.config import ConfigError
from polopt.common.moments import Moments
from polopt.common.sample_batch import SampleBatch
from polopt.rollouts.transport.channel import LostProcessError
from polopt.rollouts.workers.errors import WorkersFailedError


def content(batch: SampleBatch) -> bytes:
    return b"".join(np.ascontiguousarray(rows).tobytes() for _, rows in batch.iter_rows())


# ---- contents of a batch ------------------------------------------------------------------------


def test_synchronous_batches_are_in_worker_order() -> None:
    contents = []
    for seed in range(4):
        collector = fake_collector(3, script=shuffled_by(seed), sync=True)
        batches = [next(collector) for _ in range(3)]
        assert [batch.shape for batch in batches] == [(5, 6)] * 3
        contents.append([content(batch) for batch in batches])
    assert contents[1:] == contents[:1] * 3
    first = collector.workers.channels[0].values[0]
    np.testing.assert_array_equal(batches[0].obs[:, :2], first.obs)


def test_asynchronous_batches_are_first_come_first_served() -> None:
    collector = fake_collector(2, script=in_order([2, 2, 1, 2, 1]))
    batches = [next(collector) for _ in range(5)]
    assert [batch.worker_index for batch in batches] == [2, 2, 1, 2, 1]
    assert all(batch.shape == (5, 2) for batch in batches)


@pytest.mark.parametrize("sync", [True, False])
def test_next_fragment_starts_before_the_last_is_returned(sync: bool) -> None:
    collector = fake_collector(2, sync=sync)
    next(collector)
    assert all(channel.under_way == 1 for channel in collector.workers.channels)
    late = fake_collector(2, sync=sync, update_after_each_batch=True)
    next(late)
    # In asynchronous collection, the other worker is still busy with its first fragment.
    busy = sum(channel.under_way for channel in late.workers.channels)
    assert busy == (0 if sync else 1)


def test_one_fragment_per_worker_with_a_slow_consumer() -> None:
    collector = fake_collector(3)
    for _ in range(10):
        next(collector)
        assert all(channel.under_way <= 1 for channel in collector.workers.channels)
    calls = sum(len(channel.calls) for channel in collector.workers.channels)
    assert calls == 10 + 3  # the returned fragments, and one pending fragment of each worker


def test_lengths_follow_from_frames_per_batch() -> None:
    assert next(fake_collector(3, sync=True, frames_per_batch=61)).shape == (11, 6)
    assert next(fake_collector(3, frames_per_batch=61)).shape == (31, 2)
    assert next(fake_collector(3, sync=True)).shape == (5, 6)  # the workers' own fragments


def test_late_early_stop_leaves_the_next_collector_alone() -> None:
    """The requests to stop name calls of the first collector, which have ended."""
    first = fake_collector(2, sync=True)
    next(first)
    late = [call.number for call in first.calls.pending()]
    first.shutdown()
    for channel in first.workers.channels:
        channel.finish()
    second = Collector.over(first.workers, sync=True)
    for channel, number in zip(first.workers.channels, late, strict=True):
        channel.stop_early(number, 1)
    assert [next(second).shape for _ in range(3)] == [(5, 4)] * 3


@pytest.mark.parametrize(("sync", "expected"), [(True, [[2], [2]]), (False, [[2], []])])
def test_early_stop_of_a_batch_spares_later_fragments(sync: bool, expected: list[Any]) -> None:
    """In synchronous collection, all fragments of the batch end early. In asynchronous collection,
    only the oldest fragment ends early."""
    collector = fake_collector(2, sync=sync, broadcast_interval=1)
    collector.stop_batch_early(2)
    next(collector)
    collector.stop_batch_early(1)  # fragments of later batches are pending
    collector.stop_batch_early(None)
    next(collector)
    assert [channel.target.stops for channel in collector.workers.channels] == expected


@pytest.mark.parametrize(("sync", "expected"), [(True, [[2], [2]]), (False, [[2], []])])
def test_early_stop_of_a_batch_ends_with_the_batch(sync: bool, expected: list[Any]) -> None:
    collector = fake_collector(2, sync=sync, broadcast_interval=1)
    collector.stop_batch_early(2)
    for _ in range(3):
        next(collector)
    assert [channel.target.stops for channel in collector.workers.channels] == expected


def test_later_request_can_stop_a_fragment_earlier() -> None:
    collector = fake_collector(1, sync=True)
    next(collector)
    for keep_steps in (4, 4, 2, 3):
        collector.calls.stop_early(collector.calls.pending(), keep_steps)
    collector.shutdown()  # asks for one step
    assert collector.workers.channels[0].target.stops == [4, 2, 1]


def test_seeds_and_state_reach_collectors_that_are_starting() -> None:
    one = fake_collector(2, sync=True)
    next(one)
    seed = one.set_seed(5)
    state = one.state_dict()
    expected = content(next(one))
    for seeded in (True, False):
        starting = fake_collector(2, up=False, sync=True)
        assert [worker.up for worker in starting.workers.remote] == [False] * 2
        if seeded:
            assert starting.set_seed(5) == seed
        else:
            starting.load_state_dict(state)
        assert content(next(starting)) == expected
    unused = fake_collector(2, up=False, sync=True).state_dict()["collectors"]
    assert set(unused) == {"0", "1", "2"}


# ---- number of batches --------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("total", [1, 20, 21, 137, 200])
def test_total_frames_are_exact(sync: bool, mode: str, total: int) -> None:
    options = {"sync": sync, "frames_per_batch": 20, "total_frames": total}
    collector = fake_collector(2, {"autoreset_mode": mode}, shuffled_by(total), **options)
    frames = [batch.env_steps for batch in collector]
    assert sum(frames) == collector.num_frames >= total
    assert sum(frames[:-1]) < total, "the last batch was not needed"
    assert collector.num_batches == len(frames)
    if mode == "same_step":
        assert set(frames) == {20}
        assert len(frames) == -(-total // 20)
        launched = sum(len(channel.calls) for channel in collector.workers.channels)
        assert launched == len(frames) * (2 if sync else 1), "more is collected than returned"
    with pytest.raises(StopIteration):
        next(collector)


@pytest.mark.parametrize(("sync", "expected"), [(True, 3), (False, 5)])
def test_first_random_frames_count_over_all_collectors(sync: bool, expected: int) -> None:
    """50 frames are rounded up to whole batches. A synchronous batch has 20 frames, and an
    asynchronous batch has 10 frames."""
    collector = fake_collector(2, sync=sync, init_random_frames=50)
    batches = [next(collector) for _ in range(8)]
    uniform = [not batch["action_dist_inputs"].any() for batch in batches]
    assert uniform == [True] * expected + [False] * (8 - expected)


@pytest.mark.parametrize("sync", [True, False])
def test_removed_collector_loses_only_its_pending_fragment(sync: bool) -> None:
    collector = fake_collector(3, sync=sync, total_frames=200)
    frames = [next(collector).env_steps]
    collector.workers.channels[0].finish()
    collector.remove_collectors([1])
    rest = list(collector)
    frames += [batch.env_steps for batch in rest]
    assert sum(frames) == collector.num_frames >= 200
    assert sum(frames[:-1]) < 200
    if sync:
        assert {batch.shape for batch in rest} == {(5, 4)}
    assert all(batch.worker_index != 1 for batch in rest)
    with pytest.raises(KeyError):
        collector.remove_collectors([1])


@pytest.mark.parametrize("sync", [True, False])
def test_batches_continue_with_other_collectors_only(sync: bool) -> None:
    collector = fake_collector(2, sync=sync, total_frames=100)
    next(collector)  # the next fragments are pending
    collector.remove_collectors([1, 2])
    with pytest.raises(RuntimeError, match="no collectors left"):
        next(collector)
    collector.workers.add_workers(1)
    assert {batch.shape for batch in collector} == {(5, 2)}
    assert collector.num_frames == 100


def test_reset_rows_are_not_frames() -> None:
    collector = fake_collector(2, {"autoreset_mode": "next_step"}, frames_per_batch=40)
    batches = [next(collector) for _ in range(5)]
    rows = sum(len(batch) for batch in batches)
    assert collector.num_frames == sum(int(b["valid"].sum()) for b in batches) < rows


@pytest.mark.parametrize("sync", [True, False])
def test_frames_of_a_failed_collector_are_collected_again(sync: bool) -> None:
    collector = fake_collector(2, sync=sync, total_frames=100)
    frames = [next(collector).env_steps]
    collector.workers.channels[1].next_error = LostProcessError("gone")
    frames += [batch.env_steps for batch in collector]
    assert collector.workers.faults.num_restarts == 1
    assert sum(frames) == collector.num_frames == 100


def test_persistent_failures_end_the_iteration() -> None:
    collector = fake_collector(1, {"max_consecutive_failures": 3})
    next(collector)
    original = collector.workers._start

    def start(index: int) -> Any:
        worker = original(index)
        worker.channel.next_error = LostProcessError("never again")
        return worker

    collector.workers._start = start
    collector.workers.channels[0].next_error = LostProcessError("never again")
    next(collector)  # requested before the failure
    with pytest.raises(WorkersFailedError, match="never again"):
        next(collector)


# ---- weights ------------------------------------------------------------------------------------


def versions(collector: Collector, count: int) -> list[int]:
    """Makes one update after each batch, and returns the lag of each batch's weights in updates."""
    lags = []
    for _ in range(count):
        batch = next(collector)
        lags.append(collector.policy.version - batch.version)
        update(collector)
    return lags


def test_lag_is_zero_if_weights_are_sent_first() -> None:
    assert versions(fake_collector(2, sync=True, update_after_each_batch=True), 5) == [0] * 5
    assert versions(fake_collector(2, sync=True, broadcast_interval=1), 5) == [0, 1, 1, 1, 1]
    # If no option decides when weights are sent, no weights are sent.
    assert versions(fake_collector(2, sync=True), 5) == [0, 1, 2, 3, 4]


def test_update_policy_weights_sends_the_current_weights() -> None:
    collector = fake_collector(2, sync=True)
    next(collector)
    update(collector)
    assert collector.update_policy_weights_() == 1
    update(collector)  # this update comes later, so its weights are not sent
    assert [next(collector).version for _ in range(3)] == [0, 1, 1]
    assert collector.policy.version == 2


def test_older_fragments_come_before_newer_ones() -> None:
    """Worker 1 is fast. After an update, the next fragment of worker 1 arrives before the older
    fragment of worker 2."""
    collector = fake_collector(2, script=in_order([1, 1, 1, 2, 1, 2, 1]))
    found = [next(collector).version]
    update(collector)
    collector.update_policy_weights_()
    found += [next(collector).version for _ in range(4)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 1)


def test_fragments_are_returned_in_the_order_of_the_updates() -> None:
    """Worker 1 is slow, and samples with the weights of update 0. The fragments of workers 3 and 2
    with the weights of update 1 arrive earlier, and wait for the fragment of worker 1. The fragment
    of worker 1 is not lost."""
    collector = fake_collector(3, script=in_order([2, 2, 3, 3, 2, 1]))
    batches = []
    for i in range(6):
        batches.append(next(collector))
        if i in (0, 2):
            update(collector)
            collector.update_policy_weights_()
    assert [batch.worker_index for batch in batches] == [2, 2, 3, 1, 3, 2]
    assert [batch.version for batch in batches] == [0, 0, 0, 0, 1, 1]


def test_broadcast_interval() -> None:
    # A batch is requested one update before it is returned, so the lag of new weights is 1.
    lags = versions(fake_collector(2, sync=True, broadcast_interval=3), 10)
    assert lags == [0, 1, 2, 3, 1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_max_weight_update_interval_of_synchronous_batches(limit: int) -> None:
    lags = versions(fake_collector(2, sync=True, max_weight_update_interval=limit), 12)
    assert max(lags) == limit


def test_weights_changed_outside_are_sent() -> None:
    collector = fake_collector(1, update_after_each_batch=True)
    assert next(collector).version == 0
    assert next(collector).version == 0, "the weights are the same"
    collector.policy.flat.params.data[0] += 1.0  # as an optimizer of the user would do
    batch = next(collector)
    assert batch.version == collector.policy.version == 1
    sent = collector.workers.channels[0].target.policy.flat.params
    np.testing.assert_array_equal(sent.detach(), collector.policy.flat.params.detach())


def test_weights_from_outside() -> None:
    collector = fake_collector(1, update_after_each_batch=False)
    flat = np.arange(len(collector.policy.flat.params), dtype=np.float32)
    assert collector.update_policy_weights_(flat) == 1
    next(collector)
    received = collector.workers.channels[0].target.policy
    np.testing.assert_array_equal(received.flat.params.detach(), flat)
    state = {name: value * 0 for name, value in collector.policy.model.state_dict().items()}
    assert collector.update_policy_weights_(state) == 2
    assert not collector.policy.flat.params.any()
    with pytest.raises(ValueError, match="another network"):
        collector.update_policy_weights_(flat[:-1])
    with pytest.raises(ValueError, match="another network"):
        collector.update_policy_weights_({"what": flat})


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames_per_bach": 3}, "did you mean 'frames_per_batch'"),
        ({"total_frames": -2}, "total_frames"),
        ({"max_weight_update_interval": 0}, "max_weight_update_interval"),
        ({"fraction_workers": 0.5}, "sync=False"),
        ({"fraction_workers": 0.0, "sync": True}, "fraction_workers"),
        ({"exploration_type": "greedy"}, "exploration_type"),
        ({"split_trajs": "yes"}, "split_trajs"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fake_collector(2, **options)


@pytest.mark.parametrize("with_postproc", [False, True])
def test_collector_returns_encoded_observations(with_postproc: bool) -> None:
    seen = []

    def postproc(batch: SampleBatch) -> SampleBatch:
        seen.append(batch.obs)
        return batch

    def act(obs: np.ndarray) -> np.ndarray:
        seen.append(obs)
        return np.zeros(len(obs))

    options = {"postproc": postproc} if with_postproc else {}
    collector = local_collector(lambda: Samples(NESTED), policy=act, **options)
    batch = next(collector)
    size = spaces.utils.flatdim(NESTED)
    for obs in (*seen, batch.obs, batch.successor_obs):
        assert obs.dtype == np.float32
        assert obs.shape[-1] == size
    collector.shutdown()


def moments_of(policy: Any) -> Moments:
    moments = policy.get_weights().moments
    assert moments is not None
    return moments


def test_collector_adds_moments_and_keeps_them_with_new_weights() -> None:
    policy = ("ppo", BOTH)
    with local_collector(policy=policy, total_frames=48) as collector:
        given = collector.policy.get_weights()
        frames = 0
        for batch in collector:
            frames += batch.env_steps
            assert batch.moments is None
            assert moments_of(collector.policy).rows == frames
            collector.policy.learn_on_batch(batch)
            update(collector)
            collector.update_policy_weights_(given._replace(version=batch.version + 1))
        assert frames >= 48
        assert moments_of(collector.policy).rows == frames
