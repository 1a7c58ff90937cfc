"""`crossq`: the closed form of the gradients of CrossQ's losses, in NumPy.

In training mode, a linear layer after batch renormalisation computes

    (centred * scale + offset) W^T + b = centred (W * scale)^T + (W offset + b)

where `centred` are the inputs minus their means. So the layer scales its weights, which are fewer
numbers than the inputs of a large batch. The sums over the batch that the backward pass needs
follow from the product of the gradient and `centred`, which the gradient of the weights needs
anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from polopt.common.overrides import runs_as_written
from polopt.policies.fast_cpu.closed_forms import OF_REPLAY_POLICIES, closed_form_of
from polopt.policies.fast_cpu.linear_layer import LinearLayer, affine, column_sums, product
from polopt.policies.fast_cpu.numpy_backend import UNSUPPORTED, why_not_small
from polopt.policies.fast_cpu.numpy_network import before_activation, flat_rows
from polopt.policies.fast_cpu.numpy_q import discounted, value_stats_of
from polopt.policies.fast_cpu.numpy_sac import (
    Sample,
    alpha_of,
    by_params_of,
    drawn_noise,
    learn_temperature,
    sampled,
    set_by_actions,
)
from polopt.policies.fast_cpu.side_by_side import side_by_side
from polopt.policies.networks.actor_critics import MLPNetwork
from polopt.policies.networks.batch_renorm import BatchRenorm

#: The modules of the networks that `NormedLayers` supports.
_MODULES = (MLPNetwork, nn.Sequential, nn.Linear, nn.Tanh, nn.ReLU, BatchRenorm)


class _Trained(NamedTuple):
    """What a layer computed in training mode, for its backward pass."""

    centred: np.ndarray  # [B, in] inputs minus their means
    deviation: np.ndarray  # [in] standard deviations of the inputs
    ratio: np.ndarray  # [in] correction of batch renormalisation
    shift: np.ndarray  # [in] the same
    scale: np.ndarray  # [in]
    offset: np.ndarray  # [in]
    scaled: np.ndarray  # [out, in] weights times `scale`


class NormedLayer:
    """A `BatchRenorm` and the `nn.Linear` after it. Both share their memory with this object.

    Args:
        norm: the normalisation.
        linear: the linear layer.
        relu: whether ReLU follows.
    """

    def __init__(self, norm: BatchRenorm, linear: nn.Linear, relu: bool) -> None:
        self._norm = norm
        self._mean, self._variance = norm.mean.numpy(), norm.variance.numpy()
        self._num_batches = norm.num_batches.numpy()
        self._weight, self._bias = norm.weight.detach().numpy(), norm.bias.detach().numpy()
        if norm.weight.grad is not None and norm.bias.grad is not None:
            self._grads = norm.weight.grad.numpy(), norm.bias.grad.numpy()
        self.linear = LinearLayer(linear, relu)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Outputs `[B, out]` of inputs `[B, in]` in evaluation mode."""
        x = x - self._mean
        x *= self._scale_of_running()
        x += self._bias
        return self.linear(x)

    def by_inputs(self, gradient: np.ndarray) -> np.ndarray:
        """The gradient with respect to the inputs in evaluation mode, `[B, in]`.

        Args:
            gradient: gradient of the loss with respect to the outputs of the layer before the
                activation, `[B, out]`.
        """
        found = self.linear.by_inputs(gradient)
        found *= self._scale_of_running()
        return found

    def train(self, x: np.ndarray) -> tuple[np.ndarray, _Trained]:
        """Outputs `[B, out]` of inputs `[B, in]` in training mode. Moves the running statistics."""
        norm, count = self._norm, np.float32(len(x))
        mean = column_sums(x) / count
        centred = x - mean
        variance = np.einsum("bi,bi->i", centred, centred) / count
        deviation = np.sqrt(variance + np.float32(norm.epsilon))
        ratio, shift = np.ones_like(mean), np.zeros_like(mean)
        if self._num_batches >= norm.warm_up:
            running = np.sqrt(self._variance + np.float32(norm.epsilon))
            ratio = np.clip(deviation / running, 1.0 / norm.r_max, norm.r_max)
            shift = np.clip((mean - self._mean) / running, -norm.d_max, norm.d_max)
        self._mean += norm.momentum * (mean - self._mean)
        self._variance += norm.momentum * (variance - self._variance)
        self._num_batches += 1.0
        scale = self._weight * ratio / deviation
        offset = shift * self._weight + self._bias
        linear = self.linear
        scaled = linear.weight * scale
        out = affine(centred, scaled, linear.weight.dot(offset) + linear.bias, linear.zeros)
        return out, _Trained(centred, deviation, ratio, shift, scale, offset, scaled)

    def backward(self, done: _Trained, gradient: np.ndarray, needed: bool) -> np.ndarray:
        """Adds the gradients of all parameters, in training mode.

        Args:
            done: from `train`.
            gradient: see `by_inputs`.
            needed: whether to compute the gradient with respect to the inputs.

        Returns:
            the gradient with respect to the inputs, `[B, in]`. The result is undefined if `needed`
            is False.
        """
        count, weight = len(gradient), self.linear.weight
        # Sums over the batch of the gradient with respect to the normalised inputs, and below of
        # its product with the centred inputs.
        sums = column_sums(gradient)
        by_offset = sums.dot(weight)
        pieces = [partial(product, count, gradient.T, done.centred)]
        if needed:
            shift = -done.scale * by_offset / count
            pieces.append(partial(affine, gradient, done.scaled.T, shift, None))
        by_scaled, *found = side_by_side(count * weight.size, *pieces)
        by_scale = np.einsum("oi,oi->i", weight, by_scaled)
        by_weight, by_bias = self._grads
        by_weight += done.ratio / done.deviation * by_scale + done.shift * by_offset
        by_bias += by_offset
        by_weight, by_bias = self.linear.grads
        _add_product(by_weight, by_scaled, done.scale)
        _add_product(by_weight, sums[:, None], done.offset)
        by_bias += sums
        if not needed:
            return gradient
        by_inputs: np.ndarray = found[0]
        slope = -done.scale * by_scale / (count * done.deviation**2)
        _add_product(by_inputs, done.centred, slope)
        return by_inputs

    def _scale_of_running(self) -> np.ndarray:
        scale: np.ndarray = self._weight / np.sqrt(self._variance + np.float32(self._norm.epsilon))
        return scale


