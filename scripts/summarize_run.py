"""Prints a short summary of a run of train_cpu.sh from the metrics verl wrote.

    python summarize_run.py runs/arithmetic_cpu-prefixflow-sync

A resumed run has several metrics files; for a step that was trained twice the later one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean

REWARD = "critic/score/mean"
MISMATCH = "training/rollout_probs_diff_max"
REUSE = "prefixflow/reuse_ratio"
STAGES = {
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "reference log-probs": "timing_s/ref",
    "actor update": "timing_s/update_actor",
    "weight sync": "timing_s/update_weights",
    "checkpoint": "timing_s/save_checkpoint",
}
MAX_STEPS_AVERAGED = 5
"""First and last reward are means over up to this many steps: one step has a few groups only."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    steps = read_steps(arguments.run_dir / "metrics")
    if not steps:
        print(f"error: no training steps in {arguments.run_dir / 'metrics'}", file=sys.stderr)
        return 1
    summary = summarize(steps)
    summary["log"] = str(max((arguments.run_dir / "logs").glob("*.log"), default=None))
    checkpoints = sorted(
        (arguments.run_dir / "checkpoints").glob("global_step_*"),
        key=lambda path: int(path.name.removeprefix("global_step_")),
    )
    summary["checkpoint"] = str(checkpoints[-1]) if checkpoints else None
    print(json.dumps(summary) if arguments.json else as_text(summary))
    return 0


def read_steps(directory: Path) -> dict[int, dict[str, float]]:
    """Metrics of each training step, by step number."""
    steps: dict[int, dict[str, float]] = {}
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            if REWARD in record["data"]:
                steps[record["step"]] = record["data"]
    return dict(sorted(steps.items()))


def summarize(steps: dict[int, dict[str, float]]) -> dict:
    """Figures of a run: steps, rewards, seconds per step and stage, reuse, log-prob mismatch."""
    rows = list(steps.values())
    # The first step after a start warms up kernels and caches.
    timed = rows[1:] or rows
    step_s = mean(row["timing_s/step"] for row in timed)
    stage_s = {
        stage: sum(row.get(metric, 0.0) for row in timed) / len(timed)
        for stage, metric in STAGES.items()
        if any(metric in row for row in timed)
    }
    reuse = [row[REUSE] for row in rows if REUSE in row]
    mismatch = [row[MISMATCH] for row in rows if MISMATCH in row]
    num_averaged = max(1, min(MAX_STEPS_AVERAGED, len(rows) // 2))
    return {
        "num_steps": len(rows),
        "last_step": max(steps),
        "reward_first": mean(row[REWARD] for row in rows[:num_averaged]),
        "reward_last": mean(row[REWARD] for row in rows[-num_averaged:]),
        "num_steps_averaged": num_averaged,
        "step_s": step_s,
        "stage_s": stage_s,
        "reuse_ratio": mean(reuse) if reuse else None,
        "max_rollout_prob_diff": max(mismatch) if mismatch else None,
    }


def as_text(summary: dict) -> str:
    lines = [
        f"steps            {summary['num_steps']} (last: {summary['last_step']})",
        f"reward           {summary['reward_first']:.3f} -> {summary['reward_last']:.3f} "
        f"(averaged over {summary['num_steps_averaged']} steps at either end)",
        f"seconds per step {summary['step_s']:.2f}",
    ]
    accounted = sum(summary["stage_s"].values())
    stages = {**summary["stage_s"], "other": max(0.0, summary["step_s"] - accounted)}
    lines += [
        f"  {stage:<20} {seconds:6.2f}  {100 * seconds / summary['step_s']:3.0f} %"
        for stage, seconds in stages.items()
    ]
    if summary["reuse_ratio"] is not None:
        lines.append(f"reuse ratio      {summary['reuse_ratio']:.2f}")
    if summary["max_rollout_prob_diff"] is not None:
        lines.append(
            f"max difference of rollout and trainer {summary['max_rollout_prob_diff']:.1e}"
        )
    lines.append(f"log              {summary['log']}")
    lines.append(f"checkpoint       {summary['checkpoint'] or 'none'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
