"""The signatures of the presets and of `polopt.train` for type checkers and editors.

`python tests/generated_files.py` makes this file from the config classes. Programs do not import
this file.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, overload

from typing_extensions import Self, TypedDict, Unpack

from polopt.command_line.train_function import TrainingResult
from polopt.optimizers.policy_optimizer import PolicyOptimizer
from polopt.policies.policy import Policy
from polopt.trainers.trainer import PolicyOptimizerTrainer as _Trainer

_Path = str | os.PathLike[str]

class ModelOptions(TypedDict, total=False):
    fcnet_hiddens: Sequence[int]
    fcnet_activation: Literal["tanh", "relu", "elu", "gelu", "leaky_relu", "silu", "linear"]
    conv_filters: Sequence[Sequence[int]] | None
    post_fcnet_hiddens: Sequence[int] | None
    layer_norm: bool
    use_lstm: bool
    lstm_cell_size: int
    vf_share_layers: bool | None
    free_log_std: bool
    initial_log_std: float
    squash_actions: bool
    custom: Any
    custom_model: Any
    custom_options: Mapping[str, Any]
    custom_model_config: Mapping[str, Any]

class EvaluationOptions(TypedDict, total=False):
    explore: bool
    env: Any
    env_config: Mapping[str, Any]
    num_envs_per_worker: int | None
    num_envs_per_env_runner: int | None
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] | None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None
    max_frames_per_traj: int | None

class PluginOptions(TypedDict, total=False):
    optimizer: str | type[PolicyOptimizer] | Mapping[str, Any]
    policy: str | type[Policy] | Mapping[str, Any]

class _RolloutConfig(TypedDict, total=False):
    env: Any
    env_config: Mapping[str, Any]
    num_workers: int
    num_env_runners: int
    num_rollout_workers: int
    min_workers: int | None
    num_workers_below: int
    collection: Literal["sync", "overlapped", "async"]
    fraction_workers_below: float
    fraction_samples_below: float
    compress_data: Literal["none", "fp16", "bf16", "lz4"]
    compress_gradients: Literal["none", "fp16", "bf16", "topk"]
    topk_share: float
    num_envs_per_worker: int
    num_envs_per_env_runner: int
    rollout_fragment_length: int
    sample_batch_size: int
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] | None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None
    max_frames_per_traj: int | None
    clip_raw_rewards: Literal["sign"] | float | None
    num_cpus_per_worker: float
    num_cpus_per_env_runner: float
    num_gpus_per_worker: float
    num_gpus_per_env_runner: float
    custom_resources_per_worker: Mapping[str, float]
    custom_resources_per_env_runner: Mapping[str, float]
    memory_per_worker: int
    transport: Literal["ray", "socket", "auto"]
    worker_timeout_s: float
    worker_startup_timeout_s: float
    max_consecutive_failures: int
    max_consecutive_env_faults: int
    max_consecutive_non_finite: int
    seed: int | None
    policies: Mapping[str, Mapping[str, Any]] | None
    policy_mapping_fn: Any
    policies_to_train: Sequence[str] | None
    count_steps_by: Literal["env_steps", "agent_steps"]

class _PolicyConfig(TypedDict, total=False):
    lr: float | Sequence[Sequence[int | float]]
    lr_schedule: float | Sequence[Sequence[int | float]]
    torch_optimizer: Literal["adam", "rmsprop"]
    adam_beta1: float
    adam_epsilon: float
    rmsprop_alpha: float
    rmsprop_epsilon: float
    grad_clip: float | None
    fast_cpu: bool
    normalize_actions: bool
    clip_actions: bool
    model: ModelOptions

class _NormalizingConfig(TypedDict, total=False):
    normalize_observations: bool
    clip_observations: float

class _FragmentConfig(TypedDict, total=False):
    gamma: float
    lambda_: float
    num_sgd_iter: int
    num_epochs: int
    sgd_minibatch_size: int | None
    minibatch_size: int | None
    microbatch_size: int | None
    normalize_rewards: bool
    clip_rewards: float

class _ActorCriticConfig(TypedDict, total=False):
    vf_loss_coeff: float
    entropy_coeff: float | Sequence[Sequence[int | float]]
    entropy_coeff_schedule: float | Sequence[Sequence[int | float]]
    standardize_advantages: bool
    use_critic: bool

class _PPOConfig(TypedDict, total=False):
    clip_param: float
    vf_clip_param: float | None
    vf_clip_range: float | None
    kl_coeff: float
    kl_target: float
    kl_stop: float | None

class _VTraceConfig(TypedDict, total=False):
    vtrace_clip_rho_threshold: float
    vtrace_clip_pg_rho_threshold: float

class _AppoConfig(TypedDict, total=False):
    target_network_update_freq: int

class _ReplayConfig(TypedDict, total=False):
    gamma: float
    n_step: int | Sequence[int]
    tau: float
    target_network_update_freq: int
    target_network_update_timesteps: int | None
    random_timesteps: int
    fast_gpu: bool

class _SACConfig(TypedDict, total=False):
    actor_lr: float | Sequence[Sequence[int | float]] | None
    critic_lr: float | Sequence[Sequence[int | float]] | None
    alpha_lr: float | Sequence[Sequence[int | float]] | None
    initial_alpha: float
    target_entropy: float | Literal["auto"] | None

class _CrossQConfig(TypedDict, total=False):
    policy_delay: int

class _EpsilonGreedyConfig(TypedDict, total=False):
    epsilon: float | Sequence[Sequence[int | float]]
    per_worker_epsilon: bool

class _DQNConfig(TypedDict, total=False):
    double_q: bool
    dueling: bool
    td_error_loss_fn: Literal["huber", "mse"]

class _TD3Config(TypedDict, total=False):
    actor_lr: float | Sequence[Sequence[int | float]] | None
    critic_lr: float | Sequence[Sequence[int | float]] | None
    policy_delay: int
    exploration_noise: float | Sequence[Sequence[int | float]]
    target_noise: float
    target_noise_clip: float

class _GradientsConfig(TypedDict, total=False):
    grads_per_step: int

class _AsyncGradientsConfig(TypedDict, total=False):
    max_requests_in_flight_per_worker: int
    max_requests_in_flight_per_env_runner: int
    max_policy_lag: int | None
    stale_gradients: Literal["drop", "scale"]

class _ReplayOptions(TypedDict, total=False):
    buffer_size: int
    learning_starts: int
    num_steps_sampled_before_learning_starts: int
    train_batch_size: int
    train_batch_size_per_learner: int
    training_intensity: float
    prioritized_replay: bool
    prioritized_replay_alpha: float
    prioritized_replay_beta: float
    final_prioritized_replay_beta: float
    prioritized_replay_beta_annealing_timesteps: int
    prioritized_replay_eps: float

class _AsyncReplayConfig(TypedDict, total=False):
    num_replay_shards: int
    num_replay_buffer_shards: int
    num_cpus_per_replay_shard: float
    prefetch_batches: int
    max_requests_in_flight_per_worker: int
    max_requests_in_flight_per_env_runner: int
    error_buffer: int | None

class _AsyncSamplesConfig(TypedDict, total=False):
    train_batch_size: int | None
    train_batch_size_per_learner: int | None
    max_rollout_lag: int | None
    max_requests_in_flight_per_worker: int
    max_requests_in_flight_per_env_runner: int

class _DecentralizedAllReduceConfig(TypedDict, total=False):
    backend: Literal["auto", "socket", "gloo", "nccl"]
    keep_local_weights_in_sync: bool
    fraction_workers: float
    fraction_samples: float
    allreduce_timeout_s: float

class _SyncReplayConfig(TypedDict, total=False):
    save_replay_buffer: bool
    store_buffer_in_checkpoints: bool
    replay_unit: Literal["transition", "sequence"]
    sequence_length: int | None
    replay_sequence_length: int | None
    burn_in: int
    replay_burn_in: int

class _SyncSamplesConfig(TypedDict, total=False):
    train_batch_size: int | None
    train_batch_size_per_learner: int | None
    fraction_workers: float
    fraction_samples: float

class _TrainerConfig(TypedDict, total=False):
    min_sample_timesteps_per_iteration: int
    min_sample_timesteps_per_reporting: int
    timesteps_per_iteration: int
    min_time_s_per_iteration: float
    min_iter_time_s: float
    min_time_s_per_reporting: float
    num_cpus_for_driver: float
    num_cpus_for_main_process: float
    num_gpus: float
    num_gpus_per_learner: float
    evaluation_interval: int | None
    evaluation_duration: int
    evaluation_num_workers: int
    evaluation_num_env_runners: int
    evaluation_config: EvaluationOptions
    callbacks: Any

class _TraceConfig(TypedDict, total=False):
    trace: bool
    trace_first_step: int
    trace_num_steps: int

class _RecordingConfig(TypedDict, total=False):
    record_arrivals: bool
    record_restarts: bool

class AnyOptions(PluginOptions, total=False):
    preset: str | type[_Trainer] | Mapping[str, Any]
    env: Any
    env_config: Mapping[str, Any]
    num_workers: int
    num_env_runners: int
    num_rollout_workers: int
    min_workers: int | None
    num_workers_below: int
    collection: Literal["sync", "overlapped", "async"]
    fraction_workers_below: float
    fraction_samples_below: float
    compress_data: Literal["none", "fp16", "bf16", "lz4"]
    compress_gradients: Literal["none", "fp16", "bf16", "topk"]
    topk_share: float
    num_envs_per_worker: int
    num_envs_per_env_runner: int
    rollout_fragment_length: int
    sample_batch_size: int
    vectorization_mode: Literal["sync", "async", "vector_entry_point"] | None
    gym_env_vectorize_mode: Literal["sync", "async", "vector_entry_point"] | None
    autoreset_mode: Literal["next_step", "same_step", "disabled"] | None
    max_frames_per_traj: int | None
    clip_raw_rewards: Literal["sign"] | float | None
    num_cpus_per_worker: float
    num_cpus_per_env_runner: float
    num_gpus_per_worker: float
    num_gpus_per_env_runner: float
    custom_resources_per_worker: Mapping[str, float]
    custom_resources_per_env_runner: Mapping[str, float]
    memory_per_worker: int
    transport: Literal["ray", "socket", "auto"]
    worker_timeout_s: float
    worker_startup_timeout_s: float
    max_consecutive_failures: int
    max_consecutive_env_faults: int
    max_consecutive_non_finite: int
    seed: int | None
    policies: Mapping[str, Mapping[str, Any]] | None
    policy_mapping_fn: Any
    policies_to_train: Sequence[str] | None
    count_steps_by: Literal["env_steps", "agent_steps"]
    lr: float | Sequence[Sequence[int | float]]
    lr_schedule: float | Sequence[Sequence[int | float]]
    torch_optimizer: Literal["adam", "rmsprop"]
    adam_beta1: float
    adam_epsilon: float
    rmsprop_alpha: float
    rmsprop_epsilon: float
    grad_clip: float | None
    fast_cpu: bool
    normalize_actions: bool
    clip_actions: bool
    model: ModelOptions
    normalize_observations: bool
    clip_observations: float
    gamma: float
    lambda_: float
    num_sgd_iter: int
    num_epochs: int
    sgd_minibatch_size: int | None
    minibatch_size: int | None
    microbatch_size: int | None
    normalize_rewards: bool
    clip_rewards: float
    vf_loss_coeff: float
    entropy_coeff: float | Sequence[Sequence[int | float]]
    entropy_coeff_schedule: float | Sequence[Sequence[int | float]]
    standardize_advantages: bool
    use_critic: bool
    clip_param: float
    vf_clip_param: float | None
    vf_clip_range: float | None
    kl_coeff: float
    kl_target: float
    kl_stop: float | None
    vtrace_clip_rho_threshold: float
    vtrace_clip_pg_rho_threshold: float
    target_network_update_freq: int
    n_step: int | Sequence[int]
    tau: float
    target_network_update_timesteps: int | None
    random_timesteps: int
    fast_gpu: bool
    actor_lr: float | Sequence[Sequence[int | float]] | None
    critic_lr: float | Sequence[Sequence[int | float]] | None
    alpha_lr: float | Sequence[Sequence[int | float]] | None
    initial_alpha: float
    target_entropy: float | Literal["auto"] | None
    policy_delay: int
    epsilon: float | Sequence[Sequence[int | float]]
    per_worker_epsilon: bool
    double_q: bool
    dueling: bool
    td_error_loss_fn: Literal["huber", "mse"]
    exploration_noise: float | Sequence[Sequence[int | float]]
    target_noise: float
    target_noise_clip: float
    grads_per_step: int
    max_requests_in_flight_per_worker: int
    max_requests_in_flight_per_env_runner: int
    max_policy_lag: int | None
    stale_gradients: Literal["drop", "scale"]
    buffer_size: int
    learning_starts: int
    num_steps_sampled_before_learning_starts: int
    train_batch_size: int | None
    train_batch_size_per_learner: int | None
    training_intensity: float
    prioritized_replay: bool
    prioritized_replay_alpha: float
    prioritized_replay_beta: float
    final_prioritized_replay_beta: float
    prioritized_replay_beta_annealing_timesteps: int
    prioritized_replay_eps: float
    num_replay_shards: int
    num_replay_buffer_shards: int
    num_cpus_per_replay_shard: float
    prefetch_batches: int
    error_buffer: int | None
    max_rollout_lag: int | None
    backend: Literal["auto", "socket", "gloo", "nccl"]
    keep_local_weights_in_sync: bool
    fraction_workers: float
    fraction_samples: float
    allreduce_timeout_s: float
    save_replay_buffer: bool
    store_buffer_in_checkpoints: bool
    replay_unit: Literal["transition", "sequence"]
    sequence_length: int | None
    replay_sequence_length: int | None
    burn_in: int
    replay_burn_in: int
    min_sample_timesteps_per_iteration: int
    min_sample_timesteps_per_reporting: int
    timesteps_per_iteration: int
    min_time_s_per_iteration: float
    min_iter_time_s: float
    min_time_s_per_reporting: float
    num_cpus_for_driver: float
    num_cpus_for_main_process: float
    num_gpus: float
    num_gpus_per_learner: float
    evaluation_interval: int | None
    evaluation_duration: int
    evaluation_num_workers: int
    evaluation_num_env_runners: int
    evaluation_config: EvaluationOptions
    callbacks: Any
    trace: bool
    trace_first_step: int
    trace_num_steps: int
    record_arrivals: bool
    record_restarts: bool

class NoSuchOption: ...
class UnknownOptions(  # type: ignore[call-arg]  # mypy does not know `extra_items`
    AnyOptions, total=False, extra_items=NoSuchOption
): ...

class PolicyOptimizerTrainer(_Trainer):
    # The second form accepts the options of plugins, which are not known here.
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[AnyOptions],
    ) -> None: ...
    @overload
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Any,
    ) -> None: ...

class A3COptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _GradientsConfig,
    _AsyncGradientsConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class A3C(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[A3COptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[A3COptions]
    ) -> Self: ...

class A2COptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _SyncSamplesConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class A2C(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[A2COptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[A2COptions]
    ) -> Self: ...

class SyncPPOOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _PPOConfig,
    _SyncSamplesConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class SyncPPO(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[SyncPPOOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[SyncPPOOptions]
    ) -> Self: ...

class DDPPOOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _PPOConfig,
    _DecentralizedAllReduceConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class DDPPO(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[DDPPOOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[DDPPOOptions]
    ) -> Self: ...

class IMPALAOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _VTraceConfig,
    _AsyncSamplesConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class IMPALA(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[IMPALAOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[IMPALAOptions]
    ) -> Self: ...

class APPOOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _ActorCriticConfig,
    _PPOConfig,
    _VTraceConfig,
    _AppoConfig,
    _AsyncSamplesConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class APPO(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[APPOOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[APPOOptions]
    ) -> Self: ...

class DQNOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _ReplayConfig,
    _EpsilonGreedyConfig,
    _DQNConfig,
    _ReplayOptions,
    _SyncReplayConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class DQN(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[DQNOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[DQNOptions]
    ) -> Self: ...

class ApexDQNOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _ReplayConfig,
    _EpsilonGreedyConfig,
    _DQNConfig,
    _ReplayOptions,
    _AsyncReplayConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class ApexDQN(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[ApexDQNOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[ApexDQNOptions]
    ) -> Self: ...

class SACOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _ReplayConfig,
    _SACConfig,
    _ReplayOptions,
    _SyncReplayConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class SAC(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[SACOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[SACOptions]
    ) -> Self: ...

class TD3Options(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _ReplayConfig,
    _TD3Config,
    _ReplayOptions,
    _SyncReplayConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class TD3(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[TD3Options],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[TD3Options]
    ) -> Self: ...

class PQNOptions(
    PluginOptions,
    _RolloutConfig,
    _PolicyConfig,
    _NormalizingConfig,
    _FragmentConfig,
    _EpsilonGreedyConfig,
    _SyncSamplesConfig,
    _TrainerConfig,
    _TraceConfig,
    _RecordingConfig,
    total=False,
): ...

class PQN(PolicyOptimizerTrainer):
    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        log_dir: _Path | None = None,
        **options: Unpack[PQNOptions],
    ) -> None: ...
    @classmethod
    def from_checkpoint(  # type: ignore[override]
        cls, checkpoint: Any, *, log_dir: _Path | None = None, **changes: Unpack[PQNOptions]
    ) -> Self: ...

@overload
def train(
    experiment: Literal["A3C"] | type[A3C],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[A3COptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["A2C"] | type[A2C],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[A2COptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["SyncPPO"] | type[SyncPPO],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[SyncPPOOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["DDPPO"] | type[DDPPO],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[DDPPOOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["IMPALA"] | type[IMPALA],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[IMPALAOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["APPO"] | type[APPO],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[APPOOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["DQN"] | type[DQN],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[DQNOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["ApexDQN"] | type[ApexDQN],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[ApexDQNOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["SAC"] | type[SAC],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[SACOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["TD3"] | type[TD3],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[TD3Options],
) -> TrainingResult: ...
@overload
def train(
    experiment: Literal["PQN"] | type[PQN],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[PQNOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: str,
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[AnyOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: None = None,
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[AnyOptions],
) -> TrainingResult: ...
@overload
def train(
    experiment: type[_Trainer],
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Any,
) -> TrainingResult: ...
@overload
def train(  # type: ignore[overload-cannot-match]
    experiment: str,
    config: Mapping[str, Any] | None = None,
    *,
    stop: Mapping[str, float] | None = None,
    log_dir: _Path | None = None,
    checkpoint_every: int = 20,
    restore: _Path | None = None,
    verbose: int = 1,
    **options: Unpack[UnknownOptions],
) -> TrainingResult: ...
