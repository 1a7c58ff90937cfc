"""Linear layers compute the same in oneDNN and in NumPy, and the choice depends on the machine and
the shapes only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import threadpoolctl
import torch
from onednn import onednn_calls
from replay_helpers import replay_policy, transitions
from torch import nn

from polopt.policies.fast_cpu import linear_layer
from polopt.policies.fast_cpu.linear_layer import LinearLayer, padded

KERNELS = [{"internal_api": "openblas", "filepath": "numpy.libs/x.so", "architecture": "Haswell"}]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    with threadpoolctl.threadpool_limits(1, user_api="blas"):
        yield
    torch.set_num_threads(before)


def passes(rows: int, inputs: int, outputs: int, relu: bool) -> list[np.ndarray]:
    """The outputs of a layer, the gradient of its inputs, and the gradients of its weights and
    biases, which are added to ones."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    for parameter in linear.parameters():
        parameter.grad = torch.ones_like(parameter)
    layer = LinearLayer(linear, relu)
    x, gradient = torch.randn(rows, inputs).numpy(), torch.randn(rows, outputs).numpy()
    found = [layer(x), layer.by_inputs(gradient)]
    layer.learn(gradient, x)
    return [*found, *(parameter.grad.numpy() for parameter in linear.parameters())]  # type: ignore[union-attr]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(
    ("shape", "products"),
    [
        ((256, 160, 256), 3),
        ((64, 256, 256), 1),  # only the product with the bias
        ((256, 17, 256), 1),
        ((256, 15, 512), 0),
        ((255, 160, 256), 0),
        ((8, 256, 256), 0),
    ],
)
def test_layers_in_onednn_equal_layers_in_numpy(
    shape: tuple[int, int, int], products: int, relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_layer, "has_onednn", lambda: False)
        expected = passes(*shape, relu)
    calls = onednn_calls(monkeypatch)
    found = passes(*shape, relu)
    assert calls == [1] * products  # one thread, because the last bits may differ with two
    assert torch.get_num_threads() == 2
    assert (found[0].min() == 0.0) == relu
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("error")
def test_inputs_may_be_views_and_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = onednn_calls(monkeypatch)
    linear = nn.Linear(160, 256)
    for parameter in linear.parameters():
        parameter.grad = torch.zeros_like(parameter)
    layer = LinearLayer(linear, relu=False)
    wide = np.random.default_rng(0).standard_normal((512, 200), dtype=np.float32)
    view = wide[::2, 7:167]
    view.flags.writeable = False
    gradient = np.ones((256, 256), np.float32)
    gradient.flags.writeable = False
    expected = view.astype(np.float64) @ layer.weight.T + layer.bias
    np.testing.assert_allclose(layer(view), expected, atol=1e-4)
    np.testing.assert_allclose(
        layer.by_inputs(gradient), np.tile(layer.weight.sum(axis=0), (256, 1)), atol=1e-4
    )
    layer.learn(gradient, view)
    np.testing.assert_allclose(layer.grads[0], np.tile(view.sum(axis=0), (256, 1)), atol=1e-3)
    assert len(calls) == 3


def test_sac_learns_the_same_in_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critics compute the gradients for the actor in padded batches."""
    weights, products = [], []
    for uses in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            calls = onednn_calls(patch)
            patch.setattr(linear_layer, "has_onednn", lambda uses=uses: uses)
            policy = replay_policy("sac", model={"fcnet_hiddens": [192, 192]})
            policy.learn_on_batch(transitions(policy, 512))
            weights.append(policy.flat.get_grads())
            products.append(len(calls))
    assert products[0] == 0
    assert products[1] > 12  # 12 with the whole batch
    np.testing.assert_allclose(*weights, rtol=1e-3, atol=1e-5)


def test_batches_of_any_size_need_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn_calls(monkeypatch)
    assert [padded(count) for count in (0, 1, 31, 32, 33)] == [0, 32, 32, 32, 64]
    monkeypatch.setattr(linear_layer, "has_onednn", lambda: False)
    assert padded(33) == 33


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_torch_has_the_operation() -> None:
    """Without the operation, polopt works, but is slower on some machines."""
    assert linear_layer._operation() is not None


@pytest.mark.parametrize(
    ("capability", "kernels", "signature", "chosen"),
    [
        ("AVX512", "Haswell", None, True),
        ("AVX512", "Zen", None, True),
        ("AVX2", "Zen", None, False),  # also with ATEN_CPU_CAPABILITY=avx2
        ("AVX512", "SkylakeX", None, False),
        ("AVX512", "Haswell", "mkldnn::_linear_pointwise(Tensor X) -> Tensor Y", False),
    ],
)
def test_choice_depends_on_the_machine_only(
    capability: str,
    kernels: str,
    signature: str | None,
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if linear_layer._operation() is None:
        pytest.skip("this version of torch does not have the operation")
    pools: list[Any] = [{**KERNELS[0], "architecture": kernels}]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(threadpoolctl, "threadpool_info", lambda: pools)
    if signature is not None:
        monkeypatch.setattr(linear_layer, "_SIGNATURE", signature)
    for function in (linear_layer._operation, linear_layer.has_onednn):
        monkeypatch.setattr(linear_layer, function.__name__, function.__wrapped__)
    assert linear_layer.has_onednn() == chosen


def test_without_openblas_numpy_computes_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(threadpoolctl, "threadpool_info", list)
    assert not linear_layer.has_onednn.__wrapped__()
