"""`ModelConfig`: options of the actor-critic network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import pydantic

from polopt.common.config import Config

_Width = Annotated[int, pydantic.Field(ge=1, le=16_384)]
_Widths = Annotated[tuple[_Width, ...], pydantic.Field(max_length=100)]
#: Channels, kernel size and stride of one convolution.
ConvFilter = tuple[_Width, _Width, _Width]


class ModelConfig(Config):
    """Options of the actor-critic network, under RLlib's names.

    Attributes:
        fcnet_hiddens: widths of the hidden layers.
        fcnet_activation: `tanh` or `relu`.
        conv_filters: `(channels, kernel, stride)` of each convolution over an image `[C, H, W]` or
            `[H, W, C]`. None: those of Mnih et al. (2015) for uint8 images of at least 36 x 36,
            their minimum, and no convolutions for other observations. Empty: no convolutions.
        post_fcnet_hiddens: widths of the layers between convolutions and heads.
        use_lstm: policy and value have memory: an LSTM between hidden layers and heads. What it
            reads in one update is a fragment, `rollout_fragment_length` steps.
        lstm_cell_size: number of its cells.
        vf_share_layers: policy and value share the hidden layers. None: True for convolutions,
            which are most of the cost, False otherwise.
        free_log_std: for Box actions: the log standard deviation is a parameter that does not
            depend on the observation.
        initial_log_std: initial log standard deviation (the bias, if it depends on the
            observation).
        squash_actions: squash Box actions into the box with tanh instead of clipping them.
    """

    fcnet_hiddens: _Widths = (64, 64)
    fcnet_activation: Literal["tanh", "relu"] = "tanh"
    conv_filters: tuple[ConvFilter, ...] | None = None
    post_fcnet_hiddens: _Widths = (512,)
    use_lstm: bool = False
    lstm_cell_size: _Width = 256
    vf_share_layers: bool | None = None
    free_log_std: bool = True
    initial_log_std: float = pydantic.Field(0.0, ge=-20.0, le=10.0)
    squash_actions: bool = False

    removed: ClassVar[Mapping[str, str]] = {
        "max_seq_len": "sequences are as long as a fragment: set 'rollout_fragment_length'",
    }
