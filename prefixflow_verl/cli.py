"""The command line `prefixflow`: parses options, prints results.

The commands below `prefixflow bench` are in `bench_cli`. The work is done in `doctor`, `verify`,
`lengths`, `simulate` and `ledger_report`. They are imported when a command runs, so that
`prefixflow plan` needs neither torch nor verl, and `prefixflow doctor` can report that they are
missing. Exit status: 0 good, 1 the check failed, 2 the command cannot be carried out.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from prefixflow_verl.bench_cli import JsonFlag, bench, fail, require_matplotlib
from prefixflow_verl.config import ATTENTION_BACKENDS, PLANS, PREFIX_ACTIVATIONS, PrefixFlowOptions

if TYPE_CHECKING:
    from prefixflow_verl.accounting import ModelShape
    from prefixflow_verl.ledger_report import LedgerAnalysis, Report
    from prefixflow_verl.lengths import GroupLengths, PlanCost
    from prefixflow_verl.simulate import Simulation
    from prefixflow_verl.verify import Verification

NUM_WORST_PARAMETERS = 10
"""Parameters that `prefixflow verify` prints; `--json` has all of them."""

DEFAULT_SHAPE = {
    "num_layers": 36,
    "hidden": 4096,
    "intermediate": 12288,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab": 151936,
}
"""Sizes of Qwen3-8B, for `prefixflow plan` without `--model`."""

DtypeName = Literal["float32", "float64", "bfloat16"]
BackendName = Literal[ATTENTION_BACKENDS]
PlanName = Literal[PLANS]
ActivationsName = Literal[PREFIX_ACTIVATIONS]
DEFAULTS = PrefixFlowOptions()

TokenBudget = Annotated[int, typer.Option(min=1, help="Executed tokens per pack.")]
CountCheckpointing = Annotated[
    bool, typer.Option("--checkpointing/--no-checkpointing", help="Count activation checkpointing.")
]
ModelSizes = Annotated[
    Path | None, typer.Option(help="Directory whose config.json has the model's sizes.")
]
SizeReplacements = Annotated[
    str | None, typer.Option(help="Sizes that replace the model's, e.g. num_layers=48,hidden=5120.")
]

app = typer.Typer(
    name="prefixflow",
    help="Exact shared-prefix reuse for GRPO training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def doctor(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a model to check as well.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that training with strategy `prefixflow` would work here; exit status 1 if not."""
    from prefixflow_verl.doctor import diagnose

    findings = diagnose(model)
    num_errors = sum(finding.level == "error" for finding in findings)
    if as_json:
        record = {"ok": num_errors == 0, "findings": [dataclasses.asdict(f) for f in findings]}
        print(json.dumps(record, indent=2))
    else:
        table = _table("check", "", "found, and what to do")
        for finding in findings:
            remedy = f"\n-> {finding.remedy}" if finding.remedy else ""
            table.add_row(finding.check, finding.level, finding.detail + remedy)
        console = _console()
        console.print(table)
        console.print("ready" if not num_errors else f"not ready, errors: {num_errors}")
    raise typer.Exit(1 if num_errors else 0)


