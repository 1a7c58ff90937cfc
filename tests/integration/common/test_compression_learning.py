"""Training with each codec learns CartPole."""

from __future__ import annotations

import pytest
from learning import train_cartpole


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        *(
            {"optimizer": "async_gradients", "compress_gradients": codec}
            for codec in ("fp16", "bf16", "topk")
        ),
        *(
            {"optimizer": "sync_samples", "compress_data": codec}
            for codec in ("fp16", "bf16", "lz4")
        ),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_cartpole_is_learned_with_codec(options: dict[str, str], ray_session: None) -> None:
    assert train_cartpole(options) >= 400.0
