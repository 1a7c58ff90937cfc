"""Batches, replay buffers and files hold observations as their space holds them. Policies, their
normalisers and the user's code read encoded observations."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from replay_helpers import replay_policy
from toy_envs import AUTORESET, NESTED, Drift, Samples, make_policy, make_sampler

from polopt.common.compression import pack
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.optimizers.sync_replay import SyncReplay
from polopt.policies.normalization import Normalizer
from polopt.policies.spaces import ObservationEncoder
from polopt.replay.replay_buffer import ReplayBuffer
from polopt.replay.row_store import ColumnSpec, RowFilesError
from polopt.rollouts.envs.fast_sync_vector_env import FastSyncVectorEnv
from polopt.rollouts.workers.gathering import sample
from polopt.trainers.checkpoints import read_checkpoint, write_checkpoint

IMAGE = spaces.Box(0, 255, (84, 84, 4), np.uint8)


def vector(space: Space[Any], mode: str = "same_step", spoiled: bool = False) -> Any:
    makers = [lambda: Samples(space), lambda: Samples(space, spoiled)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode.upper()])


def sampled(mode: str = "same_step", name: str = "ppo", **options: Any) -> tuple[Any, SampleBatch]:
    env = vector(NESTED, mode)
    policy = make_policy(name, env, **options)
    return policy, make_sampler(env, policy, 6).sample()


# ---- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "nbytes"),
    [
        (spaces.Dict(image=IMAGE, speed=spaces.Box(-1, 1, (3,), np.float32)), 28_236),
        (spaces.Tuple([IMAGE, spaces.Discrete(3)]), 28_232),
        (spaces.Dict(observations=IMAGE, action_mask=spaces.Box(0, 1, (3,), np.int8)), 28_227),
        (spaces.Dict(board=spaces.Box(0, 1, (19, 19, 17), np.bool_)), 6_137),
        (spaces.Discrete(5_000), 8),
        (spaces.MultiDiscrete([500] * 20), 160),
        (spaces.MultiBinary(4_000), 4_000),
        (IMAGE, 28_224),
    ],
    ids=str,
)
def test_replay_row_has_the_bytes_of_the_space(space: Space[Any], nbytes: int) -> None:
    model = {"fcnet_hiddens": [2], "conv_filters": []}
    policy = replay_policy("dqn", space, model=model)
    assert ColumnSpec(policy.encoder.row_shape, policy.encoder.row_dtype).nbytes == nbytes
    config = SyncReplay.config_class.parse({"buffer_size": 100, "learning_starts": 10})
    of_other_columns = 8 + 4 + 4 + 1  # action, reward, next, flags
    assert config.make_buffer(policy).nbytes == 100 * (nbytes + of_other_columns)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "lz4"])
def test_sent_batch_keeps_the_fields_of_observations(codec: str) -> None:
    _, batch = sampled()
    batch.compress = codec
    arrived = pickle.loads(pickle.dumps(batch, protocol=5))
    for name in ("all_obs", "successor_obs"):
        before, after = getattr(batch, name), getattr(arrived, name)
        assert after.dtype == before.dtype
        assert after.shape == before.shape
        rounding = {"fp16": 2**-11, "bf16": 2**-8}.get(codec, 0.0)
        np.testing.assert_allclose(after["at"], before["at"], rtol=rounding, atol=rounding)
        for exact in ("picture", "pair", "time"):
            np.testing.assert_array_equal(after[exact], before[exact])
    half = 2 if codec in ("fp16", "bf16") else 4
    expected = batch.all_obs.nbytes - batch.all_obs["at"].size * (4 - half)
    assert codec == "lz4" or pack(batch.all_obs, codec).nbytes == expected


# ---- drawing, acting and learning ----------------------------------------------------------------


@pytest.mark.parametrize("mode", AUTORESET)
def test_drawn_rows_are_the_sampled_observations(mode: str) -> None:
    policy, batch = sampled(mode)
    buffer = ReplayBuffer(100, 0.9)
    buffer.add(batch)
    rows = buffer.sample(50)
    envs = batch.shape[1]
    own = dict(zip(batch.successor_index.tolist(), batch.successor_obs, strict=True))
    for index, obs, next_obs in zip(rows.indices.tolist(), rows.obs, rows.next_obs, strict=True):
        t, n = divmod(index, envs)
        assert obs == batch.all_obs[t, n]
        assert next_obs == own.get(index, batch.all_obs[t + 1, n])
    encoded = policy.encoder.encode_batch(rows)
    assert encoded.obs.shape == (50, *policy.encoder.shape)
    np.testing.assert_array_equal(encoded.next_obs, policy.encoder.encode(rows.next_obs))


def test_padding_is_encoded() -> None:
    """The padding of a batch is 0, which is not in a Discrete that starts at 4."""
    policy, batch = sampled()
    padded = SampleBatch.concat([batch, batch.steps(0, 2)])
    vectors = policy.encode_batch(padded).all_obs
    assert vectors.shape == (7, 4, *policy.encoder.shape)
    np.testing.assert_array_equal(vectors[3:, 2:], vectors[3:, 2:] * 0 + vectors[6, 3])
    np.testing.assert_array_equal(vectors[:, :2], policy.encode_batch(batch).all_obs)


# ---- normalisation -------------------------------------------------------------------------------

LARGE = {
    "float64": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "int64": spaces.Box(0, 2**40, (2,), np.int64),
}


@pytest.mark.parametrize("dtype", LARGE)
@pytest.mark.parametrize("structure", ["dict", "tuple"])
def test_large_numbers_are_normalised_as_in_a_plain_box(dtype: str, structure: str) -> None:
    """Seconds since 1970 differ by less than float32 can tell apart."""
    box, other = LARGE[dtype], spaces.Discrete(3)
    both: Space[Any] = spaces.Dict(b=box, d=other)
    if structure == "tuple":
        both = spaces.Tuple([box, other])
    values = (1.7e9 + np.arange(14).reshape(7, 2)).astype(box.dtype)
    categories = np.arange(7) % 3
    found = []
    for space, batch in (
        (box, values),
        (both, {"b": values, "d": categories} if structure == "dict" else (values, categories)),
    ):
        encoder = ObservationEncoder(space)
        normalizer = Normalizer(encoder, 10.0, None, 0.9)
        rows = encoder.rows(batch)
        columns = {"valid": np.ones((6, 1), bool)}
        none = np.zeros(0, np.int64)
        fragment = SampleBatch(rows[:, None], columns, none, rows[:0])
        normalizer.moments = normalizer.moments_of(fragment, np.zeros((6, 1)))
        fragment.per_env = normalizer.per_env(1)
        in_fragment = normalizer.normalized(fragment).all_obs[:, 0]
        at_once = normalizer.observations(rows)
        tensor = torch.from_numpy(encoder.encode(rows, normalizer.dtype))
        exported = normalizer.in_torch()(tensor).numpy()
        for one in (in_fragment, at_once, exported):
            assert one.dtype == np.float32
            assert len(np.unique(one[:, 0])) == 7
        found.append([one[:, :2] for one in (in_fragment, at_once, exported)])
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(at_once[:, 2:], np.eye(3)[categories])


def test_only_numbers_of_64_bits_need_float64() -> None:
    """The other numbers are normalised in float32, as before. A Box with small bounds counts as
    small even if its dtype has 64 bits."""
    small = {
        "a": spaces.Box(-1.0, 1.0, (2,), np.float32),
        "b": spaces.Box(0, 1_000, (2,), np.int64),
        "c": spaces.Box(-1.0, 1.0, (2,), np.float16),
    }
    for parts, dtype in (
        (small, np.float32),
        ({**small, "d": LARGE["int64"]}, np.float64),
        ({**small, "d": LARGE["float64"]}, np.float64),
    ):
        assert Normalizer(ObservationEncoder(spaces.Dict(parts)), 10.0, None, 0.9).dtype == dtype


def test_moments_of_images_do_not_travel_with_a_fragment() -> None:
    _, batch = sampled(normalize_observations=True)
    assert {name: batch.per_env[name].shape for name in ("obs_mean", "obs_inverse_std")} == {
        "obs_mean": (2, 5),  # `at` and `time`
        "obs_inverse_std": (2, 5),
    }


# ---- values that are not finite ------------------------------------------------------------------


def test_non_finite_field_is_named_with_its_environment() -> None:
    env = vector(NESTED, spoiled=True)
    sampler = make_sampler(env, make_policy("ppo", env), 3)
    fragment = sampler.sample()  # the sampler drops the rows of this environment
    assert "observation of environment 1 is nan at step 2 of the fragment" in str(fragment.faults)
    assert fragment["valid"].all(axis=0).tolist() == [True, False]


# ---- files ---------------------------------------------------------------------------------------


def filled(name: str = "same_step") -> tuple[ReplayBuffer, SampleBatch]:
    _, batch = sampled(name)
    buffer = ReplayBuffer(100, 0.9, n_step=3)
    buffer.add(batch)
    return buffer, batch


def test_saved_rows_keep_their_fields(tmp_path: Path) -> None:
    buffer, batch = filled("next_step")
    write_checkpoint(tmp_path / "state", {"replay": buffer.save(tmp_path / "rows")})
    state = read_checkpoint(tmp_path / "state")["replay"]
    again = ReplayBuffer(100, 0.9, n_step=3)
    again.load(tmp_path / "rows", state)
    for one in (buffer, again):
        one.cut(batch.worker_index)  # stores the observations after the last step
    for one, other in zip(buffer.sample(64), again.sample(64), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_rows_of_older_versions_are_refused_in_one_sentence(tmp_path: Path) -> None:
    buffer, batch = filled()
    older = ReplayBuffer(100, 0.9, n_step=3)
    older.add(ObservationEncoder(NESTED).encode_batch(batch))  # float32 vectors
    state = older.save(tmp_path)
    said = r"'obs' of the saved replay buffer has float32 \[22\] in each row, and this buffer has"
    with pytest.raises(ConfigError, match=said):
        buffer.load(tmp_path, state)
    assert buffer.num_rows == 12  # unchanged


@pytest.mark.parametrize(
    "dtype",
    ["|O", [["a", "|O", []]], [["a", "<f4", [-1]]], [["a", "<f4"]], [["a", "<f4", []]] * 2, []],
    ids=str,
)
def test_damaged_dtype_of_saved_rows_is_refused(tmp_path: Path, dtype: Any) -> None:
    buffer, _ = filled()
    state = buffer.save(tmp_path)
    state["rows"]["columns"]["obs"] = [[], dtype]
    with pytest.raises((RowFilesError, ConfigError)):
        ReplayBuffer(100, 0.9, n_step=3).load(tmp_path, state)


class DriftInDict(Drift):
    """`Drift`, whose state can be saved, with observations in a Dict."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(at=self.observation_space, of=spaces.Discrete(2))

    def reset(self, **options: Any) -> Any:
        return {"at": super().reset(**options)[0], "of": 1}, {}

    def step(self, action: int) -> Any:
        at, *rest = super().step(action)
        return {"at": at, "of": 1}, *rest