@app.command()
def verify(
    model: Annotated[
        Path | None, typer.Option(help="Directory of the model. Default: a tiny random Qwen3.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the shared prompt.")] = 64,
    response: Annotated[
        int, typer.Option(min=1, help="Tokens of a shared turn and of the longest response.")
    ] = 16,
    group: Annotated[
        int, typer.Option(min=1, help="Responses below each last-level shared segment.")
    ] = 4,
    depth: Annotated[
        int, typer.Option(min=1, help="Levels of sharing: the prompt, then turns of two branches.")
    ] = 1,
    dtype: Annotated[DtypeName, typer.Option(help="Of the parameters.")] = "float32",
    token_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per pack. Default: a plan without cuts and one all cut."),
    ] = None,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="Activation checkpointing.")
    ] = False,
    attention_backend: Annotated[
        BackendName, typer.Option(help="Kernel of the segment attention.")
    ] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of tokens, loss and random weights.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Compare reuse with full-sequence training of a model; exit status 1 if they differ."""
    try:
        from prefixflow_verl.model_hook import UnsupportedModelError
        from prefixflow_verl.verify import ModelPathError, Workload
        from prefixflow_verl.verify import verify as run
    except ModuleNotFoundError as error:
        fail(f"{error}: prefixflow doctor says what to install")
    try:
        verification = run(
            model_path=model,
            workload=Workload(prompt=prompt, response=response, group=group, depth=depth),
            dtype=dtype,
            token_budget=token_budget,
            checkpointing=checkpointing,
            attention_backend=attention_backend,
            seed=seed,
        )
    except (ModelPathError, UnsupportedModelError) as error:
        fail(f"--model: {error}")
    except ValueError as error:  # its message names the option
        fail(str(error))
    if as_json:
        print(json.dumps(verification.as_record(), indent=2))
    else:
        _print_verification(verification)
    raise typer.Exit(0 if verification.ok else 1)


@app.command()
def plan(
    lengths: Annotated[
        Path | None,
        typer.Option(help='JSON lines such as {"prompt": 120, "responses": [30, 40]}.'),
    ] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None,
    response: Annotated[int | None, typer.Option(min=1, help="Tokens of each response.")] = None,
    group: Annotated[int | None, typer.Option(min=1, help="Responses per prompt.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, without --lengths.")] = 1,
    token_budget: TokenBudget = 16384,
    max_cache_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes that prefixes may hold while their suffixes run."),
    ] = None,
    prefix_activations: Annotated[
        ActivationsName, typer.Option(help="Activations of prefixes while their suffixes run.")
    ] = "auto",
    mode: Annotated[PlanName, typer.Option(help="How shared prefixes are laid out.")] = "auto",
    min_shared_tokens: Annotated[
        int, typer.Option(min=1, help="Shortest run of tokens worth sharing.")
    ] = DEFAULTS.min_shared_tokens,
    checkpointing: CountCheckpointing = False,
    model: ModelSizes = None,
    model_shape: SizeReplacements = None,
    as_json: JsonFlag = False,
) -> None:
    """Print how rollouts of given lengths would be laid out, and what that costs. Needs no torch.

    Without --model the sizes are those of Qwen3-8B. Cached keys and values count 2 bytes, their
    gradients 4.
    """
    from prefixflow_verl.lengths import estimate
    from prefixflow_verl.plan import PackBudget

    groups = _read_groups(lengths, prompt, response, group, prompts)
    shape = _read_shape(model, model_shape)
    limits: dict[bool, int | None] = {False: None, True: None}
    if max_cache_bytes is not None:
        limits = {
            kept: shape.max_prefix_tokens(
                max_cache_bytes,
                element_bytes=2,
                gradient_bytes=4,
                kept_activations=kept,
                checkpointing=checkpointing,
            )
            for kept in limits
        }
    forest, pack_plan, cost = estimate(
        groups,
        shape,
        PackBudget(
            max_tokens=token_budget,
            max_cache_tokens=limits[False],
            max_kept_tokens=limits[True],
            prefix_activations=prefix_activations,
            cut_overhead_tokens=DEFAULTS.cut_overhead_tokens,
            split_segments=prefix_activations in ("auto", "recompute"),
        ),
        mode=mode,
        min_shared_tokens=min_shared_tokens,
        checkpointing=checkpointing,
    )
    if as_json:
        record = {
            **dataclasses.asdict(cost),
            "reuse_ratio": cost.reuse_ratio,
            "ideal_speedup": cost.ideal_speedup,
            "ideal_speedup_over_response_logits": cost.ideal_speedup_over_response_logits,
            "num_rollouts": forest.num_rollouts,
            "num_dissolved_trees": pack_plan.num_dissolved_trees,
            "prefix_activations": pack_plan.prefix_activations,
            "model_shape": dataclasses.asdict(shape),
            "rounds": [dataclasses.asdict(round_) for round_ in pack_plan.rounds],
            "packs": [
                {
                    "is_head": pack.is_head,
                    "level": pack.level,
                    "num_segments": len(pack.segments),
                    "num_tokens": int(forest.lengths[list(pack.segments)].sum()),
                }
                for pack in pack_plan.packs
            ],
        }
        print(json.dumps(record, indent=2))
        return
    print(pack_plan.describe(forest))
    if pack_plan.prefix_activations == "recompute":
        print("  prefixes run forward once more before their backward: nothing of them is kept")
    if pack_plan.num_dissolved_trees:
        print(
            f"  trees run without sharing: {pack_plan.num_dissolved_trees} (a cut has to save "
            f"{DEFAULTS.cut_overhead_tokens} tokens and to fit --max-cache-bytes)"
        )
    _print_cost(cost)


@app.command()
def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            help="Recorded lengths: JSON lines as for `prefixflow plan --lengths`, one step, or a "
            "directory of such files, a step from each."
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")],
    mini_batches: Annotated[int, typer.Option(min=1, help="Optimizer steps per update.")] = 1,
    repeat: Annotated[
        int, typer.Option(min=1, help="Copies of each group, as different prompts: more rollouts.")
    ] = 1,
    token_budget: TokenBudget = 16384,
    tflops: Annotated[
        float, typer.Option(help="TFLOP/s that a rank reaches; turns FLOPs into seconds.")
    ] = 400.0,
    checkpointing: CountCheckpointing = False,
    model: ModelSizes = None,
    model_shape: SizeReplacements = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for simulation.json and simulation.png.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict an actor update on many ranks, with veRL's placement of rollouts and with ours. Needs
    no torch.

    Seconds are FLOPs over --tflops: communication and the optimizer are left out. Without --model
    the sizes are those of Qwen3-8B.
    """
    from prefixflow_verl.lengths import read_trace
    from prefixflow_verl.plan import PackBudget
    from prefixflow_verl.simulate import Cluster
    from prefixflow_verl.simulate import simulate as simulate_trace

    if not 0 < tflops < float("inf"):
        fail(f"--tflops={tflops} must be a number above 0")
    if out is not None:
        require_matplotlib()
    try:
        steps = [(name, groups * repeat) for name, groups in read_trace(trace)]
    except OSError as error:
        fail(f"--trace={trace} cannot be read ({error.strerror}): name a JSON-lines file")
    except ValueError as error:
        fail(f"--trace: {error}")
    cluster = Cluster(
        shape=_read_shape(model, model_shape),
        budget=PackBudget(
            max_tokens=token_budget,
            prefix_activations=DEFAULTS.prefix_activations,
            cut_overhead_tokens=DEFAULTS.cut_overhead_tokens,
        ),
        num_ranks=ranks,
        num_mini_batches=mini_batches,
        checkpointing=checkpointing,
        rank_flops_per_s=tflops * 1e12,
    )
    simulation = simulate_trace(steps, cluster)
    record = {"trace": str(trace), **simulation.as_record()}
    if out is not None:
        from prefixflow_verl.simulate_plots import draw_simulation

        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "simulation.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
            draw_simulation(simulation, out / "simulation.png")
        except OSError as error:
            fail(f"--out={out} cannot be written ({error.strerror}): name a directory that can")
    print(json.dumps(record, indent=2)) if as_json else _print_simulation(simulation)


