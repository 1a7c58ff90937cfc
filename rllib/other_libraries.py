"""Names of RLlib, Stable-Baselines3 and CleanRL, and the corresponding names of polopt.

Error messages and the tables of `docs/migration*.md` use the texts in this file. The texts are
Markdown. In `Option.given`, the words between backquotes are the names of options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from polopt.rllib.old_results import BLOCKS, EPISODE_KEYS, OLD_KEYS


class Option(NamedTuple):
    """Options of another library, and the corresponding options of polopt.

    Attributes:
        given: the names in the other library in backquotes, with remarks if needed.
        here: the options of polopt to use instead.
        defaults: the default in the other library's algorithm, a vertical bar, and the default in
            polopt's preset. In the table, these are two cells.
    """

    given: str
    here: str
    defaults: str = ""

    @property
    def names(self) -> list[str]:
        """The names in `given`, in the form in which a config contains them."""
        return [name.replace("-", "_") for name in re.findall(r"`-{0,2}(\w[\w-]*)", self.given)]


def _table(text: str) -> tuple[Option, ...]:
    """Returns the rows of a table. A row has the attributes of `Option` with ` :: ` between them.
    Its further lines are indented."""
    rows = text.strip().replace("\n    ", " ").splitlines()
    return tuple(Option(*row.split(" :: ")) for row in rows)


class Fixed(NamedTuple):
    """Options of another library whose value is fixed in polopt.

    Attributes:
        same: maps names to the accepted value, with which the library does the same as polopt. A
            tuple contains several accepted values. An empty tuple means that no value is accepted.
        here: what the user can do instead of giving another value.
    """

    same: Mapping[str, Any]
    here: str

    def allowed(self, name: str) -> tuple[Any, ...]:
        """Returns the values that are accepted for a name."""
        value = self.same[name]
        return value if isinstance(value, tuple) else (value,)


RLLIB = _table(
    """
`num_env_runners`, `num_envs_per_env_runner` :: `num_workers`, `num_envs_per_worker`. RLlib's
    names are also accepted :: 2 and 1 | 2 and 8
`rollout_fragment_length` :: `rollout_fragment_length`, a number :: `"auto"` | 128
`train_batch_size_per_learner` :: `train_batch_size`. RLlib's name is also accepted. None means
    one fragment of each worker :: 4000 | None
`lr` :: `lr`, a number or a schedule `[[steps, value], ...]` :: 5e-5 | 1e-3
`gamma` :: `gamma` :: 0.99 | 0.99
`use_critic` of A2C, A3C, PPO and PG :: `use_critic`. With False, `use_gae` has no effect :: True |
    True
`lambda_` :: `lambda`. The name `lambda_` is also accepted :: 1.0 | 0.95
`minibatch_size`, `num_epochs` :: `sgd_minibatch_size`, `num_sgd_iter`. RLlib's names are also
    accepted :: 128 and 30 | 128 and 10
`clip_param` :: `clip_param` :: 0.3 | 0.2
`vf_loss_coeff`, which multiplies the mean squared error, but in IMPALA and APPO half of this
    error :: `vf_loss_coeff`. The same as in RLlib for PPO, IMPALA and APPO. For A2C and A3C, it
    multiplies half the mean squared error :: 1.0 | 0.25
`vf_clip_param`, at which the squared error is clipped :: `vf_clip_param`. None means that the
    error is not clipped :: 10.0 | None
`entropy_coeff` :: `entropy_coeff` :: 0.0 | 0.01
`clip_rewards`: True or a number :: `clip_raw_rewards`: `sign` or a number. The builders of
    `polopt.rllib` take RLlib's name :: None | None
`use_kl_loss` :: `kl_coeff`. 0 turns the KL loss off :: True | 0.0
`kl_coeff`, `kl_target` :: `kl_coeff`, `kl_target` :: 0.2 and 0.01 | 0.0 and 0.01
`normalize_actions` :: `normalize_actions`, which maps each dimension with two finite bounds.
    RLlib maps either all dimensions or no dimension :: True | True
`clip_actions` :: `clip_actions`, which clips actions to the bounds. Dimensions that
    `normalize_actions` maps are always clipped :: False | True
`grad_clip` :: `grad_clip`, which clips the global norm :: None | 0.5
`evaluation_interval`, `evaluation_duration` :: `evaluation_interval`, in iterations, and
    `evaluation_duration`, in episodes :: None and 10 | None and 10
`evaluation_num_env_runners` :: `evaluation_num_workers`. RLlib's name is also accepted :: 0 | 0
`evaluation_parallel_to_training` :: `evaluation_num_workers`: with 1 or more, evaluation always
    runs in parallel to training :: False | 0 workers, so not in parallel
