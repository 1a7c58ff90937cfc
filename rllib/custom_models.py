"""Networks that are written for RLlib: `TorchModelV2`, `ModelCatalog`, and the classes that such
networks are made of."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, ClassVar, cast

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from polopt.common.config import ConfigError, shown
from polopt.common.ray_names import register_with_tune, registered
from polopt.policies.networks.layers import ACTIVATIONS
from polopt.policies.networks.model_config import NETWORKS, register_network

#: The smallest number that RLlib's networks add to the logits of actions that are not allowed.
FLOAT_MIN, FLOAT_MAX = -3.4e38, 3.4e38
#: What a network finds in its `model_config`, unless the option `model` has other values.
MODEL_DEFAULTS: dict[str, Any] = {
    "fcnet_hiddens": [256, 256],
    "fcnet_activation": "tanh",
    "conv_filters": None,
    "conv_activation": "relu",
    "post_fcnet_hiddens": [],
    "post_fcnet_activation": "relu",
    "free_log_std": False,
    "no_final_linear": False,
    "vf_share_layers": True,
    "use_lstm": False,
    "max_seq_len": 20,
    "lstm_cell_size": 256,
    "custom_model": None,
    "custom_model_config": {},
}
#: RLlib's default for the layers that DQN adds after a network.
_Q_HIDDENS = (256,)
#: Registered names of networks that polopt cannot use, and the reasons.
_REFUSED: dict[str, str] = {}
#: Names in the methods of a network from which polopt knows that the network reads masks.
_MASK = "action_mask"
_TENSORFLOW = (
    "{} is a network of TensorFlow, and polopt uses PyTorch. Allowed: a TorchModelV2, or any "
    "torch.nn.Module (docs/networks.md)"
)

#: The category of networks in Tune's registry.
_TUNE = "rllib_model"


class TorchModelV2:
    """Base class of networks that are written for RLlib's old API stack. A subclass also derives
    from `torch.nn.Module`.

    Attributes:
        obs_space: the space of observations as RLlib's preprocessors return them. For a `Dict` and
            a `Discrete` this is a `Box` of one dimension. Its `original_space` is the space of the
            environment.
        action_space: the action space of the environment.
        num_outputs: the number of parameters of the action distribution. With DQN, the number of
            features, from which polopt computes Q-values as RLlib does.
        model_config: the option `model`, with RLlib's defaults.
        name: a name.
    """

    def __init__(
        self, obs_space: Any, action_space: Any, num_outputs: Any, model_config: Any, name: Any
    ) -> None:
        self.obs_space, self.action_space = obs_space, action_space
        self.num_outputs, self.model_config, self.name = num_outputs, model_config, name
        self.framework, self.time_major = "torch", False

    def __call__(
        self, input_dict: Mapping[str, Any], state: Any = None, seq_lens: Any = None
    ) -> Any:
        """Calls `forward`, with the flat observations under `obs_flat`."""
        given = {**input_dict, "obs_flat": _flat(input_dict["obs"])}
        return self.forward(given, [] if state is None else state, seq_lens)

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        """Returns the outputs `[B, num_outputs]` and the next state.

        Args:
            input_dict: `obs`, the observations in the structure of their space, and `obs_flat`
                `[B, ...]`.
            state: the state, as a list of tensors `[B, ...]`.
            seq_lens: the lengths `[B]` of the sequences, which are 1.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define forward")

    def value_function(self) -> Any:
        """Returns the values `[B]` of the observations of the last call of `forward`."""
        raise NotImplementedError(f"{type(self).__name__} does not define value_function")

    def get_initial_state(self) -> list[Any]:
        """Returns the state `[...]` at the beginning of an episode, without a batch dimension."""
        return []

    def is_time_major(self) -> bool:
        """Returns False."""
        return False

    def metrics(self) -> dict[str, Any]:
        """Returns an empty dict. polopt does not call this method."""
        return {}


#: The base class of `TorchModelV2` in RLlib.
ModelV2 = TorchModelV2


class TFModelV2:
    """A network of TensorFlow. A script may define such networks, but polopt cannot train them."""


