"""Tests of the builders for RLlib's algorithms: scripts for RLlib give configs of presets."""

from __future__ import annotations

import copy
import functools
import logging
import math
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from flat_configs import flat
from ray import tune
from ray.tune.constants import RAY_TUNE_CALLBACKS_ENV_VAR as VARIABLE
from ray.tune.registry import get_trainable_cls, register_env, register_trainable
from ray.tune.utils.callback import _create_default_callbacks
from rllib_scripts import CONFIGS, REFUSED, SCRIPTS

import polopt
import polopt.rllib as rllib
from polopt import ConfigError
from polopt.common.episodes import Episode
from polopt.rllib.algorithm import _INSTEAD, Algorithm, algorithm_of
from polopt.rllib.algorithm_config import AlgorithmConfig
from polopt.rllib.old_results import add_old_keys
from polopt.rllib.other_libraries import RLLIB_IGNORED, instead_of
from polopt.rllib.rllib_options import flat_config
from polopt.rllib.translation import defaults, defaults_of_preset
from polopt.rllib.user_callbacks import _NOT_CALLED, MetricsLogger, as_polopt_callbacks
from polopt.trainers import presets
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import PRESETS, SyncPPO
from polopt.trainers.tune_callbacks import Checks

BUILDERS = [cls for cls in vars(rllib).values() if isinstance(cls, type)]
BUILDERS = [cls for cls in BUILDERS if issubclass(cls, AlgorithmConfig)]
PRESENT = [cls for cls in BUILDERS if cls.preset_name in PRESETS]
# Arguments of the methods of RLlib's config classes in the versions 2.7, 2.37 and 2.60. The classes
# are the base class and the configs of A3C, A2C, PPO, APPO, IMPALA, DD-PPO, DQN, SAC and Ape-X.
ARGUMENTS = """
_deterministic_loss _disable_action_flattening _disable_execution_plan_api
_disable_initialize_loss_from_dummy_batch _disable_preprocessor_api _enable_learner_api
_enable_new_api_stack _enable_rl_module_api _env_runners_only
_evaluation_parallel_to_training_wo_thread _fake_gpus _lr_vf _run_training_always_in_thread
_separate_vf_optimizer _skip_learners _tf_policy_handles_more_than_one_loss
_torch_grad_scaler_class _torch_lr_scheduler_classes _use_beta_distribution
_use_msgpack_checkpoints _validate_config action_mask_key action_space actions_in_input_normalized
actor_lr adam_epsilon add_default_connectors_to_env_to_module_pipeline
add_default_connectors_to_learner_pipeline add_default_connectors_to_module_to_env_pipeline
after_train_step algorithm_config_overrides_per_module alpha_lr always_attach_evaluation_results
auto_wrap_old_gym_envs batch_mode before_learn_on_batch broadcast_env_runner_states
broadcast_interval broadcast_offline_eval_runner_states burn_in_len callbacks_class
categorical_distribution_temperature checkpoint_trainable_policies_only
circular_buffer_iterations_per_batch circular_buffer_num_batches clip_actions clip_param
clip_rewards compress_observations count_steps_by create_env_on_local_worker
create_local_env_runner critic_lr custom_evaluation_function custom_resources_for_main_process
custom_resources_per_env_runner custom_resources_per_learner
custom_resources_per_offline_eval_runner custom_resources_per_worker custom_stats_cls_lookup
dataset_num_iters_per_learner dataset_num_iters_per_offline_eval_runner decay
delay_between_env_runner_restarts_s delay_between_worker_restarts_s disable_env_checking double_q
dueling eager_max_retraces eager_tracing enable_async_evaluation enable_connectors
enable_env_runner_and_connector_v2 enable_rl_module_and_learner enable_tf1_exec_eagerly
entropy_coeff entropy_coeff_schedule env env_config env_runner_cls
env_runner_health_probe_timeout_s env_runner_restore_timeout_s
env_runner_state_server_max_concurrency env_task_fn env_to_module_connector
episode_lookback_horizon episodes_to_numpy epsilon
evaluation_auto_duration_max_env_steps_per_sample
evaluation_auto_duration_min_env_steps_per_sample evaluation_config evaluation_duration
evaluation_duration_unit evaluation_error_after_n_consecutive_skips
evaluation_force_reset_envs_before_iteration evaluation_interval evaluation_num_env_runners
evaluation_num_episodes evaluation_num_workers evaluation_parallel_to_training
evaluation_sample_timeout_s evaluation_unhealthy_workers_timeout_s exploration_config explore
export_native_model_files extra_python_environs_for_driver extra_python_environs_for_worker
fake_sampler framework gamma grad_clip grad_clip_by gym_env_vectorize_mode hiddens
ignore_env_runner_failures ignore_final_observation ignore_offline_eval_runner_failures
ignore_worker_failures initial_alpha input_ input_compress_columns input_config input_evaluation
input_filesystem input_filesystem_kwargs input_read_batch_size input_read_episodes
input_read_method input_read_method_kwargs input_read_sample_batches input_read_schema is_atari
iter_batches_kwargs keep_local_weights_in_sync keep_per_episode_custom_metrics kl_coeff kl_target
lambda_ learner_class learner_config_dict learner_connector learner_queue_size
learner_queue_timeout local_gpu_idx local_tf_session_args log_gradients log_level log_sys_usage
logger_config logger_creator lr lr_schedule map_batches_kwargs materialize_data
materialize_mapped_data max_num_env_runner_restarts max_num_offline_eval_runner_restarts
max_num_worker_restarts max_requests_in_flight_per_aggregator_actor
max_requests_in_flight_per_aggregator_worker max_requests_in_flight_per_env_runner
max_requests_in_flight_per_learner max_requests_in_flight_per_offline_eval_runner
max_requests_in_flight_per_replay_worker max_requests_in_flight_per_sampler_worker
merge_env_runner_states metrics_episode_collection_timeout_s metrics_num_episodes_for_smoothing
microbatch_size min_sample_timesteps_per_iteration min_time_s_per_iteration
min_train_timesteps_per_iteration mini_batch_size_per_learner minibatch_buffer_size minibatch_size
model model_config model_config_dict module_to_env_connector momentum n_step noisy
normalize_actions num_aggregation_workers num_aggregator_actors_per_learner num_atoms
num_consecutive_env_runner_failures_tolerance num_consecutive_worker_failures_tolerance
num_cpus_for_local_worker num_cpus_for_main_process num_cpus_per_env_runner num_cpus_per_learner
num_cpus_per_learner_worker num_cpus_per_offline_eval_runner num_cpus_per_worker num_env_runners
num_envs_per_env_runner num_envs_per_worker num_epochs num_gpu_loader_threads num_gpus
num_gpus_per_env_runner num_gpus_per_learner num_gpus_per_learner_worker
num_gpus_per_offline_eval_runner num_gpus_per_worker num_learner_workers num_learners
num_multi_gpu_tower_stacks num_offline_eval_runners num_rollout_workers num_sgd_iter
num_steps_sampled_before_learning_starts observation_filter observation_fn observation_space
off_policy_estimation_methods offline_data_class offline_eval_batch_size_per_runner
offline_eval_rl_module_inference_only offline_eval_runner_class
offline_eval_runner_health_probe_timeout_s offline_eval_runner_restore_timeout_s
offline_evaluation_interval offline_evaluation_timeout_s offline_evaluation_type
offline_loss_for_module_fn offline_sampling on_algorithm_init on_checkpoint_loaded
on_env_runners_recreated on_environment_created on_episode_created on_episode_end on_episode_start
on_episode_step on_evaluate_end on_evaluate_offline_end on_evaluate_offline_start
on_evaluate_start on_offline_eval_runners_recreated on_sample_end on_train_result
ope_split_batch_by_episode opt_type optimization_config optimizer output output_compress_columns
output_config output_filesystem output_filesystem_kwargs output_max_file_size
output_max_rows_per_file output_write_episodes output_write_method output_write_method_kwargs
output_write_remaining_data placement_strategy policies policies_to_train policy_map_cache
policy_map_capacity policy_mapping_fn policy_model_config policy_states_are_swappable
postprocess_inputs prelearner_buffer_class prelearner_buffer_kwargs prelearner_class
prelearner_module_synch_period prelearner_use_recorded_module_states preprocessor_pref
q_model_config recreate_failed_env_runners recreate_failed_workers remote_env_batch_wait_ms
remote_worker_envs render_env replay_buffer_config replay_buffer_num_slots replay_mode
replay_proportion restart_failed_env_runners restart_failed_offline_eval_runners
restart_failed_sub_environments rl_module_spec rollout_fragment_length sample_async
sample_collector sample_timeout_s sampler_perf_stats_ema_coef seed sgd_minibatch_size
shuffle_batch_per_epoch shuffle_buffer_size shuffle_sequences sigma0 simple_queue_size
store_buffer_in_checkpoints synchronize_filter target_entropy target_network_update_freq
target_update_frequency target_worker_clipping tau td_error_loss_fn tf_session_args
timeout_s_aggregator_manager timeout_s_replay_manager timeout_s_sampler_manager
torch_compile_learner torch_compile_learner_dynamo_backend torch_compile_learner_dynamo_mode
torch_compile_learner_what_to_compile torch_compile_worker torch_compile_worker_dynamo_backend
torch_compile_worker_dynamo_mode torch_ddp_kwargs torch_distributed_backend
torch_skip_nan_gradients train_batch_size train_batch_size_per_learner training_intensity twin_q
update_worker_filter_stats use_circular_buffer use_critic use_env_runner_state_server use_gae
use_kl_loss use_worker_filter_stats v_max v_min validate_env_runners_after_construction
validate_offline_eval_runners_after_construction validate_workers_after_construction vf_clip_param
vf_loss_coeff vf_share_layers vtrace vtrace_clip_pg_rho_threshold vtrace_clip_rho_threshold
vtrace_drop_last_ts worker_cls worker_health_probe_timeout_s worker_restore_timeout_s
"""


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevents tests from starting Ray. An earlier test of this process may have started Ray."""
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))


def run(source: str) -> list[tuple[Any, dict[str, Any]]]:
    """Runs a script with stand-ins for the algorithms and tuners. Returns the arguments of the
    stand-ins."""
    made: list[tuple[Any, dict[str, Any]]] = []

    def build(self: Any, env: Any = None, **others: Any) -> Any:
        if env is not None:
            self.environment(env)
        made.append((self.algo_class, flat(self)))
        algo = mock.create_autospec(self.algo_class, instance=True)
        episodes = {"episode_return_mean": 1.0, "custom_metrics": {"length_mean": 1.0}}
        algo.train.return_value = {"env_runners": episodes, "num_env_steps_sampled_lifetime": 8}
        add_old_keys(algo.train.return_value)
        return algo

    real = tune.Tuner

    def tuner(trainable: Any, *, param_space: Any, **others: Any) -> Any:
        real(trainable, param_space=param_space)  # Tune accepts the config
        made.append((trainable, flat(param_space)))
        return mock.Mock()

    with (
        mock.patch.object(AlgorithmConfig, "build_algo", build),
        mock.patch.object(AlgorithmConfig, "build", build),
        mock.patch.object(tune, "Tuner", tuner),
        mock.patch.object(
            tune, "run", lambda trainable, config, **_: tuner(trainable, param_space=config)
        ),
    ):
        exec(compile(source, "script", "exec"), {"__name__": "script"})
    return made


def concrete(value: Any) -> Any:
    """Returns a value from a search space."""
    if isinstance(value, dict) and "grid_search" in value:
        return value["grid_search"][0]
    return value.sample() if isinstance(value, tune.search.sample.Domain) else value


# ---- scripts ----------------------------------------------------------------------------------


#: Options that depend on what a script gives, besides the options that it gives.
DERIVED = {"rollout_fragment_length", "training_intensity"}


def plain_of(algorithm: str) -> dict[str, Any]:
    return flat_config({}, algorithm_of(algorithm), algorithm)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_makes_the_config_that_it_means(name: str) -> None:
    ((trainable, config),) = run(SCRIPTS[name])
    expected = CONFIGS[name]
    callbacks = config.pop("callbacks", None)
    assert (callbacks is not None) == ("callbacks(" in SCRIPTS[name])
    assert set(config) <= set(expected) | DERIVED
    algorithm = re.search(r"= \(?\s*(\w+)Config\(\)", SCRIPTS[name])
    assert algorithm is not None
    preset = {"PPO": "SyncPPO"}.get(algorithm[1], algorithm[1])
    assert trainable in (algorithm[1], algorithm_of(algorithm[1]))
    whole = {**defaults_of_preset(PRESETS[preset]), **plain_of(algorithm[1]), **config}
    assert {key: whole[key] for key, value in expected.items() if value is not ...} == {
        key: value for key, value in expected.items() if value is not ...
    }
    # The preset accepts the config.
    values = {key: concrete(value) for key, value in config.items()}
    Experiment.parse({**values, "callbacks": callbacks}, PRESETS[preset].preset)


def test_scripts_are_of_three_releases() -> None:
    for release in ("2.7", "2.37", "2.60"):
        assert sum(name.startswith(f"{release} ") for name in SCRIPTS) >= 5
    assert all("polopt" in source for source in SCRIPTS.values())


@pytest.mark.parametrize("code", REFUSED)
def test_unsupported_call_says_what_to_change(code: str) -> None:
    with pytest.raises(ConfigError) as caught:
        eval(code, {name: getattr(rllib, name) for name in rllib.__all__})
    assert REFUSED[code] in str(caught.value)
    assert all("(): " in line or "config: " in line for line in str(caught.value).splitlines())


# ---- options ----------------------------------------------------------------------------------


#: Builders that together have all arguments of all builders. DDPPO has the arguments of PPO, and
#: ApexDQN has the arguments of DQN.
ALL_ARGUMENTS = [rllib.A3CConfig, rllib.DDPPOConfig, rllib.ApexDQNConfig, rllib.SACConfig]


@pytest.mark.parametrize("builder", ALL_ARGUMENTS, ids=lambda cls: cls.__name__)
def test_every_argument_of_rllib_has_an_answer(builder: type[AlgorithmConfig]) -> None:
    names = [name for name in ARGUMENTS.split() if not name.startswith("on_")]
    assert len(names) > 320
    unknown = []
    for name in names:
        config = builder()
        try:
            config.training(**{name: None if "callbacks" in name else {}})
        except TypeError:
            unknown.append(name)
        except ConfigError as error:
            if repr(name) not in str(error):
                unknown.append(name)
    assert unknown == []


def test_misspelled_name_is_a_type_error_with_the_nearest() -> None:
    said = r"PPOConfig.training\(\) got an unexpected .* 'lamda_'; did you mean 'lambda_'"
    with pytest.raises(TypeError, match=said):
        rllib.PPOConfig().training(lamda_=0.9)


def test_one_error_names_every_wrong_option_of_a_call() -> None:
    with pytest.raises(TypeError) as caught:
        rllib.PPOConfig().training(lrr=1e-3, gama=0.9, vtrace=False)
    for line, name in zip(str(caught.value).splitlines(), ("lrr", "gama", "vtrace"), strict=True):
        assert repr(name) in line
    with pytest.raises(ConfigError, match=r"(?s)'noisy'.*\n.*'num_atoms'"):
        rllib.DQNConfig.from_dict({"noisy": True, "num_atoms": 51})


def test_ignored_options_are_in_the_tables() -> None:
    without = {name for name in RLLIB_IGNORED if not instead_of(name)}
    assert len(without) < 12, "most ignored options have a row in the tables"
    keys = {key for builder in PRESENT for key in defaults(PRESETS[builder.preset_name])}
    assert RLLIB_IGNORED & keys == set(), "a key of polopt is never ignored"


def test_ignored_option_warns_and_its_own_value_does_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polopt"):
        config = rllib.PPOConfig().learners(num_learners=0).fault_tolerance(True)
        assert caplog.messages == []
        config.learners(num_learners=3)
    assert flat(config) == {}
    (message,) = caplog.messages
    assert message.startswith("PPOConfig.learners(): num_learners=3 is ignored. For 'num_learners'")
    assert message.endswith("multiply train_batch_size_per_learner and minibatch_size by 3")


def test_later_value_replaces_an_earlier_one_under_another_name() -> None:
    config = rllib.PPOConfig().training(num_sgd_iter=3).training(num_epochs=5)
    assert flat(config) == {"num_sgd_iter": 5}


ALPHA, BETA = {"prioritized_replay_alpha": 0.5}, {"prioritized_replay_beta": 0.3}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {}),
        ({"capacity": 2000}, {"buffer_size": 2000}),
        ({"type": "MultiAgentReplayBuffer"}, {"prioritized_replay": False}),
        ({"type": "ray.rllib.utils.PrioritizedReplayBuffer"}, {"prioritized_replay": True}),
        ({"type": "PrioritizedEpisodeReplayBuffer", "alpha": 0.5}, ALPHA),
        ({"prioritized_replay_alpha": 0.5, "storage_unit": "timesteps"}, ALPHA),
        ({"beta": 0.3}, BETA | {"final_prioritized_replay_beta": 0.3}),
        ({"prioritized_replay_eps": 0.1}, {"prioritized_replay_eps": 0.1}),
        ({"replay_sequence_length": 1, "replay_burn_in": 0, "replay_mode": "independent"}, {}),
    ],
)
def test_replay_buffer_config(given: Any, expected: dict[str, Any]) -> None:
    if any("replay_" in key for key in expected):
        expected = {"prioritized_replay": True} | expected
    config = rllib.DQNConfig().training(replay_buffer_config=given)
    assert flat(config) == expected
    Experiment.parse({"env": "CartPole-v1", **flat(config)}, PRESETS["DQN"].preset)


def test_change_of_a_dict_that_was_read_counts() -> None:
    config = rllib.DQNConfig()
    config.replay_buffer_config["capacity"] = 2000
    config.exploration_config.update(final_epsilon=0.5)
    config.exploration_config["warmup_timesteps"] = 100
    options = flat(config)
    assert options["buffer_size"] == 2000
    assert options["epsilon"] == [[0, 1.0], [100, 1.0], [10_100, 0.5]]
    read = config.replay_buffer_config
    for other in (
        read.copy(),
        copy.copy(read),
        copy.deepcopy(read),
        pickle.loads(pickle.dumps(read)),
    ):
        assert type(other) is dict
        other["capacity"] = 1
    assert config.buffer_size == 2000
    # Changing a value that was read does not change the table of RLlib's fixed options.
    assert rllib.PPOConfig().exploration_config == {}
    with pytest.raises(AttributeError, match="frozen"):
        config.copy(copy_frozen=True).replay_buffer_config["capacity"] = 1


def test_each_method_of_a_dict_that_was_read_changes_the_builder_or_raises() -> None:
    config = rllib.DQNConfig().training(replay_buffer_config={"capacity": 2000})
    read = config.replay_buffer_config
    assert read.setdefault("capacity", 3) == 2000
    assert read.setdefault("prioritized_replay_alpha", 0.7) == read["prioritized_replay_alpha"]
    read |= {"capacity": 4000}
    assert config.buffer_size == read["capacity"] == 4000
    assert config.exploration_config.setdefault("warmup_timesteps", 100) == 100
    assert flat(config)["epsilon"][0] == [0, 1.0]
    assert flat(config)["epsilon"][1] == [100, 1.0]
    before = dict(read)
    for remove in (
        lambda: read.pop("capacity"),
        lambda: read.pop("capacity", 1),
        lambda: read.__delitem__("capacity"),
        read.popitem,
        read.clear,
    ):
        with pytest.raises(
            ConfigError, match=r"replay_buffer_config\[.* cannot be removed, because"
        ):
            remove()
    assert dict(read) == before
    assert read.pop("unknown", 5) == 5
    for missing in (lambda: read.pop("unknown"), lambda: read.__delitem__("unknown")):
        with pytest.raises(KeyError):
            missing()


def test_batch_of_replay_changes_no_fragment() -> None:
    config = rllib.ApexDQNConfig().training(train_batch_size=8)
    assert flat(config) == {"train_batch_size": 8}


def test_dicts_add_up() -> None:
    config = rllib.PPOConfig().environment(env_config={"a": 1}).environment(env_config={"b": 2})
    config.training(model={"use_lstm": True}).rl_module(model_config={"fcnet_hiddens": [8]})
    assert flat(config) == {
        "env_config": {"a": 1, "b": 2},
        "model": {"use_lstm": True, "fcnet_hiddens": [8]},
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"use_kl_loss": False, "kl_coeff": 0.3}, {"kl_coeff": 0.0}),
        ({"use_kl_loss": True, "kl_coeff": 0.3}, {"kl_coeff": 0.3}),
        ({"use_kl_loss": True}, {}),  # RLlib's default
        ({"lr": 1.0, "lr_schedule": [[0, 0.1], [9, 0.0]]}, {"lr": [[0, 0.1], [9, 0.0]]}),
        ({"lr": 1.0, "lr_schedule": None}, {"lr": 1.0}),
        ({"entropy_coeff_schedule": [[0, 0.1], [9, 0.0]]}, {"entropy_coeff": [[0, 0.1], [9, 0.0]]}),
        ({"vf_clip_param": math.inf}, {"vf_clip_param": None}),
        ({"clip_rewards": False}, {}),
        ({"observation_filter": "NoFilter"}, {}),
        ({"sample_timeout_s": None}, {"worker_timeout_s": 1e7}),
        ({"evaluation_interval": 0, "evaluation_num_workers": 2}, {"evaluation_interval": None}),
        # With 2 workers of one environment, a fragment is half of the batch.
        ({"rollout_fragment_length": "auto"}, {"rollout_fragment_length": 2000}),
        ({"horizon": 200}, {"max_frames_per_traj": 200}),
        (
            {"train_batch_size": 64},
            {"train_batch_size": 64, "rollout_fragment_length": 32},
        ),
        (
            {"train_batch_size": 10**5},
            {"train_batch_size": 10**5, "rollout_fragment_length": 50_000},
        ),
        (
            {"train_batch_size": 6401, "rollout_fragment_length": "auto"},
            {"train_batch_size": 6401, "rollout_fragment_length": 3201},
        ),
        (
            {"train_batch_size": 64, "rollout_fragment_length": 16},
            {"train_batch_size": 64, "rollout_fragment_length": 16},
        ),
    ],
)
def test_options_that_mean_something_together(given: Any, expected: Any) -> None:
    assert flat(rllib.PPOConfig().training(**given)) == expected


# ---- units ------------------------------------------------------------------------------------


def test_target_of_replay_counts_environment_steps() -> None:
    """RLlib: "Update the target network every `target_network_update_freq` sample steps"."""
    for builder in (rllib.DQNConfig, rllib.SACConfig, rllib.ApexDQNConfig):
        config = builder().training(target_network_update_freq=500)
        assert flat(config) == {"target_network_update_timesteps": 500}
        assert config.target_network_update_freq == 500
        config.target_network_update_freq *= 2
        assert flat(config) == {"target_network_update_timesteps": 1000}
        # With 0, the default of RLlib's SAC, the target moves with every update.
        config.training(target_network_update_freq=0)
        every = {"target_network_update_freq": 1, "target_network_update_timesteps": None}
        assert {**defaults_of_preset(config.algo_class), **flat(config)}.items() >= every.items()
        config.training(target_network_update_freq=tune.choice([256]))
        assert isinstance(
            flat(config)["target_network_update_timesteps"], tune.search.sample.Domain
        )


@pytest.mark.parametrize(("intensity", "expected"), [(8.0, 8.0), (1.0, 1.0), (None, 4.0)])
def test_dqn_trains_in_the_units_of_rllib(intensity: Any, expected: float) -> None:
    """Without an intensity, RLlib learns from one batch of 32 rows for each round of 8 steps."""
    algo: Any = (
        rllib.DQNConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=4)
        .training(
            target_network_update_freq=50,
            train_batch_size=32,
            training_intensity=intensity,
            num_steps_sampled_before_learning_starts=100,
            model={"fcnet_hiddens": [4]},
        )
        .reporting(min_sample_timesteps_per_iteration=500)
        .build_algo()
    )
    moved = mock.Mock(wraps=algo.get_policy().flat.refresh_copies)
    algo.get_policy().flat.refresh_copies = moved
    result = algo.train()
    algo.stop()
    sampled = result["num_env_steps_sampled_lifetime"]
    learned = result["num_env_steps_trained_lifetime"]
    assert learned / (sampled - 100) == pytest.approx(expected, rel=0.1)
    assert moved.call_count == pytest.approx((sampled - 100) / 50, abs=1.1)


def test_intensity_that_cannot_be_computed_is_refused_with_advice() -> None:
    for config in (
        rllib.ApexDQNConfig().training(training_intensity=None),
        rllib.DQNConfig().training(training_intensity=None, train_batch_size=tune.choice([32])),
    ):
        with pytest.raises(ConfigError, match=r"training_intensity=None. .* The preset has train"):
            flat(config)


@pytest.mark.parametrize(
    ("freq", "others", "updates"),
    [
        (2, {}, 32),  # RLlib: 2 * 8 batches of its circular buffer * 2 iterations per batch
        (0.125, {}, 2),
        (2, {"train_batch_size": 500, "minibatch_size": 200}, 96),  # 3 updates for each batch
        (1e-9, {}, 1),
    ],
)
def test_target_of_appo_counts_units_of_sixteen_batches(
    freq: float, others: dict[str, Any], updates: int
) -> None:
    config = rllib.APPOConfig().training(target_network_update_freq=freq, **others)
    assert flat(config)["target_network_update_freq"] == updates


def test_target_of_appo_in_units_that_are_not_a_number_is_refused() -> None:
    for freq in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=r"target_network_update_freq=.* in units of 16"):
            flat(rllib.APPOConfig().training(target_network_update_freq=freq))


@pytest.mark.parametrize("batch", [256, 1000])
def test_iteration_of_ppo_is_one_batch(batch: int) -> None:
    """An iteration of a preset has at least 4000 steps, so a loop trained 2 to 9 times as long."""
    config = rllib.PPOConfig().environment("CartPole-v1", env_config={})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    config.training(train_batch_size=batch, num_epochs=1, model={"fcnet_hiddens": [4]})
    assert config.min_sample_timesteps_per_iteration == 0
    algo = config.build_algo()
    steps = [algo.train()["env_runners"]["num_env_steps_sampled"] for _ in range(3)]
    algo.stop()
    # Steps of automatic resets do not count.
    assert all(0.8 * batch <= count <= batch for count in steps)
    config.reporting(min_sample_timesteps_per_iteration=3000)
    assert flat(config)["min_sample_timesteps_per_iteration"] == 3000
    assert rllib.DDPPOConfig().min_sample_timesteps_per_iteration == 0
    assert rllib.DQNConfig().min_sample_timesteps_per_iteration == 1000  # as in RLlib


def test_schedules_count_environment_steps_in_both_libraries() -> None:
    points = [[0, 1e-3], [1000, 1e-4]]
    for builder in (rllib.PPOConfig, rllib.DQNConfig):
        assert flat(builder().training(lr=points)) == {"lr": points}
    exploration = {"epsilon_timesteps": 5000, "final_epsilon": 0.1, "warmup_timesteps": 100}
    config = rllib.DQNConfig().exploration(exploration_config=exploration)
    assert flat(config)["epsilon"] == [[0, 1.0], [100, 1.0], [5100, 0.1]]


def test_batch_of_ddppo_is_one_fragment_of_a_worker() -> None:
    config = rllib.DDPPOConfig().training(train_batch_size=500)
    assert flat(config.env_runners(num_envs_per_env_runner=2)) == {
        "num_envs_per_worker": 2,
        "rollout_fragment_length": 250,
    }


def test_batch_of_ddppo_beside_a_fragment_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    config = rllib.DDPPOConfig().training(train_batch_size=500)
    with caplog.at_level(logging.WARNING, "polopt"):
        assert flat(config.env_runners(rollout_fragment_length=50)) == {
            "rollout_fragment_length": 50
        }
    assert "train_batch_size=500 is ignored, because rollout_fragment_length=50" in caplog.text
    caplog.clear()
    flat(config.env_runners(num_envs_per_env_runner=10))  # 10 environments of 50 steps
    assert not caplog.text


def test_batch_of_a3c_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "polopt"):
        assert flat(rllib.A3CConfig().training(train_batch_size=500)) == {}
    assert (
        "train_batch_size=500 is ignored. A gradient is computed from one fragment" in caplog.text
    )


# ---- the object -------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS, ids=lambda cls: cls.__name__)
def test_builder_exists_when_its_preset_exists(builder: type[AlgorithmConfig]) -> None:
    if builder.preset_name in PRESETS:
        config = builder().environment("CartPole-v1")
        assert flat(config) == {"env": "CartPole-v1"}
        assert issubclass(config.algo_class, PRESETS[builder.preset_name])
        assert config.algo_class.__name__ == builder.algorithm_name
        assert pickle.loads(pickle.dumps(config.algo_class)) is config.algo_class
    else:
        with pytest.raises(ConfigError, match=f"{builder.__name__}: polopt has no"):
            builder()


def test_tune_takes_a_builder_as_its_config() -> None:
    config = rllib.PPOConfig().environment("CartPole-v1")
    tune.Tuner("PPO", param_space=config)
    with mock.patch.object(AlgorithmConfig, "to_dict", side_effect=KeyboardInterrupt) as asked:
        for take in (
            lambda: tune.run("PPO", config=config),
            lambda: tune.Tuner("PPO", param_space=config),
        ):
            with pytest.raises(KeyboardInterrupt), mock.patch("ray.init"):
                take()
    assert asked.call_count == 2
    with pytest.raises(ValueError, match="must be a dict"):
        tune.Tuner("PPO", param_space=object())


def test_copies_are_independent_and_frozen_as_asked() -> None:
    config = rllib.PPOConfig().environment("CartPole-v1", env_config={"a": 1})
    config.freeze()
    for change in (
        lambda: setattr(config, "lr", 1.0),
        lambda: config.training(lr=1.0),
        lambda: config.update_from_dict({"lr": 1.0}),
    ):
        with pytest.raises(
            AttributeError, match=r"Cannot set attribute \(lr\) of an already frozen"
        ):
            change()
    assert config.copy()._is_frozen
    thawed = config.copy(copy_frozen=False)
    thawed.env_config["a"] = 2
    assert (thawed["env_config"], config["env_config"]) == ({"a": 2}, {"a": 1})
    for other in (pickle.loads(pickle.dumps(thawed)), copy.deepcopy(thawed)):
        assert flat(other) == flat(thawed)
    assert flat(config.copy(copy_frozen=True)) == flat(config)


def test_values_are_read_under_all_names() -> None:
    config = rllib.PPOConfig().env_runners(num_env_runners=3)
    names = ("num_workers", "num_env_runners", "num_rollout_workers")
    assert {config[name] for name in names} == {getattr(config, name) for name in names} == {3}
    assert (config.lr, config["lambda"], config.lambda_) == (5e-5, 1.0, 1.0)
    assert (config.framework_str, config.explore, config.env) == ("torch", True, None)
    assert config.get("nothing", 7) == config.pop("nothing", 7) == 7
    assert "lr" in config
    assert "nothing" not in config
    options = config.to_dict()
    assert {options[name] for name in names} == {options.num_env_runners} == {3}
    assert set(config.keys()) == set(options) == {key for key, _ in config.items()}
    assert len(options) > 200
    with pytest.raises(AttributeError, match="no option 'gama'; did you mean 'gamma'"):
        _ = config.gama


def test_validate_checks_values() -> None:
    config = rllib.PPOConfig().environment("CartPole-v1").training(gamma=2.0)
    with pytest.raises(ConfigError, match=r"key 'gamma': got 2\.0"):
        config.validate()


def test_to_dict_is_a_copy() -> None:
    config = rllib.PPOConfig().environment(env_config={"a": []})
    flat(config)["env_config"]["a"].append(1)
    assert flat(config) == {"env_config": {"a": []}}


def test_model_config_of_rllib_itself() -> None:
    module = pytest.importorskip("ray.rllib.core.rl_module.default_model_config")
    given = module.DefaultModelConfig(fcnet_hiddens=[8], use_lstm=True)
    config = rllib.PPOConfig().rl_module(model_config=given)
    assert flat(config) == {"model": {"fcnet_hiddens": [8], "use_lstm": True}}
    config = rllib.PPOConfig().rl_module(model_config=module.DefaultModelConfig())
    assert flat(config) == {"model": {"fcnet_hiddens": [256, 256]}}  # as in RLlib
    config.environment("CartPole-v1").validate()


def test_environment_of_register_env() -> None:
    register_env("of_a_user", lambda config: None)
    config = rllib.PPOConfig().environment("of_a_user")
    config.validate()


# ---- callbacks --------------------------------------------------------------------------------


class Worker:
    """A fake worker with the attributes that callbacks use."""

    policy = "the policy"

    class sampler:
        env = "the environments"


EPISODE = Episode(3, 10.0, 4, True, {"goal": 1})


def metrics_of(cls: type) -> Any:
    episode = EPISODE._replace(data={})
    return as_polopt_callbacks(cls)().on_episode_end(episode=episode, worker=Worker())


def test_steps_and_samples_of_a_callback() -> None:
    class Angles(rllib.DefaultCallbacks):
        def on_episode_step(self, *, episode, metrics_logger, env_index, **kwargs):  # type: ignore
            episode.user_data.setdefault("angles", []).append(episode.last_info_for()["goal"])
            metrics_logger.log_value("largest", len(episode), reduce="max")
            assert (env_index, episode.is_done, episode.is_truncated) == (3, False, False)

        def on_episode_end(self, *, episode, **kwargs):  # type: ignore
            episode.custom_metrics["angles"] = len(episode.user_data["angles"])

        def on_sample_end(self, *, samples, metrics_logger, **kwargs):  # type: ignore
            metrics_logger.log_value("rows", len(samples))

    callbacks: Any = as_polopt_callbacks(Angles)()
    data: dict[str, Any] = {}
    for length in (1, 2, 3):
        step = EPISODE._replace(episode_len=length, terminated=False, done=False, data=data)
        callbacks.on_episode_step(episode=step, worker=Worker())
    ended = callbacks.on_episode_end(episode=EPISODE._replace(data=data), worker=Worker())
    assert ended == {"angles": 3.0, "largest": 3.0}
    assert callbacks.on_sample_end(samples=[1, 2], worker=Worker()) == {"rows": 2.0}

    class OnlySteps(rllib.DefaultCallbacks):
        def on_episode_step(self, *, metrics_logger, **kwargs):  # type: ignore
            metrics_logger.log_value("x", 1.0)

    callbacks = as_polopt_callbacks(OnlySteps)()
    callbacks.on_episode_step(episode=EPISODE._replace(done=False, data=data), worker=Worker())
    ended = callbacks.on_episode_end(episode=EPISODE._replace(data=data), worker=Worker())
    assert ended["x"] == 1.0


@pytest.mark.parametrize("reduce", ["median", "ema"])
def test_unknown_reduce_is_refused(reduce: Any) -> None:
    logger = MetricsLogger()
    with pytest.raises(ValueError, match=r"'x', reduce=.*Allowed: 'mean', 'min', 'max', 'sum'"):
        logger.log_value("x", 1.0, reduce=reduce)
    assert logger.values == {}
    for value in (1.0, 2.0):
        logger.log_value("x", value, reduce=None, window=10)  # None is the default of RLlib
    assert logger.values == {"x": 1.5}


def test_callback_gets_the_arguments_that_it_has() -> None:
    seen: dict[str, Any] = {}

    class Old(rllib.DefaultCallbacks):
        def on_episode_end(
            self, *, worker, base_env, policies, episode, env_index, preprocessor, **kwargs
        ):  # type: ignore
            seen.update(kwargs, env_index=env_index, policies=policies)
            episode.custom_metrics["length"] = episode.length + episode.last_info_for()["goal"]
            with pytest.raises(AttributeError, match=r"no single environments\. Callbacks"):
                base_env.get_sub_environments()
            with pytest.raises(AttributeError, match="does not have 'batch_builder' in polopt"):
                _ = episode.batch_builder
            with pytest.raises(AttributeError, match="'preprocessor', which polopt does not have"):
                _ = preprocessor.transform

    class New(rllib.RLlibCallback):
        def on_episode_end(self, *, episode, metrics_logger, env, rl_module=None):  # type: ignore
            assert (env, rl_module) == ("the environments", "the policy")
            metrics_logger.log_value(("a", "b"), len(episode), reduce="mean")
            metrics_logger.log_dict({"c": episode.get_return()}, window=3)
            assert episode.get_infos(-1) == {"goal": 1}
            assert episode.is_terminated
            assert not episode.is_truncated

    assert metrics_of(Old) == {"length": 5.0}
    assert (seen["env_index"], seen["policies"]) == (3, {"default_policy": "the policy"})
    assert metrics_of(New) == {"a/b": 4.0, "c": 10.0}


def test_functions_as_callbacks() -> None:
    config = rllib.PPOConfig().callbacks(
        on_episode_end=lambda episode, metrics_logger, **_: metrics_logger.log_value("x", 2),
        on_train_result=None,
    )
    cls = flat(config)["callbacks"]
    episode = EPISODE._replace(data={})
    assert cls().on_episode_end(episode=episode, worker=Worker()) == {"x": 2}
    assert "on_train_result" not in vars(cls)


def test_class_of_a_partial_gets_its_arguments() -> None:
    class Threshold(rllib.RLlibCallback):
        def __init__(self, limit: float) -> None:
            self.limit = limit

        def on_episode_end(self, *, metrics_logger, **kwargs):  # type: ignore
            metrics_logger.log_value("limit", self.limit)

    partial = functools.partial(Threshold, limit=0.9)
    cls = flat(rllib.PPOConfig().callbacks(partial))["callbacks"]
    made = cls().on_episode_end(episode=EPISODE._replace(data={}), worker=Worker())
    assert made == {"limit": 0.9}
    for wrong in (functools.partial(print, 1), functools.partial(polopt.Callbacks)):
        with pytest.raises(ConfigError, match=r"got functools.partial.* Allowed: one class"):
            rllib.PPOConfig().callbacks(wrong)


def test_result_can_be_changed() -> None:
    class Mine(rllib.RLlibCallback):
        def on_train_result(self, *, algorithm, result, **kwargs):  # type: ignore
            super().on_train_result(algorithm=algorithm, result=result)
            result["of"] = algorithm

    result: dict[str, Any] = {}
    as_polopt_callbacks(Mine)().on_train_result(trainer="the trainer", result=result)
    assert result == {"of": "the trainer"}


@pytest.mark.parametrize("name", _NOT_CALLED)
def test_method_that_is_not_called_says_what_to_do(name: str) -> None:
    cls = type("Mine", (rllib.DefaultCallbacks,), {name: lambda self, **_: None})
    with pytest.raises(ConfigError, match=f"Mine has the method {name!r}.*Instead: "):
        rllib.PPOConfig().callbacks(cls)


def test_misspelled_method_is_an_error() -> None:
    cls = type("Mine", (rllib.DefaultCallbacks,), {"on_episod_end": lambda self, **_: None})
    said = "'on_episod_end', which polopt does not call.*did you mean 'on_episode_end'"
    with pytest.raises(ConfigError, match=f"Mine has the method {said}"):
        rllib.PPOConfig().callbacks(cls)
    with pytest.raises(ConfigError, match=f"FunctionCallbacks has the method {said}"):
        rllib.PPOConfig().callbacks(on_episod_end=print)


def test_callbacks_of_rllib_itself_have_the_same_methods() -> None:
    module = pytest.importorskip("ray.rllib.callbacks.callbacks")
    theirs = {name for name in vars(module.RLlibCallback) if name.startswith("on_")}
    assert theirs <= {name for name in dir(rllib.RLlibCallback) if name.startswith("on_")}

    class Mine(module.RLlibCallback):  # type: ignore
        def on_episode_end(self, *, episode, metrics_logger, **kwargs):  # type: ignore
            metrics_logger.log_value("x", 1)

    assert metrics_of(Mine) == {"x": 1}


# ---- results and algorithms -------------------------------------------------------------------


def test_old_names_of_results() -> None:
    result = {
        "env_runners": {"episode_return_mean": 5.0, "num_episodes_lifetime": 3},
        "num_env_steps_sampled_lifetime": 8,
    }
    add_old_keys(result)
    assert result["episode_reward_mean"] == 5.0
    assert (result["episodes_total"], result["num_env_steps_sampled"]) == (3, 8)
    assert "episode_reward_min" not in result
    old = {"episode_reward_mean": 5.0, "episodes_total": 3}
    assert result["sampler_results"].items() >= old.items() <= result["env_runners"].items()
    result = {"env_runners": {"custom_metrics": {"x_mean": 1.0}}}
    add_old_keys(result, [1.0, 2.0], [3, 4])
    assert result["custom_metrics"] == {"x_mean": 1.0}
    assert result["hist_stats"] == {"episode_reward": [1.0, 2.0], "episode_lengths": [3, 4]}


@pytest.mark.parametrize("name", [*_INSTEAD, "anything"])
def test_attribute_of_an_algorithm_of_rllib(name: str) -> None:
    algo = object.__new__(algorithm_of("PPO"))
    said = "" if name == "anything" else ". Use this instead: "
    with pytest.raises(AttributeError, match=f"'PPO' object has no attribute '{name}'{said}"):
        getattr(algo, name)
    assert not hasattr(Algorithm, name)


def test_algorithm_is_evaluated_and_made_of_a_checkpoint(tmp_path: Path) -> None:
    config = rllib.PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    algo = config.evaluation(evaluation_duration=2).training(lr=1e-3).build_algo()
    saved = algo.save_to_path(tmp_path / "saved")
    result = algo.evaluate()
    block = result["env_runners"]
    assert block["num_episodes"] == 2
    assert (
        block["episode_return_min"] <= block["episode_return_mean"] <= block["episode_return_max"]
    )
    assert block["episode_len_mean"] == block["episode_return_mean"]  # a reward of 1 for each step
    assert result["evaluation"]["episode_reward_mean"] == block["episode_return_mean"]
    for made in (type(algo), Algorithm):
        again = made.from_checkpoint(saved)
        assert isinstance(again, Algorithm)
        assert again.experiment.policy.lr == 1e-3
        assert again.experiment.trainer.evaluation_duration == 2
        again.stop()
    algo.stop()


def test_an_algorithm_of_rllib_under_a_name_of_polopt_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`Tuner("PPO", param_space={...})` finds the class of RLlib, whose keys are similar."""
    monkeypatch.setenv(VARIABLE, "")
    polopt.register(override=True)  # without a trainable that Tune has read
    (callback,) = (one for one in _create_default_callbacks([]) if isinstance(one, Checks))
    theirs = type("PPO", (tune.Trainable,), {"__module__": "ray.rllib.algorithms.ppo.ppo"})
    with caplog.at_level(logging.WARNING, "polopt"):
        for name, cls in (("PPO", algorithm_of("PPO")), ("SyncPPO", SyncPPO), ("CQL2", theirs)):
            trial = mock.Mock(trainable_name=name)
            trial.get_trainable_cls.return_value = cls
            callback.on_trial_start(iteration=1, trials=[trial], trial=trial)
        assert caplog.messages == []
        for _ in range(2):
            trial = mock.Mock(trainable_name="PPO")
            trial.get_trainable_cls.return_value = theirs
            callback.on_trial_start(iteration=1, trials=[trial], trial=trial)
    (message,) = caplog.messages
    assert message.startswith("Tune trains PPO of RLlib, and not of polopt. PPO is 'SyncPPO' here")


class Other(tune.Trainable):
    """A trainable of another library."""


def test_builder_registers_the_name_of_the_algorithm(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presets, "_warned", set())
    register_trainable("PPO", Other)
    with caplog.at_level(logging.WARNING, "polopt"):
        config = rllib.PPOConfig()
    assert "'PPO' was registered with Tune by" in caplog.text
    assert get_trainable_cls("PPO") is get_trainable_cls("polopt/PPO") is config.algo_class
    polopt.register(override=True)
