"""Convolutions compute the same in NumPy and in torch, and policies with them learn the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from gymnasium import spaces
from onednn import onednn_calls
from replay_helpers import replay_policy, shaken, transitions
from torch import nn
from toy_envs import make_policy, random_batch

from polopt.policies.fast_cpu import linear_layer
from polopt.policies.fast_cpu.conv_layer import ConvLayer, ImageShape, are_supported

MINATAR = spaces.Box(0, 1, (10, 10, 4), np.bool_)
UNSUPPORTED = "torch (NumPy does not support the network)"
#: The shape of the inputs, and the number of filters, kernel, stride and padding.
LAYERS: dict[str, tuple[ImageShape, tuple[int, int, int, int]]] = {
    "MinAtar": (ImageShape(4, 10, 10, channels_last=True), (16, 3, 1, 0)),
    "odd sizes": (ImageShape(3, 7, 9), (5, 3, 2, 0)),
    "rows that no filter reaches": (ImageShape(2, 8, 11), (4, 3, 3, 0)),
    "padding": (ImageShape(3, 5, 6), (4, 3, 1, 1)),
    "padding and stride": (ImageShape(2, 7, 6, channels_last=True), (3, 4, 2, 2)),
    "large padding": (ImageShape(2, 3, 4), (3, 3, 2, 4)),
    "filters of one pixel": (ImageShape(4, 5, 3), (6, 1, 1, 0)),
    "stride larger than the filter": (ImageShape(2, 7, 7), (3, 2, 3, 0)),
    "one position": (ImageShape(3, 4, 4, channels_last=True), (5, 4, 1, 0)),
}
every_layer = pytest.mark.parametrize("key", LAYERS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield


def assert_equals_torch(key: str, count: int = 6, kind: type[ConvLayer] = ConvLayer) -> None:
    """Checks the outputs and all gradients of two batches. Gradients of weights are added to 1."""
    shape, filters = LAYERS[key]
    torch.manual_seed(0)
    conv = nn.Conv2d(shape.channels, *filters)
    for parameter in conv.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer = kind(conv, shape)
    right = nn.Conv2d(shape.channels, *filters)
    right.load_state_dict(conv.state_dict())
    for _ in range(2):
        channels, height, width, last = shape
        images = torch.randn(count, channels, height, width, requires_grad=True)
        expected = right(images).relu()
        gradient = torch.randn_like(expected)
        expected.backward(gradient)
        assert images.grad is not None

        def stored(given: torch.Tensor, last: bool = last) -> np.ndarray:
            moved = given.detach().permute(0, 2, 3, 1) if last else given.detach()
            return np.asfortranarray(moved.reshape(count, shape.size).numpy())

        inputs = stored(images)
        outputs = layer(inputs)
        assert outputs.shape == (count, layer.outputs.size)
        close(outputs, expected.detach().flatten(1).numpy())
        before = gradient.flatten(1).numpy() * (outputs > 0.0)
        close(layer.by_inputs(before), stored(images.grad))
        layer.learn(before, inputs)
    for mine, other in zip(conv.parameters(), right.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        close(mine.grad.numpy(), other.grad.numpy() + 1.0)


def close(one: np.ndarray, other: np.ndarray) -> None:
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(np.abs(other).max()))


@every_layer
def test_convolution_equals_torch(key: str) -> None:
    assert_equals_torch(key)


def test_convolution_in_onednn_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = onednn_calls(monkeypatch)
    monkeypatch.setattr(linear_layer, "_MIN_PRODUCT", 0)
    assert_equals_torch("MinAtar", 32)
    assert len(calls) == 6


class Flipped(ConvLayer):
    """Applies each filter upside down."""

    def __init__(self, conv: nn.Conv2d, shape: ImageShape) -> None:
        super().__init__(conv, shape)
        flipped = conv.weight.detach().flip(2).numpy()
        self.weight = flipped.reshape(self.weight.shape)


class Shifted(ConvLayer):
    """Pads at one side only."""

    def __init__(self, conv: nn.Conv2d, shape: ImageShape) -> None:
        super().__init__(conv, shape)
        self._inside = np.s_[:, : shape.height, : shape.width]


class OtherChannels(ConvLayer):
    """Reads the pixels in another order."""

    def __init__(self, conv: nn.Conv2d, shape: ImageShape) -> None:
        super().__init__(conv, shape._replace(channels_last=not shape.channels_last))


class Stale(ConvLayer):
    """Keeps the pixels of the first batch."""

    def _columns(self, x: np.ndarray) -> np.ndarray:
        if not hasattr(self, "_kept"):
            self._kept = super()._columns(x)
        return self._kept


@pytest.mark.parametrize("kind", [Flipped, Shifted, OtherChannels, Stale])
def test_wrong_convolutions_are_detected(kind: type[ConvLayer]) -> None:
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_torch("padding", kind=kind)


@every_layer
def test_convolution_accepts_no_rows(key: str) -> None:
    shape, filters = LAYERS[key]
    layer = ConvLayer(nn.Conv2d(shape.channels, *filters), shape)
    outputs = layer(np.zeros((0, shape.size), np.float32))
    assert outputs.shape == (0, layer.outputs.size)
    assert layer.by_inputs(outputs).shape == (0, shape.size)


def observations(space: Any, count: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if space.dtype.kind == "f":
        return rng.normal(size=(count, *space.shape)).astype(space.dtype)
    return rng.integers(space.low, space.high, (count, *space.shape), endpoint=True).astype(
        space.dtype
    )


IMAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "MinAtar": (MINATAR, {}),
    "padding, uint8": (
        spaces.Box(0, 255, (2, 9, 7), np.uint8),
        {"conv_filters": [[4, 3, 2, 1], [5, 2, 1]], "post_fcnet_hiddens": [8, 6]},
    ),
    "several bounds, two trunks": (
        spaces.Box(0, np.arange(75, dtype=np.uint8).reshape(5, 5, 3), (5, 5, 3), np.uint8),
        {"conv_filters": [[4, 2, 1]], "vf_share_layers": False},
    ),
    "floats, no hidden layer": (
        spaces.Box(-9.0, 9.0, (6, 5, 2)),
        {"conv_filters": [[3, 3, 1]], "post_fcnet_hiddens": []},
    ),
}
every_image = pytest.mark.parametrize("key", IMAGES)


@every_image
@pytest.mark.parametrize("dueling", [True, False])
def test_updates_of_dqn_equal_updates_in_torch(key: str, dueling: bool) -> None:
    space, model = IMAGES[key]
    options = {"dueling": dueling, "target_network_update_freq": 2, "model": model}
    fast, slow = (replay_policy("dqn", space, fast_cpu=fast, **options) for fast in (True, False))
    assert (fast.learns_with, slow.learns_with) == ("NumPy", "torch (fast_cpu is False)")
    for seed in range(3):
        rows = transitions(
            fast,
            32,
            seed,
            obs=observations(space, 32, seed),
            next_obs=observations(space, 32, seed + 9),
        )
        (stats, errors), (expected, others) = (p.learn_on_transitions(rows) for p in (fast, slow))
        np.testing.assert_allclose(errors, others, rtol=1e-3, atol=1e-4)
        assert stats == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert np.abs(slow.flat.get_grads()).max() > 1e-3
        close(fast.flat.get_grads(), slow.flat.get_grads())
        fast.set_weights(slow.get_weights())  # Adam enlarges rounding errors of small gradients
        np.testing.assert_allclose(
            fast.action_params(rows.obs), slow.action_params(rows.obs), rtol=1e-4, atol=1e-4
        )


@every_image
def test_gradients_of_ppo_equal_gradients_in_torch(key: str) -> None:
    space, model = IMAGES[key]
    env: Any = type("Env", (), {"observation_space": space, "action_space": spaces.Discrete(3)})()
    fast, slow = (
        shaken(make_policy("ppo", env, model=model, fast_cpu=fast)) for fast in (True, False)
    )
    assert (fast.learns_with, slow.learns_with) == ("NumPy", "torch (fast_cpu is False)")
    rows = slow.training_rows(
        slow.prepare_batch(random_batch(slow, 16, 4, np.random.default_rng(0)))
    )
    rows["obs"] = observations(space, len(rows["obs"]), 0)
    stats, expected = (policy.backward(rows) for policy in (fast, slow))
    assert stats == pytest.approx(expected, rel=1e-4, abs=1e-5)
    close(fast.flat.get_grads(), slow.flat.get_grads())


def test_boards_with_an_action_mask_learn_as_in_torch() -> None:
    board = spaces.Box(0, 1, (4, 5, 2), np.int8)
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "board": board})
    model = {"conv_filters": [[4, 3, 1]], "post_fcnet_hiddens": [8]}
    fast, slow = (replay_policy("dqn", space, fast_cpu=f, model=model) for f in (True, False))
    assert fast.learns_with == "NumPy"
    rows = transitions(fast, 32)
    masks = np.random.default_rng(1).integers(0, 2, (32, 3))
    masks[np.arange(32), rows.actions] = 1
    rows.obs[:, :3] = rows.next_obs[:, :3] = masks
    for policy in (fast, slow):
        policy.backward(rows)
    close(fast.flat.get_grads(), slow.flat.get_grads())


@pytest.mark.parametrize(("size", "described"), [(15, "NumPy"), (16, UNSUPPORTED)])
def test_large_images_learn_in_torch(size: int, described: str) -> None:
    """The limit lies between 13 * 13 * 90 and 14 * 14 * 90 numbers under filters."""
    policy = replay_policy("dqn", spaces.Box(0, 255, (size, size, 10), np.uint8))
    assert policy.learns_with == described


@pytest.mark.parametrize(
    "options",
    [
        {"dilation": 2},
        {"groups": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same"},
        {"stride": (1, 2)},
        {"kernel_size": (3, 2)},
        {"bias": False},
    ],
)
def test_other_convolutions_are_not_supported(options: dict[str, Any]) -> None:
    shape = ImageShape(4, 9, 9)
    usual = {"kernel_size": 3, "stride": 2, "padding": 1}
    assert are_supported([nn.Conv2d(4, 16, **usual)], shape)
    conv = nn.Conv2d(4, 16, **{**usual, "stride": 1, **options})
    assert not are_supported([conv], shape)
