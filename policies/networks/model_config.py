"""`ModelConfig`: options of the network. `register_network` makes a user's network selectable by
name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from torch import nn

from polopt.common.add_ons import fixed_options
from polopt.common.config import Config, ConfigError, canonical, without_fixed
from polopt.common.registry import Registry, load_path

NETWORKS = Registry("network", "polopt.networks", "torch.nn:Module", {})
_Width = Annotated[int, pydantic.Field(ge=1, le=16_384)]
Widths = Annotated[tuple[_Width, ...], pydantic.Field(max_length=100)]
_ALLOWED_WIDTHS = "a list of the widths of layers, such as [64, 64], at most 100"
_Padding = Annotated[int, pydantic.Field(ge=0, le=16_384)]
#: Names of `polopt.policies.networks.layers.ACTIVATIONS`.
Activation = Literal["tanh", "relu", "elu", "gelu", "leaky_relu", "silu", "linear"]
#: Channels, kernel size, stride and optional padding of one convolution.
ConvFilter = tuple[_Width, _Width, _Width] | tuple[_Width, _Width, _Width, _Padding]


def register_network(name: str, cls: type, override: bool = False) -> None:
    """Makes a `torch.nn.Module` class selectable as `config["model"] = {"custom": name}`. See
    `Registry.register`.

    Raises:
        ConfigError: the errors of `Registry.register`, or the name contains a colon. A colon is
            reserved for `module:Class`, a class to import.
    """
    if ":" in name:
        raise ConfigError(
            f"register network {name!r}: a name with a colon means a class to import, "
            "'module:Class'. Allowed: a name without a colon"
        )
    NETWORKS.register(name, cls, override)


def _network_class(value: Any) -> type[nn.Module] | None:
    """Converts the value of the option `custom` to a class.

    The value may be a name or a class. This function does not register a class, because a notebook
    may define several classes with the same name. A checkpoint could then find the wrong class.
    """
    names = NETWORKS.names()
    allowed = "a subclass of torch.nn.Module, 'module:Class' of one, or a name given to "
    allowed += "polopt.register_network" + (f": {', '.join(names)}" if names else "")
    found = value
    if isinstance(value, str):
        try:
            # `NETWORKS.get` also finds a name that only the driver of this trial has registered.
            found = load_path(value) if ":" in value else NETWORKS.get(value)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{allowed} ({error})") from None
        except ConfigError:
            if value in names:  # the name is registered, but its class cannot be imported
                raise
    if found is None or (isinstance(found, type) and issubclass(found, nn.Module)):
        return found
    raise ValueError(allowed)


def _json_options(options: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"values of JSON, which checkpoints can hold ({error})") from None
    return options


class ModelConfig(Config):
    """Options of the network. Options that RLlib also has have RLlib's names.

    Attributes:
        fcnet_hiddens: the widths of the hidden layers. This option and `fcnet_activation` have no
            effect if the observation is one image with convolutions.
        fcnet_activation: the activation of the hidden layers. With `linear`, they have none, and
            the network is linear.
        conv_filters: a tuple `(channels, kernel, stride)` or `(channels, kernel, stride, padding)`
            for each convolution over an image `[C, H, W]` or `[H, W, C]`. A ReLU follows each
            convolution. Each image of a Dict or Tuple has its own convolutions. An empty list
            disables convolutions. With `None`, only images of uint8 or bool have convolutions.
            Images of at least 36 x 36 pixels then get the convolutions of Mnih et al. (2015).
            Smaller images get 16 filters of 3 x 3. Images smaller than 3 x 3 pixels have no
            convolutions.
        post_fcnet_hiddens: the widths of the layers after the convolutions. A ReLU follows each
            layer. `None` means one layer of 512 units. If `conv_filters` is also `None`, an image
            smaller than 36 x 36 pixels gets one layer of 128 units.
        layer_norm: whether to apply layer normalisation (Ba et al., 2016) before each activation.
            The normalisation after a convolution is over channels and positions.
        use_lstm: whether to add an LSTM between the hidden layers and the heads, as memory for
            policy and value. In training, the LSTM reads sequences of `rollout_fragment_length`
            steps, so gradients go back through at most this number of steps.
        lstm_cell_size: the number of cells of the LSTM.
        vf_share_layers: whether policy and value share the hidden layers. `None` means True for
            networks with convolutions, because convolutions take most of the time, and False for
            other networks.
        free_log_std: whether the log standard deviation of Box actions is a separate parameter that
            does not depend on the observation. With False, the network computes the log standard
            deviation from the observation.
        initial_log_std: the initial log standard deviation of an action before the action is mapped
            to the bounds. If `free_log_std` is False, this is the initial bias of the layer that
            computes the log standard deviation.
        squash_actions: whether to squash Box actions into the box with tanh. With True,
            `normalize_actions` and `clip_actions` have no effect.
        custom: a `torch.nn.Module` class that replaces the network. Pass the class, its registered
            name, or `module:Class`. See `docs/networks.md`. Of the options above, only
            `squash_actions` has an effect together with `custom`, and `use_lstm` raises an error.
        custom_options: the keyword arguments of the constructor of `custom`.
    """

    fcnet_hiddens: Widths = pydantic.Field(default=(64, 64), description=_ALLOWED_WIDTHS)
    fcnet_activation: Activation = "tanh"
    conv_filters: tuple[ConvFilter, ...] | None = pydantic.Field(
        default=None,
        description="a list of [channels, kernel, stride], such as [[16, 4, 2], [32, 3, 1]]",
    )
    post_fcnet_hiddens: Widths | None = pydantic.Field(default=None, description=_ALLOWED_WIDTHS)
    layer_norm: bool = False
    use_lstm: bool = False
    lstm_cell_size: _Width = 256
    vf_share_layers: bool | None = None
    free_log_std: bool = True
    initial_log_std: float = pydantic.Field(default=0.0, ge=-20.0, le=10.0)
    squash_actions: bool = False
    custom: Annotated[Any, pydantic.AfterValidator(_network_class)] = None
    custom_options: Annotated[dict[str, Any], pydantic.AfterValidator(_json_options)] = (
        pydantic.Field(default_factory=dict)
    )

    def named(self) -> dict[str, Any]:
        """The options by key, for JSON. If `custom` is set, its value is a name instead of a
        class."""
        options = self.to_dict()
        if self.custom is not None:
            options["custom"] = NETWORKS.saved_name(self.custom)
        return options

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or cls.model_fields.keys() >= data.keys():
            return data
        options = canonical(data, cls.other_names(), "model")
        return without_fixed(options, fixed_options("model"), cls.keys(), "model")

    @pydantic.model_validator(mode="after")
    def _check_options_have_a_module(self) -> ModelConfig:
        if self.custom_options and self.custom is None:
            raise ValueError("'custom_options' only together with 'custom', which is not given")
        if self.use_lstm and self.custom is not None:
            raise ValueError("'use_lstm' without 'custom'")
        return self
