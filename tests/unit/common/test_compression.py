"""The precision of codecs, the error feedback of `topk`, and the use of packed gradients and
batches."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from fakes import FakeWorkerSet, make_optimizer, worker_config
from toy_envs import POLICIES, Drift, random_batch

from polopt.common import compression
from polopt.common.compression import (
    GradientPacker,
    Packed,
    PackedGradients,
    pack,
    unpack,
    unpack_gradients,
)
from polopt.common.config import ConfigError
from polopt.common.sample_batch import SampleBatch
from polopt.common.weights import Gradients
from polopt.optimizers.async_gradients import AsyncGradients
from polopt.rollouts.envs.vector_env import probe_env
from polopt.rollouts.rollout_config import RolloutConfig

#: The columns that determine importance ratios.
EXACT = ("actions", "action_dist_inputs", "action_logp")
GRADIENT_CODECS = ("none", "fp16", "bf16", "topk")
#: Maps each codec to the largest relative error of a value.
PRECISION = {"none": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "lz4": 0.0}


def gradients(flat: Any, rows: int = 1) -> Gradients:
    return Gradients(np.asarray(flat, np.float32), 3, rows, {"vf_loss": 1.0})


@pytest.mark.parametrize("codec", PRECISION)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_relative_error_is_bounded_at_any_magnitude(codec: str, size: float) -> None:
    rng = np.random.default_rng(0)
    # All values are at least 2^-13 of the largest value, so the error bound of fp16 applies.
    array = (rng.choice([-1, 1], 500) * rng.uniform(2.0**-13, 1.0, 500) * size).astype(np.float32)
    result = unpack(pack(array.reshape(20, 25), codec))
    assert result.shape == (20, 25)
    assert result.dtype == np.float32
    errors = np.abs(result.ravel() - array) / np.abs(array)
    assert errors.max() <= PRECISION[codec] * 1.001
    if codec in ("fp16", "bf16"):
        assert errors.max() > PRECISION[codec] / 4, "the bound is tight"


def test_half_precision_without_scale_overflows() -> None:
    with np.errstate(over="ignore"):
        assert np.isinf(np.float32([1e30]).astype(np.float16)).all()


@pytest.mark.parametrize("codec", PRECISION)
def test_other_dtypes_are_lossless(codec: str) -> None:
    rng = np.random.default_rng(1)
    for array in (
        rng.integers(0, 256, (3, 4, 5), dtype=np.uint8),
        rng.integers(-9, 9, (3, 4)),
        rng.random((3, 4)) < 0.5,
        rng.normal(size=7),
        np.zeros((0, 4), np.float32),
        np.array([0.0, -0.0, 1.0], np.float32),
    ):
        result = unpack(pack(array, codec))
        assert result.dtype == array.dtype
        assert result.shape == array.shape
        assert result.tobytes() == array.tobytes()


@pytest.mark.parametrize("codec", GRADIENT_CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_gradient_affects_no_later_gradient(codec: str, bad: float) -> None:
    packer = GradientPacker(codec, share=0.5)  # type: ignore[arg-type]
    arrived = unpack_gradients(packer.pack(gradients([1.0, bad, 2.0, 0.5])))
    assert not np.isfinite(arrived.flat).all()
    arrived = unpack_gradients(packer.pack(gradients([1.0, 4.0, 2.0, 0.5])))
    assert np.isfinite(arrived.flat).all()


def test_topk_sends_largest_and_accumulates_rest() -> None:
    packer = GradientPacker("topk", share=0.25)
    sent = [
        unpack_gradients(packer.pack(gradients(flat))).flat.tolist()
        for flat in ([5, -1, 2, 0], [0, -1, 2, 0], [0, -4, 0, 0], [0, 0, 0, 0])
    ]
    # Computed by hand: first 5, then 2 + 2, then -1 - 1 - 4, then zeros.
    assert sent == [[5, 0, 0, 0], [0, 0, 4, 0], [0, -6, 0, 0], [0, 0, 0, 0]]
    assert packer.residual is not None
    assert not packer.residual.any()


def test_topk_sent_plus_residual_is_sum_of_gradients() -> None:
    rng = np.random.default_rng(2)
    packer = GradientPacker("topk", share=0.1)
    # The values are integers, so float32 sums are exact.
    given = rng.integers(-50, 50, size=(30, 101)).astype(np.float32)
    sent = [unpack_gradients(packer.pack(gradients(flat))) for flat in given]
    assert all(np.count_nonzero(part.flat) <= 10 for part in sent)
    total = sum(part.flat for part in sent)
    assert packer.residual is not None
    assert np.array_equal(total + packer.residual, given.sum(axis=0))
    assert not np.array_equal(total, given.sum(axis=0)), "the residual is not zero"
    assert sent[0][1:] == gradients(given[0])[1:]


def test_gradient_of_zero_rows_leaves_residual() -> None:
    packer = GradientPacker("topk")
    empty = gradients([0.0, 0.0], rows=0)
    assert packer.pack(empty) is empty
    assert packer.residual is None


@pytest.mark.parametrize("codec", ["fp16", "bf16", "topk"])
def test_packed_gradients_are_pickled_out_of_band(codec: str) -> None:
    flat = np.random.default_rng(3).normal(size=50_000).astype(np.float32)
    packed = GradientPacker(codec).pack(gradients(flat))  # type: ignore[arg-type]
    assert isinstance(packed, PackedGradients)
    beside: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(packed, protocol=5, buffer_callback=beside.append)
    assert len(inside) < 1000
    assert sum(buffer.raw().nbytes for buffer in beside) == packed.packed.nbytes < flat.nbytes


def test_image_batches_need_a_lossless_codec() -> None:
    """Only `lz4` makes uint8 columns smaller."""
    image = np.zeros((4, 84, 84), np.uint8)
    sizes = {codec: pack(image, codec).nbytes for codec in PRECISION}
    assert sizes["fp16"] == sizes["bf16"] == sizes["none"] == image.nbytes
    assert sizes["lz4"] < image.nbytes / 10


def test_lz4_gradients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'compress_gradients': got 'lz4'.*'fp16'.*'topk'"):
        RolloutConfig.parse({"compress_gradients": "lz4"})


def test_unknown_codec_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'zip'"):
        pack(np.zeros(3, np.float32), "zip")
    with pytest.raises(ValueError, match="got 'zip'"):
        unpack(Packed("zip", (3,), "<f4", (np.zeros(3),)))


def sampled(compress: str) -> SampleBatch:
    spaces = probe_env(Drift, RolloutConfig())[:2]
    policy = POLICIES["ppo"](*spaces, POLICIES["ppo"].config_class())
    batch = random_batch(policy, 6, 4, np.random.default_rng(4))
    batch.worker_index, batch.compress, batch.version = 2, compress, 7
    return batch


@pytest.mark.parametrize("codec", PRECISION)
def test_batch_is_packed_only_when_pickled(codec: str) -> None:
    batch = sampled(codec)
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=beside.append)
    arrived = pickle.loads(data, buffers=beside)
    assert (arrived.version, arrived.worker_index, arrived.shape) == (7, 2, (6, 4))
    assert arrived.columns.keys() == batch.columns.keys()
    for name, column in batch.iter_rows():
        other = arrived.flat(name)
        assert other.dtype == column.dtype
        if column.dtype == np.float32 and name not in EXACT:
            scale = np.abs(column).max(initial=0.0)
            assert np.abs(other - column).max() <= PRECISION[codec] * scale
        else:
            assert np.array_equal(other, column)
    again = pickle.loads(pickle.dumps(arrived))
    assert np.array_equal(again["advantages"], arrived["advantages"])
    sizes = {c: sum(b.raw().nbytes for b in _beside(sampled(c))) for c in PRECISION}
    if codec in ("fp16", "bf16"):
        assert sizes[codec] < 0.75 * sizes["none"]


def _beside(batch: SampleBatch) -> list[pickle.PickleBuffer]:
    beside: list[pickle.PickleBuffer] = []
    pickle.dumps(batch, protocol=5, buffer_callback=beside.append)
    return beside


def descend(codec: str, steps: int = 400) -> float:
    """Returns the distance to the minimum of `|A x - b|^2 / 2` after gradient descent with packed
    gradients."""
    rng = np.random.default_rng(5)
    matrix = rng.normal(size=(60, 20)) / 60**0.5
    solution = rng.normal(size=20)
    packer = GradientPacker(codec, share=0.1)  # type: ignore[arg-type]
    x = np.zeros(20)
    for _ in range(steps):
        gradient = matrix.T @ (matrix @ (x - solution))
        x -= 0.1 * unpack_gradients(packer.pack(gradients(gradient))).flat
    return float(np.linalg.norm(x - solution) / np.linalg.norm(solution))


@pytest.mark.parametrize("codec", GRADIENT_CODECS)
def test_gradient_descent_converges_with_codec(codec: str) -> None:
    assert descend(codec) < 1e-3


def test_topk_without_error_feedback_converges_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GradientPacker._largest

    def without_residual(self: GradientPacker, flat: np.ndarray) -> Any:
        self.residual = None
        return right(self, flat)

    reached = descend("topk", steps=150)
    monkeypatch.setattr(compression.GradientPacker, "_largest", without_residual)
    assert descend("topk", steps=150) > 2.0 * reached


@pytest.mark.parametrize("codec", GRADIENT_CODECS)
def test_optimizer_unpacks_gradients_of_workers(codec: str) -> None:
    rollout = {"compress_gradients": codec, "topk_share": 0.2, "num_workers": 1}
    workers = FakeWorkerSet(worker_config(rollout=rollout))
    optimizer = make_optimizer(AsyncGradients, workers, grads_per_step=4)
    result = optimizer.step()
    assert result == (40, 40, 4)
    sent = workers.channels[0].values
    assert {type(part) for part in sent} == {Gradients if codec == "none" else PackedGradients}
    assert np.isfinite(optimizer.policy.get_weights().flat).all()
