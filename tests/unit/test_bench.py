"""`prefixflow bench update`: result arithmetic, refusal of arms that differ, tiny real runs."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from prefixflow_verl.bench import (
    ArmsDisagreeError,
    case_figures,
    check_agreement,
    memory_figures,
    verdict,
)
from prefixflow_verl.bench_plots import draw_heat_maps
from prefixflow_verl.bench_report import report
from prefixflow_verl.bench_settings import ModelSizes
from prefixflow_verl.cli import app
from prefixflow_verl.memory import MemoryPeaks

ARMS = {"prefixflow", "verl", "dense-head-only", "prefix-grouper", "prefix-grouper-split"}
TINY = [
    *("--layers", "1", "--hidden", "32", "--vocab", "64"),
    *("--repeats", "2", "--threads", "1", "--json"),
]

TRACE = (
    '{"prompt": 10, "responses": [3, 12, 7, 4]}',
    # Three rollouts of two turns, a tool's answer in between.
    '{"prompt_len": 17, "prompt_group_id": 1, "response_loss_mask_rle": [[1, 5], [0, 9], [1, 2]]}',
    '{"prompt_len": 17, "prompt_group_id": 1, "response_loss_mask_rle": [[1, 3], [0, 4]]}',
    '{"prompt_len": 17, "prompt_group_id": 1, "response_loss_mask_rle": [[1, 6]]}',
    # Nothing to share with anyone.
    '{"prompt": 5, "responses": [9]}',
)

RUN = """
import json, sys
from typer.testing import CliRunner
from prefixflow_verl.cli import app

def invoke(*arguments):
    result = CliRunner().invoke(app, ["bench", "update", *arguments])
    reason = repr(result.exception) if result.exit_code else ""
    return [result.exit_code, result.stdout, result.stderr[-400:] + reason]

*tiny, trace, out = sys.argv[1:]
grid = ("--case", "24,8,4,2")
ragged = ("--trace", trace, "--turns", "3", "--context", "16,40", "--response", "6")
found = {"good": invoke(*tiny, *grid, "--case", "8,8,1,2", *ragged, "--out", out)}

from prefixflow_verl import bench_arms, engine
from verl.utils import tensordict_utils as tu
used = set()
run = engine.PrefixFlowEngine.forward_backward_batch
def noted(self, data, *args, **kwargs):
    size = tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=None)
    used.add((self.options.plan, size))
    return run(self, data, *args, **kwargs)
engine.PrefixFlowEngine.forward_backward_batch = noted
tiny[tiny.index("--repeats") + 1] = "1"
fixed = ("--rollouts-per-forward", "2", "--option", "plan=cut", "--option", "min_shared_tokens=4")
found["fixed"] = invoke(*tiny, *grid, *fixed)
found["used"] = sorted(used, key=str)
found["log_prob"] = invoke(*tiny, *ragged, "--what", "log_prob")

right = bench_arms._jagged_loss
bench_arms._jagged_loss = lambda *args, **kwargs: (1.01 * right(*args, **kwargs)[0], {})
found["larger"] = invoke(*tiny, *grid)

def mean_of_rows(model_output, data, dp_group=None):
    rows = zip(model_output["log_probs"].unbind(), data["advantages"].unbind())
    return -sum((row[-len(a) - 1 : -1] * a).mean() for row, a in rows) / 8, {}
