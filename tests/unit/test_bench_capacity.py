"""`prefixflow bench capacity`: the search, and a tiny real one."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from prefixflow_verl.bench_capacity import largest, report_capacity
from prefixflow_verl.cli import app

ARMS = ["prefixflow", "dense-head-only", "verl-padded"]
TINY = [
    *("--layers", "1", "--hidden", "32", "--vocab", "64", "--threads", "1", "--json"),
    *("--response", "8", "--group", "2", "--granularity", "32", "--max-prompt", "448"),
]

RUN = """
import json, sys
from typer.testing import CliRunner
from prefixflow_verl.cli import app

def invoke(*arguments):
    result = CliRunner().invoke(app, ["bench", "capacity", *arguments])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result.stderr

*tiny, out = sys.argv[1:]
dense, progress = invoke(*tiny, "--prompt", "128", "--out", out)
found = {"dense": dense, "progress": progress}
for name, factor in (("half", 0.5), ("double", 2)):
    found[name], _ = invoke(*tiny, "--bytes", str(int(dense["bytes"] * factor)))
found["nothing"], _ = invoke(*tiny, "--bytes", "1000")
found["everything"], _ = invoke(*tiny, "--bytes", str(1 << 40))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("capacity")
    finished = subprocess.run(
        [sys.executable, "-c", RUN, *TINY, str(out)], capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr
    return {**json.loads(finished.stdout.splitlines()[-1]), "out": out}


@pytest.mark.parametrize("limit", [1, 7, 100])
def test_search_finds_the_largest(limit):
    for answer in range(limit + 1):
        for first in (1, 3, 50, 200):
            asked = []

            def fits(number, answer=answer, asked=asked):
                assert 1 <= number <= limit
                asked.append(number)
                return number <= answer

            assert largest(fits, first=first, limit=limit) == answer
            assert len(asked) == len(set(asked)) <= 16


def test_capacity_honours_the_budget(found):
    for name in ("half", "dense", "double"):
        record = found[name]
        assert list(record["capacity"]) == ARMS
        for arm, total in record["capacity"].items():
            peaks = {
                point["total"]: point["peak_bytes"]
                for point in record["curve"]
                if point["arm"] == arm
            }
            assert peaks[total] <= record["bytes"]
            if total != 448 + 8:
                assert peaks[total + 32] > record["bytes"]
            # Longer takes more.
            assert [peaks[length] for length in sorted(peaks)] == sorted(peaks.values())
        for arm, ratio in record["ratio"].items():
            assert ratio == record["capacity"]["prefixflow"] / record["capacity"][arm]


def test_more_bytes_hold_more_tokens(found):
    for arm in ARMS:
        half, dense, double = (found[name]["capacity"][arm] for name in ("half", "dense", "double"))
        assert half < dense < double


def test_default_budget_is_that_of_dense(found):
    record = found["dense"]
    assert record["capacity"]["dense-head-only"] == 128 + 8
    assert record["settings"]["rollouts_per_forward"] == 1
    assert record["limited"] == []
    assert "dense-head-only: 136 tokens, " in found["progress"]


def test_ends_of_the_range(found):
    assert found["nothing"]["capacity"] == dict.fromkeys(ARMS)
    assert found["nothing"]["ratio"] == dict.fromkeys(ARMS[1:])
    assert found["everything"]["capacity"] == dict.fromkeys(ARMS, 448 + 8)
    assert found["everything"]["limited"] == ARMS
    assert "| prefixflow | none fits |  |  |" in report_capacity(found["nothing"])
    assert "| prefixflow | 456 or more |  |" in report_capacity(found["everything"])


def test_files(found):
    out = found["out"]
    assert {path.name for path in out.iterdir()} == {"capacity.json", "capacity.md", "capacity.png"}
    assert json.loads((out / "capacity.json").read_text()) == found["dense"]
    text = (out / "capacity.md").read_text()
    assert text.isascii()
    assert "(capacity.png)" in text
    assert "| dense-head-only | 136 |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bytes", "9", "--prompt", "9"), "--prompt contradicts --bytes"),
        (("--max-prompt", "255"), "--max-prompt=255 is less than --granularity=256"),
        (("--rollouts-per-forward", "3"), "--rollouts-per-forward=3 must divide the 8 rollouts"),
        (("--option", "plan=1"), "--option plan=1: "),
    ],
)
def test_option_errors(arguments, message):
    result = CliRunner().invoke(app, ["bench", "capacity", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
