"""The commands `prefixflow bench ...`: parse options, print results. See `cli`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

if TYPE_CHECKING:
    from prefixflow_verl.bench_workloads import Case
    from prefixflow_verl.config import PrefixFlowOptions

GRID = {"--prompt": "1024", "--response": "128", "--group": "8", "--prompts": "1"}
"""Lengths of the grid, where not given."""

DEFAULT_TRACE_GROUPS = 4

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers.")]
Hidden = Annotated[int, typer.Option(min=2, help="Width of the model.")]
Heads = Annotated[int, typer.Option(min=1, help="Attention heads.")]
KvHeads = Annotated[int, typer.Option(min=1, help="Key and value heads.")]
Vocab = Annotated[int, typer.Option(min=2, help="Vocabulary.")]
DtypeName = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Of parameters and activations.")
]
Checkpointing = Annotated[
    bool, typer.Option("--checkpointing/--no-checkpointing", help="Activation checkpointing.")
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE: a setting of the engine with prefix reuse, e.g. plan=cut; repeatable."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of one operation. Default: PyTorch's.")
]

bench = typer.Typer(help="Measure prefix reuse against other ways to train.", no_args_is_help=True)


@bench.command()
def update(
    what: Annotated[
        Literal["update", "log_prob"], typer.Option(help="An actor update, or log-probs alone.")
    ] = "update",
    prompt: Annotated[
        str | None, typer.Option(help="Tokens of a prompt; may be a list: 256,1024. [1024]")
    ] = None,
    response: Annotated[
        str | None, typer.Option(help="Tokens of a response; may be a list. [128]")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Responses per prompt; may be a list. [8]")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="Prompts in the mini-batch; may be a list. [1]")
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option(
            help="prompt,response,group,prompts of one case instead of the grid; repeatable."
        ),
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Recorded lengths instead of the grid: JSON lines as for `prefixflow plan "
            "--lengths`, or a directory of such files, a case from each; repeatable."
        ),
    ] = None,
    trace_groups: Annotated[
        int | None, typer.Option(min=1, help="Groups to take, evenly spaced over the file. [4]")
    ] = None,
    trace_scale: Annotated[
        float | None, typer.Option(help="Factor of all lengths, which are rounded up. [1.0]")
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(min=2, help="One conversation instead of the grid, a sample for each turn."),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="With --turns: tokens of the first and the last context: 256,2048."),
    ] = None,
    layers: Layers = 4,
    hidden: Hidden = 256,
    heads: Heads = 4,
    kv_heads: KvHeads = 2,
    vocab: Vocab = 4096,
    dtype: DtypeName = "float32",
    token_budget: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per forward. Default: four sequences of mean length."),
    ] = None,
    rollouts_per_forward: Annotated[
        int | None, typer.Option(min=1, help="Rollouts per forward, instead of a token budget.")
    ] = None,
    option: EngineOptions = None,
    checkpointing: Checkpointing = False,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each arm.")] = 5,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for results.json, report.md and heat maps.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Time one update with reuse, by veRL's own engine, dense, and by prefix_grouper.

    Lists of lengths make a grid. Exit status 1 if the arms do not compute the same update.
    """
    if out is not None:
        require_matplotlib()
    try:
        from prefixflow_verl.bench import ArmsDisagreeError, run_benchmark
        from prefixflow_verl.bench_report import report, write_results
        from prefixflow_verl.bench_settings import ModelSizes, Settings
        from prefixflow_verl.bench_workloads import forward_size
    except ModuleNotFoundError as error:
        fail(f"{error}: prefixflow doctor says what to install")
    lengths = dict(zip(GRID, (prompt, response, group, prompts), strict=True))
    cases: list[Case] = [
        *_listed_cases(case or ()),
        *_trace_cases(trace or (), trace_groups, trace_scale),
        *_turns_cases(turns, context, response),
    ]
    if not cases:
        cases = _grid(lengths)
    else:
        source = "--case" if case else "--trace" if trace else "--turns"
        for name, given in lengths.items():
            if given is not None and not (name == "--response" and turns):
                fail(f"{name} contradicts {source}: leave one of them out")
    try:
        settings = Settings(
            what=what,
            sizes=ModelSizes(
                layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab
            ),
            dtype=dtype,
            token_budget=token_budget,
            rollouts_per_forward=rollouts_per_forward,
            options=_engine_options(option or ()),
            checkpointing=checkpointing,
            repeats=repeats,
            threads=threads,
        )
        for workload in cases:
            forward_size(workload, settings)
    except ValueError as error:  # its message names the option
        fail(error)
    try:
        record = run_benchmark(cases, settings, _command())
    except ModuleNotFoundError as error:
        fail(f"{error}: prefixflow doctor says what to install")
    except ArmsDisagreeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if out is not None:
        write_results(record, out)
    print(json.dumps(record, indent=2) if as_json else report(record), end="\n" if as_json else "")