@app.command()
def provenance(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A ledger, or a run's directory that holds one.")
    ],
    step: Annotated[
        int | None, typer.Option(help="Say which policy versions fed this step.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(help="Say which steps this policy version reached.")
    ] = None,
    uid: Annotated[
        str | None,
        typer.Option(help="Say where the sequences of this group went; its beginning is enough."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with pictures to this file as well.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Tell from a run's ledger which policy versions it was trained on; exit status 1 if something
    was trained twice or on a wrong version."""
    try:
        from prefixflow_verl.ledger import LedgerError, read_ledger
        from prefixflow_verl.ledger_report import LedgerAnalysis, QuestionError, make_report
    except ModuleNotFoundError as error:
        fail(f"{error}: a ledger is read with pyarrow, pip install pyarrow")
    try:
        analysis = LedgerAnalysis(read_ledger(directory))
        report = make_report(analysis, step=step, version=version, uid=uid)
    except (LedgerError, QuestionError) as error:  # its message names file or option
        fail(error)
    except OSError as error:
        fail(f"{error.filename} cannot be read ({error.strerror})")
    if html is not None:
        _write_page(html, analysis, report)
    if as_json:
        print(json.dumps(report.as_record(), indent=2, allow_nan=False))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.faults else 0)


def _write_page(file: Path, analysis: LedgerAnalysis, report: Report) -> None:
    try:
        from prefixflow_verl.ledger_pages import render_page
    except ModuleNotFoundError as error:
        fail(f"{error}: --html draws with matplotlib, pip install prefixflow_verl[bench]")
    try:
        file.write_text(render_page(analysis, report), encoding="utf-8")
    except OSError as error:
        fail(f"--html={file} cannot be written ({error.strerror}): name a file that can")


def _print_report(report: Report) -> None:
    console = _console()
    for contents in report.tables():
        console.print(contents.title)
        table = _table(*contents.columns)
        for row in contents.rows:
            table.add_row(*row)
        console.print(table)
        if contents.note:
            console.print(contents.note)
        console.print()
    console.print(f"FAILED: faults: {len(report.faults)}" if report.faults else "ok: no faults")


def _read_groups(
    lengths: Path | None,
    prompt: int | None,
    response: int | None,
    group: int | None,
    prompts: int,
) -> list[GroupLengths]:
    from prefixflow_verl.lengths import GroupLengths, read_groups

    sizes = {"--prompt": prompt, "--response": response, "--group": group}
    if lengths is not None:
        given = [name for name, value in sizes.items() if value is not None]
        if given:
            fail(f"{given[0]} contradicts --lengths: leave one of them out")
        try:
            return read_groups(lengths)
        except OSError as error:
            fail(f"--lengths={lengths} cannot be read ({error.strerror}): name a JSON-lines file")
        except ValueError as error:
            fail(f"--lengths: {error}")
    missing = [name for name, value in sizes.items() if value is None]
    if missing:
        fail(f"{missing[0]} is missing: give --lengths, or --prompt, --response and --group")
    return [GroupLengths(prompt=prompt, responses=(response,) * group)] * prompts


def _read_shape(model: Path | None, replacements: str | None) -> ModelShape:
    from prefixflow_verl.accounting import ModelShape

    sizes = DEFAULT_SHAPE
    if model is not None:
        config_path = model / "config.json"
        try:
            config = SimpleNamespace(**json.loads(config_path.read_text(encoding="utf-8")))
            sizes = dataclasses.asdict(ModelShape.from_config(config))
        except OSError as error:
            fail(f"--model: {config_path} cannot be read ({error.strerror}): name a model")
        except (ValueError, TypeError) as error:
            fail(f"--model: {config_path} is not a model's config ({error})")
        except AttributeError as error:
            fail(f"--model: {config_path} has no {error.name}: give the sizes with --model-shape")
    for item in replacements.split(",") if replacements else ():
        name, _, value = item.partition("=")
        if name not in DEFAULT_SHAPE:
            fail(f"--model-shape: {name!r} is not one of {', '.join(DEFAULT_SHAPE)}")
        if not value.isdecimal() or int(value) < 1:
            fail(f"--model-shape: {name}={value} must be an integer of 1 or more")
        sizes = {**sizes, name: int(value)}
    return ModelShape(**sizes)


def _print_simulation(simulation: Simulation) -> None:
    from prefixflow_verl.simulate import NO_REUSE, OURS, VERL

    record = simulation.as_record()
    table = _table(
        "one update, mean over steps",
        "no reuse, veRL's placement",
        "reuse, veRL's placement",
        "reuse, our placement",
    )
    arms = (NO_REUSE, VERL, OURS)
    for label, key, show in (
        ("slowest rank, predicted", "slowest_rank_s", lambda seconds: f"{seconds:.3g} s"),
        ("imbalance, max / mean over ranks", "imbalance", lambda ratio: f"{ratio:.3f}"),
        ("prefixes run by further ranks", "duplicated_prefixes", lambda number: f"{number:.1f}"),
        ("tokens of these", "duplicated_tokens", lambda number: f"{_si(number)}"),
        ("caches and activations, largest rank", "peak_bytes", lambda size: f"{_si(size)}B"),
    ):
        values = record[key]
        table.add_row(label, *(show(values[arm]) if arm in values else "-" for arm in arms))
    console = _console()
    console.print(table)
    console.print(
        f"{record['speedup_over_verl_placement']:.2f}x faster than with veRL's placement, "
        f"{record['speedup_over_no_reuse']:.2f}x than without reuse; no placement with these "
        f"mini-batches has an imbalance below {record['lower_bound']:.3f}"
    )
    console.print(
        f"steps: {len(simulation.steps)}, ranks: {simulation.num_ranks}, mini-batches: "
        f"{simulation.num_mini_batches}, found in {record['placement_s']:.2g} s per step"
    )


def _print_cost(cost: PlanCost) -> None:
    table = _table("one update", "FLOPs", "ideal speed-up of reuse")
    table.add_row("dense", _si(cost.dense_flops), f"{cost.ideal_speedup:.2f}x")
    table.add_row(
        "dense, LM head on responses only",
        _si(cost.dense_response_logits_flops),
        f"{cost.ideal_speedup_over_response_logits:.2f}x",
    )
    table.add_row("reuse", _si(cost.reuse_flops), "")
    console = _console()
    console.print(table)
    console.print(f"KV cache of keys, values and gradients: {_si(cost.max_cache_bytes)}B at most")


def _print_verification(verification: Verification) -> None:
    plans = verification.plans
    stats = plans[0].stats
    console = _console()
    console.print(
        f"{verification.model}, {verification.dtype} on {verification.device}, "
        f"attention backend {verification.attention_backend}"
    )
    table = _table("reuse against full sequences", *(plan.name for plan in plans), "limit")
    for label, read in (
        ("logical tokens", lambda plan: str(plan.stats.logical_tokens)),
        ("executed tokens", lambda plan: str(plan.stats.executed_tokens)),
        ("reuse ratio", lambda plan: f"{plan.stats.reuse_ratio:.2f}x"),
        ("packs", lambda plan: str(plan.stats.num_packs)),
        ("cut edges", lambda plan: str(plan.stats.num_cut_edges)),
        ("KV cache", lambda plan: f"{_si(plan.stats.max_cache_bytes)}B"),
    ):
        table.add_row(label, *(read(plan) for plan in plans), "")
    for label, name in (
        ("log-prob error, largest, nats", "max_abs_logprob_error"),
        ("entropy error, largest, nats", "max_abs_entropy_error"),
        ("loss error", "loss_error"),
        ("gradient error, all parameters, relative", "total_rel_grad_error"),
        ("gradient error, worst parameter, relative", "max_rel_grad_error"),
    ):
        errors = [f"{plan.errors.figures[name]:.1e}" for plan in plans]
        table.add_row(label, *errors, f"{plans[0].limits[name]:.1e}")
    console.print(table)
    worst = sorted(
        plans[0].errors.by_parameter,
        key=lambda name: -max(plan.errors.by_parameter[name] for plan in plans),
    )[:NUM_WORST_PARAMETERS]
    table = _table("parameters with the largest relative error", *(plan.name for plan in plans))
    for name in worst:
        table.add_row(name, *(f"{plan.errors.by_parameter[name]:.1e}" for plan in plans))
    console.print(table)
    console.print(
        "relative to the parameter's own gradient norm, or to 1e-2 of the whole gradient's norm "
        "where that is larger"
    )
    if verification.ok:
        console.print(f"ok: {stats.num_rollouts} rollouts, the same update")
    else:
        console.print("FAILED: an error is beyond its limit")


def _console() -> Console:
    return Console(highlight=False, markup=False, soft_wrap=False)


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.ASCII, header_style="")
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, overflow="fold")
    return table


def _si(value: float) -> str:
    """`value` with a decimal unit prefix, e.g. 1.25 G."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} E"
