"""Every shipped config composes as verl would compose it and becomes verl's own dataclasses."""

import subprocess
import sys
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from prefixflow_verl.config import PrefixFlowOptions, ProvenanceOptions

REPOSITORY = Path(__file__).parents[2]
PRIMARY_CONFIGS = ("prefixflow_grpo", "prefixflow_grpo_cpu")


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("compose") / "assets"
    maker = REPOSITORY / "recipes" / "arithmetic_cpu" / "make_assets.py"
    command = [sys.executable, str(maker), "--out", str(directory), "--prompt-len", "32"]
    subprocess.run(command, check=True, timeout=120)
    return directory


@pytest.fixture(autouse=True)
def cpu_platform(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")


def compose_run(module: str, name: str, assets: Path, *overrides: str) -> DictConfig:
    """The config of a run of verl's main_ppo on the recipe's assets."""
    with initialize_config_module(module, version_base=None):
        return compose(
            name,
            overrides=[
                f"actor_rollout_ref.model.path={assets}/model",
                f"data.train_files={assets}/train.parquet",
                f"data.val_files={assets}/val.parquet",
                "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
                "trainer.n_gpus_per_node=1",
                *overrides,
            ],
        )


def validate(config: DictConfig) -> None:
    """What main_ppo does with a config before it starts Ray."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    from prefixflow_verl.preflight import check_run

    check_run(config)
    validate_config(
        config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )


def engine_configs(config: DictConfig) -> tuple:
    """Engine configs of actor, reference and critic, as verl's workers would build them."""
    from verl.utils.config import omega_conf_to_dataclass

    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    # The worker renames these keys before it builds the reference's config.
    reference_section = config.actor_rollout_ref.ref
    OmegaConf.set_struct(reference_section, False)
    for name in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
        reference_section[f"ppo_{name}"] = reference_section.pop(f"log_prob_{name}")
    reference_section.use_dynamic_bsz = reference_section.pop("log_prob_use_dynamic_bsz")
    reference = omega_conf_to_dataclass(reference_section)
    critic_section = config.critic
    OmegaConf.set_struct(critic_section, False)
    critic_section.model.path = config.actor_rollout_ref.model.path
    critic_section.ppo_micro_batch_size_per_gpu = 1
    critic = omega_conf_to_dataclass(critic_section)
    return actor.engine, reference.engine, critic.engine


def test_every_shipped_config_is_covered():
    shipped = {
        Path(file.name).stem
        for file in resources.files("prefixflow_verl.configs").iterdir()
        if file.name.endswith(".yaml")
    }
    assert shipped == {*PRIMARY_CONFIGS, "prefixflow_engine"}


@pytest.mark.parametrize("name", PRIMARY_CONFIGS)
def test_primary_config_selects_the_engine_with_documented_defaults(name, assets):
    config = compose_run("prefixflow_verl.configs", name, assets)
    validate(config)
    assert config.algorithm.adv_estimator == "grpo"
    actor, reference, _ = engine_configs(config)
    assert (actor.strategy, reference.strategy) == ("prefixflow", "prefixflow")
    assert reference.forward_only and not actor.forward_only
    assert actor.prefixflow == reference.prefixflow == PrefixFlowOptions()


@pytest.mark.parametrize("name", PRIMARY_CONFIGS)
def test_every_option_of_the_config_reaches_both_engines(name, assets):
    values = {
        "on_unsupported": "fallback",
        "attention_backend": "reference",
        "max_tokens_per_pack": 77,
        "max_cache_bytes": 88,
        "prefix_activations": "recompute",
        "cache_grad_dtype": "param",
        "plan": "cut",
        "min_shared_tokens": 99,
        "cut_overhead_tokens": 111,
        "oom_retry": True,
        "failure_timeout_s": 7.5,
        "placement": "length",
        "provenance": {
            "enabled": False,
            "max_staleness": 3,
            "on_stale": "mask",
            "on_mixed": "drop_group",
            "on_missing": "error",
            "ledger_dir": "here",
        },
    }
    path = "actor_rollout_ref.actor.fsdp_config.prefixflow"
    rules = values["provenance"]
    overrides = [f"{path}.{option}={value}" for option, value in values.items() if value != rules]
    overrides += [f"{path}.provenance.{rule}={value}" for rule, value in rules.items()]
    config = compose_run("prefixflow_verl.configs", name, assets, *overrides)
    section = OmegaConf.select(config, path)
    options = {field.name for field in fields(PrefixFlowOptions)}
    assert options == set(section) == set(values), "every option is in the config, and in this test"
    assert {field.name for field in fields(ProvenanceOptions)} == set(section.provenance)
    assert set(rules) == set(section.provenance)
    actor, reference, _ = engine_configs(config)
    expected = PrefixFlowOptions(**values | {"provenance": ProvenanceOptions(**rules)})
    assert actor.prefixflow == reference.prefixflow == expected


def test_option_out_of_range_stops_the_run_before_it_starts(assets):
    config = compose_run(
        "prefixflow_verl.configs",
        "prefixflow_grpo",
        assets,
        "actor_rollout_ref.actor.fsdp_config.prefixflow.plan=best",
    )
    with pytest.raises(Exception, match="fsdp_config.prefixflow.plan='best' must be one of auto"):
        validate(config)


def test_one_override_on_verls_own_config_selects_the_engine(assets):
    config = compose_run(
        "verl.trainer.config",
        "ppo_trainer",
        assets,
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.strategy=prefixflow",
    )
    validate(config)
    from prefixflow_verl.engine_config import options_of

    actor, reference, critic = engine_configs(config)
    assert (actor.strategy, reference.strategy) == ("prefixflow", "prefixflow")
    assert critic.strategy == "fsdp", "a critic keeps verl's strategy"
    assert options_of(actor) == options_of(reference) == PrefixFlowOptions()


def test_the_same_config_runs_verls_engine_for_comparison(assets):
    config = compose_run(
        "prefixflow_verl.configs",
        "prefixflow_grpo_cpu",
        assets,
        "actor_rollout_ref.actor.strategy=fsdp2",
    )
    validate(config)
    actor, reference, critic = engine_configs(config)
    assert (actor.strategy, reference.strategy, critic.strategy) == ("fsdp2", "fsdp2", "fsdp2")