`evaluation_config={"explore": False, "env_config": {...}}` :: `evaluation_config`, with `env`,
    `env_config`, options of sampling, and `explore`, which is False by default. See
    [docs/train.md](train.md#evaluation-while-training) :: explores | does not explore
`callbacks(...)` :: `callbacks`. The [methods and arguments](results.md#callbacks) differ from
    RLlib's. `polopt.rllib` calls RLlib's methods with RLlib's arguments
`min_sample_timesteps_per_iteration` :: `min_sample_timesteps_per_iteration`. 0 means that each
    iteration is one step of the optimizer, and is the default of `PPOConfig` and `DDPPOConfig` of
    `polopt.rllib` :: 0 | 4000
`num_gpus_per_learner` :: `num_gpus`. RLlib's name is also accepted :: 0 | 0
`gym_env_vectorize_mode` :: `vectorization_mode`. RLlib's name is also accepted :: `sync` | None,
    which means the environment's own vector implementation or else `sync`
`horizon` (RLlib 0.8) :: `max_frames_per_traj` :: None | None
`sample_timeout_s` :: `worker_timeout_s` :: 60 | 60
`max_num_env_runner_restarts`, which limits all restarts together :: `max_consecutive_failures`,
    which limits failures without a success in between :: 1000 | 10
`DefaultModelConfig(fcnet_hiddens, ...)` :: `model`: `fcnet_hiddens`, `fcnet_activation`,
    `conv_filters`, `vf_share_layers` :: (256, 256) | (64, 64)
`head_fcnet_hiddens` :: `model`: `post_fcnet_hiddens`, the layers after the convolutions :: () |
    None
`use_lstm`, `lstm_cell_size` :: the same keys of `model`. See [docs/memory.md](memory.md) :: False
    and 256 | False and 256
`max_seq_len` :: polopt has no such option: a sequence is a fragment of `rollout_fragment_length`
    steps :: 20 | 128
`custom_model`, `custom_model_config` of the old API stack :: the same keys of `model`, or
    `custom` and `custom_options`. The class is a `torch.nn.Module` with the
    [arguments](networks.md#a-network-of-your-own) that polopt passes. `polopt.rllib` also takes a
    `TorchModelV2`
`Dict` with `action_mask` and `observations`, and an `RLModule` that applies the mask :: the same
    observation space. polopt applies the mask itself. See
    [docs/networks.md](networks.md#action-masks)
`policies`: names, or a dict from names to `PolicySpec` :: `policies`: names, or a dict from names
    to the options that differ from those of the run. The spaces are those of the environment ::
    `default_policy` | None, which means one policy for all agents with the same spaces
`policy_mapping_fn` :: `policy_mapping_fn`, a function with any of the arguments `agent_id`,
    `episode`, `worker` and `rng`, or a dict of patterns :: maps to `default_policy` | None
`policies_to_train` :: `policies_to_train`, a list of names. A function is not possible :: None |
    None
`count_steps_by` :: `count_steps_by`. It decides what `train_batch_size` counts :: `env_steps` |
    `env_steps`
`MultiRLModuleSpec`, `algorithm_config_overrides_per_module` :: `policies={"prey": {"model":
    {...}, "lr": 1e-3}}`. `polopt.rllib` accepts RLlib's names
"""
)

#: Options of RLlib's DQN and SAC.
RLLIB_REPLAY = _table(
    """
`replay_buffer_config`: `capacity`, `alpha`, `beta` :: `buffer_size`, `prioritized_replay_alpha`
    and `prioritized_replay_beta`. RLlib's beta is constant, so set
    `final_prioritized_replay_beta` to the same value. If the type of RLlib's buffer contains
    `Prioritized`, set `prioritized_replay=True`. `DQNConfig` and `SACConfig` of `polopt.rllib`
    accept the dict :: 50000, 0.6 and 0.4, prioritized | 50000, 0.6 and 0.4, not prioritized
`num_steps_sampled_before_learning_starts` :: `learning_starts`, the number of rows that must be
    in the buffer. RLlib's name is also accepted :: 1000 | 1000
`train_batch_size_per_learner` :: `train_batch_size`. RLlib's name is also accepted :: 32 | 32
`replay_sequence_length`, `replay_burn_in` :: `sequence_length`, `burn_in` of `sync_replay` with
    `replay_unit`: `sequence`. RLlib's names are also accepted :: 1 and 0 | None and 0
`training_intensity`. None means one batch after each round of sampling :: `training_intensity`,
    the number of learned rows per environment step of all workers. The builders of `polopt.rllib`
    compute it for None :: None | 8.0
`n_step`, a number or a range, `double_q`, `dueling`, `td_error_loss_fn` :: the same: `n_step`,
    `double_q`, `dueling`, `td_error_loss_fn` :: 1, True, True and huber | the same
`hiddens` :: `fcnet_hiddens` of `model`, which lists all hidden layers. `DQNConfig` of
    `polopt.rllib` takes `hiddens` :: (256,) | (64, 64)
`epsilon`, or in the old API stack `exploration_config` with `initial_epsilon`, `final_epsilon`
    and `epsilon_timesteps` :: `epsilon` of the policies `dqn` and `pqn`, a number or a schedule
    `[[steps, value], ...]` over the environment steps of all workers :: [[0, 1.0], [10000, 0.05]]
    | the same
`target_network_update_freq`, in environment steps. 0 means every update ::
    `target_network_update_timesteps`, in environment steps. polopt's own
    `target_network_update_freq` counts updates, and 1 means every update. `DQNConfig`,
    `SACConfig` and `ApexDQNConfig` of `polopt.rllib` take RLlib's name in environment steps ::
    500; SAC: 0 | 250 updates; SAC: 1 update
`tau` :: `tau` :: 1.0; SAC: 0.005 | 1.0; SAC: 0.005
SAC: `actor_lr`, `critic_lr`, `alpha_lr` :: `actor_lr`, `critic_lr`, `alpha_lr`. None means the
    value of `lr` :: 3e-5, 3e-4 and 3e-4 | 3e-4 each
SAC: `initial_alpha`, `target_entropy` :: the same: `initial_alpha`, `target_entropy` :: 1.0 and
    auto | 1.0 and auto
SAC: `q_model_config`, `policy_model_config` :: `model`, for the actor and the critics :: (256,
    256) with relu | (256, 256) with relu
`store_buffer_in_checkpoints` :: `save_replay_buffer`. RLlib's name is also accepted :: False |
    False
"""
)

_NO_OFFLINE = "polopt has no offline data"
_NO_RAINBOW = "`dqn` has only double Q-learning, a dueling network, n-step returns and priorities"
_IN_DRIVER = "the driver learns. With the optimizer `decentralized_allreduce`, all workers learn"
_CALLBACKS = "`callbacks`, a class with methods such as `on_episode_end` and `on_train_result`"
_WRAP = "wrap the environment"
_CONNECTORS = (
    f"polopt has no connectors: {_WRAP} (see [docs/wrappers.md](wrappers.md)), or write a policy"
)
_RESTARTS = (
    "polopt always replaces workers that fail. The limits are `max_consecutive_failures`, "
    "`worker_timeout_s` and `worker_startup_timeout_s`"
)
_OWN_NETWORK = "use a network of your own: `model` with `custom`"

#: Options of RLlib 2.60 and earlier releases that have a fixed value in polopt.
RLLIB_FIXED = (
    Fixed(
        {"framework": "torch", "use_pytorch": True, "use_torch": True, "eager": False}
        | {"eager_tracing": (True, False), "eager_max_retraces": (), "tf_session_args": {}}
        | {"local_tf_session_args": {}, "enable_tf1_exec_eagerly": False},
        "polopt uses PyTorch",
    ),
    Fixed(
        {"explore": (True, None), "exploration_config": ({}, {"type": "StochasticSampling"})},
        'training always explores. For evaluation, use `evaluation_config={"explore": ...}`',
    ),
    Fixed(
        {"use_gae": True},
        "policies such as `ppo` and `a3c` compute advantages by GAE. With `lambda` of 1, an "
        "advantage is the return minus the value. With `use_critic` of False, it is the return",
    ),
    Fixed(
        {"vtrace": ()},
        "the policies `impala` and `appo` use V-trace, and `ppo` and `a2c` use GAE",
    ),
    Fixed(
        {"num_learners": 0, "num_cpus_per_learner": "auto", "custom_resources_per_learner": {}}
        | {"num_aggregator_actors_per_learner": 0, "num_aggregation_workers": 0}
        | {"max_requests_in_flight_per_learner": ()}
        | {"max_requests_in_flight_per_aggregator_actor": (), "local_gpu_idx": 0}
        | {"torch_ddp_kwargs": {}, "num_multi_gpu_tower_stacks": 1, "num_gpu_loader_threads": ()}
        | {"learner_queue_size": (), "learner_queue_timeout": ()}
        | {"max_requests_in_flight_per_aggregator_worker": ()}
        | {"simple_optimizer": (True, False), "sample_async": False},
        _IN_DRIVER,
    ),
    Fixed(
        {"batch_mode": "truncate_episodes", "soft_horizon": False, "no_done_at_end": False},
        "fragments have `rollout_fragment_length` steps. If a fragment ends within an episode, "
        "returns use a bootstrap value",
    ),
    Fixed(
        {"observation_filter": "NoFilter", "synchronize_filters": (True, False)}
        | {"use_worker_filter_stats": True, "update_worker_filter_stats": True}
        | {"sync_filters_on_rollout_workers_timeout_s": ()},
        "`normalize_observations=True`, which uses the running mean and standard deviation of all "
        "workers",
    ),
    Fixed(
        {"evaluation_duration_unit": "episodes", "evaluation_num_episodes": ()}
        | {"evaluation_auto_duration_min_env_steps_per_sample": ()}
        | {"evaluation_auto_duration_max_env_steps_per_sample": ()},
        "evaluation plays `evaluation_duration` whole episodes",
    ),
    Fixed(
        {"evaluation_force_reset_envs_before_iteration": True, "custom_eval_function": None}
        | {
            "custom_evaluation_function": None,
            "custom_async_evaluation_function": None,
            "enable_async_evaluation": False,
        }
        | {"always_attach_evaluation_results": True, "evaluation_sample_timeout_s": ()}
        | {"evaluation_unhealthy_workers_timeout_s": ()}
        | {"evaluation_error_after_n_consecutive_skips": None, "in_evaluation": False},
        "the options of evaluation are `evaluation_interval`, `evaluation_duration`, "
        "`evaluation_num_workers`, `evaluation_config` and `worker_timeout_s`",
    ),
    Fixed(
        {"restart_failed_env_runners": True, "recreate_failed_workers": True}
        | {"recreate_failed_env_runners": True, "ignore_env_runner_failures": False}
        | {"ignore_worker_failures": False, "delay_between_env_runner_restarts_s": ()}
        | {"num_consecutive_env_runner_failures_tolerance": ()}
        | {"num_consecutive_worker_failures_tolerance": ()}
        | {"env_runner_health_probe_timeout_s": (), "env_runner_restore_timeout_s": ()}
        | {"worker_health_probe_timeout_s": (), "worker_restore_timeout_s": ()}
        | {"validate_env_runners_after_construction": True}
        | {"validate_workers_after_construction": True},
        _RESTARTS,
    ),
    Fixed(
        {"restart_failed_sub_environments": True},
        "polopt always replaces an environment that raises. The limit is "
        "`max_consecutive_env_faults`",
    ),
    Fixed(
        {"compress_observations": False},
        "`compress_data`, which names a codec: `none`, `fp16`, `bf16` or `lz4`",
    ),
    Fixed(
        {"actions_in_input_normalized": False},
        "batches contain the actions that the policy chose, before `normalize_actions` maps them",
    ),
    Fixed(
        {"grad_clip_by": "global_norm", "shuffle_batch_per_epoch": True}
        | {"shuffle_sequences": True}
        | {"torch_skip_nan_gradients": True, "_separate_vf_optimizer": False, "_lr_vf": ()}
        | {"minibatch_buffer_size": 1, "log_gradients": (True, False)},
        "policies use `lr` (SAC and TD3 have `actor_lr` and `critic_lr`), clip the global norm at "
        "`grad_clip`, and shuffle minibatches. A policy of your own can do this differently",
    ),
    Fixed(
        {"opt_type": (), "decay": (), "momentum": ()},
        "`torch_optimizer`, `rmsprop_alpha`, `rmsprop_epsilon`, `adam_epsilon`",
    ),
    Fixed(
        {"torch_compile_learner": False, "torch_compile_worker": False}
        | {"torch_compile_learner_what_to_compile": (), "torch_compile_learner_dynamo_mode": ()}
        | {"torch_compile_learner_dynamo_backend": (), "torch_compile_worker_dynamo_mode": ()}
        | {"torch_compile_worker_dynamo_backend": (), "_torch_grad_scaler_class": None}
        | {"_torch_lr_scheduler_classes": None},
        "polopt does not compile networks. For small networks on the CPU, `fast_cpu` computes "
        "outputs and gradients in NumPy instead of torch. On a GPU, `fast_gpu` records the "
        "gradients of DQN, SAC and TD3 as CUDA graphs",
    ),
    Fixed(
        {"multiagent": {}, "algorithm_config_overrides_per_module": {}}
        | {"_per_module_overrides": {}},
        "`policies`, `policy_mapping_fn`, `policies_to_train` and `count_steps_by`. The dict "
        "`policies` has the options of each policy",
    ),
    Fixed({"observation_fn": None}, f"to change what agents observe, {_WRAP}"),
    Fixed(
        {"policy_map_capacity": (), "policy_map_cache": (), "policy_states_are_swappable": False},
        "polopt keeps all policies in memory",
    ),
    Fixed(
        {"input": "sampler", "input_config": {}, "input_evaluation": (), "postprocess_inputs": ()}
        | {"input_filesystem": None, "input_filesystem_kwargs": {}, "input_read_batch_size": None}
        | {"input_read_episodes": False, "input_read_sample_batches": False}
        | {"input_read_method": (), "input_read_method_kwargs": {}, "input_read_schema": {}}
        | {"input_compress_columns": (), "input_spaces_jsonable": ()}
        | {"ignore_final_observation": False, "iter_batches_kwargs": {}, "map_batches_kwargs": {}}
        | {"materialize_data": False, "materialize_mapped_data": (), "offline_data_class": None}
        | {"prelearner_buffer_class": None, "prelearner_buffer_kwargs": {}}
        | {"prelearner_class": None, "prelearner_module_synch_period": ()}
        | {"prelearner_use_recorded_module_states": False, "shuffle_buffer_size": 0}
        | {"dataset_num_iters_per_learner": None, "dataset_num_iters_per_eval_runner": ()}
        | {"episodes_to_numpy": (), "off_policy_estimation_methods": {}, "offline_sampling": False}
        | {"ope_split_batch_by_episode": (), "num_offline_eval_runners": 0}
        | {"offline_evaluation_interval": None, "offline_evaluation_duration": ()}
        | {"offline_evaluation_parallel_to_training": False, "offline_evaluation_type": ()}
        | {"offline_evaluation_timeout_s": (), "offline_loss_for_module_fn": None}
        | {"offline_eval_batch_size_per_runner": (), "offline_eval_runner_class": None}
        | {
            "offline_eval_rl_module_inference_only": (),
            "custom_resources_per_offline_eval_runner": {},
        }
        | {"offline_eval_runner_health_probe_timeout_s": ()}
        | {"offline_eval_runner_restore_timeout_s": (), "num_cpus_per_offline_eval_runner": ()}
        | {"num_gpus_per_offline_eval_runner": 0, "ignore_offline_eval_runner_failures": False}
        | {"max_num_offline_eval_runner_restarts": (), "restart_failed_offline_eval_runners": ()}
        | {"max_requests_in_flight_per_offline_eval_runner": ()}
        | {"broadcast_offline_eval_runner_states": False}
        | {"validate_offline_eval_runners_after_construction": ()},
        _NO_OFFLINE,
    ),
    Fixed(
        {"output": None, "output_config": {}, "output_compress_columns": ()}
        | {"output_filesystem": None, "output_filesystem_kwargs": {}, "output_max_file_size": ()}
        | {"output_max_rows_per_file": None, "output_write_episodes": (), "output_write_method": ()}
        | {"output_write_method_kwargs": {}, "output_write_remaining_data": False},
        "polopt does not write samples to files. A `Collector` returns them to your program",
    ),
    Fixed(
        {"worker_side_prioritization": False, "replay_buffer_num_slots": 0}
        | {"replay_proportion": 0.0, "min_replay_history": ()},
        "the optimizers `sync_replay` and `async_replay` have replay buffers. IMPALA does not "
        "replay samples",
    ),
    Fixed(
        {"burn_in_len": 0},
        "`burn_in` of `sync_replay` with `replay_unit`: `sequence`",
    ),
    Fixed({"before_learn_on_batch": None}, "to change batches, write a policy of your own"),
    Fixed(
        {"use_circular_buffer": False, "circular_buffer_num_batches": ()}
        | {"circular_buffer_iterations_per_batch": (), "simple_queue_size": ()},
        "APPO learns from each batch in `num_sgd_iter` consecutive epochs, and then drops it",
    ),
    Fixed(
        {"noisy": False, "sigma0": (), "num_atoms": 1, "v_min": (), "v_max": ()}
        | {"categorical_distribution_temperature": 1.0},
        _NO_RAINBOW,
    ),
    Fixed(
        {"schedule_max_timesteps": (), "exploration_fraction": ()},
        "`epsilon`, a schedule over environment steps",
    ),
    Fixed(
        {"twin_q": True, "_deterministic_loss": False, "_use_beta_distribution": False}
        | {"use_state_preprocessor": -1, "optimization": ()},
        "the policies `sac` and `td3` have two critics, and `sac` uses a squashed Gaussian. The "
        "learning rates are `actor_lr`, `critic_lr` and `alpha_lr`",
    ),
    Fixed(
        {"target_worker_clipping": (), "target_update_frequency": ()},
        "the policy `appo` copies the network to the target network after every "
        "`target_network_update_freq` updates",
    ),
    Fixed(
        {"broadcast_interval": 1},
        "a worker receives the newest weights with its next call",
    ),
    Fixed(
        {"env_runner_cls": None, "worker_cls": None, "sample_collector": (), "env_task_fn": None}
        | {"create_local_env_runner": True, "create_env_on_driver": (True, False)}
        | {"create_env_on_local_worker": (True, False), "fake_sampler": False}
        | {"_env_runners_only": False, "_skip_learners": False}
        | {"max_requests_in_flight_per_sampler_worker": ()}
        | {"max_sample_requests_in_flight_per_worker": (), "num_data_loader_buffers": ()}
        | {"broadcast_env_runner_states": True, "merge_env_runner_states": ()}
        | {"use_env_runner_state_server": False, "env_runner_state_server_max_concurrency": ()}
        | {"_dont_auto_sync_env_runner_states": False, "episode_lookback_horizon": ()}
        | {"placement_strategy": "PACK", "custom_resources_for_main_process": {}}
        | {"memory": 0, "object_store_memory": 0, "object_store_memory_per_worker": 0},
        "polopt chooses the processes of a run. To change which processes sample, write an "
        "optimizer of your own. The resources of workers are `num_cpus_per_worker`, "
        "`memory_per_worker` and `custom_resources_per_worker`",
    ),
    Fixed(
        {"remote_worker_envs": False, "remote_env_batch_wait_ms": 0},
        '`vectorization_mode="async"` runs each environment in its own process',
    ),
    Fixed(
        {"render_env": (False, None), "monitor": False, "record_env": (False, None)},
        "`polopt evaluate CHECKPOINT --video DIR`",
    ),
    Fixed(
        {"observation_space": None, "action_space": None, "action_mask_key": "action_mask"}
        | {"auto_wrap_old_gym_envs": (), "_is_atari": None}
        | {"preprocessor_pref": (None, "rllib"), "_disable_preprocessor_api": (True, False)}
        | {"_disable_action_flattening": (True, False)},
        f"polopt uses the environment's spaces. To change the spaces, {_WRAP}, for example with "
        "`gymnasium.wrappers.AtariPreprocessing`",
    ),
    Fixed(
        {"_env_to_module_connector": None, "_module_to_env_connector": None}
        | {"_learner_connector": None, "enable_connectors": (True, False)}
        | {"add_default_connectors_to_env_to_module_pipeline": True}
        | {"add_default_connectors_to_module_to_env_pipeline": True}
        | {"add_default_connectors_to_learner_pipeline": True},
        _CONNECTORS,
    ),
    Fixed(
        {"_learner_class": None, "learner_config_dict": {}, "_rl_module_spec": None}
        | {"rl_module_spec": None, "_model_config": {}, "_prior_exploration_config": ()}
        | {"_enable_rl_module_api": (), "enable_rl_module_and_learner": (True, False)}
        | {"enable_env_runner_and_connector_v2": (True, False), "_enable_learner_api": ()}
        | {"_disable_initialize_loss_from_dummy_batch": (True, False)}
        | {"_disable_execution_plan_api": (), "_tf_policy_handles_more_than_one_loss": ()},
        "to change the loss, write a policy of your own. To change the network, use `model`",
    ),
    Fixed(
        {"callbacks_on_algorithm_init": None, "callbacks_on_checkpoint_loaded": None}
        | {"callbacks_on_env_runners_recreated": None, "callbacks_on_environment_created": None}
        | {"callbacks_on_episode_created": None, "callbacks_on_episode_start": None}
        | {"callbacks_on_episode_step": None, "callbacks_on_episode_end": None}
        | {"callbacks_on_evaluate_start": None, "callbacks_on_evaluate_end": None}
        | {"callbacks_on_evaluate_offline_start": None, "callbacks_on_evaluate_offline_end": None}
        | {"callbacks_on_offline_eval_runners_recreated": None, "callbacks_on_sample_end": None}
        | {"callbacks_on_train_result": None, "callbacks_class": None},
        _CALLBACKS,
    ),
    Fixed(
        {"min_train_timesteps_per_iteration": 0, "min_train_timesteps_per_reporting": 0},
        "`min_sample_timesteps_per_iteration` or `min_time_s_per_iteration`",
    ),
    Fixed(
        {"metrics_num_episodes_for_smoothing": 100, "metrics_smoothing_episodes": (100, None)}
        | {"metrics_episode_collection_timeout_s": (), "collect_metrics_timeout": ()}
        | {"keep_per_episode_custom_metrics": False, "stats_cls_lookup": ()}
        | {"log_sys_usage": (True, False), "sampler_perf_stats_ema_coef": None, "log_level": "WARN"}
        | {"logger_config": None, "logger_creator": None},
        "the content of results and logs is fixed, for example mean returns over the last 100 "
        "episodes. [docs/results.md](results.md) lists all keys of results",
    ),
    Fixed(
        {"vtrace_drop_last_ts": (True, False), "after_train_step": ()}
        | {"_enable_new_api_stack": (True, False), "dataset_num_iters_per_offline_eval_runner": ()},
        "to change how a policy learns from a batch, write a policy of your own",
    ),
    Fixed(
        {"torch_distributed_backend": ("gloo", "nccl")},
        "the workers of `decentralized_allreduce` sum their gradients over sockets, gloo or NCCL. "
        "The result `optimizer/allreduce_backend` says which of these a run uses",
    ),
    Fixed(
        {"timeout_s_aggregator_manager": (), "timeout_s_sampler_manager": ()}
        | {"timeout_s_replay_manager": ()},
        "a call fails after `worker_timeout_s` seconds without progress",
    ),
    Fixed(
        {"optimization_config": ()},
        "the learning rates of SAC are `actor_lr`, `critic_lr` and `alpha_lr`",
    ),
    Fixed({"replay_mode": "independent"}, "each policy replays its own rows"),
    Fixed(
        {"export_native_model_files": False, "checkpoint_trainable_policies_only": False}
        | {"_use_msgpack_checkpoints": (True, False), "_is_online": True, "_fake_gpus": False},
        "`trainer.save(path)` writes a checkpoint, and `polopt export` writes an ONNX model",
    ),
    Fixed(
        {"_validate_config": True, "disable_env_checking": False},
        "polopt always checks the config and the environment",
    ),
    Fixed(
        {"extra_python_environs_for_driver": {}, "extra_python_environs_for_worker": {}},
        'start Ray with `ray.init(runtime_env={"env_vars": {...}})`',
    ),
)

#: Options of RLlib that the builders of `polopt.rllib` ignore without a word.
RLLIB_SILENT = frozenset((
    "_disable_execution_plan_api", "_enable_learner_api", "_enable_rl_module_api",
    "_tf_policy_handles_more_than_one_loss", "_use_trajectory_view_api", "collect_metrics_timeout",
    "use_exec_api", "use_state_preprocessor", "uses_new_env_runners",
))  # fmt: skip
#: Options of RLlib that change nothing or little of what a run learns, for example its speed, its
#: reports or its failure handling. If a value is not accepted, the builders log a warning and
#: ignore the option.
# fmt: off
RLLIB_IGNORED = frozenset((
    "action_space", "batch_mode", "eager", "eager_max_retraces", "eager_tracing", "explore",
    "framework", "local_tf_session_args", "metrics_smoothing_episodes", "monitor",
    "no_done_at_end", "no_eager_on_workers", "observation_space", "preprocessor_pref",
    "record_env", "render_env", "sample_collector", "straggler_mitigation", "tf_session_args",
    "_evaluation_parallel_to_training_wo_thread", "_fake_gpus",
    "_run_training_always_in_thread", "_use_msgpack_checkpoints", "_validate_config",
    "always_attach_evaluation_results", "auto_wrap_old_gym_envs",
    "broadcast_env_runner_states", "broadcast_interval", "checkpoint_trainable_policies_only",
    "compress_observations", "create_local_env_runner", "custom_resources_per_learner",
    "custom_stats_cls_lookup", "delay_between_env_runner_restarts_s",
    "delay_between_worker_restarts_s", "disable_env_checking", "enable_async_evaluation",
    "env_runner_health_probe_timeout_s", "env_runner_restore_timeout_s",
    "env_runner_state_server_max_concurrency", "episodes_to_numpy",
    "evaluation_auto_duration_max_env_steps_per_sample",
    "evaluation_auto_duration_min_env_steps_per_sample",
    "evaluation_error_after_n_consecutive_skips",
    "evaluation_force_reset_envs_before_iteration", "evaluation_sample_timeout_s",
    "evaluation_unhealthy_workers_timeout_s", "export_native_model_files",
    "ignore_env_runner_failures", "ignore_worker_failures", "keep_per_episode_custom_metrics",
    "learner_queue_size", "learner_queue_timeout", "local_gpu_idx", "log_gradients",
    "log_level", "log_sys_usage", "logger_config", "logger_creator",
    "max_num_env_runner_restarts", "max_num_worker_restarts",
    "max_requests_in_flight_per_aggregator_actor",
    "max_requests_in_flight_per_aggregator_worker", "max_requests_in_flight_per_env_runner",
    "max_requests_in_flight_per_learner", "max_requests_in_flight_per_replay_worker",
    "max_requests_in_flight_per_sampler_worker", "max_sample_requests_in_flight_per_worker",
    "merge_env_runner_states", "metrics_episode_collection_timeout_s",
    "metrics_num_episodes_for_smoothing", "min_train_timesteps_per_iteration",
    "num_aggregation_workers", "num_aggregator_actors_per_learner",
    "num_consecutive_env_runner_failures_tolerance",
    "num_consecutive_worker_failures_tolerance", "num_cpus_per_learner",
    "num_data_loader_buffers", "num_gpu_loader_threads", "num_learners",
    "num_multi_gpu_tower_stacks", "placement_strategy", "policy_map_cache",
    "policy_map_capacity", "policy_states_are_swappable", "recreate_failed_env_runners",
    "recreate_failed_workers", "restart_failed_env_runners",
    "restart_failed_sub_environments", "sample_async", "sampler_perf_stats_ema_coef",
    "simple_optimizer", "stats_cls_lookup", "sync_filters_on_rollout_workers_timeout_s",
    "synchronize_filters", "timeout_s_aggregator_manager", "timeout_s_replay_manager",
    "timeout_s_sampler_manager", "torch_compile_learner",
    "torch_compile_learner_dynamo_backend", "torch_compile_learner_dynamo_mode",
    "torch_compile_learner_what_to_compile", "torch_compile_worker",
    "torch_compile_worker_dynamo_backend", "torch_compile_worker_dynamo_mode",
    "torch_ddp_kwargs", "torch_distributed_backend", "update_worker_filter_stats",
    "use_env_runner_state_server", "use_worker_filter_stats",
    "validate_env_runners_after_construction", "validate_workers_after_construction",
    "worker_health_probe_timeout_s", "worker_restore_timeout_s",
))
# fmt: on

#: Keys of RLlib's `model` that have a fixed value in polopt.
RLLIB_MODEL_FIXED = (
    Fixed(
        {"fcnet_weights_initializer": None, "fcnet_weights_initializer_config": None}
        | {"fcnet_kernel_initializer": None, "fcnet_kernel_initializer_kwargs": None}
        | {"fcnet_bias_initializer": None, "fcnet_bias_initializer_config": None}
        | {"fcnet_bias_initializer_kwargs": None}
        | {"conv_kernel_initializer": None, "conv_kernel_initializer_config": None}
        | {"conv_kernel_initializer_kwargs": None, "conv_bias_initializer": None}
        | {"conv_bias_initializer_config": None, "conv_bias_initializer_kwargs": None}
        | {"conv_transpose_kernel_initializer": None, "conv_transpose_bias_initializer": None}
        | {"conv_transpose_kernel_initializer_config": None}
        | {"conv_transpose_bias_initializer_config": None}
        | {"post_fcnet_weights_initializer": None, "post_fcnet_weights_initializer_config": None}
        | {"post_fcnet_bias_initializer": None, "post_fcnet_bias_initializer_config": None}
        | {"head_fcnet_kernel_initializer": None, "head_fcnet_kernel_initializer_kwargs": None}
        | {"head_fcnet_bias_initializer": None, "head_fcnet_bias_initializer_kwargs": None}
        | {"lstm_weights_initializer": None}
        | {"lstm_weights_initializer_config": None, "lstm_kernel_initializer": None}
        | {"lstm_kernel_initializer_kwargs": None, "lstm_bias_initializer": None}
        | {"lstm_bias_initializer_config": None, "lstm_bias_initializer_kwargs": None}
        | {"fusionnet_hiddens": (), "fusionnet_activation": ()}
        | {"fusionnet_kernel_initializer": None, "fusionnet_kernel_initializer_kwargs": None}
        | {"fusionnet_bias_initializer": None, "fusionnet_bias_initializer_kwargs": None}
        | {"encoder_latent_dim": None, "no_final_linear": False},
        _OWN_NETWORK,
    ),
    Fixed(
        {"fcnet_use_layernorm": False, "head_fcnet_use_layernorm": False},
        "`layer_norm` of `model` adds layer normalisation before each activation",
    ),
    Fixed(
        {"conv_activation": "relu", "post_fcnet_activation": "relu"}
        | {"head_fcnet_activation": "relu"},
        "convolutions and the layers after them always use ReLU. For another activation, "
        f"{_OWN_NETWORK}",
    ),
    Fixed(
        {"lstm_use_prev_action": False, "lstm_use_prev_reward": False, "_time_major": False}
        | {"lstm_use_prev_action_reward": False, "use_attention": False}
        | {"attention_num_transformer_units": (), "attention_dim": (), "attention_num_heads": ()}
        | {"attention_head_dim": (), "attention_memory_inference": ()}
        | {"attention_memory_training": (), "attention_position_wise_mlp_dim": ()}
        | {"attention_init_gru_gate_bias": (), "attention_use_n_prev_actions": 0}
        | {"attention_use_n_prev_rewards": 0},
        "`use_lstm` is the only kind of memory, and does not read previous actions or rewards. For "
        f"another kind, {_OWN_NETWORK}",
    ),
    Fixed(
        {"framestack": False, "dim": (), "grayscale": False, "zero_mean": False},
        f"{_WRAP}, for example with `gymnasium.wrappers.AtariPreprocessing` and "
        "`FrameStackObservation`",
    ),
    Fixed(
        {"log_std_clip_param": (), "custom_action_dist": None},
        "`initial_log_std` sets the initial log standard deviation. For a distribution of your "
        "own, write a policy of your own",
    ),
    Fixed(
        {"custom_preprocessor": None, "always_check_shapes": False}
        | {"_use_default_native_models": (), "_disable_preprocessor_api": (True, False)}
        | {"_disable_action_flattening": (True, False)},
        f"polopt encodes the environment's spaces. To change the spaces, {_WRAP}",
    ),
)

#: The values that `RLLIB_FIXED` and `RLLIB_MODEL_FIXED` accept for each option.
FIXED = {name: row.allowed(name) for row in RLLIB_FIXED for name in row.same}
MODEL_FIXED = {name: row.allowed(name) for row in RLLIB_MODEL_FIXED for name in row.same}

_LOGS = "Tune's loggers and `polopt dashboard`"
_STOP = (
    "`stop.num_env_steps_sampled_lifetime` of `polopt train`, Tune's `stop`, or a loop over "
    "`trainer.train()`"
)

STABLE_BASELINES3 = _table(
    """
`MlpPolicy`, `CnnPolicy`, `MultiInputPolicy`, `MlpLstmPolicy`, `CnnLstmPolicy` :: polopt has no
    such option: the preset is the algorithm, and `model` and the observation space determine the
    network. For `MlpPolicy` on images: `conv_filters=[]` of `model`
`n_envs` of `make_vec_env` :: `num_envs_per_worker`, times `num_workers` if `num_workers` is not 0
    :: 1 | 8 times 2
`n_steps` :: `rollout_fragment_length` :: 2048 | 128
`batch_size` :: `sgd_minibatch_size`. For DQN, SAC and TD3: `train_batch_size` :: 64 | 128
`n_epochs` :: `num_sgd_iter` :: 10 | 10
`learning_rate`, a number or a function of the remaining share of the run :: `lr`, a number or
    `[[steps, value], ...]` :: 3e-4 | 1e-3
`gamma` :: `gamma` :: 0.99 | 0.99
`gae_lambda` :: `lambda` :: 0.95 | 0.95
`clip_range` :: `clip_param` :: 0.2 | 0.2
`clip_range_vf` :: `vf_clip_range` :: None | None
`ent_coef` :: `entropy_coeff` :: 0.0 | 0.01
`vf_coef`, which multiplies the mean squared error :: `vf_loss_coeff`. In A2C, it multiplies half
    the mean squared error, so double the number :: 0.5 | 0.25
`max_grad_norm` :: `grad_clip` :: 0.5 | 0.5
`normalize_advantage`, within each minibatch :: `standardize_advantages`, within the whole batch
    :: True | True
`target_kl`: learning stops within an epoch, when the KL of a minibatch exceeds 1.5 times the
    number :: `kl_stop`: learning stops after an epoch, when the mean KL of the epoch exceeds the
    number :: None | None
`total_timesteps` of `learn` :: `stop.num_env_steps_sampled_lifetime` of `polopt train`, Tune's
    `stop`, or a loop over `trainer.train()`
`reset_num_timesteps` of `learn` :: polopt has no such option: after `trainer.restore(path)`, the
    counts continue
`policy_kwargs` :: `model`
`net_arch`, a list or `dict(pi=[...], vf=[...])` with the same layers :: `fcnet_hiddens` of
    `model`. For different layers, write a [network](networks.md#a-network-of-your-own) :: (64,
    64) | (64, 64)
`activation_fn` :: `fcnet_activation` of `model` :: `Tanh` | `tanh`
`log_std_init` :: `initial_log_std` of `model` :: 0.0 | 0.0
`squash_output` :: `squash_actions` of `model` :: False | False
`share_features_extractor` :: `vf_share_layers` of `model` :: True | None, which means True for
    images and otherwise False
`features_extractor_class`, `features_extractor_kwargs` :: `custom` and `custom_options` of
    `model`, which replace the [whole
    network](networks.md#a-features-extractor-of-stable-baselines3)
`ortho_init` :: polopt has no such option: the weights of built-in networks are orthogonal. A
    `custom` network [initialises itself](networks.md#a-features-extractor-of-stable-baselines3)
    :: True | True for built-in networks
`optimizer_class`, `optimizer_kwargs` :: `torch_optimizer`, with `adam_epsilon`, `rmsprop_alpha`
    and `rmsprop_epsilon` :: `Adam` | `adam`
`normalize_images` :: polopt has no such option: uint8 images are always scaled to [0, 1] :: True
    | always True
`n_lstm_layers`, `shared_lstm`, `enable_critic_lstm` :: polopt has no such option: `use_lstm` of
    `model` adds one LSTM layer between hidden layers and heads :: 1, False and True |
`lstm_hidden_size` :: `use_lstm` and `lstm_cell_size` of `model` :: 256 | 256
`VecNormalize`: `norm_obs`, `clip_obs` :: `normalize_observations`, `clip_observations` :: True
    and 10.0 | False and 10.0
`VecNormalize`: `norm_reward`, `clip_reward` :: `normalize_rewards`, `clip_rewards`. Instead of
    the `gamma` of `VecNormalize`, polopt uses the policy's `gamma`. See
    [docs/normalization.md](normalization.md) :: True and 10.0 | False and 10.0
`MaskablePPO`: `action_masks()` of the environment :: the key `action_mask` of the `Dict`
    observation, which is True or 1 for allowed actions. `predict` reads the mask from the
    observation. A [wrapper](migration-sb3.md#masks-checkpoints-and-episodes) puts it there
`seed` :: `seed`
`device` :: `num_gpus`: 1 for `cuda`, 0 for `cpu` :: `auto` | 0
`use_sde`, `sde_sample_freq`, `use_expln`, `full_std` :: polopt has no gSDE :: False |
`rollout_buffer_class`, `rollout_buffer_kwargs` :: polopt has no such option: use `postprocess` of
    a [policy of your own](write-a-policy.md)
`tensorboard_log`, `tb_log_name`, `log_interval`, `verbose`, `progress_bar` :: Tune's loggers and
    `polopt dashboard`
`stats_window_size` :: polopt has no such option: mean returns are always over the last 100
    episodes :: 100 | always 100
`env_kwargs` of `make_vec_env` :: `env_config` :: {} | {}
`vec_env_cls`, `vec_env_kwargs` of `make_vec_env` :: `num_workers`, and within a worker
    `vectorization_mode`: `"sync"` or `"async"`
`wrapper_class`, `wrapper_kwargs`, `monitor_dir`, `monitor_kwargs` :: `env`: a function that makes
    and wraps the environment. A `Monitor` is not needed
A2C: `rms_prop_eps` :: `rmsprop_epsilon` :: 1e-5 | 1e-5
A2C: `use_rms_prop` :: `torch_optimizer="rmsprop"` :: True | `adam`
A2C: `n_steps`, `learning_rate` :: `rollout_fragment_length`, `lr` :: 5 and 7e-4 | 20 and 1e-3
`EvalCallback`: `eval_freq`, in steps of the vector environment :: `evaluation_interval`, in
    iterations :: 10000 | None
`eval_env` :: `env` and `env_config` of `evaluation_config`
`log_path` of `EvalCallback` :: polopt has no such option: the results contain the returns of
    evaluation
`deterministic` of `EvalCallback` :: `explore` of `evaluation_config`, which is the opposite ::
    True | False
`n_eval_episodes` :: `evaluation_duration` :: 5 | 10
`best_model_save_path` :: if `evaluation_interval` is set, the folder `best_checkpoint` of the run
    holds the best policy
`predict(deterministic)`, `evaluate_policy(deterministic)` :: `predict(deterministic)`, and
    `polopt evaluate`, which is deterministic without `--stochastic` :: False and True | True and
    True
`RecurrentPPO`: `predict(obs, state, episode_start)` :: `predict(obs, state)`. When an episode
    begins, set the row of its environment in `state` to 0
`CheckpointCallback`: `save_freq` :: `checkpoint_frequency` of `tune.CheckpointConfig`, in
    iterations, or `trainer.save()` in the loop
`StopTrainingOnRewardThreshold`, `StopTrainingOnMaxEpisodes` :: `stop` of `polopt train` or Tune:
    `env_runners/episode_return_mean`, `env_runners/num_episodes_lifetime`, or a condition in the
    loop
`StopTrainingOnNoModelImprovement` :: a condition in the loop, or `ExperimentPlateauStopper` of
    Tune
`PPO.load(path, env=env)`, then `learn` :: `polopt.SyncPPO.from_checkpoint(path)`, then `train()`.
    Schedules continue at the saved number of steps
`Monitor`: `filename`, `load_results`, `ts2xy` :: `log_dir` writes `progress.csv` with one row for
    each iteration. For one row for each episode, write
    [`on_episode_end`](migration-sb3.md#masks-checkpoints-and-episodes)
`model.q_net(obs)`, `policy.obs_to_tensor` :: `trainer.get_policy().action_params(obs)`, which are
    the Q-values `[B, n]` of DQN
`callback`: `_on_step`, `_on_rollout_end` :: `callbacks`: `on_episode_step`, `on_sample_end`,
    `on_train_result`
"""
)

#: Options of Stable-Baselines3's DQN, SAC and TD3.
STABLE_BASELINES3_REPLAY = _table(
    """
`buffer_size` :: `buffer_size` :: 1e6; SAC: 1e6 | 50000; SAC: 1e6
`learning_starts`, with random actions until then :: `learning_starts`, and `random_timesteps` for
    the random actions :: 100 | 1000
`train_freq`, `gradient_steps` :: `training_intensity`, the number of learned rows per environment
    step: `gradient_steps * batch_size / (train_freq * n_envs)` :: 4 and 1, an intensity of 8.0;
    SAC: 256.0 | 8.0; SAC: 256.0
`tau` :: `tau` :: 1.0; SAC: 0.005 | 1.0; SAC: 0.005
`target_update_interval`, in environment steps. SAC: in updates ::
    `target_network_update_timesteps`. SAC: `target_network_update_freq` :: 10000; SAC: 1 | 250;
    SAC: 1
`exploration_fraction`, `exploration_initial_eps`, `exploration_final_eps` :: `epsilon`, a
    schedule `[[0, 1.0], [steps, 0.05]]`, where steps is the exploration fraction times all
    environment steps of the run :: 0.1, 1.0 and 0.05 | from 1.0 to 0.05 over 10,000 steps
`ent_coef`: `auto` or a number :: `initial_alpha`. For a fixed number, also set
    `target_entropy=None`
`target_entropy` :: `target_entropy` :: auto | auto
`action_noise`: `NormalActionNoise` :: `exploration_noise` of the policy `td3`, a standard
    deviation :: None | 0.1
`policy_delay`, `target_policy_noise`, `target_noise_clip` :: `policy_delay`, `target_noise`,
    `target_noise_clip` :: 2, 0.2 and 0.5 | 2, 0.2 and 0.5
`n_steps` of DQN, SAC and TD3 :: `n_step` :: 1 | 1
`replay_buffer_class`, `replay_buffer_kwargs` :: polopt has no such option.
    `prioritized_replay=True` samples by priority
`optimize_memory_usage` :: polopt has no such option: each observation is always stored once, also
    with time limits and n-step returns :: False | always True
`use_sde_at_warmup` :: polopt has no gSDE :: False |
`model.save_replay_buffer(path)` :: `save_replay_buffer=True`, which saves the buffer in each
    checkpoint
"""
)

CLEANRL = _table(
    """
`--num-envs` :: `num_envs_per_worker`, times `num_workers` if `num_workers` is not 0 :: 4 | 8
    times 2
`--num-steps` :: `rollout_fragment_length` :: 128 | 128
`--num-minibatches`, the number of minibatches :: `sgd_minibatch_size`, the number of rows in a
    minibatch :: 4, each of 128 rows | 128
`--update-epochs` :: `num_sgd_iter` :: 4 | 10
`--learning-rate` :: `lr`, a number or `[[steps, value], ...]` :: 2.5e-4 | 1e-3
`--anneal-lr` :: `lr`, a schedule over environment steps: `[[0, 2.5e-4], [steps, 0.0]]` :: True |
    a constant number
`--gamma` :: `gamma` :: 0.99 | 0.99
`--gae-lambda` :: `lambda` :: 0.95 | 0.95
`--clip-coef` :: `clip_param` :: 0.2 | 0.2
`--clip-vloss` :: `vf_clip_range`, a number :: True, so 0.2 (`--clip-coef`) | None
`--ent-coef` :: `entropy_coeff` :: 0.01 | 0.01
`--vf-coef`, which multiplies half the mean squared error :: `vf_loss_coeff`, which multiplies the
    mean squared error, so use half the number :: 0.5 | 0.25, which is the same loss
`--max-grad-norm` :: `grad_clip` :: 0.5 | 0.5
`--norm-adv`, within each minibatch :: `standardize_advantages`, within the whole batch :: True |
    True
`--target-kl`: learning stops after an epoch, when the KL of its last minibatch exceeds the number
    :: `kl_stop`: learning stops after an epoch, when the mean KL of the epoch exceeds the number
    :: None | None
`--total-timesteps`, `--num-iterations` :: `stop.num_env_steps_sampled_lifetime` of `polopt
    train`, Tune's `stop`, or a loop over `trainer.train()` :: 500000 |
`--env-id` :: `env` :: `CartPole-v1` |
`--seed` :: `seed` :: 1 | None
`--cuda` :: `num_gpus`: 1 or 0 :: True | 0
`--torch-deterministic` :: polopt has no such option: with `seed`, synchronous optimizers repeat a
    run bit for bit, as long as no worker fails :: True |
`--exp-name` :: `tune.RunConfig(name=...)`. With `polopt train`, the name of the file
`--track`, `--wandb-project-name`, `--wandb-entity` :: Tune's `WandbLoggerCallback`. See
    [docs/monitoring.md](monitoring.md)
`--capture-video` :: `polopt evaluate CHECKPOINT --video DIR` :: False |
`--save-model` of other scripts, such as `ppo_continuous_action.py` :: `trainer.save(path)`
"""
)

_NONE = (
    "polopt has no {}. It has A2C, A3C, SyncPPO, DDPPO, IMPALA, APPO, DQN, ApexDQN, SAC, TD3 and "
    "PQN"
)
_NO_DISTRIBUTIONAL = f"{_NONE.format('distributional DQN')}. {_NO_RAINBOW}"
_NO_CRITIC = "polopt has no critic that observes all agents"
_REINFORCE = "is `A2C` with `use_critic` of False and `entropy_coeff` of 0 here"
#: Maps algorithms of the other libraries to texts about the corresponding presets.
ALGORITHMS: Mapping[str, str] = {
    "PPO": "PPO is `SyncPPO` here. `DDPPO` and `APPO` are other distributed variants of PPO",
    "PPO2": "PPO is `SyncPPO` here",
    "MaskablePPO": "MaskablePPO is `SyncPPO`, with the key `action_mask` of a `Dict` observation",
    "RecurrentPPO": 'RecurrentPPO is `SyncPPO` with `model={"use_lstm": True}`',
    "PPG": _NONE.format("PPG"),
    "DecentralizedPPO": "DD-PPO is `DDPPO` here",
    "DPPO": 'DPPO is `PolicyOptimizerTrainer` with `optimizer="sync_gradients"` and `policy="ppo"`',
    "ACKTR": _NONE.format("ACKTR"),
    "ACER": _NONE.format("ACER"),
    "TRPO": _NONE.format("TRPO"),
    "PG": f"PG {_REINFORCE}",
    "REINFORCE": f"REINFORCE {_REINFORCE}",
    "ES": _NONE.format("evolution strategies"),
    "ARS": _NONE.format("random search"),
    "DDQN": "DDQN is `DQN` here",
    "SimpleQ": "SimpleQ is `DQN` with `double_q` and `dueling` of False",
    **dict.fromkeys(("C51", "Rainbow", "QRDQN"), _NO_DISTRIBUTIONAL),
    **dict.fromkeys(("APEX", "Ape-X"), "Ape-X is `ApexDQN` here"),
    "DDPG": "DDPG is `TD3` with `policy_delay=1` and `target_noise=0.0`, and with two critics",
    **{name: _NONE.format(name) for name in ("R2D2", "ApexDDPG", "HER", "TQC", "CrossQ", "REDQ")},
    **{name: _NONE.format(name) for name in ("DreamerV3", "MuZero")},
    **dict.fromkeys(("BC", "MARWIL", "CQL", "IQL", "CRR", "DT"), _NO_OFFLINE),
    "IPPO": "IPPO is `SyncPPO` in an environment with several agents",
    "MAPPO": f"{_NO_CRITIC}. The most similar algorithm is `SyncPPO` with one policy",
    "QMIX": f"{_NO_CRITIC}. The most similar algorithm is `DQN` with one policy",
    "MADDPG": f"{_NO_CRITIC}. The most similar algorithms are `TD3` and `SAC`",
}
#: Names of RLlib's options that a config may use, in RLlib 2.60 and older releases.
OTHER_NAMES = {
    "custom_model": "custom",
    "custom_model_config": "custom_options",
    "custom_resources_per_env_runner": "custom_resources_per_worker",
    "entropy_coeff_schedule": "entropy_coeff",
    "evaluation_num_env_runners": "evaluation_num_workers",
    "gym_env_vectorize_mode": "vectorization_mode",
    "lr_schedule": "lr",
    "max_requests_in_flight_per_env_runner": "max_requests_in_flight_per_worker",
    "min_iter_time_s": "min_time_s_per_iteration",
    "min_sample_timesteps_per_reporting": "min_sample_timesteps_per_iteration",
    "min_time_s_per_reporting": "min_time_s_per_iteration",
    "minibatch_size": "sgd_minibatch_size",
    "num_cpus_for_main_process": "num_cpus_for_driver",
    "num_cpus_per_env_runner": "num_cpus_per_worker",
    "num_env_runners": "num_workers",
    "num_envs_per_env_runner": "num_envs_per_worker",
    "num_epochs": "num_sgd_iter",
    "num_gpus_per_env_runner": "num_gpus_per_worker",
    "num_gpus_per_learner": "num_gpus",
    "num_replay_buffer_shards": "num_replay_shards",
    "num_rollout_workers": "num_workers",
    "num_steps_sampled_before_learning_starts": "learning_starts",
    "replay_burn_in": "burn_in",
    "replay_sequence_length": "sequence_length",
    "sample_batch_size": "rollout_fragment_length",
    "store_buffer_in_checkpoints": "save_replay_buffer",
    "timesteps_per_iteration": "min_sample_timesteps_per_iteration",
    "train_batch_size_per_learner": "train_batch_size",
}
#: Keys of RLlib's old API stack, and the keys that replace them.
RESULT_KEYS = {
    **OLD_KEYS,
    **{f"{block}/{name}": OLD_KEYS[name] for block in BLOCKS for name in EPISODE_KEYS},
    "info/num_steps_sampled": "num_env_steps_sampled_lifetime",
    "info/num_steps_trained": "num_env_steps_trained_lifetime",
}
del RESULT_KEYS["env_runners/episode_len_mean"]  # is still the name
#: Algorithms that RLlib registers with Tune under a name that polopt registers, too. RLlib does so
#: when Tune looks up a name that is not registered.
ALSO_OF_RLLIB = ("APPO", "IMPALA", "DQN", "PPO", "SAC")
_ALGORITHMS = {re.sub(r"\W", "", name).lower(): text for name, text in ALGORITHMS.items()}


def instead_of_algorithm(name: Any) -> str:
    """Returns a text that says which preset of polopt corresponds to an algorithm of another
    library, or that polopt has no such algorithm. The text has no final full stop. For names that
    are not in `ALGORITHMS`, the result is an empty string."""
    return _plain(_ALGORITHMS.get(re.sub(r"\W|_", "", str(name)).lower(), ""))


def instead_of(name: Any) -> str:
    """Returns a text that says what to use in polopt instead of an option of another library. The
    text has no final full stop. For names that are not in the tables of this file, the result is an
    empty string. An example:

        For 'n_steps' of Stable-Baselines3: 'rollout_fragment_length'
    """
    name = str(name).lstrip("-").replace("-", "_")
    answers: dict[str, list[str]] = {}
    for library, options, algorithms, of_replay in (
        ("Stable-Baselines3", STABLE_BASELINES3, "DQN, SAC and TD3", STABLE_BASELINES3_REPLAY),
        ("CleanRL", CLEANRL, "", ()),
        ("RLlib", RLLIB, "DQN and SAC", RLLIB_REPLAY),
    ):
        found = [option.here for option in options if name in option.names]
        _add(answers, library, found)
        # If `options` also has this name, the name may mean something else in `algorithms`. The
        # text then names `algorithms`.
        owner = f"{library}'s {algorithms}" if found else library
        _add(answers, owner, [option.here for option in of_replay if name in option.names])
    _add(answers, "RLlib", (f.here for f in (*RLLIB_FIXED, *RLLIB_MODEL_FIXED) if name in f.same))
    return ". ".join(
        f"For {name!r} of {' and '.join(libraries)}: {_plain(here)}"
        for here, libraries in answers.items()
    )


def _add(answers: dict[str, list[str]], library: str, found: Iterable[str]) -> None:
    for here in found:
        if library not in answers.setdefault(here, []):
            answers[here].append(library)
        return  # if several rows have this name, errors use the first row


def _plain(markdown: str) -> str:
    """Converts Markdown to plain text: removes links, and replaces backquotes by quotes."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", markdown).replace("`", "'")
