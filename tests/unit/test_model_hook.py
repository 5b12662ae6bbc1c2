"""Refusals: what prefix reuse cannot reproduce is named, and no model stays switched."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    MixtralConfig,
    Qwen3NextConfig,
)

from prefixflow_verl import PrefixFlow, UnsupportedModelError, check_model
from prefixflow_verl.model_hook import ATTENTION_NAME, pretrained_model, routed
from tests.reference import VOCAB, dense_log_probs, tiny_model

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ROPE = {"rope_theta": 1e4, "factor": 2.0}


def from_config(config, **settings):
    return AutoModelForCausalLM.from_config(config(**SIZES, **settings))


def with_setting(name, value):
    model = tiny_model(num_layers=1)
    setattr(model.config, name, value)
    return model


def with_lora_dropout():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    return peft.get_peft_model(tiny_model(num_layers=1), config)


def with_reentrant_checkpointing():
    model = tiny_model(num_layers=1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    return model


def with_longrope():
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64, **ROPE, **factors}
    return tiny_model("llama", num_layers=1, rope_parameters=rope)


REFUSALS = {
    "attention dropout": (
        lambda: tiny_model("llama", attention_dropout=0.1),
        "dropout",
        "attention_dropout=0.1",
    ),
    "LoRA dropout": (with_lora_dropout, "dropout", "lora_dropout"),
    "attention soft-capping": (
        lambda: from_config(Gemma2Config, final_logit_softcapping=None),
        "softcap",
        "attn_logit_softcapping",
    ),
    "logit soft-capping": (
        lambda: from_config(Gemma2Config, attn_logit_softcapping=None),
        "softcap",
        "final_logit_softcapping",
    ),
    "dynamic rope": (
        lambda: tiny_model("llama", rope_parameters={"rope_type": "dynamic", **ROPE}),
        "rope_type",
        "rope_type=dynamic",
    ),
    "long rope": (with_longrope, "rope_type", "rope_type=longrope"),
    "dynamic rope of one layer type": (
        lambda: with_setting(
            "rope_parameters", {"full_attention": {"rope_type": "dynamic", **ROPE}}
        ),
        "rope_type",
        "rope_type=dynamic",
    ),
    "linear attention": (
        lambda: with_setting("layer_types", ["full_attention", "linear_attention"]),
        "layer_types",
        "linear_attention",
    ),
    "chunked attention": (
        lambda: with_setting("layer_types", ["chunked_attention"]),
        "layer_types",
        "chunked_attention",
    ),
    "reentrant checkpointing": (
        with_reentrant_checkpointing,
        "reentrant_checkpointing",
        "use_reentrant",
    ),
    "router loss": (
        lambda: from_config(MixtralConfig, output_router_logits=True, num_local_experts=2),
        "router_loss",
        "output_router_logits",
    ),
    "images": (lambda: with_setting("vision_config", {"depth": 1}), "multimodal", "multimodal"),
    "sound": (lambda: with_setting("audio_config", {"depth": 1}), "multimodal", "multimodal"),
    "no attention interface": (
        lambda: AutoModelForCausalLM.from_config(
            BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
        ),
        "attention_interface",
        "BloomForCausalLM does not route its attention",
    ),
    "a linear-attention model": (
        lambda: from_config(Qwen3NextConfig, num_experts=2, linear_num_value_heads=2),
        None,
        "Qwen3NextForCausalLM",
    ),
    "not a transformers model": (
        lambda: torch.nn.Linear(2, 2),
        "not_transformers",
        "no Hugging Face PreTrainedModel",
    ),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_refused_by_name(refusal):
    make, feature, named = REFUSALS[refusal]
    model = make()
    with pytest.raises(UnsupportedModelError) as error:
        check_model(model)
    assert named in str(error.value)
    assert feature is None or error.value.feature == feature


def test_the_public_door_refuses_too():
    with pytest.raises(UnsupportedModelError, match="attention_dropout"):
        PrefixFlow(tiny_model("llama", attention_dropout=0.1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_supported_models_pass(family, checkpointing):
    check_model(tiny_model(family, num_layers=1, checkpointing=checkpointing))


@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
def test_rope_that_depends_on_position_alone_passes(rope_type):
    check_model(tiny_model("llama", rope_parameters={"rope_type": rope_type, **ROPE}))


def test_a_window_shorter_than_a_rollout_is_refused_when_it_is_met():
    model = tiny_model("mistral", num_layers=1, sliding_window=20)
    flow = PrefixFlow(model)
    fits = torch.arange(20)
    torch.testing.assert_close(flow.log_probs([fits])[0], dense_log_probs(model, fits)[0].detach())
    with pytest.raises(UnsupportedModelError, match="sliding_window=20") as error:
        flow.log_probs([torch.arange(22)])
    assert error.value.feature == "sliding_window"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "settings, feature",
    [
        ({"dropout": 0.5}, "attention_dropout"),
        ({"softcap": 30.0}, "softcap_or_sinks"),
        ({"s_aux": torch.zeros(2)}, "softcap_or_sinks"),
    ],
)
def test_what_only_the_attention_sees_is_refused_there(settings, feature, monkeypatch):
    """Settings that no config shows reach the attention function as arguments."""
    model = tiny_model(num_layers=1)
    attention = model.model.layers[0].self_attn
    whole = type(attention).forward

    def forward(self, *arguments, **keywords):
        return whole(self, *arguments, **keywords, **settings)

    if "dropout" in settings:
        attention.attention_dropout = settings["dropout"]
    else:
        monkeypatch.setattr(type(attention), "forward", forward)
    with pytest.raises(UnsupportedModelError) as error:
        PrefixFlow(model).log_probs([torch.arange(4)])
    assert error.value.feature == feature


def test_an_attention_without_its_context_is_refused():
    model = tiny_model(num_layers=1)
    with routed(model), pytest.raises(RuntimeError, match="did not pass `prefixflow_context`"):
        model(input_ids=torch.arange(4)[None])


def test_routed_switches_and_restores():
    model = tiny_model(num_layers=1)
    with routed(model):
        assert model.config._attn_implementation == ATTENTION_NAME
    assert model.config._attn_implementation == "sdpa"


def test_routed_restores_after_an_exception():
    model = tiny_model(num_layers=1)
    flow = PrefixFlow(model)

    def broken(_):
        raise KeyError("the user's own mistake")

    with pytest.raises(KeyError):
        flow.backward([torch.arange(5)], broken)
    assert model.config._attn_implementation == "sdpa"


def test_the_model_is_found_below_wrappers():
    model = tiny_model(num_layers=1)
    assert pretrained_model(torch.nn.Sequential(torch.nn.Identity(), model)) is model


def test_a_model_that_runs_a_layer_twice_is_refused() -> None:
    model = tiny_model(num_layers=2)
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match="attention layer 0 twice"):
        PrefixFlow(model)


def test_a_model_that_makes_its_own_positions_is_refused() -> None:
    model = tiny_model(num_layers=2)
    rotary = model.model.rotary_emb
    forward = rotary.forward

    def positions_of_the_row(hidden, position_ids):
        return forward(hidden, torch.arange(hidden.shape[1])[None])

    rotary.forward = positions_of_the_row
    with pytest.raises(UnsupportedModelError, match="other log-probs when a prefix is reused"):
        PrefixFlow(model)
