"""Attaches CUDA graphs to policies that learn from replayed rows on a GPU."""

from __future__ import annotations

from typing import Any

from polopt.common.add_ons import AddOn
from polopt.common.overrides import Replacement


class FastGPU(AddOn):
    """Records gradients as CUDA graphs, unless the option `fast_gpu` is False."""

    def faster(self, policy: Any, method: str) -> Replacement | None:
        if policy.device.type != "cuda" or method != "backward":
            return None
        from polopt.policies.fast_gpu.cuda_graphs import CudaGraphs

        return CudaGraphs(policy).replacement


ADD_ON = FastGPU()
