"""`SyncReplay` with `replay_unit: sequence`, and a policy with memory that learns from it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes import FakeTransport, FakeWorkerSet, make_optimizer, worker_config
from recurrent_q import Recall, RecurrentQ
from toy_envs import Clock

import polopt
from polopt.common.config import ConfigError
from polopt.optimizers.sync_replay import SyncReplay
from polopt.policies.dqn import DQNPolicy

STARTS, ROWS, LENGTH, BURN_IN = 60, 24, 8, 2
SEQUENCES: dict[str, Any] = {
    "replay_unit": "sequence",
    "sequence_length": LENGTH,
    "burn_in": BURN_IN,
    "buffer_size": 400,
    "learning_starts": STARTS,
    "train_batch_size": ROWS,
    "training_intensity": 1.5,
}
RUN: dict[str, Any] = {
    "optimizer": "sync_replay",
    "policy": RecurrentQ,
    "env": Recall,
    "num_workers": 0,
    "num_envs_per_worker": 8,
    "rollout_fragment_length": 4,
}


def make(mode: str = "same_step", num_workers: int = 0, **options: Any) -> Any:
    rollout = {"num_workers": num_workers, "num_envs_per_worker": 2, "rollout_fragment_length": 5}
    config = worker_config(
        RecurrentQ,
        env=Recall,
        rollout={**rollout, "autoreset_mode": mode},
        model={"use_lstm": True, "lstm_cell_size": 4, "fcnet_hiddens": [4]},
    )
    return make_optimizer(
        SyncReplay, FakeWorkerSet(config, FakeTransport()), **SEQUENCES, **options
    )


def test_policy_with_memory_learns_to_recall() -> None:
    options: dict[str, Any] = {
        "sequence_length": 6,
        "buffer_size": 4000,
        "learning_starts": 100,
        "train_batch_size": 128,
        "training_intensity": 16.0,
        "lr": 1e-2,
        "gamma": 0.9,
        "epsilon": [[0, 1.0], [500, 0.1]],
        "min_sample_timesteps_per_iteration": 500,
        "seed": 0,
    }
    trainer = polopt.PolicyOptimizerTrainer({**RUN, **SEQUENCES, **options})
    result = trainer.train()
    # A policy without memory reaches 0.5.
    assert trainer.evaluate(40, seed=0).episode_return_mean > 0.9
    delivered = result["optimizer"]["training_intensity"]
    assert delivered == pytest.approx(16.0, abs=128 / 400)
    trainer.stop()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_intensity_is_exact_although_sequences_have_rows_that_reset(
    mode: str, num_workers: int
) -> None:
    optimizer = make(mode, num_workers)
    drawn: list[Any] = []
    learn = optimizer.policy.learn_on_transitions
    optimizer.policy.learn_on_transitions = lambda rows: drawn.append(rows) or learn(rows)
    for _ in range(14):
        optimizer.step()
        sampled = optimizer.metrics.num_env_steps_sampled
        owed = Fraction(3, 2) * max(0, sampled - STARTS)
        assert 0 <= owed - sum(rows.num_rows for rows in drawn) < ROWS
    sizes = {rows.num_rows for rows in drawn}
    assert sizes == {ROWS} if mode == "same_step" else min(sizes) < ROWS
    assert all(rows.batch.shape == (LENGTH, ROWS // (LENGTH - BURN_IN)) for rows in drawn)
    assert optimizer.metrics.num_env_steps_trained == sum(rows.num_rows for rows in drawn) > 0


def test_restored_buffer_draws_the_same_sequences(tmp_path: Path) -> None:
    whole, killed, restored = (make(save_replay_buffer=True) for _ in range(3))
    for _ in range(12):
        whole.step()
        killed.step()
    state = killed.get_state()
    files, _ = killed.buffer_files.write(tmp_path / "replay")
    restored.set_state(state)
    restored.buffer_files.read(tmp_path / "replay", files)
    for optimizer in (whole, restored):
        optimizer.buffer._rng.bit_generator.state = state["replay"]["buffer"]["rng"]
    rows = [optimizer._draw() for optimizer in (whole, restored)]
    for column in ("actions", "rewards", "valid"):
        np.testing.assert_array_equal(rows[0].batch[column], rows[1].batch[column])
    np.testing.assert_array_equal(*(r.batch.per_env["state"] for r in rows))
    assert np.abs(rows[0].batch.per_env["state"]).max() > 0.0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"policy": "dqn"},
            "policy 'dqn' with optimizer 'sync_replay': the policy learns from Transitions, but "
            "the optimizer gives it Sequences",
        ),
        (
            {"replay_unit": "transition", "sequence_length": None, "burn_in": 0},
            "Allowed: optimizer 'sync_replay' with replay_unit='sequence', or policy 'crossq', ",
        ),
        ({"sequence_length": None}, "key 'sequence_length': got None with replay_unit='sequence'"),
        ({"burn_in": 8}, "key 'burn_in': got 8 with sequence_length=8; allowed: 0 to 7"),
        ({"train_batch_size": 25}, "key 'train_batch_size': got 25 with sequences of 6 rows"),
        ({"replay_unit": "transition"}, "key 'sequence_length': got 8 with replay_unit='transit"),
        ({"replay_unit": "sequences"}, "key 'replay_unit'"),
        ({"rollout_fragment_length": 9}, "key 'rollout_fragment_length': got 9 with sequence_len"),
        ({"buffer_size": 80}, "key 'buffer_size': got 80. Allowed: 96 or more"),
        ({"optimizer": "sync_samples"}, "an option of optimizer 'sync_replay'"),
        ({"optimizer": "async_replay", "num_workers": 1}, "an option of optimizer 'sync_replay'"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        polopt.PolicyOptimizerTrainer({**RUN, **SEQUENCES, **changes})
    assert said in str(caught.value)


def test_names_of_rllib_are_accepted() -> None:
    parsed = SyncReplay.config_class.parse(
        {"replay_unit": "sequence", "replay_sequence_length": 8, "replay_burn_in": 4}, "optimizer"
    )
    assert (parsed.sequence_length, parsed.burn_in) == (8, 4)


def test_learning_waits_for_windows_that_are_complete() -> None:
    """A window may be longer than `learning_starts`. Rows that arrive before the first window is
    complete do not add credit."""
    config = worker_config(
        DQNPolicy,
        env=lambda config: Clock(200),
        rollout={"num_workers": 0, "rollout_fragment_length": 4},
        n_step=20,
    )
    workers = FakeWorkerSet(config, FakeTransport())
    options: dict[str, Any] = {"learning_starts": 0, "training_intensity": 8.0}
    optimizer = make_optimizer(SyncReplay, workers, train_batch_size=8, **options)
    # A window is complete after 20 steps and the next observation. So the buffer can draw rows
    # after the sixth fragment of 4 steps. One of the 8 rows of this fragment ends the filling of
    # the buffer. Each other row adds credit for 8 trained rows, which are one update.
    assert [optimizer.step().updates for _ in range(8)] == [0, 0, 0, 0, 0, 7, 8, 8]


def test_rows_earn_no_credit_before_one_can_be_drawn() -> None:
    """If an n-step window is longer than `learning_starts`, the first draw waits until the window
    is complete."""
    trainer = polopt.PolicyOptimizerTrainer(
        env="CartPole-v1",
        optimizer={"name": "sync_replay", "learning_starts": 1, "train_batch_size": 4},
        policy={"name": "dqn", "n_step": 8},
        num_workers=0,
        num_envs_per_worker=1,
        rollout_fragment_length=2,
        min_sample_timesteps_per_iteration=2,
        seed=0,
    )
    trained = [trainer.train()["num_env_steps_trained_lifetime"] for _ in range(12)]
    trainer.stop()
    assert trained[0] == 0 < trained[-1]
