"""`prefixflow verify` itself: it passes where reuse is exact, and fails for every broken channel.

The equality it measures is proven elsewhere in this folder; here the measuring is under test.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from typer.testing import CliRunner

from prefixflow_verl import attention
from prefixflow_verl.cli import app
from prefixflow_verl.kv_cache import PackCache
from prefixflow_verl.phases import PhaseRunner
from tests.reference import tiny_model

SMALL = ("--prompt", "24", "--response", "6", "--group", "3")


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def invoke(*arguments):
    return CliRunner().invoke(app, ["verify", *(str(argument) for argument in arguments)])


def verify(*arguments, ok=True):
    result = invoke("--json", *SMALL, *arguments)
    assert result.exit_code == (0 if ok else 1), result.output
    record = json.loads(result.stdout)
    assert record["ok"] is ok
    return record


def plans_of(record):
    return {plan["name"]: plan for plan in record["plans"]}


def refusal(*arguments):
    """The one sentence in which a command ends that cannot be carried out."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    return lines[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-6)])
def test_reuse_is_exact(dtype, tolerance):
    record = verify("--dtype", dtype, "--depth", "2")
    assert record["tolerance"] == tolerance
    assert record["max_rel_grad_error"] <= tolerance
    assert record["max_abs_logprob_error"] <= 10 * tolerance
    assert record["loss_error"] <= 10 * tolerance
    assert record["worst_parameter"] in record["plans"][0]["parameters"]
    assert len(record["plans"][0]["parameters"]) == len(list(tiny_model().parameters()))
    plans = plans_of(record)
    assert plans["fused"]["num_packs"] == 1
    assert plans["fused"]["num_cut_edges"] == 0
    # One prompt, two turns, three responses below each.
    assert plans["cut"]["num_cut_edges"] == 8
    assert plans["cut"]["max_cache_bytes"] > 0


def test_bfloat16_is_judged_by_full_sequence_bfloat16():
    record = verify("--dtype", "bfloat16")
    for plan in record["plans"]:
        for name, limit in plan["limits"].items():
            assert 0 < plan[name] <= limit
    assert 1e-3 < record["max_rel_grad_error"] < 0.2


