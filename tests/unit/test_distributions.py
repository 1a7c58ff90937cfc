"""Action distributions against `torch.distributions`, and environment actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch import distributions as td

from polopt.common.config import ConfigError
from polopt.policies.distributions.base import ActionDistribution
from polopt.policies.distributions.categorical import Categorical
from polopt.policies.distributions.diag_gaussian import DiagGaussian
from polopt.policies.distributions.factory import make_distribution
from polopt.policies.distributions.multi_categorical import MultiCategorical
from polopt.policies.distributions.squashed_gaussian import SquashedGaussian

ROWS = 50
BOX = spaces.Box(np.array([-2.0, 0.0, 1.0], np.float32), np.array([2.0, 0.5, 4.0], np.float32))
SPACES = {
    "discrete": (spaces.Discrete(5), False),
    "offset": (spaces.Discrete(3, start=-1), False),
    "multi": (spaces.MultiDiscrete([2, 3, 4]), False),
    "grid": (spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, -1], [0, 5]]), False),
    "clipped": (BOX, False),
    "squashed": (BOX, True),
    "matrix": (spaces.Box(-1.0, 2.0, (2, 3), np.float64), False),
    "squashed matrix": (spaces.Box(-1.0, 2.0, (2, 3), np.float64), True),
}
every_space = pytest.mark.parametrize("key", SPACES)


def dist_of(key: str) -> ActionDistribution:
    return make_distribution(*SPACES[key])


def params_for(dist: ActionDistribution, seed: int, scale: float = 0.8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (scale * rng.normal(size=(ROWS, dist.num_params))).astype(np.float32)


def reference(key: str, params: Tensor) -> td.Distribution:
    """Distribution of stored actions, which for a squashed Gaussian are before squashing."""
    space, _ = SPACES[key]
    if isinstance(space, spaces.Discrete):
        return td.Categorical(logits=params)
    if isinstance(space, spaces.Box):
        mean, log_std = params.chunk(2, dim=-1)
        return td.Independent(td.Normal(mean, log_std.exp()), 1)
    raise AssertionError(key)


def parts(key: str, params: Tensor) -> list[td.Categorical]:
    """The components of a MultiDiscrete space, for which torch has no distribution."""
    sizes = SPACES[key][0].nvec.reshape(-1).tolist()
    return [td.Categorical(logits=logits) for logits in params.split(sizes, dim=-1)]


@pytest.mark.parametrize("key", ["discrete", "offset", "clipped", "matrix"])
def test_equals_torch_distributions(key: str) -> None:
    dist = dist_of(key)
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    noise = dist.draw_noise(np.random.default_rng(2), ROWS)
    actions = torch.from_numpy(dist.sample(old.numpy(), noise))
    expected = reference(key, new)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dist.log_prob(new, actions), expected.log_prob(actions), **close)
    torch.testing.assert_close(dist.entropy(new), expected.entropy(), **close)
    kl = td.kl_divergence(reference(key, old), expected)
    torch.testing.assert_close(dist.kl(old, new), kl, **close)


@pytest.mark.parametrize("key", ["multi", "grid"])
def test_multi_discrete_is_sum_of_components(key: str) -> None:
    dist = dist_of(key)
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    noise = dist.draw_noise(np.random.default_rng(2), ROWS)
    actions = torch.from_numpy(dist.sample(old.numpy(), noise))
    log_prob = sum(p.log_prob(actions[:, i]) for i, p in enumerate(parts(key, new)))
    entropy = sum(p.entropy() for p in parts(key, new))
    kl = sum(td.kl_divergence(p, q) for p, q in zip(parts(key, old), parts(key, new), strict=True))
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(dist.log_prob(new, actions), log_prob, **close)
    torch.testing.assert_close(dist.entropy(new), entropy, **close)
    torch.testing.assert_close(dist.kl(old, new), kl, **close)


def test_squashed_density_equals_transformed_density() -> None:
    dist = dist_of("squashed")
    old, new = (torch.from_numpy(params_for(dist, seed)) for seed in (0, 1))
    actions = dist.sample(old.numpy(), dist.draw_noise(np.random.default_rng(2), ROWS))
    low, high = torch.from_numpy(BOX.low).double(), torch.from_numpy(BOX.high).double()
    mean, log_std = new.double().chunk(2, dim=-1)
    squashed = td.TransformedDistribution(
        td.Independent(td.Normal(mean, log_std.exp()), 1),
        [td.TanhTransform(cache_size=1), td.AffineTransform((low + high) / 2, (high - low) / 2, 1)],
    )
    in_box = squashed.transforms[1](squashed.transforms[0](torch.from_numpy(actions).double()))
    log_prob = dist.log_prob(new, torch.from_numpy(actions))
    torch.testing.assert_close(log_prob.double(), squashed.log_prob(in_box), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dist.to_env(actions), in_box.numpy(), rtol=1e-4, atol=1e-5)
    # A bijection does not change KL.
    kl = td.kl_divergence(reference("squashed", old), reference("squashed", new))
    torch.testing.assert_close(dist.kl(old, new), kl, rtol=1e-4, atol=1e-5)


def test_squashed_density_is_finite_for_large_actions() -> None:
    dist = dist_of("squashed")
    params = torch.zeros(2, dist.num_params)
    actions = torch.tensor([[40.0, -40.0, 0.0], [-90.0, 90.0, 90.0]])
    assert dist.log_prob(params, actions).isfinite().all()


@pytest.mark.parametrize("key", ["discrete", "multi"])
def test_sample_frequencies_equal_probabilities(key: str) -> None:
    dist, draws = dist_of(key), 40_000
    params = params_for(dist, 3)[:1]
    noise = dist.draw_noise(np.random.default_rng(4), draws)
    actions = dist.sample(np.repeat(params, draws, axis=0), noise).reshape(draws, -1)
    components = [reference(key, torch.from_numpy(params))] if key == "discrete" else None
    for i, component in enumerate(components or parts(key, torch.from_numpy(params))):
        expected = component.probs[0].numpy()
        counts = np.bincount(actions[:, i], minlength=len(expected))
        # Five standard deviations of a frequency.
        np.testing.assert_allclose(counts / draws, expected, atol=5 * 0.5 / draws**0.5)


def test_gaussian_moments() -> None:
    dist, draws = dist_of("clipped"), 40_000
    params = params_for(dist, 3)[:1]
    noise = dist.draw_noise(np.random.default_rng(4), draws)
    actions = dist.sample(np.repeat(params, draws, axis=0), noise)
    mean, std = params[0, :3], np.exp(params[0, 3:])
    assert (np.abs(actions.mean(0) - mean) < 5 * std / draws**0.5).all()
    np.testing.assert_allclose(actions.std(0), std, rtol=0.02)
    np.testing.assert_allclose(np.corrcoef(actions.T), np.eye(3), atol=0.03)


@every_space
def test_sample_without_noise_is_the_mode(key: str) -> None:
    dist = dist_of(key)
    params = params_for(dist, 5)
    mode = dist.sample(params, None)
    assert mode.shape == (ROWS, *dist.action_shape)
    assert mode.dtype == dist.action_dtype
    if isinstance(dist, DiagGaussian):
        np.testing.assert_array_equal(mode, params[:, : dist.num_params // 2])
        assert not np.shares_memory(mode, params)
        return
    noise = dist.draw_noise(np.random.default_rng(6), ROWS)
    tensors = [torch.from_numpy(a) for a in (params, mode, dist.sample(params, noise))]
    best = dist.log_prob(tensors[0], tensors[1])
    assert (best >= dist.log_prob(tensors[0], tensors[2])).all()
    assert (best > dist.log_prob(tensors[0], tensors[2])).any()


@every_space
def test_environment_gets_actions_of_its_space(key: str) -> None:
    space, _ = SPACES[key]
    dist = dist_of(key)
    params = params_for(dist, 7, scale=3.0)  # far over the bounds
    noise = dist.draw_noise(np.random.default_rng(8), ROWS)
    actions = dist.sample(params, noise)
    assert actions.shape == (ROWS, *dist.action_shape)
    assert actions.dtype == dist.action_dtype
    given = dist.to_env(actions)
    assert given.shape == (ROWS, *space.shape)
    for action in given:
        assert space.contains(action if space.shape else np.int64(action))


def test_offsets_are_added() -> None:
    assert dist_of("offset").to_env(np.array([0, 2])).tolist() == [-1, 1]
    grid = dist_of("grid").to_env(np.array([[0, 0, 0, 0], [1, 2, 3, 1]]))
    assert grid.tolist() == [[[1, -1], [0, 5]], [[2, 1], [3, 6]]]


def test_clipped_or_squashed_to_the_box() -> None:
    actions = np.array([[-9.0, 0.25, 2.0], [9.0, -9.0, 9.0]], np.float32)
    clipped = dist_of("clipped").to_env(actions)
    np.testing.assert_allclose(clipped, [[-2.0, 0.25, 2.0], [2.0, 0.0, 4.0]])
    assert clipped.dtype == np.float32
    middle = dist_of("squashed").to_env(np.zeros((1, 3), np.float32))
    np.testing.assert_allclose(middle, [[0.0, 0.25, 2.5]])
    assert dist_of("matrix").to_env(np.zeros((1, 6), np.float32)).dtype == np.float64


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_bounds_hold_in_the_precision_of_the_space(squash: bool, dtype: type) -> None:
    # 0.1 rounds up in float32: an action clipped to that is outside a box of float64.
    space = spaces.Box(-0.1, 0.1, (2,), dtype)
    given = make_distribution(space, squash).to_env(np.array([[50.0, -50.0]], np.float32))
    assert space.contains(given[0])
    np.testing.assert_array_equal(given[0], [space.high[0], space.low[1]])


def test_half_open_box_is_clipped_on_one_side() -> None:
    dist = make_distribution(spaces.Box(0.0, np.inf, (1,), np.float32))
    assert dist.to_env(np.array([[-3.0], [3e8]], np.float32)).tolist() == [[0.0], [3e8]]


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("discrete", Categorical),
        ("multi", MultiCategorical),
        ("clipped", DiagGaussian),
        ("squashed", SquashedGaussian),
    ],
)
def test_space_chooses_the_family(key: str, family: type) -> None:
    assert type(dist_of(key)) is family


@pytest.mark.parametrize(
    "space",
    [
        spaces.MultiBinary(3),
        spaces.Text(5),
        spaces.Box(0, 255, (2,), np.uint8),
        spaces.Tuple([spaces.Discrete(2)]),
        spaces.Dict(a=spaces.Discrete(2)),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unsupported_space_error_names_the_space(space: spaces.Space[Any]) -> None:
    with pytest.raises(ConfigError) as error:
        make_distribution(space)
    assert str(space) in str(error.value)
    assert "Discrete, MultiDiscrete, Box" in str(error.value)


@pytest.mark.parametrize("bounds", [(-np.inf, np.inf), (0.0, np.inf), (-np.inf, 1.0)])
def test_unbounded_box_cannot_be_squashed(bounds: tuple[float, float]) -> None:
    space = spaces.Box(*bounds, (2,), np.float32)
    with pytest.raises(ConfigError, match="'squash_actions'") as error:
        make_distribution(space, squash_actions=True)
    assert str(space) in str(error.value)
    make_distribution(space, squash_actions=False)
