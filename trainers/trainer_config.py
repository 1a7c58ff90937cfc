"""`TrainerConfig` and `EvaluationConfig`: the options of the trainer itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import pydantic

from polopt.common.config import Config, canonical
from polopt.rollouts.resources import Amount
from polopt.rollouts.rollout_config import RolloutConfig


class EvaluationConfig(Config):
    """Options of evaluation: how evaluation chooses actions, and how the environments of evaluation
    differ from the training environments. An option that is `None` has the same value as in
    training.

    Attributes:
        explore: `True` samples actions from the policy's distribution. `False` takes the mode of
            this distribution.
        env: the environment. The allowed values are the same as for the option `env` of training.
            `None` means the environment of training.
        env_config: the options of the environments. These options are merged into the `env_config`
            of training, and override options with the same key. Nested dicts are merged, too, as in
            RLlib.
        num_envs_per_worker: the number of environments in each evaluation worker. `None` means the
            value of training.
        vectorization_mode: how each evaluation worker steps its environments. `None` means the
            value of training.
        autoreset_mode: Gymnasium's autoreset mode. `None` means the value of training.
        max_frames_per_traj: the number of environment steps after which an episode is truncated.
            `None` means the value of training.
    """

    explore: bool = False
    env: Any = None
    env_config: dict[str, Any] = pydantic.Field(default_factory=dict)
    num_envs_per_worker: int | None = pydantic.Field(default=None, ge=1, le=100_000)
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None = None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None = None
    max_frames_per_traj: int | None = pydantic.Field(default=None, ge=1)

    advises: ClassVar[bool] = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_aliases(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or cls.model_fields.keys() >= data.keys():
            return data
        return canonical(data, cls.other_names(), "evaluation_config")

    def changes(self, training: RolloutConfig) -> dict[str, Any]:
        """Returns the options of `RolloutConfig` that evaluation overrides, with their values in
        evaluation."""
        given = {name: value for name, value in self if name in RolloutConfig.model_fields}
        given["env_config"] = merged_options(training.env_config, self.env_config)
        if not self.env_config:
            del given["env_config"]
        return {name: value for name, value in given.items() if value is not None}


class TrainerConfig(Config):
    """Options of the trainer itself.

    Attributes:
        min_sample_timesteps_per_iteration: the minimum number of environment steps in one training
            iteration. Optimizer steps are repeated until the iteration has this number of
            environment steps. A single optimizer step can take a few milliseconds, which is less
            than Tune needs to handle one result.
        min_time_s_per_iteration: the minimum duration of one training iteration, in seconds. With a
            value above 0, the number of environment steps in an iteration depends on the speed of
            the machine.
        num_cpus_for_driver: the number of Ray CPUs that the driver reserves. The learner uses as
            many threads.
        num_gpus: the number of Ray GPUs that the driver reserves. With a value above 0, the
            driver's policy is on CUDA.
        evaluation_interval: the number of training iterations between two evaluations of the
            policy. `None` means that the policy is not evaluated. RLlib: `evaluation_interval`.
        evaluation_duration: the number of whole episodes in one evaluation. These episodes are
            divided among the environments in advance. If evaluation used the first episodes that
            end, it would use too many short episodes. RLlib: `evaluation_duration`, with the unit
            `episodes`.
        evaluation_num_workers: the number of Ray actors that play the evaluation episodes while
            training continues. Each actor reserves the resources of a rollout worker except GPUs.
            With 0, the driver plays the episodes between two iterations, and training waits.
            RLlib: `evaluation_num_env_runners`.
        evaluation_config: the options for the actions and the environments of evaluation.
            RLlib: `evaluation_config`, where `explore` is True by default.
        callbacks: a subclass of `polopt.Callbacks`, or its path as `module:Class`. The workers call
            methods of this class during sampling, and the driver calls a method with each result.
            RLlib: `callbacks`.
    """

    min_sample_timesteps_per_iteration: int = pydantic.Field(default=4000, ge=0, le=2**62)
    min_time_s_per_iteration: float = pydantic.Field(default=0.0, ge=0.0, le=1e9)
    num_cpus_for_driver: Amount = 1.0
    num_gpus: Amount = 0.0
    evaluation_interval: int | None = pydantic.Field(default=None, ge=1, le=2**62)
    evaluation_duration: int = pydantic.Field(default=10, ge=1, le=1_000_000)
    evaluation_num_workers: int = pydantic.Field(default=0, ge=0, le=10_000)
    evaluation_config: EvaluationConfig = EvaluationConfig()
    callbacks: Any = None

    @pydantic.model_validator(mode="after")
    def _check_evaluation(self) -> TrainerConfig:
        workers, episodes = self.evaluation_num_workers, self.evaluation_duration
        if workers > episodes:
            raise ValueError(
                f"key 'evaluation_num_workers': got {workers} with evaluation_duration={episodes}. "
                "Allowed: at most one worker for each episode"
            )
        if workers and self.evaluation_interval is None:
            raise ValueError(
                f"key 'evaluation_num_workers': got {workers} without evaluation_interval. "
                "Allowed: 0. To evaluate the policy, also set evaluation_interval"
            )
        return self


def merged_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with the changes applied. If `options` and `changes` both have a dict
    under the same key, these two dicts are merged in the same way."""
    merged = dict(options)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            merged[key] = merged_options(old, value)
        else:
            merged[key] = value
    return merged