def test_saved_sampler_continues_from_its_observation(tmp_path: Path) -> None:
    def sampler(seed: int) -> Any:
        env = FastSyncVectorEnv([DriftInDict] * 2)
        return make_sampler(env, make_policy("ppo", env), 5, seed=seed)

    one, other, third = sampler(0), sampler(1), sampler(2)
    last = one.sample().bootstrap_obs
    write_checkpoint(tmp_path, {"sampler": one.get_state()})
    state = read_checkpoint(tmp_path)["sampler"]
    other.set_state(state)
    batch = other.sample()
    np.testing.assert_array_equal(batch.all_obs[0], last)
    np.testing.assert_array_equal(batch.all_obs, one.sample().all_obs)
    # An older version saved float32 vectors. All environments then begin new episodes.
    state["obs"] = one.policy.encoder.encode(last)
    third.set_state(state)
    assert not third.get_state()["lengths"].any()
    assert (third.sample().all_obs[0] != last).all()


# ---- code of the user ----------------------------------------------------------------------------


@pytest.mark.parametrize(("normalizes", "dtype"), [(False, np.float32), (True, np.float64)])
def test_worker_sends_rows_and_the_user_reads_vectors(normalizes: bool, dtype: Any) -> None:
    """The vectors have 64 bits if the normaliser may still need them."""
    policy, batch = sampled(normalize_observations=normalizes)
    config = SimpleNamespace(postproc=None)
    worker: Any = SimpleNamespace(
        policy=policy, config=config, set_weights=lambda weights: None, next_batch=lambda: batch
    )
    assert sample(worker, None) is batch
    config.postproc = lambda given: given
    shown = sample(worker, None)
    assert shown.obs.dtype == shown.successor_obs.dtype == dtype
    np.testing.assert_array_equal(
        policy.normalized(shown).all_obs, policy.normalized(batch).all_obs
    )
