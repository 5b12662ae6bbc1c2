"""`prefixflow bench update`: result arithmetic, refusal of arms that differ, a tiny real run."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from prefixflow_verl.bench import (
    ArmsDisagreeError,
    Case,
    ModelSizes,
    case_figures,
    check_agreement,
    report,
    verdict,
)
from prefixflow_verl.cli import app

ARMS = {"prefixflow", "verl", "dense-head-only", "prefix-grouper", "prefix-grouper-split"}
TINY = [
    *("--layers", "1", "--hidden", "32", "--vocab", "64"),
    *("--repeats", "2", "--threads", "1", "--json"),
]

RUN = """
import json, sys
from typer.testing import CliRunner
from prefixflow_verl.cli import app

def invoke(*arguments):
    result = CliRunner().invoke(app, ["bench", "update", *arguments])
    return [result.exit_code, result.stdout, result.stderr[-400:]]

*tiny, out = sys.argv[1:]
good = invoke(*tiny, "--case", "24,8,4,2", "--case", "8,8,1,2", "--out", out)
from prefixflow_verl import bench_arms
right = bench_arms._jagged_loss
bench_arms._jagged_loss = lambda *args, **kwargs: (1.01 * right(*args, **kwargs)[0], {})
print(json.dumps([good, invoke(*tiny, "--case", "24,8,4,2")]))
"""
"""A good run, then one in which the loss of veRL's engines is one percent larger."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    finished = subprocess.run(
        [sys.executable, "-c", RUN, *TINY, str(out)], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    good, bad = json.loads(finished.stdout.splitlines()[-1])
    return good, bad, out


def test_json_of_a_run(runs):
    (exit_code, stdout, stderr), _, out = runs
    assert exit_code == 0, stderr
    record = json.loads(stdout)
    assert json.loads((out / "results.json").read_text()) == record
    assert {"cpu", "cores", "threads", "torch", "verl", "command"} <= record["machine"].keys()
    assert record["settings"]["repeats"] == 2
    shared, single = record["cases"]
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
    # Nothing to share: not more work than dense, and no arm that needs a group.
    assert single["ideal"] == 1.0
    assert set(single["speedup"]) == {"verl", "dense-head-only"}
    assert "nothing to share" in single["skipped"]["prefix-grouper"]


def test_files_of_a_run(runs):
    *_, out = runs
    images = {path.name for path in out.glob("*.png")}
    assert images == {"speedup.png", "efficiency.png", "peak_memory.png"}
    text = (out / "report.md").read_text()
    assert text.isascii()
    assert "| 24, 8, 4 x 2 | 248 / 104 | prefixflow |" in text
    assert all(f"({image})" in text for image in images)


def test_arms_that_differ_are_refused(runs):
    _, (exit_code, stdout, stderr), _ = runs
    assert exit_code == 1
    assert stdout == ""
    assert "differs from dense-head-only by 1.0e-02" in stderr


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


@pytest.mark.parametrize(
    ("ours", "expected"),
    [((1, 2), "faster"), ((1, 3), "same"), ((4, 5), "same"), ((6, 7), "slower")],
)
def test_verdict(ours, expected):
    baseline = {"min": 3, "max": 5}
    assert verdict({"min": ours[0], "max": ours[1]}, baseline) == expected


def test_report_says_where_reuse_does_not_pay(runs):
    record = json.loads(runs[0][1])
    case = record["cases"][1]
    case["verdict"] = {"verl": "same", "dense-head-only": "slower"}
    case["speedup"] = {"verl": 1.0, "dense-head-only": 0.5}
    text = report({**record, "cases": [case]})
    assert "- 8, 8, 1 x 2: no faster or slower than verl (1.00x)" in text
    assert "- 8, 8, 1 x 2: slower than dense-head-only (0.50x)" in text


def test_cases_and_sizes():
    assert str(Case(prompt=5, response=4, group=3, prompts=2)) == "5, 4, 3 x 2"
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
        (("--case", "1,2,3"), "--case=1,2,3 must be 4 integers"),
        (("--hidden", "36"), "--hidden=36 must be an even multiple of --heads=4"),
    ],
)
def test_option_errors(arguments, message):
    result = CliRunner().invoke(app, ["bench", "update", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
