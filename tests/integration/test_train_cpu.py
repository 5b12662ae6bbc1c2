"""The real thing, small: verl's trainer through scripts/train_cpu.sh, with both engines.

Last link of the proof chain: what the other tests show for parts holds in a run that a user starts.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TRAIN = REPOSITORY / "scripts" / "train_cpu.sh"
RUN_TIMEOUT_S = 420
SMALL = {"PROMPTS": "2", "GROUP": "4", "PROMPT_LEN": "64", "RESPONSE_LEN": "4", "VERBOSE": "0"}

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("train") / "assets"


def settings(assets: Path, run_dir: Path, **knobs: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    paths = {"ASSETS_DIR": str(assets), "RUN_DIR": str(run_dir)}
    return inherited | SMALL | paths | {"TIMEOUT_S": "300"} | knobs


def train(environment: dict[str, str], *overrides: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(TRAIN), *overrides],
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )


def read_metrics(run_dir: Path) -> list[dict[int, dict]]:
    """Metrics of each launch, oldest first: step -> metrics."""
    launches = []
    for file in sorted((run_dir / "metrics").glob("*.jsonl")):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        steps = {
            record["step"]: record["data"]
            for record in records
            if "critic/score/mean" in record["data"]
        }
        launches.append(steps)
    return launches


def checkpointed_step(run_dir: Path) -> int:
    """The step verl would resume from; 0 without a checkpoint."""
    marker = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(marker.read_text()) if marker.is_file() else 0


def test_verls_own_engine_trains(assets, tmp_path):
    # Enough responses that a step in which every group ties is rare.
    knobs = {"ENGINE": "fsdp2", "STEPS": "2", "PROMPTS": "4", "GROUP": "8"}
    finished = train(settings(assets, tmp_path, **knobs))
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert re.search(r"^steps +2 ", finished.stdout, re.MULTILINE)
    [steps] = read_metrics(tmp_path)
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
        # Groups that tie have no advantage, and a step of nothing else has no gradient.
        assert (metrics["actor/grad_norm"] > 0) == (metrics["critic/advantages/max"] > 0)
    assert any(metrics["actor/grad_norm"] > 0 for metrics in steps.values())


def settled_step(run_dir: Path, quiet_s: float = 8.0) -> int:
    """Last checkpointed step once none has come for `quiet_s`: Ray's workers outlive the launcher a
    little, and may finish the step they are in."""
    step, since = checkpointed_step(run_dir), time.monotonic()
    while time.monotonic() - since < quiet_s:
        time.sleep(0.2)
        if checkpointed_step(run_dir) != step:
            step, since = checkpointed_step(run_dir), time.monotonic()
    return step


def test_killed_run_resumes_to_the_same_next_step(assets, tmp_path):
    """prefixflow: killed without warning once a checkpoint is there, then started again."""
    environment = settings(assets, tmp_path, ENGINE="prefixflow", STEPS="100", SAVE_FREQ="1")
    with (tmp_path / "first.txt").open("w") as output:
        run = subprocess.Popen(
            ["bash", str(TRAIN)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while checkpointed_step(tmp_path) < 2:
            assert run.poll() is None, (tmp_path / "first.txt").read_text()
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.2)
        os.killpg(run.pid, signal.SIGTERM)
        run.wait(60)
    resumed_from = settled_step(tmp_path)

    last = resumed_from + 2
    environment = settings(assets, tmp_path, ENGINE="prefixflow", STEPS=str(last), SAVE_FREQ="1")
    finished = train(environment)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    first, second = read_metrics(tmp_path)
    assert min(first) == 1
    assert sorted(second) == [resumed_from + 1, last]
    for metrics in [*first.values(), *second.values()]:
        # After the resume too: the weights that vLLM samples with are the trainer's.
        assert metrics["training/rollout_probs_diff_max"] < 1e-3
    assert checkpointed_step(tmp_path) == last
    summary = json.loads(
        subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts/summarize_run.py"), str(tmp_path), "--json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert summary["last_step"] == last


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "actor_rollout_ref.model.path=/no/such/model",
            "actor_rollout_ref.model.path=/no/such/model does not exist: name a model directory",
        ),
        (
            "data.train_files={broken}",
            "data.train_files={broken} is not a readable parquet file",
        ),
        (
            "actor_rollout_ref.actor.strategy=prefixflw",
            "actor_rollout_ref.actor.strategy=prefixflw is not a strategy: use one of",
        ),
    ],
)
def test_mistake_ends_the_run_in_one_clear_sentence(assets, tmp_path, override, sentence):
    broken = tmp_path / "broken.parquet"
    broken.write_text("not parquet")
    finished = train(settings(assets, tmp_path / "run"), override.format(broken=broken))
    assert finished.returncode != 0
    last_line = finished.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: ")
    assert sentence.format(broken=broken) in last_line


def test_unsupported_verl_ends_the_run_in_one_clear_sentence(assets, tmp_path):
    # Metadata of another verl, in front of the installed one's.
    other = tmp_path / "site" / "verl-0.8.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    finished = train(settings(assets, tmp_path / "run", PYTHONPATH=str(other.parent)))
    assert finished.returncode != 0
    last_line = finished.stderr.strip().splitlines()[-1]
    assert "prefixflow_verl supports verl 0.9.1, but verl 0.8.0 is installed" in last_line


@pytest.mark.parametrize("knob", [{"MODE": "separate"}, {"STEPS": "0"}, {"GROUP": "many"}])
def test_wrong_knob_is_named(assets, tmp_path, knob):
    finished = train(settings(assets, tmp_path, **knob))
    assert finished.returncode == 2
    [(name, value)] = knob.items()
    assert f"error: {name}={value}" in finished.stderr
