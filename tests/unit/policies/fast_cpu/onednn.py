"""Products in oneDNN on every machine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polopt.policies.fast_cpu import linear_layer


def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes large products run in oneDNN, as on a processor with AVX-512 for which OpenBLAS has no
    kernels. Returns a list to which each product adds torch's number of threads."""
    operation = linear_layer._operation()
    if operation is None:
        pytest.skip("this version of torch does not have the operation")
    calls: list[int] = []

    def noted(*args: Any) -> Any:
        calls.append(torch.get_num_threads())
        return operation(*args)

    monkeypatch.setattr(linear_layer, "_operation", lambda: noted)
    monkeypatch.setattr(linear_layer, "has_onednn", lambda: True)
    return calls