class SlimFC(nn.Module):
    """A linear layer with an activation, as RLlib's class of the same name."""

    def __init__(
        self,
        in_size: int,
        out_size: int,
        initializer: Callable[[Tensor], Any] | None = None,
        activation_fn: Any = None,
        use_bias: bool = True,
        bias_init: float = 0.0,
    ) -> None:
        super().__init__()
        linear = nn.Linear(in_size, out_size, bias=use_bias)
        (initializer or nn.init.xavier_uniform_)(linear.weight)
        if use_bias:
            nn.init.constant_(linear.bias, bias_init)
        activation = _activation(activation_fn)
        layers = [linear] if activation is None else [linear, activation()]
        self._model = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs `[B, out_size]`."""
        outputs: Tensor = self._model(inputs)
        return outputs


class SlimConv2d(nn.Module):
    """A convolution with an activation, as RLlib's class of the same name."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Any,
        stride: Any,
        padding: Any = None,
        *,
        initializer: Any = "default",
        activation_fn: Any = "relu",
        bias_init: float = 0.0,
    ) -> None:
        super().__init__()
        convolution = nn.Conv2d(in_channels, out_channels, kernel, stride)
        if initializer is not None:
            (nn.init.xavier_uniform_ if initializer == "default" else initializer)(
                convolution.weight
            )
        nn.init.constant_(convolution.bias, bias_init)  # type: ignore[arg-type]
        activation = _activation("relu" if activation_fn == "default" else activation_fn)
        layers: list[nn.Module] = [nn.ZeroPad2d(padding)] if padding else []
        layers += [convolution, *([] if activation is None else [activation()])]
        self._model = nn.Sequential(*layers)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs `[B, out_channels, ...]`."""
        outputs: Tensor = self._model(inputs)
        return outputs


class DQNTorchModel(TorchModelV2, nn.Module):
    """RLlib's base class of networks for DQN. polopt adds the layers `hiddens` itself."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        nn.Module.__init__(self)
        names = ("obs_space", "action_space", "num_outputs", "model_config", "name")
        given = {name: value for name, value in others.items() if name in names}
        TorchModelV2.__init__(self, *arguments[: len(names)], **given)


