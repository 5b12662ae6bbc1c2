"""`scripts/compare_step_time.py` on made-up run directories: parsing, ratios, report, refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_step_time.py"
SECONDS = {
    "prefixflow": {"gen": 2.0, "old_log_prob": 1.0, "update_actor": 1.5, "update_weights": 0.5},
    "fsdp2": {"gen": 2.0, "old_log_prob": 4.0, "update_actor": 12.0, "update_weights": 0.5},
}
WARM_UP = 100.0
"""Times the first step takes longer; no figure may show it."""


def write_run(
    directory: Path,
    engine: str,
    *,
    num_steps: int = 4,
    seconds: dict[str, float] | None = None,
    rewards: list[float] | None = None,
    response: float = 64.0,
    log_ppl: float = 4.0,
    overrides: tuple[str, ...] = (),
    assets: dict | None = None,
    fallback: float = 0.0,
) -> Path:
    """What train_cpu.sh leaves behind, as far as the script reads it."""
    hydra = directory / "logs" / "hydra" / ".hydra"
    hydra.mkdir(parents=True)
    common = [
        f"hydra.run.dir={directory}",
        f"actor_rollout_ref.actor.strategy={engine}",
        "actor_rollout_ref.rollout.n=16",
        "data.max_prompt_length=2048",
        f"+ray_kwargs.ray_init._temp_dir=/tmp/{engine}",
    ]
    (hydra / "overrides.yaml").write_text(yaml.safe_dump([*common, *overrides]))
    (directory / "assets.json").write_text(json.dumps(assets or {"hidden": 128, "seed": 0}))
    (directory / "metrics").mkdir()
    seconds = seconds or SECONDS[engine]
    lines = []
    for step in range(1, num_steps + 1):
        scale = WARM_UP if step == 1 else 1.0
        data = {f"timing_s/{stage}": scale * value for stage, value in seconds.items()}
        data["timing_s/step"] = sum(data.values()) + scale * 0.5
        data["critic/score/mean"] = rewards[step - 1] if rewards else 0.1 * step
        data["response_length/mean"] = response
        data["rollout_corr/rollout_log_ppl"] = log_ppl
        data["prompt_length/mean"] = 2048.0
        data["perf/total_num_tokens"] = 32 * (2048 + response)
        data["training/rollout_probs_diff_max"] = 1e-7 * step
        data["actor/grad_norm"] = 1.0
        if engine == "prefixflow":
            data["prefixflow/reuse_ratio"] = 11.0
            data["prefixflow/executed_tokens"] = 6094.0
            data["prefixflow/fallback"] = fallback
        lines.append(json.dumps({"step": step, "data": data}))
    (directory / "metrics" / "20260101-000000.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def compare(out: Path, *arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())


def test_ratios_of_medians_without_the_first_step(tmp_path):
    a = write_run(tmp_path / "a", "prefixflow")
    b = write_run(tmp_path / "b", "fsdp2")
    finished = compare(tmp_path / "out", "--runs", a, b)
    assert finished.returncode == 0, finished.stderr
    record = results(tmp_path / "out")
    assert record["speedup"] == pytest.approx(
        {"gen": 1.0, "old_log_prob": 4.0, "update_actor": 8.0, "update_weights": 1.0}
        | {"step without gen": 17.0 / 3.5, "step": 19.0 / 5.5}
    )
    fsdp2 = record["engines"]["fsdp2"]
    assert fsdp2["num_timed_steps"] == 3
    assert fsdp2["stage_s"]["step"] == pytest.approx(
        {"median": 19.0, "p25": 19.0, "p75": 19.0, "share_of_step": 1.0}
    )
    assert fsdp2["stage_s"]["update_actor"]["share_of_step"] == pytest.approx(12 / 19)
    assert record["engines"]["prefixflow"]["reuse_ratio"] == 11.0
    assert fsdp2["reuse_ratio"] is None
    assert record["first_differing_step"] == [None]
    assert record["warnings"] == []
    assert (tmp_path / "out" / "step_time.png").stat().st_size > 10_000
    report = (tmp_path / "out" / "report.md").read_text()
    assert report in finished.stdout
    assert (
        "| update_actor | 1.50 (1.50 to 1.50) | 12.00 (12.00 to 12.00) | 63 % | 8.00x |" in report
    )
    assert "| reuse ratio | 11.00 | - |" in report
    assert "same mean length, reward and log-prob" in report


def test_rounds_are_pooled_and_shown(tmp_path):
    runs = []
    for round_, seconds in enumerate((2.0, 4.0, 9.0)):
        a = write_run(tmp_path / f"a{round_}", "prefixflow", num_steps=2, seconds={"gen": 2.0})
        b = write_run(tmp_path / f"b{round_}", "fsdp2", num_steps=2, seconds={"gen": seconds})
        runs += ["--runs", a, b]
    assert compare(tmp_path / "out", *runs).returncode == 0
    record = results(tmp_path / "out")
    assert record["engines"]["fsdp2"]["stage_s"]["gen"]["median"] == 4.0
    assert record["engines"]["fsdp2"]["stage_s"]["gen"]["p25"] == 3.0
    assert record["speedup"]["gen"] == 2.0
    assert [by_stage["gen"] for by_stage in record["speedup_by_round"]] == [1.0, 2.0, 4.5]


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({"rewards": [0.1, 0.2, 0.35, 0.4]}, 3),
        ({"log_ppl": 4.01}, 1),
        ({"log_ppl": 4.00001}, None),
    ],
)
def test_first_step_with_other_rollouts_is_named(tmp_path, change, step):
    a = write_run(tmp_path / "a", "prefixflow", rewards=[0.1, 0.2, 0.3, 0.4])
    b = write_run(tmp_path / "b", "fsdp2", **{"rewards": [0.1, 0.2, 0.3, 0.4], **change})
    finished = compare(tmp_path / "out", "--runs", a, b)
    assert results(tmp_path / "out")["first_differing_step"] == [step]
    assert (f"by round: {step}. Both" in finished.stdout) == (step is not None)
    assert ("64.0 and 64.0 tokens" in finished.stdout) == (step is not None)


def test_unequal_work_and_fallback_are_warned_of(tmp_path):
    a = write_run(tmp_path / "a", "prefixflow", fallback=1.0)
    b = write_run(tmp_path / "b", "fsdp2", response=200.0)
    finished = compare(tmp_path / "out", "--runs", a, b)
    assert finished.returncode == 0
    assert "Warning: prefixflow fell back to training without reuse" in finished.stdout
    assert "Warning: the work was not the same" in finished.stdout


def test_one_engine_against_itself(tmp_path):
    a = write_run(tmp_path / "a", "fsdp2")
    b = write_run(tmp_path / "b", "fsdp2")
    assert compare(tmp_path / "out", "--runs", a, b).returncode == 0
    record = results(tmp_path / "out")
    assert list(record["engines"]) == ["fsdp2 (A)", "fsdp2 (B)"]
    assert record["speedup"]["step"] == 1.0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"overrides": ("actor_rollout_ref.rollout.n=4",)},
            "actor_rollout_ref.rollout.n is 16 and 4",
        ),
        ({"overrides": ("+data.new=1",)}, "data.new is not set and 1"),
        ({"assets": {"hidden": 256, "seed": 0}}, "assets.hidden is 128 and 256"),
    ],
)
def test_other_workload_is_refused(tmp_path, change, sentence):
    a = write_run(tmp_path / "a", "prefixflow")
    b = write_run(tmp_path / "b", "fsdp2", **change)
    finished = compare(tmp_path / "out", "--runs", a, b)
    assert finished.returncode == 2
    assert "differ in more than the engine: " + sentence in finished.stderr
    assert not (tmp_path / "out").exists()


def test_too_few_steps_are_refused(tmp_path):
    a = write_run(tmp_path / "a", "prefixflow")
    b = write_run(tmp_path / "b", "fsdp2", num_steps=1)
    finished = compare(tmp_path / "out", "--runs", a, b)
    assert finished.returncode == 2
    assert f"error: {b} has 1 finished steps, but 2 or more are needed" in finished.stderr


def test_swapped_engines_are_refused(tmp_path):
    a, b = write_run(tmp_path / "a", "prefixflow"), write_run(tmp_path / "b", "fsdp2")
    finished = compare(tmp_path / "out", "--runs", a, b, "--runs", b, a)
    assert finished.returncode == 2
    assert "same order" in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--engines", "prefixflow,fsdp"), "--engines=prefixflow,fsdp must name two of"),
        (("--engines", "fsdp2"), "--engines=fsdp2 must name two of"),
        (("--rounds", "0"), "--rounds=0 must be 1 or more"),
        (("--runs", "a", "b", "--full-length"), "leave out --full-length"),
        (("--runs", "/no/such/a", "/no/such/b"), "/no/such/a is not a run directory"),
    ],
)
def test_mistake_is_named(tmp_path, arguments, sentence):
    finished = compare(tmp_path / "out", *arguments)
    assert finished.returncode == 2
    assert sentence in finished.stderr.splitlines()[-1]


def test_runs_are_never_mixed_with_older_ones(tmp_path):
    older = write_run(tmp_path / "out" / "round1-b-fsdp2", "fsdp2")
    finished = compare(tmp_path / "out")
    assert finished.returncode == 2
    assert f"error: {older} exists: name another --out" in finished.stderr