@bench.command()
def capacity(
    num_bytes: Annotated[
        int | None,
        typer.Option(
            "--bytes", min=1, help="Peak to stay within. Default: that of dense at --prompt."
        ),
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(min=1, help="Prompt that sets --bytes, if not given. [2048]")
    ] = None,
    response: Annotated[int, typer.Option(min=1, help="Tokens of each response.")] = 128,
    group: Annotated[int, typer.Option(min=1, help="Responses to the prompt.")] = 8,
    rollouts_per_forward: Annotated[int, typer.Option(min=1, help="Rollouts per forward.")] = 1,
    granularity: Annotated[
        int, typer.Option(min=1, help="Prompts are multiples of so many tokens.")
    ] = 256,
    max_prompt: Annotated[
        int, typer.Option(min=1, help="Longest prompt to try; an arm may be capable of more.")
    ] = 65536,
    layers: Layers = 4,
    hidden: Hidden = 256,
    heads: Heads = 4,
    kv_heads: KvHeads = 2,
    vocab: Vocab = 4096,
    dtype: DtypeName = "float32",
    option: EngineOptions = None,
    checkpointing: Checkpointing = False,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for capacity.json, capacity.md and a plot.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the longest prompt + response whose update fits in a number of bytes.

    Bytes are of live tensors above parameters and optimizer state. Exit status 1 if the arms do not
    compute the same update.
    """
    if out is not None:
        require_matplotlib()
    if num_bytes is not None and prompt is not None:
        fail("--prompt contradicts --bytes: leave one of them out")
    try:
        from prefixflow_verl.bench import ArmsDisagreeError
        from prefixflow_verl.bench_capacity import (
            Search,
            report_capacity,
            run_capacity,
            write_capacity,
        )
        from prefixflow_verl.bench_settings import ModelSizes, Settings
        from prefixflow_verl.bench_workloads import forward_size
    except ModuleNotFoundError as error:
        fail(f"{error}: prefixflow doctor says what to install")
    try:
        settings = Settings(
            sizes=ModelSizes(
                layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab
            ),
            dtype=dtype,
            rollouts_per_forward=rollouts_per_forward,
            options=_engine_options(option or ()),
            checkpointing=checkpointing,
            threads=threads,
        )
        search = Search(
            num_bytes=num_bytes,
            dense_prompt=prompt if prompt is not None else 2048,
            response=response,
            group=group,
            granularity=granularity,
            max_prompt=max_prompt,
        )
        forward_size(search.case(granularity), settings)
    except ValueError as error:  # its message names the option
        fail(error)
    try:
        record = run_capacity(search, settings, _command())
    except ModuleNotFoundError as error:
        fail(f"{error}: prefixflow doctor says what to install")
    except ArmsDisagreeError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if out is not None:
        write_capacity(record, out)
    text = json.dumps(record, indent=2) + "\n" if as_json else report_capacity(record)
    print(text, end="")


def fail(message: Any) -> NoReturn:
    """End with one sentence on stderr and exit status 2."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)


def _command() -> str:
    return shlex.join(["prefixflow", *sys.argv[1:]])


def require_matplotlib() -> None:
    """Fail unless pictures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        fail("--out draws with matplotlib: pip install prefixflow_verl[bench], or use --json")


def _grid(lengths: dict[str, str | None]) -> list[Case]:
    """Every combination of the lists."""
    from prefixflow_verl.bench_workloads import GridCase

    axes = [
        _read_numbers(name, GRID[name] if text is None else text) for name, text in lengths.items()
    ]
    return [
        GridCase(prompt=prompt, response=response, group=group, prompts=prompts)
        for prompt, response, group, prompts in itertools.product(*axes)
    ]


def _listed_cases(texts: list[str]) -> list[Case]:
    from prefixflow_verl.bench_workloads import GridCase

    names = ("prompt", "response", "group", "prompts")
    return [
        GridCase(**dict(zip(names, _read_numbers("--case", text, names=names), strict=True)))
        for text in texts
    ]


def _trace_cases(paths: list[Path], num_groups: int | None, scale: float | None) -> list[Case]:
    from prefixflow_verl.bench_workloads import TraceCase

    for name, value in (("--trace-groups", num_groups), ("--trace-scale", scale)):
        if value is not None and not paths:
            fail(f"{name} needs --trace")
    # Also refuses what is not a number.
    if scale is not None and not 0 < scale < float("inf"):
        fail(f"--trace-scale={scale} must be a number above 0")
    cases = []
    for path in paths:
        try:
            cases += TraceCase.read(
                path,
                num_groups=num_groups if num_groups is not None else DEFAULT_TRACE_GROUPS,
                scale=scale if scale is not None else 1.0,
            )
        except OSError as error:
            fail(f"--trace={path} cannot be read ({error.strerror}): name a JSON-lines file")
        except ValueError as error:
            fail(f"--trace: {error}")
    return cases


def _turns_cases(turns: int | None, context: str | None, response: str | None) -> list[Case]:
    from prefixflow_verl.bench_workloads import TurnsCase

    if turns is None:
        if context is not None:
            fail("--context needs --turns")
        return []
    if context is None:
        fail("--turns needs --context: tokens of the first and the last context, as in 256,2048")
    first, last = _read_numbers("--context", context, names=("first", "last"))
    try:
        return [
            TurnsCase(turns=turns, context=(first, last), response=length)
            for length in _read_numbers("--response", response or GRID["--response"])
        ]
    except ValueError as error:  # its message names the option
        fail(error)


def _engine_options(texts: list[str]) -> PrefixFlowOptions:
    """Options from NAME=VALUE, where VALUE is YAML."""
    import yaml

    from prefixflow_verl.config import PrefixFlowOptions

    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            fail(f"--option {text}: give NAME=VALUE")
        if name in given:
            fail(f"--option {text}: {name} is given twice")
        try:
            given[name] = yaml.safe_load(value)
            if value in ("on", "off", "yes", "no"):  # booleans of YAML, but words of the options
                given[name] = value
            PrefixFlowOptions.from_mapping({name: given[name]})
        except (yaml.YAMLError, ValueError) as error:
            fail(f"--option {text}: {error}")
    return PrefixFlowOptions.from_mapping(given)


def _read_numbers(option: str, text: str, names: tuple[str, ...] | None = None) -> list[int]:
    """Comma-separated integers of 1 or more; one for each of `names`, where given."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        fail(f"{option}={text} must be integers of 1 or more, separated by commas")
    if names is not None and len(parts) != len(names):
        fail(f"{option}={text} must be {len(names)} integers: {','.join(names)}")
    return [int(part) for part in parts]
