"""`scripts/compare_step_time.py` from end to end: both engines in verl's trainer, then a report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "compare_step_time.py"
SMALL = {"PROMPTS": "2", "GROUP": "4", "PROMPT_LEN": "64", "RESPONSE_LEN": "6", "STEPS": "2"}

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def compare(*arguments: str, **knobs: str) -> subprocess.CompletedProcess:
    inherited = {
        name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"
    }
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=inherited | SMALL | {"TIMEOUT_S": "300"} | knobs,
        capture_output=True,
        text=True,
        timeout=700,
    )


def test_both_engines_train_and_are_compared(tmp_path):
    # With a reference model, for the stage `ref`.
    reference = "actor_rollout_ref.actor.use_kl_loss=True"
    finished = compare("--full-length", "--out", str(tmp_path), "--", reference)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    assert "[1/2 prefixflow] step 2 |" in finished.stdout
    assert "[2/2 fsdp2] step 2 |" in finished.stdout
    record = json.loads((tmp_path / "results.json").read_text())
    stages = {"gen", "old_log_prob", "ref", "update_actor", "update_weights"}
    assert set(record["speedup"]) == stages | {"step without gen", "step"}
    assert all(figures > 0 for figures in record["speedup"].values())
    assert record["workload"]["actor_rollout_ref.rollout.ignore_eos"] == "True"
    for figures in record["engines"].values():
        assert figures["num_timed_steps"] == 1
        assert figures["tokens_per_step"] == 2 * 4 * (64 + 6)
        assert figures["response_tokens"] == 6
        assert figures["max_rollout_prob_diff"] < 1e-3
    assert record["engines"]["prefixflow"]["reuse_ratio"] > 1.5
    assert record["warnings"] == []
    assert (tmp_path / "report.md").read_text() in finished.stdout
    assert (tmp_path / "step_time.png").is_file()

    # The same figures again from what is on disk.
    directories = [str(tmp_path / "round1-a-prefixflow"), str(tmp_path / "round1-b-fsdp2")]
    again = compare("--runs", *directories, "--out", str(tmp_path / "again"))
    assert again.returncode == 0, again.stderr
    reread = json.loads((tmp_path / "again" / "results.json").read_text())
    assert reread["engines"] == record["engines"]
    assert reread["speedup"] == record["speedup"]


def test_failed_run_is_named_with_its_log(tmp_path):
    finished = compare("--out", str(tmp_path), "--", "actor_rollout_ref.model.path=/no/such/model")
    assert finished.returncode == 2
    last_line = finished.stderr.strip().splitlines()[-1]
    assert last_line.startswith("error: the run of prefixflow failed with status")
    assert "/no/such/model does not exist" in last_line
    log = Path(last_line.rsplit("its log: ", 1)[1])
    assert log.is_file()
