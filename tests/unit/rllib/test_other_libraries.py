"""Options and algorithms of RLlib, Stable-Baselines3 and CleanRL. Errors and the migration page use
the same table, and the table contains every option."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import ray
from migration_tables import PAGES, tables, with_tables

import polopt
from polopt.common.config import ConfigError
from polopt.optimizers.optimizer_registry import OPTIMIZERS
from polopt.policies.networks.model_config import ModelConfig
from polopt.policies.policy_registry import POLICIES
from polopt.rllib.other_libraries import (
    ALGORITHMS,
    CLEANRL,
    RESULT_KEYS,
    RLLIB,
    RLLIB_FIXED,
    RLLIB_MODEL_FIXED,
    RLLIB_REPLAY,
    STABLE_BASELINES3,
    STABLE_BASELINES3_REPLAY,
    Fixed,
    instead_of,
    instead_of_algorithm,
)
from polopt.rollouts.rollout_config import RolloutConfig
from polopt.trainers.experiment import Experiment
from polopt.trainers.presets import A3C, PRESETS, SyncPPO
from polopt.trainers.results import check_stop_key
from polopt.trainers.trainer_config import TrainerConfig

CONFIGS = [TrainerConfig, RolloutConfig]
CONFIGS += [POLICIES.get(name).config_class for name in POLICIES.names()]
CONFIGS += [OPTIMIZERS.get(name).config_class for name in OPTIMIZERS.names()]
KEYS = {key for config in CONFIGS for key in (*config.keys(), *config.other_names())}
KEYS |= {"optimizer", "policy"}
MODEL_KEYS = {*ModelConfig.keys(), *ModelConfig.other_names()}
FIXED = [(name, row) for row in RLLIB_FIXED for name in row.same]
MODEL_FIXED = [(name, row) for row in RLLIB_MODEL_FIXED for name in row.same]

# Arguments of Stable-Baselines3 2.9.2: PPO and A2C, `learn`, `make_vec_env`, `VecNormalize`,
# `EvalCallback`, and `policy_kwargs` of its policies.
SB3 = """
env learning_rate n_steps batch_size n_epochs gamma gae_lambda clip_range clip_range_vf
normalize_advantage ent_coef vf_coef max_grad_norm use_sde sde_sample_freq rollout_buffer_class
rollout_buffer_kwargs target_kl stats_window_size tensorboard_log policy_kwargs verbose seed device
rms_prop_eps use_rms_prop
total_timesteps callback log_interval tb_log_name reset_num_timesteps progress_bar
n_envs monitor_dir wrapper_class env_kwargs vec_env_cls vec_env_kwargs monitor_kwargs wrapper_kwargs
norm_obs norm_reward clip_obs clip_reward
eval_env eval_freq n_eval_episodes best_model_save_path log_path deterministic
net_arch activation_fn ortho_init full_std use_expln squash_output log_std_init
share_features_extractor features_extractor_class features_extractor_kwargs normalize_images
optimizer_class optimizer_kwargs n_lstm_layers lstm_hidden_size shared_lstm enable_critic_lstm
"""
# Further arguments of DQN, SAC and TD3 in Stable-Baselines3.
SB3_REPLAY = """
buffer_size learning_starts batch_size tau train_freq gradient_steps replay_buffer_class
replay_buffer_kwargs optimize_memory_usage n_steps target_update_interval exploration_fraction
exploration_initial_eps exploration_final_eps action_noise ent_coef target_entropy
use_sde_at_warmup policy_delay target_policy_noise target_noise_clip
"""
# The fields of `Args` of CleanRL's ppo.py.
PPO_PY = """
exp_name seed torch_deterministic cuda track wandb_project_name wandb_entity capture_video env_id
total_timesteps learning_rate num_envs num_steps anneal_lr gamma gae_lambda num_minibatches
update_epochs norm_adv clip_coef clip_vloss ent_coef vf_coef max_grad_norm target_kl
batch_size minibatch_size num_iterations
"""
# Options of RLlib's releases before 2.0.
OLD_RLLIB = """
num_workers num_envs_per_worker sample_batch_size horizon soft_horizon no_done_at_end batch_mode
sample_async observation_filter synchronize_filters compress_observations multiagent monitor
log_level callbacks use_pytorch eager num_cpus_per_worker num_gpus_per_worker num_cpus_for_driver
custom_resources_per_worker vf_share_layers lr_schedule entropy_coeff_schedule min_iter_time_s
timesteps_per_iteration metrics_smoothing_episodes collect_metrics_timeout clip_rewards clip_actions
preprocessor_pref ignore_worker_failures recreate_failed_workers sgd_minibatch_size num_sgd_iter
shuffle_sequences simple_optimizer remote_worker_envs remote_env_batch_wait_ms grads_per_step
evaluation_num_episodes evaluation_num_workers in_evaluation env_task_fn log_sys_usage
num_rollout_workers postprocess_inputs min_time_s_per_reporting keep_local_weights_in_sync
use_critic use_gae normalize_actions explore exploration_config learner_queue_size
num_data_loader_buffers
max_sample_requests_in_flight_per_worker broadcast_interval replay_proportion buffer_size
prioritized_replay learning_starts training_intensity worker_side_prioritization n_step
"""


def error_of(options: dict[str, Any], preset: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Experiment.parse({"env": "CartPole-v1", **options}, preset or SyncPPO.preset)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_pages_have_the_tables_of_the_code() -> None:
    texts = [page.read_text() for page in PAGES]
    assert texts == [*map(with_tables, texts)], "run `python tests/unit/rllib/migration_tables.py`"
    lines = [line for text in texts for line in text.splitlines()]
    assert [lines.count(table[0]) for table in tables()] == [1] * len(tables())


def test_each_row_has_as_many_cells_as_the_head_of_its_table() -> None:
    for table in tables():
        assert {line.count("|") for line in table} == {table[0].count("|")}


# ---- nothing is missing -----------------------------------------------------------------------


@pytest.mark.parametrize("name", (SB3 + SB3_REPLAY + PPO_PY + OLD_RLLIB).split())
def test_every_option_has_an_answer(name: str) -> None:
    assert name in KEYS | MODEL_KEYS or instead_of(name)


def test_every_option_of_the_installed_rllib_has_an_answer() -> None:
    if not ray.__version__.startswith("2.60."):
        pytest.skip("the table is of RLlib 2.60")
    ppo = pytest.importorskip("ray.rllib.algorithms.ppo")
    impala = pytest.importorskip("ray.rllib.algorithms.impala")
    appo = pytest.importorskip("ray.rllib.algorithms.appo")
    dqn = pytest.importorskip("ray.rllib.algorithms.dqn")
    sac = pytest.importorskip("ray.rllib.algorithms.sac")
    configs = ppo.PPOConfig(), impala.IMPALAConfig(), appo.APPOConfig()
    configs += dqn.DQNConfig(), sac.SACConfig()
    names = {name for config in configs for name in config.to_dict()}
    assert len(names) > 250
    deprecated = {name for name in names if name.startswith("_train_batch_size")}
    known = KEYS | MODEL_KEYS | deprecated
    assert {name for name in names if name not in known and not instead_of(name)} == set()


def test_every_option_of_the_network_of_rllib_has_an_answer() -> None:
    catalog = pytest.importorskip("ray.rllib.models.catalog")
    new = pytest.importorskip("ray.rllib.core.rl_module.default_model_config")
    names = {field.name for field in dataclasses.fields(new.DefaultModelConfig)}
    names |= set(catalog.MODEL_DEFAULTS)
    assert {name for name in names if name not in MODEL_KEYS and not instead_of(name)} == set()


def test_fixed_options_of_other_libraries_are_not_keys_of_polopt() -> None:
    assert {name for name, _ in FIXED} & KEYS == set()
    assert {name for name, _ in MODEL_FIXED} & MODEL_KEYS == set()
    assert len({name for name, _ in FIXED}) == len(FIXED)
    assert len({name for name, _ in MODEL_FIXED}) == len(MODEL_FIXED)
    assert set(ALGORITHMS) & set(PRESETS) == set()


# ---- the answers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("n_steps", "For 'n_steps' of Stable-Baselines3: 'rollout_fragment_length'"),
        ("n_envs", "'num_envs_per_worker', times 'num_workers' if 'num_workers' is not 0"),
        ("learning_rate", "of Stable-Baselines3 and CleanRL: 'lr', a number or "),
        ("max_grad_norm", "of Stable-Baselines3 and CleanRL: 'grad_clip'"),
        ("total_timesteps", "'stop.num_env_steps_sampled_lifetime' of 'polopt train'"),
        ("device", "'num_gpus': 1 for 'cuda', 0 for 'cpu'"),
        ("ent_coef", "of Stable-Baselines3 and CleanRL: 'entropy_coeff'"),
        ("target_kl", "'kl_stop'"),
        ("policy_kwargs", "For 'policy_kwargs' of Stable-Baselines3: 'model'"),
        ("num_steps", "For 'num_steps' of CleanRL: 'rollout_fragment_length'"),
        ("num_envs", "For 'num_envs' of CleanRL: 'num_envs_per_worker', times "),
        ("num-envs", "For 'num_envs' of CleanRL: 'num_envs_per_worker', times "),
        ("horizon", "For 'horizon' of RLlib: 'max_frames_per_traj'"),
        ("compress_observations", "Allowed: False. For 'compress_observations' of RLlib: 'compres"),
        ("multiagent", "For 'multiagent' of RLlib: 'policies', 'policy_mapping_fn', "),
        ("use_kl_loss", "For 'use_kl_loss' of RLlib: 'kl_coeff'. 0 turns the KL loss off"),
        ("replay_buffer_config", "For 'replay_buffer_config' of RLlib: 'buffer_size', 'priori"),
        ("gradient_steps", "'gradient_steps * batch_size / (train_freq * n_envs)'"),
        ("ent_coef", "For 'ent_coef' of Stable-Baselines3's DQN, SAC and TD3: 'initial_alpha'"),
        ("n_steps", "For 'n_steps' of Stable-Baselines3's DQN, SAC and TD3: 'n_step'"),
    ],
)
def test_option_of_another_library_names_its_place(name: str, said: str) -> None:
    message = error_of({name: "x"})
    assert said in message
    assert f"key {name!r}" in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"policy": {"learning_rate": 1}}, "policy 'ppo': unknown key 'learning_rate'. For "),
        ({"policy": {"name": "ppo", "use_gae": False}}, "key 'use_gae': got False. Allowed: True"),
        ({"optimizer": {"n_steps": 1}}, "optimizer 'sync_samples': unknown key 'n_steps'. For "),
        ({"model": {"net_arch": [64]}}, "'model.net_arch'. For 'net_arch' of Stable-Baselines3: "),
        ({"model": {"max_seq_len": 9}}, "For 'max_seq_len' of RLlib: polopt has no such option"),
        ({"model": {"use_attention": True}}, "model: key 'use_attention': got True. Allowed: Fal"),
    ],
)
def test_nested_option_of_another_library_names_its_place(given: dict[str, Any], said: str) -> None:
    assert said in error_of(given)


@pytest.mark.parametrize("name", ["MlpPolicy", "CnnPolicy", "MultiInputPolicy"])
def test_network_of_stable_baselines3_in_place_of_a_policy(name: str) -> None:
    said = f"For {name!r} of Stable-Baselines3: polopt has no such option: the preset is the algo"
    assert said in error_of({"policy": name})  # with a preset, and below without a preset
    plain = {"optimizer": "sync_samples"}
    assert said in error_of({"policy": name}, plain)
    with pytest.raises(ConfigError, match=f"got {name!r}. Allowed: a dict.*{said}"):
        SyncPPO(name, env="CartPole-v1")
    with pytest.raises(ConfigError, match=f"got {name!r}. Allowed: a dict.*{said}"):
        A3C(*[name, "CartPole-v1"], verbose=1)


def test_second_positional_argument_is_one_error() -> None:
    arguments: list[Any] = [{"num_workers": 0}, "CartPole-v1"]
    with pytest.raises(ConfigError, match=r"SyncPPO takes one .*got another one, 'CartPole-v1'"):
        SyncPPO(*arguments)


def test_mode_of_vectors_has_the_name_of_rllib() -> None:
    given = {"env": "CartPole-v1", "gym_env_vectorize_mode": "async"}
    assert Experiment.parse(given, {}).rollout.vectorization_mode == "async"


def test_option_of_another_policy_says_that_it_is_one() -> None:
    message = error_of({"clip_param": 0.1}, A3C.preset)
    assert message.startswith("key 'clip_param' is an option of policy 'appo', 'decoupled_ppo'")
    assert "The policy of this config is 'a3c'" in message
    assert message.endswith(
        'with PolicyOptimizerTrainer, for example policy={"name": "ppo", "clip_param": ...}'
    )
    message = error_of({"policy": "a2c", "clip_param": 0.1}, {"optimizer": "sync_samples"})
    assert message.endswith('another policy, for example policy={"name": "ppo", "clip_param": ...}')
    message = error_of({"grads_per_step": 3})
    assert "The optimizer of this config is 'sync_samples'" in message
    assert 'optimizer={"name": "sync_gradients", "grads_per_step": ...}' in message
    assert "policy" not in message.replace("PolicyOptimizer", "")


@pytest.mark.parametrize("name", [*ALGORITHMS, "ppo", "ddqn", "recurrent_ppo", "ape_x", "Rainbow"])
def test_algorithm_of_another_library(name: str) -> None:
    said = instead_of_algorithm(name)
    assert said
    assert "`" not in said
    if name not in PRESETS:
        with pytest.raises(AttributeError) as caught:
            getattr(polopt, name)
        assert str(caught.value).endswith(f". {said}")
    assert not any(instead_of_algorithm(preset) for preset in PRESETS)


# ---- values that mean what polopt does anyway -----------------------------------------------


ACCEPTED = {
    "framework": "torch",
    "explore": True,
    "use_gae": True,
    "use_critic": True,
    "num_learners": 0,
    "batch_mode": "truncate_episodes",
    "observation_filter": "NoFilter",
    "evaluation_duration_unit": "episodes",
    "restart_failed_env_runners": True,
    "grad_clip_by": "global_norm",
    "exploration_config": {},
    "input": "sampler",
    "output": None,
    "create_env_on_driver": False,
}


def test_option_that_changes_nothing_is_accepted() -> None:
    plain = Experiment.parse({"env": "CartPole-v1"}, SyncPPO.preset)
    assert Experiment.parse({"env": "CartPole-v1", **ACCEPTED}, SyncPPO.preset) == plain
    nested = {"env": "CartPole-v1", "policy": {"name": "ppo", "use_gae": True}}
    nested["model"] = {"use_attention": False, "framestack": False}
    assert Experiment.parse(nested, SyncPPO.preset) == plain


@pytest.mark.parametrize("row", [*RLLIB_FIXED, *RLLIB_MODEL_FIXED], ids=lambda row: min(row.same))
def test_each_value_that_changes_nothing(row: Fixed) -> None:
    nested = row in RLLIB_MODEL_FIXED
    for name in row.same:
        for value in row.allowed(name):
            given = {"model": {name: value}} if nested else {name: value}
            Experiment.parse({"env": "CartPole-v1", **given}, SyncPPO.preset)
        for other in ("another value", 7, not row.allowed(name) or [1]):
            message = error_of({"model": {name: other}} if nested else {name: other})
            assert f"key {name!r}: got {other!r}" in message
            assert f"For {name!r} of " in message
            assert all(repr(value) in message for value in row.allowed(name))


def test_true_is_not_one_and_false_is_not_zero() -> None:
    assert "got False. Allowed: 0" in error_of({"num_learners": False})
    assert "got 1. Allowed: True" in error_of({"use_gae": 1})


# ---- similar letters --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["horizons", "stepsize", "runners", "threads", "framework_"])
def test_no_suggestion_at_a_distance(name: str) -> None:
    assert "did you mean" not in error_of({name: 1})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("gama", "gamma"),
        ("lrr", "lr"),
        ("sed", "seed"),
        ("num_worker", "num_workers"),
        ("num_env_runer", "num_env_runners"),
        ("rollout_fragment_lenght", "rollout_fragment_length"),
        ("clip_parm", "clip_param"),
    ],
)
def test_misspelling_is_suggested(name: str, meant: str) -> None:
    assert f"did you mean {meant!r}?" in error_of({name: 1})


def test_tables_are_not_empty() -> None:
    for options in (RLLIB, STABLE_BASELINES3, CLEANRL):
        assert len(options) > 20
    for options in (RLLIB, RLLIB_REPLAY, STABLE_BASELINES3, STABLE_BASELINES3_REPLAY, CLEANRL):
        assert len(options) > 10
        assert all(row.names and row.here for row in options)


def test_renamed_stop_keys_name_the_new_key() -> None:
    for old, new in RESULT_KEYS.items():
        with pytest.raises(ConfigError, match=f"{old!r} is now {new!r}"):
            check_stop_key(old)
        check_stop_key(new)