class AppendBiasLayer(nn.Module):
    """Appends parameters that do not depend on the inputs, such as log standard deviations."""

    def __init__(self, num_bias_vars: int) -> None:
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(num_bias_vars))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[B, F + num_bias_vars]` for inputs `[B, F]`."""
        return torch.cat([x, self.log_std.expand(len(x), -1)], dim=1)


def normc_initializer(std: float = 1.0) -> Callable[[Tensor], None]:
    """Returns a function that draws weights whose rows have the norm `std`."""

    def initialise(weight: Tensor) -> None:
        drawn = torch.empty_like(weight).normal_()
        with torch.no_grad():
            weight.copy_(drawn * std / drawn.pow(2).sum(1, keepdim=True).sqrt())

    return initialise


class FullyConnectedNetwork(TorchModelV2, nn.Module):
    """RLlib's default network: hidden layers, and separate or shared layers for the value."""

    def __init__(
        self, obs_space: Any, action_space: Any, num_outputs: Any, model_config: Any, name: Any
    ) -> None:
        TorchModelV2.__init__(self, obs_space, action_space, num_outputs, model_config, name)
        nn.Module.__init__(self)
        config = {**MODEL_DEFAULTS, **(model_config or {})}
        size = int(np.prod(obs_space.shape))
        widths = [*config["fcnet_hiddens"], *(config["post_fcnet_hiddens"] or [])]
        activation = config["fcnet_activation"]
        self._free_log_std = bool(config["free_log_std"])
        outputs = num_outputs // 2 if self._free_log_std else num_outputs
        self.log_std = nn.Parameter(torch.zeros(outputs)) if self._free_log_std else None
        self._hidden_layers = _mlp(size, widths, activation)
        features = widths[-1] if widths else size
        if config["no_final_linear"] and num_outputs:
            self._hidden_layers.append(
                SlimFC(features, outputs, normc_initializer(1.0), activation)
            )
            self._logits, features = None, outputs
        elif num_outputs:
            self._logits = SlimFC(features, outputs, normc_initializer(0.01))
        else:
            self._logits, self.num_outputs = None, features
        shares = config["vf_share_layers"]
        self._value_layers = None if shares else _mlp(size, widths, activation)
        value_features = features if shares else (widths[-1] if widths else size)
        self._value_branch = SlimFC(value_features, 1, normc_initializer(0.01))
        self._features: Any = None
        self._last_input: Any = None

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        """Returns the outputs `[B, num_outputs]`, and `state`."""
        self._last_input = input_dict["obs_flat"].float().flatten(1)
        self._features = self._hidden_layers(self._last_input)
        outputs = self._features if self._logits is None else self._logits(self._features)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], dim=1)
        return outputs, state

    def value_function(self) -> Any:
        """Returns the values `[B]`."""
        features = self._features
        if self._value_layers is not None:
            features = self._value_layers(self._last_input)
        return self._value_branch(features).squeeze(1)


class RecurrentNetwork(TorchModelV2):
    """Base class of networks with memory. A subclass defines `forward_rnn`, `get_initial_state`
    and `value_function`."""

    def forward(self, input_dict: Any, state: Any, seq_lens: Any) -> Any:
        """Calls `forward_rnn` with sequences of one step."""
        inputs = input_dict["obs_flat"].float().flatten(1)[:, None]
        outputs, state = self.forward_rnn(inputs, state, seq_lens)
        return outputs.reshape(len(inputs), -1), state

    def forward_rnn(self, inputs: Any, state: Any, seq_lens: Any) -> Any:
        """Returns the outputs `[B, T, num_outputs]` and the next state, from inputs `[B, T, F]`."""
        raise NotImplementedError(f"{type(self).__name__} does not define forward_rnn")


#: Another name of `RecurrentNetwork` in scripts.
TorchRNN = RecurrentNetwork


class ModelCatalog:
    """Registers networks by name, as RLlib's class of the same name."""

    @staticmethod
    def register_custom_model(model_name: str, model_class: Any) -> None:
        """Makes a network selectable with `model={"custom_model": model_name}`.

        Args:
            model_name: the name. A network that was registered under this name is replaced.
            model_class: a `TorchModelV2`, or a `torch.nn.Module` for the option `custom` of
                polopt. A network of TensorFlow is refused when it is used.

        Raises:
            ConfigError: the class is neither.
        """
        _REFUSED.pop(model_name, None)
        if _is_tensorflow(model_class):
            _REFUSED[model_name] = _TENSORFLOW.format(model_class.__name__)
            return
        if not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
            raise ConfigError(
                f"register_custom_model({model_name!r}, {shown(model_class)}): Allowed: a class "
                "that derives from TorchModelV2 and torch.nn.Module"
            )
        register_network(model_name, as_network(model_class), override=True)
        register_with_tune(_TUNE, model_name, model_class)  # for the processes of trials

    @staticmethod
    def register_custom_action_dist(name: str, action_dist: Any) -> None:
        """Raises a ConfigError, because a distribution of polopt belongs to its policy."""
        raise ConfigError(
            f"register_custom_action_dist({name!r}): polopt has no custom action distributions. "
            "Instead, write a policy with `make_distribution` (docs/write-a-policy.md)"
        )

    @staticmethod
    def register_custom_preprocessor(name: str, preprocessor: Any) -> None:
        """Raises a ConfigError, because polopt has no preprocessors."""
        raise ConfigError(
            f"register_custom_preprocessor({name!r}): polopt has no preprocessors. Instead, wrap "
            "the environment with gymnasium.ObservationWrapper"
        )


class Network(nn.Module):
    """Passes observations and memory to a `TorchModelV2`, and takes outputs, values and memory from
    it. `as_network` makes a subclass for each class of RLlib.

    Args:
        observation_space: the observation space of the environment, without an action mask.
        action_space: the action space of the environment.
        num_params: the number P of parameters of the action distribution.
        model_config: the options of `model` that the user has set.
        q_hiddens: the widths of layers after the features of the network, from which the
            advantages `[B, P]` and the values `[B]` of DQN are computed. Empty means that the
            outputs of the network are the Q-values, as in RLlib. None is for other policies.
        options: the custom options of the network.
    """

    model_class: ClassVar[type[Any]]

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        num_params: int,
        model_config: Mapping[str, Any] | None = None,
        q_hiddens: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = {**MODEL_DEFAULTS, **(model_config or {}), "custom_model_config": options}
        outputs = num_params
        if q_hiddens:
            outputs = config["fcnet_hiddens"][-1] if config["fcnet_hiddens"] else 256
        self._reads_mask = _mentions(self.model_class, _MASK)
        self._num_actions = int(getattr(action_space, "n", 0))
        space = _preprocessed(observation_space, self._num_actions if self._reads_mask else 0)
        make, arguments = self.model_class, (space, action_space, outputs, config, "model")
        if not issubclass(make, nn.Module):
            raise TypeError(f"{make.__name__} does not derive from torch.nn.Module")
        made: Any = make(*arguments, **_accepted(make, options))
        self.model = made
        initial = [torch.as_tensor(one).float() for one in made.get_initial_state()]
        self._shapes = [tuple(one.shape) for one in initial]
        self.state_size = sum(one.numel() for one in initial)
        # The memory of polopt is 0 at the beginning of an episode, so it is the difference to this.
        flat = torch.cat([one.flatten() for one in initial]) if initial else torch.zeros(0)
        self._initial: Tensor
        self.register_buffer("_initial", flat.detach().clone())
        self.advantages: nn.Module | None = None
        self.values: nn.Module | None = None
        self._is_q = q_hiddens is not None
        if q_hiddens:
            outputs = int(made.num_outputs or outputs)
            self.advantages = _q_head(outputs, q_hiddens, num_params)
            self.values = _q_head(outputs, q_hiddens, 1)

    def forward(self, obs: Any, state: Tensor | None = None) -> Any:
        """Returns the parameters `[B, P]` and the values `[B]`, and with `state` `[B, S]` also the
        next memory."""
        flat = _flat(obs)
        if self._reads_mask and isinstance(obs, dict):
            obs = {_MASK: torch.ones(len(flat), self._num_actions, device=flat.device), **obs}
            flat = _flat(obs)
        one_step = torch.ones(len(flat), dtype=torch.int32, device=flat.device)
        given = [] if state is None else self._split(state + self._initial)
        is_training = self.training
        inputs = {"obs": obs, "obs_flat": flat, "is_training": is_training, "seq_lens": one_step}
        outputs, following = self.model(inputs, given, one_step)
        if self.advantages is not None and self.values is not None:
            params, values = self.advantages(outputs), self.values(outputs)
        elif self._is_q:
            params, values = outputs, outputs.new_zeros(len(flat))
        else:
            params, values = outputs, self.model.value_function()
        values = values.reshape(-1)
        if state is None:
            return params, values
        joined = torch.cat([one.reshape(len(flat), -1) for one in following], dim=1)
        return params, values, joined - self._initial

    def __deepcopy__(self, memo: dict[int, Any]) -> Network:
        """Copies the network without what the model keeps from its last call of `forward`, because
        torch cannot copy tensors that depend on parameters."""
        for module in self.modules():
            kept = vars(module)
            for name, value in kept.items():
                tensors = value if isinstance(value, list | tuple) else [value]
                if any(isinstance(one, Tensor) and not one.is_leaf for one in tensors):
                    kept[name] = None
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _split(self, state: Tensor) -> list[Tensor]:
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        parts = state.split(sizes, dim=1)
        return [part.reshape(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]


def as_network(model_class: type[Any]) -> type[nn.Module]:
    """Returns a class for the option `custom` of polopt that uses a `TorchModelV2`. Returns other
    subclasses of `torch.nn.Module` unchanged."""
    if not issubclass(model_class, TorchModelV2) and not _is_of_rllib(model_class):
        return model_class
    if "custom_loss" in itertools.chain.from_iterable(
        vars(base) for base in model_class.__mro__ if not _is_of_rllib_itself(base)
    ):
        raise ConfigError(
            f"{model_class.__name__} has a custom_loss, which polopt does not call. To change the "
            "loss, write a policy (docs/write-a-policy.md)"
        )
    attributes = {"model_class": model_class, "__module__": model_class.__module__}
    return type(model_class.__name__, (Network,), attributes)


def with_custom_model(
    model: dict[str, Any], hiddens: Any, has_q: bool, has_critics: bool, where: str
) -> dict[str, Any]:
    """Returns the option `model` for polopt, if it names a network that is written for RLlib. All
    other options of `model` become the network's `model_config`. Returns other options unchanged.

    Args:
        model: the option, with `custom` or `custom_model`.
        hiddens: the option `hiddens` of DQN, None for its default.
        has_q: whether the policy is DQN.
        has_critics: whether the policy is SAC.
        where: name of the method that the user called, for messages.

    Raises:
        ConfigError: the network is of TensorFlow, or the policy cannot use it.
    """
    custom = model.get("custom", model.get("custom_model"))
    if custom in _REFUSED or _is_tensorflow(custom):
        reason = _REFUSED.get(str(custom)) or _TENSORFLOW.format(getattr(custom, "__name__", ""))
        raise ConfigError(f"{where}: custom_model={shown(custom)}: {reason}")
    found = custom
    if isinstance(custom, str):
        if custom not in NETWORKS.names() and (registered_model := registered(_TUNE, custom)):
            register_network(custom, as_network(cast(Any, registered_model)))
        found = NETWORKS.get(custom) if custom in NETWORKS.names() else custom
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        return model
    network = as_network(found)
    if not issubclass(network, Network):
        return model
    if has_critics:
        raise ConfigError(
            f"{where}: custom_model={shown(custom)}: SAC makes critics of its network, which reads "
            "observations and actions. Allowed: a torch.nn.Module as docs/networks.md describes it"
        )
    others = {
        key: value
        for key, value in model.items()
        if key not in ("custom", "custom_model", "custom_options", "custom_model_config")
    }
    options = dict(model.get("custom_options", model.get("custom_model_config")) or {})
    if others:
        options["model_config"] = others
    if has_q:
        options["q_hiddens"] = list(_Q_HIDDENS if hiddens is None else hiddens)
    return {"custom": custom if isinstance(custom, str) else network, "custom_options": options}


def _is_tensorflow(model: Any) -> bool:
    if not isinstance(model, type):
        return False
    modules = [base.__module__.split(".")[0] for base in model.__mro__]
    is_tf = any(base.__name__ in ("TFModelV2", "RecurrentTFNetwork") for base in model.__mro__)
    return is_tf or bool({"tensorflow", "keras", "tf_keras"} & set(modules))


def _is_of_rllib(cls: type) -> bool:
    """Whether a class derives from RLlib's own `TorchModelV2`."""
    return any(_is_of_rllib_itself(base) for base in cls.__mro__)


def _is_of_rllib_itself(cls: type) -> bool:
    return cls.__module__.startswith(("ray.rllib.models", "polopt.rllib"))


def _accepted(make: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that the constructor of a network takes, as RLlib passes them."""
    parameters = inspect.signature(make.__init__).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(options)
    names = {one.name for one in parameters}
    return {name: value for name, value in options.items() if name in names}


def _preprocessed(space: Space[Any], mask_size: int) -> Any:
    """Returns the space of observations as RLlib's preprocessors return them."""
    if isinstance(space, spaces.Box):
        dtype: Any = space.dtype
        flat: Any = spaces.Box(space.low, space.high, dtype=dtype)
    else:
        has_mask = isinstance(space, spaces.Dict)
        size = int(spaces.utils.flatdim(space)) + (mask_size if has_mask else 0)
        flat = spaces.Box(-np.inf, np.inf, (size,), np.float32)
    if mask_size and isinstance(space, spaces.Dict):
        mask = spaces.Box(0.0, 1.0, (mask_size,), np.float32)
        space = spaces.Dict({_MASK: mask, **space.spaces})
    flat.original_space = space
    return flat


def _flat(obs: Any) -> Tensor:
    """Joins observations in the structure of their space to one tensor `[B, F]`. Images stay
    `[B, *shape]` only in `obs`."""
    if isinstance(obs, Tensor):
        return obs if obs.dim() <= 2 else obs.flatten(1)
    parts = obs.values() if isinstance(obs, Mapping) else obs
    return torch.cat([_flat(part).float() for part in parts], dim=1)


def _mlp(size: int, widths: Sequence[int], activation: Any) -> nn.Sequential:
    sizes = [size, *widths]
    return nn.Sequential(
        *(SlimFC(*pair, normc_initializer(1.0), activation) for pair in itertools.pairwise(sizes))
    )


def _q_head(size: int, widths: Sequence[int], outputs: int) -> nn.Module:
    sizes = [size, *widths]
    layers = [SlimFC(*pair, activation_fn="relu") for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*layers, SlimFC(sizes[-1], outputs))


def _activation(name: Any) -> Any:
    if name is None or name == "linear":
        return None
    if not isinstance(name, str):
        return name  # a class of torch
    known = {"swish": "silu", **{key: key for key in ACTIVATIONS}}
    if name.lower() not in known:
        raise ConfigError(f"activation {name!r}. Allowed: {', '.join(known)}")
    return ACTIVATIONS[known[name.lower()]]


def _mentions(cls: type, text: str) -> bool:
    """Whether the methods of a class, or of its bases in the same program, contain a string."""
    return any(
        _contains(code, text)
        for base in cls.__mro__
        if not base.__module__.startswith(("torch", "polopt", "builtins"))
        for method in vars(base).values()
        if isinstance(code := getattr(method, "__code__", None), CodeType)
    )


def _contains(code: CodeType, text: str) -> bool:
    return any(
        one == text or (isinstance(one, CodeType) and _contains(one, text))
        for one in code.co_consts
    )
