"""Attaches NumPy to policies on the CPU: small networks act and learn in NumPy."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from polopt.common.add_ons import AddOn, RunListener
from polopt.common.overrides import Replacement


class OneTorchThread(RunListener):
    """Limits torch to one thread in the driver of a run that learns in NumPy.

    Only the update of the weights is then left to torch. After it, idle threads of torch would
    spin on the cores on which `side_by_side` computes the next gradient.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def begin(self) -> None:
        import torch

        from polopt.policies.fast_cpu.closed_forms import TITLE

        if self._trainer.optimizer.policy.learns_with == TITLE:
            torch.set_num_threads(1)


class FastCPU(AddOn):
    """Computes outputs and gradients in NumPy, unless the option `fast_cpu` is False."""

    def follow(self, trainer: Any) -> RunListener | None:
        return OneTorchThread(trainer)

    def faster(self, policy: Any, method: str) -> Replacement | None:
        if policy.device.type != "cpu":
            return None
        off = "" if policy.config.fast_cpu else "fast_cpu is False"
        if method == "backward":
            from polopt.policies.fast_cpu.closed_forms import gradient_of

            # These modules register closed forms.
            for module in ("numpy_crossq", "numpy_q", "numpy_sac", "numpy_td3"):
                import_module(f"polopt.policies.fast_cpu.{module}")
            return gradient_of(policy, off)
        if off:
            return Replacement(policy, type(policy), (), None, off)
        if method == "make_backend":
            from polopt.policies.fast_cpu.numpy_backend import numpy_backend

            return Replacement(policy, type(policy), (), numpy_backend(policy))
        from polopt.policies.fast_cpu.numpy_crossq import normed_actor
        from polopt.policies.fast_cpu.numpy_q import acting_network

        network = normed_actor(policy.model) or acting_network(policy.model)
        compute = None if network is None else network.action_params
        return Replacement(policy, type(policy), (), compute)


ADD_ON = FastCPU()