def _add_product(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> None:
    """Adds `a * b`, with broadcasting, to `total`. torch needs one pass over memory, and takes half
    as long as NumPy for 256x256 numbers."""
    torch.from_numpy(total).addcmul_(torch.from_numpy(a), torch.from_numpy(b))


class NormedLayers:
    """The layers of a network with batch renormalisation, with an activation after each linear
    layer except the last one.

    Args:
        network: the network, from `add_batch_renorm`.
        head: the last linear layer.
    """

    def __init__(self, network: Any, head: nn.Linear) -> None:
        trunk = list(network.policy_trunk)
        self._relu = any(isinstance(module, nn.ReLU) for module in trunk)
        linears = [*(module for module in trunk if isinstance(module, nn.Linear)), head]
        norms = [module for module in trunk if isinstance(module, BatchRenorm)]
        self.steps = [
            NormedLayer(norm, linear, self._relu and linear is not head)
            for norm, linear in zip(norms, linears, strict=True)
        ]
        #: The number of multiplications of a forward pass for one row.
        self.work = sum(step.linear.weight.size for step in self.steps)

    def forward(self, x: np.ndarray) -> list[np.ndarray]:
        """Returns a list of the input and the outputs of all layers, in evaluation mode."""
        done = [x]
        for step in self.steps:
            done.append(self._activated(step, step(done[-1])))
        return done

    def by_inputs(self, done: list[np.ndarray], gradient: np.ndarray) -> np.ndarray:
        """The gradient with respect to the inputs, `[B, in]`, in evaluation mode.

        Args:
            done: the list from `forward`.
            gradient: gradient of the loss with respect to the outputs, `[B, out]`.
        """
        for i in reversed(range(len(self.steps))):
            if i + 1 < len(self.steps):
                gradient = before_activation(gradient, done[i + 1], self._relu)
            gradient = self.steps[i].by_inputs(gradient)
        return gradient

    def train(self, x: np.ndarray) -> tuple[list[np.ndarray], list[_Trained]]:
        """Returns the outputs of all layers in training mode, and what `backward` needs besides."""
        outputs, trained = [], []
        for step in self.steps:
            x, done = step.train(x)
            outputs.append(self._activated(step, x))
            trained.append(done)
        return outputs, trained

    def backward(
        self, outputs: list[np.ndarray], trained: list[_Trained], gradient: np.ndarray
    ) -> None:
        """Adds the gradients of all parameters, in training mode.

        Args:
            outputs: from `train`.
            trained: from `train`.
            gradient: gradient of the loss with respect to the outputs, `[B, out]`.
        """
        for i in reversed(range(len(self.steps))):
            if i + 1 < len(self.steps):
                gradient = before_activation(gradient, outputs[i], self._relu)
            gradient = self.steps[i].backward(trained[i], gradient, needed=i > 0)

    def _activated(self, step: NormedLayer, out: np.ndarray) -> np.ndarray:
        if self._relu or step is self.steps[-1]:
            return out  # the linear layer has applied ReLU
        return np.tanh(out, out=out)


class _ActingLayers:
    """Computes distribution parameters in evaluation mode.

    Args:
        layers: the layers of an actor.
    """

    def __init__(self, layers: NormedLayers) -> None:
        self._layers = layers

    def action_params(self, obs: np.ndarray) -> np.ndarray:
        """Distribution parameters `[N, P]` of observations `[N, ...]`."""
        return self._layers.forward(flat_rows(obs))[-1]


def normed_actor(network: nn.Module) -> _ActingLayers | None:
    """Returns the actor of a `CrossQPolicy` in NumPy, or None if NumPy does not support it."""
    if not _is_normed(network):
        return None
    return _ActingLayers(NormedLayers(network, network.policy_head))  # type: ignore[arg-type]


def _is_normed(network: Any) -> bool:
    """Whether `NormedLayers` supports the network: an `MLPNetwork` from `add_batch_renorm`, on the
    CPU, without hooks or modules of subclasses."""
    if type(network) is not MLPNetwork or network.state_size:
        return False
    modules = list(network.modules())
    if not any(type(module) is BatchRenorm for module in modules):
        return False
    on_cpu = next(network.parameters()).device.type == "cpu"
    return on_cpu and all(type(m) in _MODULES and runs_as_written(m) for m in modules)


def _layers(policy: Any) -> tuple[Any, ...] | str:
    """The layers of the actor and the critics of a `CrossQPolicy`, or why the policy learns in
    torch."""
    critics = list(policy.segments["critics"].module.networks)
    if not all(map(_is_normed, (policy.model, *critics))):
        return UNSUPPORTED
    actor = NormedLayers(policy.model, policy.model.policy_head)
    of_critics = [NormedLayers(critic, critic.value_head) for critic in critics]
    return why_not_small(policy.model, *critics) or (actor, of_critics)


@closed_form_of(
    "polopt.policies.crossq:CrossQPolicy",
    *("critic_loss", "add_actor_gradient", "actor_loss", "alpha_loss"),
    *("sampled", "params_in_torch", "normal", "drawn"),
    of_family=OF_REPLAY_POLICIES,
    networks=_layers,
)
def crossq(
    policy: Any, actor: NormedLayers, critics: list[NormedLayers], rows: Any
) -> tuple[dict[str, float], np.ndarray]:
    """Adds the gradients of the losses of a `CrossQPolicy` to the `.grad` of its networks. Moves
    the running statistics.

    Args:
        policy: has the options, the temperature, and the random generator of the noise.
        actor: the layers of the actor.
        critics: the layers of the two critics.
        rows: normalised `Transitions`.

    Returns:
        the statistics, and the absolute TD errors `[B]`, which are means over the critics.
    """
    count, learns_actor = len(rows.rewards), not policy.resting
    alpha, head = alpha_of(policy), actor.steps[-1].linear.weight
    obs, next_obs = flat_rows(rows.obs), flat_rows(rows.next_obs)
    # The next observation of a row with a discount of 0 is meaningless. It must not change the
    # statistics of the batch.
    next_obs = np.where(rows.discounts[:, None] > 0.0, next_obs, obs)
    following = sampled(policy, actor.forward, next_obs, drawn_noise(policy, head, count))

    all_obs = np.concatenate([obs, next_obs])
    inputs = np.empty((2 * count, obs.shape[1] + following.actions.shape[1]), np.float32)
    inputs[:, : obs.shape[1]] = all_obs
    np.tanh(rows.actions, out=inputs[:count, obs.shape[1] :])
    inputs[count:, obs.shape[1] :] = following.actions
    forward: list[Callable[[], Any]] = [partial(critic.train, inputs) for critic in critics]
    if learns_actor:
        noise = drawn_noise(policy, head, count)
        forward.append(partial(_trained_sample, policy, actor, obs, noise))
    work = 2 * count * critics[0].work
    first, second, *of_actor = side_by_side(work, *forward)
    both = np.stack([outputs[-1][:, 0] for outputs, _ in (first, second)])
    soft = both[:, count:].min(axis=0) - alpha * following.log_prob
    targets = rows.rewards + discounted(rows, soft)

    sample: Sample | None = of_actor[0][0] if learns_actor else None
    new_inputs = None if sample is None else np.concatenate([obs, sample.actions], axis=1)

    def learn(
        critic: NormedLayers, outputs: list[np.ndarray], trained: list[_Trained]
    ) -> tuple[np.ndarray, float, list[np.ndarray]]:
        """Adds the gradient of the loss of a critic. Returns its errors `[B]`, its loss, and its
        activations in evaluation mode for new actions."""
        errors = outputs[-1][:count, 0] - targets
        weighted = rows.weights * errors
        by_values = np.zeros((2 * count, 1), np.float32)
        by_values[:count, 0] = weighted / np.float32(count)
        critic.backward(outputs, trained, by_values)
        of_new = [] if new_inputs is None else critic.forward(new_inputs)
        return errors, 0.5 * float(np.dot(weighted, errors)) / count, of_new

    (errors, loss, of_new), (other_errors, other_loss, other_of_new) = side_by_side(
        work, partial(learn, critics[0], *first), partial(learn, critics[1], *second)
    )
    vf_loss = loss + other_loss
    stats = {"vf_loss": vf_loss, "total_loss": vf_loss}
    if sample is not None:
        q, other_q = of_new[-1][:, 0], other_of_new[-1][:, 0]
        by_actions = np.empty_like(sample.actions)
        side_by_side(
            count * critics[0].work // 2,
            *(
                partial(set_by_actions, by_actions, np.flatnonzero(places), new, critic.by_inputs)
                for critic, new, places in zip(
                    critics, (of_new, other_of_new), (q <= other_q, q > other_q), strict=True
                )
            ),
        )
        actor.backward(sample.done, of_actor[0][1], by_params_of(policy, alpha, sample, by_actions))
        stats |= learn_temperature(policy, alpha, sample, np.minimum(q, other_q))
        stats["total_loss"] += stats["policy_loss"]
    stats["alpha_value"] = float(alpha)
    absolute = 0.5 * (np.abs(errors) + np.abs(other_errors))
    return stats | value_stats_of(0.5 * (errors + other_errors), targets), absolute


def _trained_sample(
    policy: Any, actor: NormedLayers, obs: np.ndarray, noise: np.ndarray
) -> tuple[Sample, list[_Trained]]:
    """New actions of the actor in training mode, and what its `backward` needs besides."""
    outputs, trained = actor.train(obs)
    return sampled(policy, lambda _: outputs, obs, noise), trained
