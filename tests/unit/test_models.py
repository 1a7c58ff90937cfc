"""Networks over images: which one is made, what it computes, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.models import (
    NATURE_FILTERS,
    NATURE_MIN_SIZE,
    CNNActorCritic,
    MLPActorCritic,
    ModelConfig,
    make_model,
)

BYTES, FLOATS = np.dtype(np.uint8), np.dtype(np.float32)


def model_for(shape: tuple[int, ...], dtype: np.dtype[Any] = BYTES, **options: Any) -> Any:
    return make_model(shape, dtype, 6, False, ModelConfig(**options))


def test_images_of_bytes_get_the_network_of_mnih_et_al() -> None:
    model = model_for((4, 84, 84))
    assert isinstance(model, CNNActorCritic)
    convolutions = [m for m in model.policy_trunk if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions] == [
        *NATURE_FILTERS
    ]
    linear = next(m for m in model.policy_trunk if isinstance(m, nn.Linear))
    assert (linear.in_features, linear.out_features) == (64 * 7 * 7, 512)
    assert model.value_trunk is model.policy_trunk, "shared, as in the paper"
    # 1,684,128 parameters up to the 512 features, which is the figure known for this network.
    assert sum(p.numel() for p in model.policy_trunk.parameters()) == 1_684_128


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((4, 84, 84), FLOATS, {}),
        ((4, 84, 84), BYTES, {"conv_filters": []}),
        ((3, 35, 35), BYTES, {}),
        ((84, 84), BYTES, {}),
        ((4,), BYTES, {}),
    ],
)
def test_all_else_is_flattened(
    shape: tuple[int, ...], dtype: np.dtype[Any], options: dict[str, Any]
) -> None:
    assert isinstance(model_for(shape, dtype, **options), MLPActorCritic)


def test_the_smallest_image_fits() -> None:
    model = model_for((3, NATURE_MIN_SIZE, NATURE_MIN_SIZE))
    assert isinstance(model, CNNActorCritic)
    assert model(torch.zeros(2, 3, NATURE_MIN_SIZE, NATURE_MIN_SIZE))[0].shape == (2, 6)


def test_convolutions_equal_their_definition() -> None:
    """One layer, computed by hand over every window; bytes are divided by 255."""
    model = model_for((2, 5, 6), conv_filters=[[3, 3, 2]], post_fcnet_hiddens=[])
    obs = np.random.default_rng(0).integers(0, 256, (4, 2, 5, 6), dtype=np.uint8)
    conv = model.policy_trunk[0]
    weight, bias = conv.weight.detach().numpy(), conv.bias.detach().numpy()
    windows = np.zeros((4, 3, 2, 2))
    for row, column in np.ndindex(2, 2):
        patch = obs[:, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3] / 255.0
        windows[:, :, row, column] = np.einsum("bchw,kchw->bk", patch, weight) + bias
    features = np.maximum(windows, 0.0).reshape(4, -1)
    expected = features @ model.value_head.weight.detach().numpy().T
    values = model.value(torch.as_tensor(obs)).detach().numpy()
    np.testing.assert_allclose(values, expected[:, 0], atol=1e-5)


def test_channels_last_is_the_same_image() -> None:
    options = {"conv_filters": [[3, 3, 2]], "post_fcnet_hiddens": [8]}
    first, last = model_for((2, 5, 6), **options), model_for((5, 6, 2), **options)
    last.load_state_dict(first.state_dict())
    obs = torch.as_tensor(np.random.default_rng(0).integers(0, 256, (4, 2, 5, 6), dtype=np.uint8))
    for one, other in zip(first(obs), last(obs.permute(0, 2, 3, 1)), strict=True):
        torch.testing.assert_close(one, other)


def test_policy_and_value_apart_have_a_trunk_each() -> None:
    model = model_for((3, 40, 40), vf_share_layers=False)
    model.value(torch.zeros(2, 3, 40, 40)).sum().backward()
    assert all(p.grad is None for p in model.policy_trunk.parameters())
    assert all(p.grad is not None for p in model.value_trunk.parameters())


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match=r"conv_filters.*10 x 10.*\(64, 4, 2\) finds 1 x 1"):
        model_for((3, 10, 10), conv_filters=NATURE_FILTERS)
    with pytest.raises(ConfigError, match=r"conv_filters.*shape \(4,\)"):
        model_for((4,), conv_filters=NATURE_FILTERS)
    with pytest.raises(ConfigError, match="conv_filters"):
        ModelConfig.parse({"conv_filters": [[32, 8]]})
