"""Networks over images: selection, outputs and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.cnn import NATURE_FILTERS, NATURE_MIN_SIZE, CNNNetwork
from polopt.policies.networks.config import ModelConfig
from polopt.policies.networks.factory import make_network
from polopt.policies.networks.mlp import MLPNetwork

BYTES, FLOATS = np.dtype(np.uint8), np.dtype(np.float32)


def network_for(shape: tuple[int, ...], dtype: np.dtype[Any] = BYTES, **options: Any) -> Any:
    return make_network(shape, dtype, 6, False, ModelConfig(**options))


def test_uint8_images_use_nature_cnn() -> None:
    model = network_for((4, 84, 84))
    assert isinstance(model, CNNNetwork)
    convolutions = [m for m in model.policy_trunk if isinstance(m, nn.Conv2d)]
    assert [(c.out_channels, c.kernel_size[0], c.stride[0]) for c in convolutions] == [
        *NATURE_FILTERS
    ]
    linear = next(m for m in model.policy_trunk if isinstance(m, nn.Linear))
    assert (linear.in_features, linear.out_features) == (64 * 7 * 7, 512)
    assert model.value_trunk is model.policy_trunk, "shared, as in the paper"
    # The published number of parameters up to the 512 features.
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
def test_other_observations_use_mlp(
    shape: tuple[int, ...], dtype: np.dtype[Any], options: dict[str, Any]
) -> None:
    assert isinstance(network_for(shape, dtype, **options), MLPNetwork)


def test_smallest_image_is_accepted() -> None:
    model = network_for((3, NATURE_MIN_SIZE, NATURE_MIN_SIZE))
    assert isinstance(model, CNNNetwork)
    assert model(torch.zeros(2, 3, NATURE_MIN_SIZE, NATURE_MIN_SIZE))[0].shape == (2, 6)


def test_convolutions_equal_definition() -> None:
    """One layer, computed for each window; uint8 is divided by 255."""
    model = network_for((2, 5, 6), conv_filters=[[3, 3, 2]], post_fcnet_hiddens=[])
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


def test_channels_last_equals_channels_first() -> None:
    options = {"conv_filters": [[3, 3, 2]], "post_fcnet_hiddens": [8]}
    first, last = network_for((2, 5, 6), **options), network_for((5, 6, 2), **options)
    last.load_state_dict(first.state_dict())
    obs = torch.as_tensor(np.random.default_rng(0).integers(0, 256, (4, 2, 5, 6), dtype=np.uint8))
    for one, other in zip(first(obs), last(obs.permute(0, 2, 3, 1)), strict=True):
        torch.testing.assert_close(one, other)


def test_separate_policy_and_value_have_own_trunks() -> None:
    model = network_for((3, 40, 40), vf_share_layers=False)
    model.value(torch.zeros(2, 3, 40, 40)).sum().backward()
    assert all(p.grad is None for p in model.policy_trunk.parameters())
    assert all(p.grad is not None for p in model.value_trunk.parameters())


def test_unsuitable_filters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"conv_filters.*10 x 10.*\(64, 4, 2\) is 1 x 1"):
        network_for((3, 10, 10), conv_filters=NATURE_FILTERS)
    with pytest.raises(ConfigError, match=r"conv_filters.*shape \(4,\)"):
        network_for((4,), conv_filters=NATURE_FILTERS)
    with pytest.raises(ConfigError, match="conv_filters"):
        ModelConfig.parse({"conv_filters": [[32, 8]]})
