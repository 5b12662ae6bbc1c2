"""The plugin's settings: defaults, ranges, and what verl's engine config makes of them."""

import subprocess
import sys

import pytest

from prefixflow_verl.config import OPTIONS_PATH, PrefixFlowOptions


def test_defaults_are_the_documented_ones():
    options = PrefixFlowOptions()
    assert options == PrefixFlowOptions(
        on_unsupported="error",
        attention_backend="auto",
        max_tokens_per_pack=None,
        max_cache_bytes=None,
        cache_grad_dtype="float32",
        plan="auto",
        min_shared_tokens=8,
        cut_overhead_tokens=256,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("on_unsupported", "ignore"),
        ("attention_backend", "flash"),
        ("cache_grad_dtype", "bfloat16"),
        ("plan", "tree"),
        ("max_tokens_per_pack", 0),
        ("max_tokens_per_pack", True),
        ("max_tokens_per_pack", 10.5),
        ("max_cache_bytes", -1),
        ("max_cache_bytes", "1GB"),
        ("min_shared_tokens", 0),
        ("cut_overhead_tokens", -1),
    ],
)
def test_value_out_of_range_names_the_full_config_path(name, value):
    with pytest.raises(ValueError) as error:
        PrefixFlowOptions(**{name: value})
    assert f"{OPTIONS_PATH}.{name}={value!r}" in str(error.value)


def test_unknown_setting_is_refused_by_name():
    with pytest.raises(ValueError, match=f"{OPTIONS_PATH}.max_token is not a setting"):
        PrefixFlowOptions.from_mapping({"max_token": 3})


def test_options_import_without_torch_and_verl():
    blocked = "import sys; sys.modules.update(torch=None, verl=None); import prefixflow_verl.config"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=60)


def test_engine_config_turns_a_mapping_into_options():
    from prefixflow_verl.engine_config import PrefixFlowEngineConfig, options_of

    engine_config = PrefixFlowEngineConfig(prefixflow={"max_tokens_per_pack": 512})
    assert engine_config.strategy == "prefixflow"
    assert options_of(engine_config) == PrefixFlowOptions(max_tokens_per_pack=512)


def test_plain_engine_config_gets_default_options():
    from verl.workers.config import FSDPEngineConfig

    from prefixflow_verl.engine_config import options_of

    assert options_of(FSDPEngineConfig()) == PrefixFlowOptions()


def test_engine_config_refuses_a_foreign_strategy():
    from prefixflow_verl.engine_config import PrefixFlowEngineConfig

    with pytest.raises(ValueError, match="actor_rollout_ref.actor.strategy=prefixflow"):
        PrefixFlowEngineConfig(strategy="megatron")


def test_as_fsdp2_leaves_the_original_alone():
    from prefixflow_verl.engine_config import PrefixFlowEngineConfig, as_fsdp2

    engine_config = PrefixFlowEngineConfig(fsdp_size=2, prefixflow={"plan": "cut"})
    built = as_fsdp2(engine_config)
    assert (built.strategy, built.fsdp_size) == ("fsdp2", 2)
    assert engine_config.strategy == "prefixflow"
    assert engine_config.prefixflow.plan == "cut"
