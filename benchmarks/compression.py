"""Measures the bytes and microseconds of each codec, for gradients and for a fragment.

    python benchmarks/compression.py

The gradients have 10,000 and 1,000,000 parameters.

A PPO policy computes a gradient from CartPole-v1 observations, so the distribution of its elements
is realistic. The script repeats this gradient to the requested size and adds 1 percent of noise.
The fragment has 128 steps of 8 environments. This process packs and unpacks with one thread. The
figures are medians of `--repeats` runs.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import polopt
from polopt import GradientPacker, unpack_gradients

GRADIENT_CODECS = ("none", "fp16", "bf16", "topk")
BATCH_CODECS = ("none", "fp16", "bf16", "lz4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"polopt {polopt.__version__}, torch {torch.__version__}, NumPy {np.__version__}, ")
    print(f"Python {platform.python_version()}, one thread, medians of {repeats}")
    batch, gradients = sample()
    print("\n| what | codec | bytes | share | pack, us | unpack, us |\n|---|---|---|---|---|---|")
    for size in (10_000, 1_000_000):
        measure_gradients(stretched(gradients, size), repeats)
    measure_batch(batch, repeats)


def sample() -> tuple[Any, Any]:
    """Returns a fragment `[128, 8]` of CartPole-v1, and the gradient of this fragment."""
    factory = polopt.GradientWorkerSet.create_factory(
        "CartPole-v1",
        ("ppo", {"model": {"fcnet_hiddens": (64, 64)}}),
        num_workers=0,
        rollout_fragment_length=128,
        num_envs_per_worker=8,
        seed=0,
    )
    worker = factory().local
    batch = worker.sample()
    return batch, worker.policy.compute_gradients(batch)


def stretched(gradients: Any, size: int) -> Any:
    """Repeats the vector to `size` elements, and adds noise so that the copies differ."""
    rng = np.random.default_rng(0)
    flat = np.resize(gradients.flat, size)
    noise = rng.normal(scale=0.01, size=size).astype(np.float32)
    return gradients._replace(flat=flat * (1.0 + noise))


def measure_gradients(gradients: Any, repeats: int) -> None:
    size = len(gradients.flat)
    for codec in GRADIENT_CODECS:
        packer = GradientPacker(codec, share=0.01)
        packed = packer.pack(gradients)
        bytes_ = gradients.flat.nbytes if codec == "none" else packed.packed.nbytes
        row(
            f"gradient of {size:,}",
            "topk (1%)" if codec == "topk" else codec,
            bytes_,
            bytes_ / gradients.flat.nbytes,
            time_us(lambda packer=packer: packer.pack(gradients), repeats),
            time_us(lambda packed=packed: unpack_gradients(packed), repeats),
        )


def measure_batch(batch: Any, repeats: int) -> None:
    plain = sum(len(part) for part in pickled(batch, "none"))
    for codec in BATCH_CODECS:
        parts = pickled(batch, codec)
        size = sum(len(part) for part in parts)
        row(
            "fragment of 128 x 8",
            codec,
            size,
            size / plain,
            time_us(lambda codec=codec: pickled(batch, codec), repeats),
            time_us(lambda parts=parts: pickle.loads(parts[0], buffers=parts[1:]), repeats),
        )


def pickled(batch: Any, codec: str) -> list[Any]:
    """Returns the message that a worker sends: the pickle, and its out-of-band arrays."""
    batch.compress = codec
    beside: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=beside.append)
    return [data, *(buffer.raw() for buffer in beside)]


def time_us(call: Callable[[], Any], repeats: int) -> float:
    """Returns the median microseconds of a call."""
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        call()
        times.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(times)


def row(*values: Any) -> None:
    what, codec, size, share, packing, unpacking = values
    print(f"| {what} | {codec} | {size:,} | {share:.0%} | {packing:,.0f} | {unpacking:,.0f} |")


if __name__ == "__main__":
    main()
