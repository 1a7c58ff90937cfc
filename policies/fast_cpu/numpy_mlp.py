"""An `MLPActorCritic` in NumPy, forwards and backwards, over views of the torch module's memory.

A call through torch costs microseconds of bookkeeping for each operation, forwards and again
backwards, which for a small network is several times its arithmetic. Weights and gradients are
views of the torch tensors, so there is nothing to keep in step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from polopt.common.threads import blas_threads

if TYPE_CHECKING:
    from polopt.policies.networks.models import MLPActorCritic

#: Parameters of a network that learns in NumPy; above, arithmetic is what costs, and torch may use
#: several threads for it.
MOST_LEARNED_IN_NUMPY = 100_000


class NumpyActorCritic:
    """Acts and computes gradients as an `MLPActorCritic` does.

    Args:
        model: on the CPU. Gradients are added to the `.grad` of its parameters, which have to be
            there (`FlatParameters` makes them).

    Attributes:
        learns: whether gradients are better computed here than by torch.
    """

    def __init__(self, model: MLPActorCritic) -> None:
        relu = any(isinstance(module, nn.ReLU) for module in model.policy_trunk)
        policy, value = _linears(model.policy_trunk), _linears(model.value_trunk)
        self._shared = _Layers(policy if model.shared else [], relu, last_too=True)
        own = slice(len(policy) if model.shared else 0, None)
        self._policy = _Layers([*policy[own], model.policy_head], relu)
        self._value = _Layers([*value[own], model.value_head], relu)
        self._log_std: np.ndarray | None = None
        if model.log_std is not None:
            self._log_std = model.log_std.detach().numpy()
            if model.log_std.grad is not None:
                self._log_std_grad = model.log_std.grad.numpy()
        # Outputs hang on it, or autograd would not ask for their gradients.
        self._anchor = model.policy_head.weight
        parameters = list(model.parameters())
        # Of BLAS's threads all but one wait for work so small, and spin meanwhile.
        self.learns = (
            sum(p.numel() for p in parameters) <= MOST_LEARNED_IN_NUMPY
            and all(p.grad is not None for p in parameters)
            and blas_threads() == 1
        )

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` of observations `[N, ...]`."""
        return self._with_log_std(self._policy(self._shared(_flat(obs))))

    def value(self, obs: np.ndarray) -> np.ndarray:
        """Values `[N]`."""
        return self._value(self._shared(_flat(obs)))[:, 0]

    def outputs(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Distribution parameters `[B, P]` and values `[B]`, which know their gradient."""
        apply: Any = _Outputs.apply
        params, values = apply(self._anchor, self, obs.detach().numpy())
        return params, values

    def forward(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any]:
        """As `outputs`, and what `backward` needs."""
        shared = self._shared.forward(_flat(obs))
        policy, value = self._policy.forward(shared[-1]), self._value.forward(shared[-1])
        return self._with_log_std(policy[-1]), value[-1][:, 0], (shared, policy, value)

    def backward(self, done: Any, params: np.ndarray, values: np.ndarray) -> None:
        """Adds the gradients of all weights to their `.grad`.

        Args:
            done: of `forward`.
            params: gradient of the loss by the distribution parameters, `[B, P]`.
            values: that by the values, `[B]`.
        """
        shared, policy, value = done
        if self._log_std is not None:
            size = len(self._log_std)
            self._log_std_grad += np.add.reduce(params[:, size:], axis=0)
            params = params[:, :size]
        needed = bool(self._shared.weights)
        by_policy = self._policy.backward(policy, params, needed)
        by_value = self._value.backward(value, values[:, None], needed)
        if needed:
            self._shared.backward(shared, by_policy + by_value, needed=False)

    def _with_log_std(self, head: np.ndarray) -> np.ndarray:
        if self._log_std is None:
            return head
        params = np.empty((len(head), 2 * head.shape[1]), dtype=np.float32)
        params[:, : head.shape[1]] = head
        params[:, head.shape[1] :] = self._log_std
        return params


class _Outputs(torch.autograd.Function):
    """Where autograd hands over to `NumpyActorCritic`, which needs no graph of its own."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, twin: NumpyActorCritic, obs: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        params, values, ctx.done = twin.forward(obs)
        ctx.twin = twin
        return torch.from_numpy(params), torch.from_numpy(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, params: Tensor, values: Tensor) -> tuple[None, None, None]:
        ctx.twin.backward(ctx.done, params.numpy(), values.numpy())
        return None, None, None


class _Layers:
    """Linear layers in a row, with an activation after each but the last.

    Args:
        linears: may be none, which changes nothing.
        relu: the activation; else tanh.
        last_too: an activation after the last one, too.
    """

    def __init__(self, linears: list[nn.Linear], relu: bool, last_too: bool = False) -> None:
        self.weights = [m.weight.detach().numpy() for m in linears]  # [out, in]
        self._biases = [m.bias.detach().numpy() for m in linears]
        self._grads = [
            (m.weight.grad.numpy(), m.bias.grad.numpy())
            for m in linears
            if m.weight.grad is not None and m.bias.grad is not None
        ]
        self._relu = relu
        self._activated = len(linears) if last_too else len(linears) - 1

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Outputs `[N, out]` of inputs `[N, in]`."""
        return self.forward(x)[-1]

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """The input, and what comes out of each layer."""
        done = [x]
        for i, (weight, bias) in enumerate(zip(self.weights, self._biases, strict=True)):
            x = x.dot(weight.T)  # less ado than @, which is a third of it at batch 8
            x += bias
            if i < self._activated:
                if self._relu:
                    np.maximum(x, 0.0, out=x)
                else:
                    np.tanh(x, out=x)
            done.append(x)
        return done

    def backward(self, done: list[np.ndarray], gradient: np.ndarray, needed: bool) -> np.ndarray:
        """Adds to the gradients of weights and biases.

        Args:
            done: of `forward`.
            gradient: of the loss by the outputs, `[B, out]`.
            needed: the gradient by the input is, too.

        Returns:
            it, or something else if it is not needed.
        """
        for i in reversed(range(len(self.weights))):
            if i < self._activated:
                out = done[i + 1]
                # By what comes out, tanh' is 1 - out^2 and relu' is 1 where out > 0.
                gradient = gradient * (out > 0.0 if self._relu else 1.0 - out * out)
            weight, bias = self._grads[i]
            weight += gradient.T.dot(done[i])
            bias += np.add.reduce(gradient, axis=0)
            if needed or i > 0:
                gradient = gradient.dot(self.weights[i])
        return gradient


def _linears(trunk: nn.Sequential) -> list[nn.Linear]:
    return [module for module in trunk if isinstance(module, nn.Linear)]


def _flat(obs: np.ndarray) -> np.ndarray:
    return obs.reshape(len(obs), -1).astype(np.float32, copy=False)