@pytest.mark.parametrize("channel", [0, 1], ids=["dK", "dV"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lost_cache_gradient_fails(monkeypatch, channel, dtype):
    add_gradient = PackCache.add_gradient

    def lose_one(self, layer, start, end, *grads):
        kept = [grad * (index != channel) for index, grad in enumerate(grads)]
        add_gradient(self, layer, start, end, *kept)

    monkeypatch.setattr(PackCache, "add_gradient", lose_one)
    plans = plans_of(verify("--dtype", dtype, ok=False))
    assert plans["fused"]["ok"]  # nothing goes through the cache
    assert not plans["cut"]["ok"]


def test_lost_boundary_prediction_fails(monkeypatch):
    gather = PhaseRunner._gather

    def detach_other_packs(self, completion, output):
        values = gather(self, completion, output)
        own_pack = completion.sources[-1][0]
        num_other = sum(len(found) for pack, found in completion.sources if pack != own_pack)
        return torch.cat([values[:num_other].detach(), values[num_other:]])

    monkeypatch.setattr(PhaseRunner, "_gather", detach_other_packs)
    plans = plans_of(verify(ok=False))
    assert plans["fused"]["ok"] and not plans["cut"]["ok"]


def test_wrong_forward_fails(monkeypatch):
    merge_part = attention.merge_part

    def shifted(out, lse, part_out, part_lse):
        merge_part(out, lse, part_out, part_lse + 1e-2)

    monkeypatch.setattr(attention, "merge_part", shifted)
    record = verify(ok=False)
    assert record["max_abs_logprob_error"] > record["plans"][0]["limits"]["max_abs_logprob_error"]


def test_gradient_that_is_not_finite_fails(monkeypatch):
    add_gradient = PackCache.add_gradient

    def poison(self, layer, start, end, key_grad, value_grad):
        add_gradient(self, layer, start, end, key_grad * float("nan"), value_grad)

    monkeypatch.setattr(PackCache, "add_gradient", poison)
    assert verify(ok=False)["max_rel_grad_error"] is None


def test_sizes_are_those_asked_for():
    for group, depth, num_rollouts in ((1, 1, 1), (5, 1, 5), (2, 3, 8)):
        record = verify(
            "--prompt",
            10,
            "--response",
            1,
            "--group",
            group,
            "--depth",
            depth,
            "--no-checkpointing",
        )
        assert record["logical_tokens"] == num_rollouts * (10 + depth - 1)
    # Without siblings nothing is shared.
    assert verify("--group", 1)["reuse_ratio"] == 1.0


def test_token_budget_replaces_both_plans():
    (plan,) = verify("--token-budget", 30)["plans"]
    assert plan["name"] == "budget"
    assert plan["num_cut_edges"] == 3
    (plan,) = verify("--token-budget", 1000)["plans"]
    assert plan["num_cut_edges"] == 0


def test_checkpointing_runs_the_layers_again(monkeypatch):
    calls = []
    forward_parts = attention.forward_parts

    def count(*arguments):
        queries = arguments[0]
        # One dummy token, without gradients, shows what follows the LM head.
        if queries.shape[2] > 1:
            calls.append(1)
        return forward_parts(*arguments)

    monkeypatch.setattr(attention, "forward_parts", count)
    verify("--no-checkpointing")
    num_plain = len(calls)
    verify("--checkpointing")
    assert len(calls) - num_plain == 2 * num_plain


def test_attention_backend_is_the_one_that_runs(monkeypatch):
    assert verify("--attention-backend", "reference")["attention_backend"] == "reference"

    def refuse(*arguments):
        raise AssertionError("another backend ran")

    monkeypatch.setattr(attention.ReferenceBackend, "forward", refuse)
    monkeypatch.setattr(attention.SdpaCpuBackend, "forward", refuse)
    for backend in ("reference", "sdpa_cpu"):
        result = invoke(*SMALL, "--attention-backend", backend)
        assert isinstance(result.exception, AssertionError)


def test_seed_changes_the_rollouts():
    errors = {seed: verify("--seed", seed)["plans"][0]["parameters"] for seed in (0, 1)}
    assert errors[0] != errors[1]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_model_of_a_directory(tmp_path, family):
    tiny_model(family, tied=False).save_pretrained(tmp_path)
    record = verify("--model", tmp_path)
    assert record["model"] == str(tmp_path)
    assert "lm_head.weight" in record["plans"][0]["parameters"]


def test_parameter_without_gradient_has_no_error(tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=31,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=1,
        decoder_sparse_step=1,
    )
    model = AutoModelForCausalLM.from_config(config)
    torch.nn.init.zeros_(model.lm_head.weight)  # no gradient gets past the head
    model.save_pretrained(tmp_path)
    parameters = verify("--model", tmp_path)["plans"][0]["parameters"]
    assert parameters["model.layers.0.self_attn.q_proj.weight"] == 0.0
    assert parameters["lm_head.weight"] > 0.0


def test_unsupported_models_are_named(tmp_path):
    tiny_model(attention_dropout=0.1).save_pretrained(tmp_path / "dropout")
    tiny_model("mistral", sliding_window=8).save_pretrained(tmp_path / "window")
    assert "--model: attention_dropout=0.1" in refusal("--model", tmp_path / "dropout")
    assert "--model: sliding_window=8" in refusal("--model", tmp_path / "window")


def test_models_that_cannot_be_loaded(tmp_path):
    assert "/no/such does not exist" in refusal("--model", "/no/such")
    assert "has no config.json" in refusal("--model", tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be used" in refusal("--model", tmp_path)
    tiny_model().config.save_pretrained(tmp_path)
    assert f"{tmp_path} cannot be loaded" in refusal("--model", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert "hidden_dropout_prob=0.1" in refusal("--model", tmp_path)


def test_rollouts_longer_than_the_model(tmp_path):
    tiny_model(max_position_embeddings=16).save_pretrained(tmp_path)
    assert "max_position_embeddings=16: lower --prompt" in refusal("--model", tmp_path)


def test_weights_that_are_not_finite(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    model.save_pretrained(tmp_path)
    assert "not finite" in refusal("--model", tmp_path)


def test_table_for_people():
    result = invoke(*SMALL, "--depth", "2")
    assert result.exit_code == 0
    assert "reuse ratio" in result.stdout
    assert "self_attn" in result.stdout
    assert result.stdout.splitlines()[-1] == "ok: 6 rollouts, the same update"
    assert result.stdout.isascii()