bench_arms._jagged_loss = mean_of_rows
found["mean of rows, equal"] = invoke(*tiny, *grid)
found["mean of rows, ragged"] = invoke(*tiny, "--trace", trace)
print(json.dumps(found))
"""
"""Good runs, then some in which veRL's engines get another loss: one percent larger; the mean over
rollouts of means over tokens, which is the right one where all (here 8) have the same length."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    trace = out / "lengths.jsonl"
    trace.write_text("\n".join(TRACE))
    finished = subprocess.run(
        [sys.executable, "-c", RUN, *TINY, str(trace), str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    return {**json.loads(finished.stdout.splitlines()[-1]), "out": out}


def record_of(run):
    exit_code, stdout, stderr = run
    assert exit_code == 0, stderr
    return json.loads(stdout)


def test_json_of_a_run(runs):
    record = record_of(runs["good"])
    assert json.loads((runs["out"] / "results.json").read_text()) == record
    assert {"cpu", "cores", "threads", "torch", "verl", "command"} <= record["machine"].keys()
    assert record["settings"]["repeats"] == 2
    assert record["settings"]["options"]["plan"] == "auto"
    shared, single, *_ = record["cases"]
    assert shared["label"] == "24, 8, 4 x 2"
    assert set(shared["seconds"]) == set(shared["peak_bytes"]) == ARMS
    assert set(shared["speedup"]) == ARMS - {"prefixflow"}
    assert shared["skipped"] == {}
    assert shared["token_budget"] == 4 * 32
    # Two groups of one prompt and four responses; the last token of each is a target only.
    assert shared["logical_tokens"] == 8 * 31
    assert shared["executed_tokens"] == 2 * (24 + 4 * 7)
    assert set(shared["verl_variants"]) == {"padded", "packed"}
    for case in record["cases"]:
        assert case["efficiency"] == case["speedup"]["dense-head-only"] / case["ideal"]
        assert all(count > 0 for count in case["peak_bytes"].values())
        assert all(difference < 1e-3 for difference in case["relative_difference"].values())
        for spread in case["seconds"].values():
            assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        assert set(case["memory"]) == {"suffix_phase_below_dense", "whole_below_dense"}
    # Nothing to share: not more work than dense, and no arm that needs a group.
    assert single["ideal"] == 1.0
    assert set(single["speedup"]) == {"verl", "dense-head-only"}
    assert "nothing to share" in single["skipped"]["prefix-grouper"]


def test_all_arms_agree_on_recorded_lengths(runs):
    case = record_of(runs["good"])["cases"][2]
    assert case["label"] == "lengths.jsonl, 3 groups"
    assert set(case["relative_difference"]) == ARMS
    means = {"prompt": (10 + 17 + 5) / 3, "response": 64 / 8, "group": 8 / 3, "prompts": 3}
    assert {name: case[name] for name in means} == pytest.approx(means)
    # Four sequences of mean length; the longest is shorter.
    assert case["token_budget"] == 4 * (4 * 10 + 26 + 3 * 17 + 29 + 5 + 9) // 8
    assert case["logical_tokens"] == 4 * 10 + 26 - 4 + 3 * 17 + 29 - 3 + 5 + 9 - 1
    assert case["executed_tokens"] == (10 + 26 - 4) + (17 + 29 - 3) + (5 + 9 - 1)


def test_turns_share_all_but_the_last(runs):
    case = record_of(runs["good"])["cases"][3]
    assert case["label"] == "3 turns, context 16 to 40, response 6"
    # Contexts of 16, 28 and 40 tokens; the last sample holds the others.
    assert case["logical_tokens"] == (16 + 5) + (28 + 5) + (40 + 5)
    assert case["executed_tokens"] == 40 + 5
    assert (case["prompt"], case["response"]) == (28, 6)
    assert case["group"] is None
    assert case["prompts"] is None
    assert set(case["relative_difference"]) == {"prefixflow", "verl", "dense-head-only"}
    assert "contexts that continue each other" in case["skipped"]["prefix-grouper"]
    assert 2 < case["ideal"] < 2.5


def test_log_probs_come_back_in_order(runs):
    trace, turns = record_of(runs["log_prob"])["cases"]
    assert set(trace["relative_difference"]) == ARMS
    assert max(*trace["relative_difference"].values(), *turns["relative_difference"].values()) < (
        1e-4
    )


def test_options_and_rollouts_per_forward_reach_the_engine(runs):
    record = record_of(runs["fixed"])
    # The warm-up has a token budget.
    assert runs["used"] == [["cut", 2], ["cut", None]]
    assert record["settings"]["options"]["plan"] == "cut"
    assert record["settings"]["options"]["min_shared_tokens"] == 4
    (case,) = record["cases"]
    assert (case["token_budget"], case["rollouts_per_forward"]) == (None, 2)
    assert set(case["relative_difference"]) == ARMS


def test_files_of_a_run(runs):
    images = {path.name for path in runs["out"].glob("*.png")}
    assert images == {"speedup.png", "efficiency.png", "peak_memory.png"}
    text = (runs["out"] / "report.md").read_text()
    assert text.isascii()
    assert "| 24, 8, 4 x 2 | 248 / 104 | prefixflow |" in text
    assert "| lengths.jsonl, 3 groups | 152 / 88 | prefixflow |" in text
    assert "| 3 turns, context 16 to 40, response 6 | 99 / 45 | prefixflow |" in text
    assert all(f"({image})" in text for image in images)


def test_heat_maps_are_of_grid_cases(runs, tmp_path):
    record = record_of(runs["good"])
    assert draw_heat_maps({**record, "cases": record["cases"][2:]}, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_arms_that_differ_are_refused(runs):
    for name in ("larger", "mean of rows, ragged"):
        exit_code, stdout, stderr = runs[name]
        assert exit_code == 1
        assert stdout == ""
        assert "verl padded differs from dense-head-only by" in stderr
    assert "by 1.0e-02" in runs["larger"][2]
    record_of(runs["mean of rows, equal"])


def test_agreement():
    truth = torch.tensor([1.0, -4.0])
    assert check_agreement("a", truth + 0.002, truth, "float32") == pytest.approx(5e-4, rel=1e-3)
    check_agreement("a", truth + 0.1, truth, "bfloat16")
    for result in (truth + 0.1, truth * float("nan")):
        with pytest.raises(ArmsDisagreeError, match="a differs from dense-head-only"):
            check_agreement("a", result, truth, "float32")


def test_figures():
    seconds = {
        "prefixflow": [1.0, 2.0, 9.0],
        "verl": [8.0, 10.0, 12.0],
        "dense-head-only": [6.0, 5.0, 7.0],
    }
    figures = case_figures(seconds, ideal=4.0)
    assert figures["seconds"]["prefixflow"] == {"median": 2.0, "min": 1.0, "max": 9.0}
    assert figures["speedup"] == {"verl": 5.0, "dense-head-only": 3.0}
    assert figures["efficiency"] == 0.75
    assert figures["verdict"] == {"verl": "same", "dense-head-only": "same"}


@pytest.mark.parametrize(("phases", "below"), [({"suffix": 25, "prefix": 60}, 0.75), ({}, None)])
def test_memory_figures(phases, below):
    figures = memory_figures(
        {
            "prefixflow": MemoryPeaks(peak_bytes=60, phase_bytes=phases),
            "dense-head-only": MemoryPeaks(peak_bytes=100, phase_bytes={}),
        }
    )
    assert figures == {
        "suffix_phase_below_dense": below,
        "whole_below_dense": pytest.approx(0.4),
    }


@pytest.mark.parametrize(
    ("ours", "expected"),
    [((1, 2), "faster"), ((1, 3), "same"), ((4, 5), "same"), ((6, 7), "slower")],
)
def test_verdict(ours, expected):
    baseline = {"min": 3, "max": 5}
    assert verdict({"min": ours[0], "max": ours[1]}, baseline) == expected


def test_report_says_where_reuse_does_not_pay(runs):
    record = record_of(runs["good"])
    case = record["cases"][1]
    case["verdict"] = {"verl": "same", "dense-head-only": "slower"}
    case["speedup"] = {"verl": 1.0, "dense-head-only": 0.5}
    case["phase_bytes"]["prefixflow"] = {"suffix": 3 << 20}
    record["settings"]["options"]["plan"] = "off"
    text = report({**record, "cases": [case]})
    assert "- 8, 8, 1 x 2: no faster or slower than verl (1.00x)" in text
    assert "- 8, 8, 1 x 2: slower than dense-head-only (0.50x)" in text
    assert "| 3.0 |\n|  |  | verl |" in text
    assert "Options of `prefixflow`: `plan=off`." in text


def test_sizes():
    for sizes, message in (
        ({"hidden": 36}, "--hidden=36 must be an even multiple of --heads=4"),
        ({"kv_heads": 3}, "--heads=4 must be a multiple of --kv-heads=3"),
    ):
        with pytest.raises(ValueError, match=message):
            ModelSizes(**sizes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "8,x"), "--prompt=8,x must be integers of 1 or more"),
        (("--group", "0"), "--group=0 must be integers of 1 or more"),
        (("--case", "1,2,3"), "--case=1,2,3 must be 4 integers: prompt,response,group,prompts"),
        (("--case", "1,2,3,4", "--group", "2"), "--group contradicts --case"),
        (("--hidden", "36"), "--hidden=36 must be an even multiple of --heads=4"),
        (
            ("--token-budget", "9", "--rollouts-per-forward", "1"),
            "--token-budget contradicts --rollouts-per-forward",
        ),
        (("--rollouts-per-forward", "3"), "--rollouts-per-forward=3 must divide the 8 rollouts"),
        (("--token-budget", "99"), "--token-budget=99 is less than the 1152 tokens"),
        (("--turns", "3"), "--turns needs --context"),
        (("--context", "8,16"), "--context needs --turns"),
        (("--turns", "3", "--context", "8"), "--context=8 must be 2 integers: first,last"),
        (
            ("--turns", "3", "--context", "8,16", "--response", "5"),
            "with --response=5 the last context needs 18 tokens or more",
        ),
        (("--turns", "3", "--context", "8,999", "--prompt", "5"), "--prompt contradicts --turns"),
        (("--trace", "/no/such"), "--trace=/no/such cannot be read"),
        (("--trace-groups", "2"), "--trace-groups needs --trace"),
        (("--trace", ".", "--trace-scale", "0"), "--trace-scale=0.0 must be a number above 0"),
        (("--option", "plan"), "--option plan: give NAME=VALUE"),
        (("--option", "plans=cut"), "--option plans=cut: "),
        (("--option", "plan=true"), "--option plan=true: "),
        (("--option", "plan=[cut"), "--option plan=[cut: "),
        (("--option", "plan=cut", "--option", "plan=auto"), "plan is given twice"),
        (("--option", "min_shared_tokens=0"), "must be an integer of 1 or more"),
    ],
)
def test_option_errors(arguments, message):
    result = CliRunner().invoke(app, ["bench", "update", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
