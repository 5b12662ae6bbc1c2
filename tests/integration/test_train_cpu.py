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
from collections import Counter
from pathlib import Path

import pytest

from prefixflow_verl.ledger import read_ledger

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
    check_ledger(tmp_path, last, lost_steps=set(first) - set(range(1, resumed_from + 1)))
    summary = json.loads(
        subprocess.run(
            [sys.executable, str(REPOSITORY / "scripts/summarize_run.py"), str(tmp_path), "--json"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    )
    assert summary["last_step"] == last


def check_ledger(run_dir: Path, last: int, lost_steps: set[int]) -> None:
    """Every step once, sampled by the weights it starts from, whatever was killed in between."""
    ledger = read_ledger(run_dir)
    assert [launch.number for launch in ledger.launches] == [1, 2]
    # The killed launch may have written a step that it did not live to log.
    assert ledger.num_superseded >= len(lost_steps)
    rows = ledger.table.to_pylist()
    sequences_of = Counter(row["step"] for row in rows)
    assert sequences_of == {step: 8 for step in range(1, last + 1)}
    for row in rows:
        version = row["step"] - 1
        (span,) = row["spans"]
        assert (span["version_start"], span["version_end"]) == (version, version)
        assert row["trainer_version"] == version
        assert row["old_log_prob_step"] == row["step"]
        assert row["mini_batches"] == [0]
        assert row["action"] == "train" and row["reasons"] == []
        assert row["k3"] < 1e-6
    keys = Counter((row["uid"], row["session"], row["output"]) for row in rows)
    assert set(keys.values()) == {1}
    prefixflow = Path(sys.executable).with_name("prefixflow")
    command = [str(prefixflow), "provenance", str(run_dir)]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def test_separate_async_is_one_version_behind_and_stale_tokens_can_be_masked(assets, tmp_path):
    knobs = {"MODE": "separate_async", "STEPS": "3", "PROMPTS": "4", "SAVE_FREQ": "-1"}
    rules = "actor_rollout_ref.actor.fsdp_config.prefixflow.provenance"
    finished = train(
        settings(assets, tmp_path, **knobs),
        f"{rules}.max_staleness=0",
        f"{rules}.on_stale=mask",
    )
    assert finished.returncode == 0, finished.stderr + finished.stdout
    rows = read_ledger(tmp_path).table.to_pylist()
    assert Counter((row["step"], row["trigger"]) for row in rows) == {
        (step, trigger): 8 for step in (1, 2, 3) for trigger in (0, 1)
    }
    for row in rows:
        # Versions come after every second update, so a step's rollouts are one version older.
        oldest = max(row["step"] - 2, 0)
        assert row["spans"][0]["version_start"] == oldest
        assert {span["version_start"] == span["version_end"] for span in row["spans"]} == {True}
        assert row["staleness_worst"] == row["trainer_version"] - oldest
        is_stale = row["step"] > 1
        assert row["action"] == ("mask" if is_stale else "train")
        # A response that was running during a sync has tokens of the next version as well.
        stale = [s for s in row["spans"] if s["version_start"] < row["trainer_version"]]
        num_stale = sum(span["num_tokens"] for span in stale)
        assert row["num_loss_tokens"] == row["num_response_tokens"] - num_stale
    [steps] = read_metrics(tmp_path)
    for step, metrics in steps.items():
        prefix = "prefixflow/provenance/"
        assert metrics[f"{prefix}clean_fraction"] == 1
        assert metrics[f"{prefix}staleness/max"] == float(step > 1)
        assert (metrics[f"{prefix}removed_tokens"] > 0) == (step > 1)
        if metrics.get(f"{prefix}staleness/fraction_age_0", 0) == 0:
            assert metrics["actor/grad_norm"] == 0, "nothing was left to train on"


def test_partial_rollouts_carry_every_version_they_went_through(assets, tmp_path):
    knobs = {"MODE": "colocate_async", "STEPS": "4", "PROMPTS": "4", "RESPONSE_LEN": "400"}
    # verl's truncated importance weights correct for those versions; provenance names them.
    override = "algorithm.rollout_correction.rollout_is=token"
    finished = train(settings(assets, tmp_path, **knobs, SAVE_FREQ="-1"), override)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    [steps] = read_metrics(tmp_path)
    weights = [metrics["rollout_corr/rollout_is_mean"] for metrics in steps.values()]
    assert weights[0] == pytest.approx(1, abs=1e-3)
    assert any(abs(weight - 1) > 1e-3 for weight in weights[1:])
    rows = read_ledger(tmp_path).table.to_pylist()
    assert Counter(row["step"] for row in rows) == {step: 16 for step in (1, 2, 3, 4)}
    resumed = [row for row in rows if len(row["spans"]) > 1]
    assert resumed, "some responses were aborted and resumed under other weights"
    for row in rows:
        versions = [span["version_start"] for span in row["spans"]]
        assert versions == [span["version_end"] for span in row["spans"]]
        assert versions == sorted(set(versions))
        assert versions[0] >= 0 and versions[-1] <= row["trainer_version"]
        assert sum(span["num_tokens"] for span in row["spans"]) == row["num_response_tokens"]
        assert row["staleness_worst"] == row["trainer_version"] - versions[0]
        assert (versions[0], versions[-1]) == (row["verl_min_version"], row["verl_max_version"])


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
