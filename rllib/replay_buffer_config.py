"""Converts RLlib's dict `replay_buffer_config` to options of an optimizer with a replay buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polopt.common.config import ConfigError, nearest, shown

#: Classes of RLlib's buffers that draw transitions in proportion to their priorities.
_PRIORITIZED = ("PrioritizedEpisodeReplayBuffer", "PrioritizedReplayBuffer")
#: Classes of RLlib's buffers that draw transitions uniformly.
_UNIFORM = ("EpisodeReplayBuffer", "ReplayBuffer")
#: RLlib's keys, and the options of polopt with the same meaning.
_RENAMED = {
    "capacity": "buffer_size",
    "learning_starts": "learning_starts",
    "alpha": "prioritized_replay_alpha",
    "beta": "prioritized_replay_beta",
    "eps": "prioritized_replay_eps",
    "prioritized_replay_alpha": "prioritized_replay_alpha",
    "prioritized_replay_beta": "prioritized_replay_beta",
    "prioritized_replay_eps": "prioritized_replay_eps",
}
_SEQUENCES = (
    "optimizer 'sync_replay' with replay_unit='sequence', sequence_length and burn_in, and a "
    "policy of your own that learns from sequences"
)
#: Keys that have no effect. For each key: the accepted values (None accepts any value, and an empty
#: tuple accepts no value), and what to use instead of a value that is not accepted.
_FIXED: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    "storage_unit": (("timesteps",), _SEQUENCES),
    "replay_sequence_length": ((1, None), _SEQUENCES),
    "batch_length_T": ((1, None), _SEQUENCES),
    "replay_burn_in": ((0,), _SEQUENCES),
    "replay_zero_init_states": (None, ""),
    "replay_sequence_override": (None, ""),
    "batch_size_B": ((), "train_batch_size, the number of rows of an update"),
    "replay_batch_size": (None, ""),
    "replay_mode": (("independent",), "a single policy, because polopt trains one policy"),
    "underlying_buffer_config": ((None,), "the same keys in replay_buffer_config itself"),
    "worker_side_prioritization": ((False,), "ApexDQN, whose samplers compute priorities"),
    "num_shards": ((1,), "num_replay_shards of ApexDQN"),
    "num_replay_buffer_shards": ((1,), "num_replay_shards of ApexDQN"),
    "replay_buffer_shards_colocated_with_driver": (None, ""),
    "no_local_replay_buffer": (None, ""),
    "_enable_replay_buffer_api": (None, ""),
    "metrics_num_episodes_for_smoothing": (None, ""),
}


#: Changes to `_FIXED` and `_RENAMED` for Ape-X.
_FIXED_APEX = {"worker_side_prioritization": ((True,), "DQN, whose driver computes priorities")}
_RENAMED_APEX = {"num_replay_buffer_shards": "num_replay_shards", "num_shards": "num_replay_shards"}


def as_replay_buffer(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns RLlib's dict for the options of an optimizer with a replay buffer."""
    config = {"capacity": options["buffer_size"], "learning_starts": options["learning_starts"]}
    if options["prioritized_replay"]:
        config["type"] = "PrioritizedReplayBuffer"
        for key in ("prioritized_replay_alpha", "prioritized_replay_beta"):
            config[key] = options[key]
        config["prioritized_replay_eps"] = options["prioritized_replay_eps"]
    return config


def of_replay_buffer(config: Any, where: str, is_apex: bool = False) -> dict[str, Any]:
    """Converts a `replay_buffer_config` to options of polopt.

    The key `type` decides whether transitions are drawn in proportion to their priorities. Without
    `type`, priorities are used if the dict has an option of priorities, such as `alpha`. RLlib does
    not change `beta` during training. Therefore, `final_prioritized_replay_beta` gets the value of
    `beta`.

    Args:
        config: RLlib's dict. For None, the result is empty.
        where: name of the method that the user called, for messages.
        is_apex: whether the options are for Ape-X, which has replay shards.

    Raises:
        ConfigError: polopt does not have a key or does not allow its value. The message says what
            to use instead.
    """
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: replay_buffer_config={shown(config)}. Allowed: a dict")
    options: dict[str, Any] = {}
    renamed = {**_RENAMED, **_RENAMED_APEX} if is_apex else _RENAMED
    fixed = {**_FIXED, **_FIXED_APEX} if is_apex else _FIXED
    for key, value in config.items():
        if key == "type":
            options["prioritized_replay"] = _is_prioritized(value, where)
        elif key in renamed:
            options[renamed[key]] = value
        elif key in fixed:
            accepted, instead = fixed[key]
            if accepted is not None and value not in accepted:
                only = " or ".join(map(repr, accepted)) or "not to give this key"
                raise ConfigError(
                    f"{where}: replay_buffer_config: key {key!r}: got {shown(value)}. Allowed: "
                    f"{only}. Instead: {instead}"
                )
        else:
            names = ["type", *renamed, *fixed]
            raise ConfigError(
                f"{where}: replay_buffer_config: unknown key {key!r}{nearest(str(key), names)}"
            )
    if any(key.startswith("prioritized_replay_") for key in options):
        options.setdefault("prioritized_replay", True)
    if "prioritized_replay_beta" in options:
        options["final_prioritized_replay_beta"] = options["prioritized_replay_beta"]
    return options


def _is_prioritized(kind: Any, where: str) -> bool:
    name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    plain = name.removeprefix("MultiAgent")
    if plain in _PRIORITIZED + _UNIFORM:
        return plain in _PRIORITIZED
    raise ConfigError(
        f"{where}: replay_buffer_config: key 'type': got {shown(kind)}. Allowed: "
        f"{', '.join(_UNIFORM + _PRIORITIZED)}, or one of them with the prefix MultiAgent"
        f"{nearest(plain, _UNIFORM + _PRIORITIZED)}"
    )
