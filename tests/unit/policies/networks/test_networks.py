"""Networks over images: selection, outputs and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from torch import nn

from polopt.common.config import ConfigError
from polopt.policies.networks.actor_critics import (
    NATURE_FILTERS,
    NATURE_MIN_SIZE,
    CNNNetwork,
    CombinedNetwork,
    MLPNetwork,
)
from polopt.policies.networks.make_network import make_network
from polopt.policies.networks.model_config import ModelConfig

BYTES, FLOATS, BOOLEANS = np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.bool_)


def network_of(space: Space[Any], **options: Any) -> Any:
    config = ModelConfig(**options)
    return make_network(space, spaces.Discrete(6), None, 6, False, config)


def network_for(shape: tuple[int, ...], dtype: np.dtype[Any] = BYTES, **options: Any) -> Any:
    high = 255 if dtype == BYTES else 1
    return network_of(spaces.Box(0, high, shape, dtype.type), **options)


def layers_of(trunk: Any) -> list[str]:
    return [
        f"{m.out_channels} of {m.kernel_size[0]} by {m.stride[0]}"
        if isinstance(m, nn.Conv2d)
        else str(m.out_features)
        for m in trunk.modules()
        if isinstance(m, nn.Conv2d | nn.Linear)
    ]


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
    # The published number of parameters of all layers up to the 512 features.
    assert sum(p.numel() for p in model.policy_trunk.parameters()) == 1_684_128


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((4, 84, 84), FLOATS, {}),
        ((4, 84, 84), BYTES, {"conv_filters": []}),
        ((2, 2, 3), BYTES, {}),
        ((4, 4, 2), FLOATS, {}),
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
    """The test computes one layer window by window. The network divides uint8 by 255."""
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


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((10, 10, 4), BOOLEANS),  # MinAtar
        ((10, 10, 10), BOOLEANS),  # MinAtar's Seaquest: channels last
        ((3, 35, 35), BYTES),
        ((3, 3, 1), BYTES),
    ],
)
def test_small_images_use_the_network_of_minatar(
    shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    model = network_for(shape, dtype)
    assert isinstance(model, CNNNetwork)
    assert layers_of(model.policy_trunk) == ["16 of 3 by 1", "128"]
    assert model.shared
    assert model(torch.zeros(2, *shape, dtype=torch.bool))[0].shape == (2, 6)


def test_large_images_of_booleans_use_nature_cnn() -> None:
    model = network_for((40, 40, 2), BOOLEANS)
    assert layers_of(model.policy_trunk)[-2:] == ["64 of 3 by 1", "512"]


def test_cube_of_booleans_has_its_channels_last() -> None:
    model = network_for((10, 10, 10), BOOLEANS)
    image = torch.zeros(1, 10, 10, 10, dtype=torch.bool)
    image[0, 1, 2, 3] = True
    assert model.prepare(image)[0, 3, 1, 2] == 1.0
    assert model.prepare(image).sum() == 1.0


def test_width_after_given_filters_is_512() -> None:
    model = network_for((10, 10, 4), BOOLEANS, conv_filters=[[8, 3, 1]])
    assert layers_of(model.policy_trunk) == ["8 of 3 by 1", "512"]
    given = network_for((10, 10, 4), BOOLEANS, post_fcnet_hiddens=[7])
    assert layers_of(given.policy_trunk) == ["16 of 3 by 1", "7"]


def test_padding_keeps_the_size_of_an_image() -> None:
    padded = [[4, 3, 1, 1], [5, 5, 1, 2]]
    model = network_for((3, 10, 9), conv_filters=padded, post_fcnet_hiddens=[])
    assert model.policy_head.in_features == 5 * 10 * 9
    with pytest.raises(ConfigError, match=r"\(4, 7, 1, 1\) is 4 x 5"):
        network_for((3, 4, 5), conv_filters=[[4, 7, 1, 1]])


@pytest.mark.parametrize("options", [{}, {"conv_filters": []}])
def test_bytes_of_images_are_scaled(options: dict[str, Any]) -> None:
    """An image is scaled alone and in a Dict, with and without convolutions."""
    image = spaces.Box(0, 255, (4, 5, 3), np.uint8)
    pair = spaces.Dict(image=image, speed=spaces.Box(-1.0, 1.0, (2,)))
    alone, both = network_of(image, **options), network_of(pair, **options)
    obs = torch.full((2, 4, 5, 3), 255, dtype=torch.uint8)
    assert torch.equal(alone.prepare(obs), torch.ones_like(alone.prepare(obs)))
    flat = torch.cat([obs.flatten(1).float(), torch.full((2, 2), 7.0)], dim=1)
    *images, rest = both.prepare(flat)
    assert len(images) == (0 if options else 1)
    assert all(torch.equal(image, torch.ones(2, 3, 4, 5)) for image in images)
    assert rest[:, -2:].eq(7.0).all()
    assert rest[:, :-2].eq(1.0).all()


@pytest.mark.parametrize("options", [{}, {"conv_filters": []}])
def test_bytes_are_divided_by_the_upper_bound(options: dict[str, Any]) -> None:
    """The bound may be the same for all elements, or different for each element. An element with
    the bound 0 is always 0."""
    shape = (4, 5, 3)
    board = torch.randint(0, 2, (2, *shape), dtype=torch.uint8)
    bounds = np.random.default_rng(0).integers(0, 9, shape).astype(np.uint8)
    assert (bounds == 0).any()
    for high, obs, scaled in (
        (np.ones(shape, np.uint8), board, board.float()),
        (np.full(shape, 10, np.uint8), board * 10, board.float()),
        (np.zeros(shape, np.uint8), board * 0, board * 0.0),
        (bounds, torch.from_numpy(np.stack([bounds, bounds])), torch.from_numpy(bounds > 0)),
    ):
        image = spaces.Box(np.zeros(shape, np.uint8), high, shape, np.uint8)
        expected = scaled.expand(2, *shape).float()
        alone = network_of(image, **options)
        pair = network_of(spaces.Dict(image=image, n=spaces.Discrete(2)), **options)
        flat = torch.cat([obs.flatten(1).float(), torch.zeros(2, 2)], dim=1)
        inputs = [alone.prepare(obs), pair.prepare(flat)[0]]
        assert type(alone) is (MLPNetwork if options else CNNNetwork)
        for found in inputs:
            if options:
                torch.testing.assert_close(found[:, :60], expected.flatten(1))
            else:
                torch.testing.assert_close(found, expected.permute(0, 3, 1, 2))


def test_each_image_of_a_dict_has_its_own_convolutions() -> None:
    """The features are the features of a separate network for each image, and the vectors."""
    space = spaces.Dict(
        [
            ("large", spaces.Box(0, 255, (3, 40, 36), np.uint8)),
            ("kind", spaces.Discrete(3)),
            ("small", spaces.Box(0, 1, (10, 10, 4), np.bool_)),
            ("speed", spaces.Tuple([spaces.Box(-1.0, 1.0, (2,)), spaces.MultiBinary(2)])),
        ]
    )
    model = network_of(space, fcnet_hiddens=[9], fcnet_activation="silu")
    assert isinstance(model, CombinedNetwork)
    assert model.shared
    large, small = model.policy_trunk.images
    assert layers_of(large)[-1] == "512"
    assert layers_of(small) == ["16 of 3 by 1", "128"]
    rng = np.random.default_rng(0)
    bytes_ = torch.as_tensor(rng.integers(0, 256, (2, 3, 40, 36)))
    bits = torch.as_tensor(rng.integers(0, 2, (2, 10, 10, 4)))
    vectors = torch.as_tensor(rng.normal(size=(2, 7)), dtype=torch.float32)
    parts = [bytes_.flatten(1), vectors[:, :3], bits.flatten(1), vectors[:, 3:]]
    params, values = model(torch.cat([part.float() for part in parts], dim=1))
    features = [
        large(bytes_.float() / 255.0),
        small(bits.float().permute(0, 3, 1, 2)),
        vectors,
    ]
    joint = model.policy_trunk.joint
    hidden = nn.functional.silu(joint[0](torch.cat(features, dim=1)))
    torch.testing.assert_close(params, model.policy_head(hidden))
    torch.testing.assert_close(values, model.value_head(hidden)[:, 0])


def test_images_of_a_dict_have_memory() -> None:
    space = spaces.Dict(
        image=spaces.Box(0, 1, (5, 5, 2), np.bool_), speed=spaces.Box(-1.0, 1.0, (2,))
    )
    model = network_of(space, use_lstm=True, lstm_cell_size=4)
    obs = torch.rand(3, 6, 52).round()
    params, values, states = model.unroll(obs, torch.zeros(6, model.state_size))
    assert (params.shape, values.shape) == ((3, 6, 6), (3, 6))
    assert states[2].shape == (6, model.state_size)


@pytest.mark.parametrize("name", ["tanh", "relu", "elu", "gelu", "leaky_relu", "silu"])
def test_activation_follows_each_hidden_layer(name: str) -> None:
    model = network_for((4,), FLOATS, fcnet_activation=name, fcnet_hiddens=[3])
    obs = torch.randn(5, 4)
    function = getattr(torch, name, None) or getattr(nn.functional, name)
    expected = model.policy_head(function(model.policy_trunk[0](obs)))
    torch.testing.assert_close(model(obs)[0], expected)
